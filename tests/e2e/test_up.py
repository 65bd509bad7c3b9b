"""`moonserve up` as a user has it: real processes, real signals, the fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support.up import (
    HIDES_TORCH,
    PROGRAM,
    STOP_S,
    Up,
    children_of,
    gone,
    send,
    shared_memory_of,
)

pytestmark = [
    pytest.mark.model,  # for its tokenizer and chat template
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc"),
]
FLAGS = ("--engine", "fake", "--segment-bytes", "64MiB")
WITHOUT_TORCH = {"PYTHONPATH": os.pathsep.join([str(HIDES_TORCH), *sys.path])}
"""The fake engine needs no package of the extra `engine`."""


@pytest.fixture
def up() -> Iterator[Up]:
    """A cluster of one gateway, one prefill and one decode worker."""
    cluster = Up(*FLAGS, environ=WITHOUT_TORCH)
    yield cluster
    cluster.end()


def ask(up: Up, max_tokens: int = 8, on_first: Callable[[], object] = lambda: None) -> str:
    """A chat, streamed; its text. `on_first` is called when some of it is here."""
    body = {
        "model": up.get("/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": "Hello!"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    events = []
    with send(up.url, "/v1/chat/completions", body, {}) as reply:
        assert reply.headers["x-request-id"]
        for line in reply:
            if line.startswith(b"data: "):
                events.append(line[6:].decode().strip())
                if len(events) == 3:
                    on_first()
    assert events
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] in ("length", "stop")
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_serves_then_drains_on_ctrl_c(up: Up) -> None:
    """A chat is streamed; Ctrl-C ends all with code 0; no process and no memory is left."""
    assert ask(up)
    pids = up.children()
    assert set(pids) == {"gateway", "p0", "d0"}
    assert len(shared_memory_of(pids.values())) == 2
    up.process.send_signal(signal.SIGINT)
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert up.process.returncode == 0, up.output
    assert all(gone(pid) for pid in pids.values())
    assert not shared_memory_of(pids.values()), up.output
    assert "Traceback" not in up.output
    assert "did not stop" not in up.output


def test_workers_want_the_token(up: Up) -> None:
    """The environment's token is the cluster's: a worker refuses a caller without it."""
    for worker in up.get("/api/instances"):
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        with pytest.raises(HTTPError, match="401"):
            send(worker["url"], "/v1/completions", body, {"authorization": "Bearer guess"})
        assert up.post("/v1/completions", body, worker["url"])["usage"]["completion_tokens"] == 1


def test_running_requests_finish_before_the_end(up: Up) -> None:
    """A stream under way at Ctrl-C goes on to its last token; then all ends as usual.

    It takes longer than the silence after which an instance is taken for dead.
    """
    whole = ask(up, 3500)
    assert ask(up, 3500, on_first=lambda: up.process.send_signal(signal.SIGINT)) == whole
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert up.process.returncode == 0, up.output


def test_second_ctrl_c_does_not_wait(up: Up) -> None:
    """A second Ctrl-C cuts a drain short, and still leaves no process."""

    def twice() -> None:
        up.process.send_signal(signal.SIGINT)
        up.until(lambda: any("draining" in line for line in up.lines))
        up.process.send_signal(signal.SIGINT)

    assert up.url
    pids = up.children()
    with pytest.raises((OSError, HTTPException, AssertionError)):
        ask(up, 4000, on_first=twice)
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert all(gone(pid) for pid in pids.values())
    assert any("not waiting" in line for line in up.lines)
    assert not shared_memory_of(pids.values())


def test_who_listens_may_go_before_the_end() -> None:
    """Without a reader, as in `moonserve up 2>&1 | head`, it goes on, and Ctrl-C ends all."""
    with subprocess.Popen(
        [*PROGRAM, "up", "--port", "0", *FLAGS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        assert any(b"Ready at" in line for line in process.stdout)
        children = children_of(process.pid)
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)
    assert all(map(gone, children))
    assert shared_memory_of(children) == []


def test_killed_supervisor_takes_all_with_it(up: Up) -> None:
    """SIGKILL of the supervisor ends its children within seconds, and frees their memory."""
    assert up.url
    pids = up.children()
    up.process.kill()
    up.until(lambda: all(gone(pid) for pid in pids.values()), 15)
    assert not shared_memory_of(pids.values()), up.output


@pytest.mark.parametrize("victims", [["d0"], ["p0", "d0"]])
def test_a_stream_outlives_its_workers(up: Up, victims: list[str]) -> None:
    """Killed in mid-stream, the only workers come back and the stream goes on, token for token."""
    whole = ask(up, 1000)

    def kill() -> None:
        pids = up.children()
        for name in victims:
            os.kill(pids[name], signal.SIGKILL)

    assert ask(up, 1000, on_first=kill) == whole
    up.settle()


@pytest.mark.parametrize("victim", ["p0", "d0", "gateway"])
def test_killed_child_is_restarted_and_serves_again(up: Up, victim: str) -> None:
    """A process that dies is reported and started again, and the cluster serves as before."""
    before = ask(up)
    first = up.children()[victim]
    os.kill(first, signal.SIGKILL)
    up.until(lambda: any("KILLED BY SIGKILL" in line for line in up.lines))
    up.until(lambda: up.children().get(victim, first) != first)
    up.until(lambda: _is_ready(up))
    up.until(lambda: _asks_well(up))
    assert ask(up) == before
    assert not shared_memory_of([first])


def _is_ready(up: Up) -> bool:
    try:
        up.get("/ready")
    except OSError:
        return False
    return True


def _asks_well(up: Up) -> bool:
    """Whether a request is served; one may fail while a dead worker has not been missed yet."""
    try:
        return bool(ask(up))
    except (OSError, AssertionError):
        return False

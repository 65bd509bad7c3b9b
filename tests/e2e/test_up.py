"""`moonserve up` as a user has it: real processes, real signals, the fake engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytestmark = [
    pytest.mark.model,  # for its tokenizer and chat template
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc"),
]
PROGRAM = (sys.executable, "-m", "moonserve")
START_S = 60.0
STOP_S = 30.0


class Up:
    """One `moonserve up`, and what it has printed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "up", "--engine", "fake", "--port", "0", "--segment-bytes", "64MiB"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "CI": "true"},
        )
        self.lines: list[str] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def until(self, true: Callable[[], object], within_s: float = START_S) -> None:
        """Poll until it holds, or fail with what was printed."""
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, "waited in vain; it said:\n" + "".join(self.lines)
            time.sleep(0.05)

    @property
    def url(self) -> str:
        """Where it is ready; waits for that."""
        self.until(lambda: self._ready_line() or self.process.poll() is not None)
        found = self._ready_line()
        assert found, "ended before it was ready; it said:\n" + "".join(self.lines)
        return found[1]

    def _ready_line(self) -> re.Match[str] | None:
        return re.search(r"^Ready at (http\S+)$", "".join(self.lines), re.MULTILINE)

    def children(self) -> dict[str, int]:
        """Pids of the cluster's processes, by name."""
        return {_name(pid): pid for pid in children_of(self.process.pid)}

    def ask(self, max_tokens: int = 8, on_first: Callable[[], object] = lambda: None) -> str:
        """A chat, streamed; its text. `on_first` is called when some of it is here."""
        body = {
            "model": models(self.url)[0],
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.headers["x-request-id"]
            events = []
            for line in reply:
                if line.startswith(b"data: "):
                    events.append(line[6:].decode().strip())
                    if len(events) == 3:
                        on_first()
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert choices[-1]["finish_reason"] in ("length", "stop")
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def end(self) -> None:
        """Whatever happened: leave nothing running."""
        left = [*children_of(self.process.pid), self.process.pid]
        for pid in left:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(10)


@pytest.fixture
def up() -> Iterator[Up]:
    """A cluster of one gateway, one prefill and one decode worker."""
    cluster = Up()
    yield cluster
    cluster.end()


def models(url: str) -> list[str]:
    """The names of the models served."""
    with urllib.request.urlopen(url + "/v1/models", timeout=10) as reply:
        listed: dict[str, Any] = json.load(reply)
    return [model["id"] for model in listed["data"]]


def children_of(pid: int) -> list[int]:
    """Pids of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _name(pid: int) -> str:
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return argv[argv.index("--name") + 1] if "--name" in argv else "gateway"


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """The regions these processes made; a region's name has its maker's pid."""
    made = {f"moonserve-kv-{pid}-" for pid in pids}
    return [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(tuple(made))]


def test_serves_then_drains_on_ctrl_c(up: Up) -> None:
    """Ready, a chat is streamed, Ctrl-C ends all with 0, and neither process nor memory is left."""
    assert up.ask()
    pids = up.children()
    assert set(pids) == {"gateway", "p0", "d0"}
    assert len(shared_memory_of(pids.values())) == 2
    up.process.send_signal(signal.SIGINT)
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert up.process.returncode == 0, "".join(up.lines)
    assert all(gone(pid) for pid in pids.values())
    assert not shared_memory_of(pids.values()), "".join(up.lines)
    assert "Traceback" not in "".join(up.lines)
    assert "did not stop" not in "".join(up.lines)


def test_running_requests_finish_before_the_end(up: Up) -> None:
    """A stream under way at Ctrl-C goes on to its last token; then all ends as usual."""
    whole = up.ask(2000)
    assert up.ask(2000, on_first=lambda: up.process.send_signal(signal.SIGINT)) == whole
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert up.process.returncode == 0, "".join(up.lines)


def test_second_ctrl_c_does_not_wait(up: Up) -> None:
    """A second Ctrl-C cuts a drain short, and still leaves no process."""

    def twice() -> None:
        up.process.send_signal(signal.SIGINT)
        up.until(lambda: any("draining" in line for line in up.lines))
        up.process.send_signal(signal.SIGINT)

    assert up.url
    pids = up.children()
    with pytest.raises((OSError, HTTPException, AssertionError, IndexError)):
        up.ask(4000, on_first=twice)
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert all(gone(pid) for pid in pids.values())
    assert any("not waiting" in line for line in up.lines)
    assert not shared_memory_of(pids.values())


def test_killed_supervisor_takes_all_with_it(up: Up) -> None:
    """SIGKILL of the supervisor ends its children within seconds, and frees their memory."""
    assert up.url
    pids = up.children()
    up.process.kill()
    up.until(lambda: all(gone(pid) for pid in pids.values()), 15)
    assert not shared_memory_of(pids.values()), "".join(up.lines)


@pytest.mark.parametrize("victim", ["p0", "d0", "gateway"])
def test_killed_child_is_restarted_and_serves_again(up: Up, victim: str) -> None:
    """A process that dies is said, started again, and the cluster serves as before."""
    before = up.ask()
    first = up.children()[victim]
    os.kill(first, signal.SIGKILL)
    up.until(lambda: any("KILLED BY SIGKILL" in line for line in up.lines))
    up.until(lambda: up.children().get(victim, first) != first)
    up.until(lambda: _is_ready(up.url))
    up.until(lambda: _asks_well(up))
    assert up.ask() == before
    assert not shared_memory_of([first])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _asks_well(up: Up) -> bool:
    """Whether a request is served; one may fail while a dead worker has not been missed yet."""
    try:
        return bool(up.ask())
    except (OSError, AssertionError):
        return False

"""`--workers 2` as a user has it: two fronts on one port, one Conductor, real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from threading import Barrier
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.support.up import STOP_S, Up, children_of, gone, send

pytestmark = [
    pytest.mark.model,  # for its tokenizer and chat template
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc"),
]
STREAMS = 16
"""Requests at once. All of them come to one front in one of 32,768 runs."""


@pytest.fixture
def up() -> Iterator[Up]:
    """A cluster whose gateway is two fronts and the Conductor's process."""
    cluster = Up(
        "--engine", "fake", "--segment-bytes", "64MiB", "--workers", "2", "--wait-ready", "3s"
    )
    yield cluster
    cluster.end()


def parts(up: Up, part: str) -> list[int]:
    """The pids of the gateway's processes of one kind."""
    gateway = up.children().get("gateway")
    found = children_of(gateway) if gateway is not None else []
    mark = {"front": "--shared\0", "conductor": "moonserve\0conductor\0"}[part]
    return [pid for pid in found if mark in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def complete(up: Up, prompt: list[int], count: int) -> list[int]:
    """Token ids of a completion, on a connection of its own."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"model": up.get("/v1/models")["data"][0]["id"], "return_token_ids": True}
    ids: list[int] = up.post("/v1/completions", body)["choices"][0]["token_ids"]
    return ids


def metrics(up: Up) -> dict[str, float]:
    """Samples by name with labels."""
    with urlopen(up.url + "/metrics", timeout=10) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_two_fronts_serve_and_what_they_say_is_of_both(up: Up) -> None:
    """Hundreds of requests over both: tokens as from one, counts summed, all ledgers at zero."""
    wanted = [complete(up, [100 + i] * 40, 8) for i in range(4)]
    before = [_cpu(pid) for pid in parts(up, "front")]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda i: complete(up, [100 + i % 4] * 40, 8), range(300)))
    assert got == [wanted[i % 4] for i in range(300)]
    assert all(_cpu(pid) > was for pid, was in zip(parts(up, "front"), before, strict=True))
    up.settle()
    for _ in range(4):  # whoever is asked
        counted = metrics(up)
        assert counted['moonserve_requests_total{route="/v1/completions",status="200"}'] == 304
        assert counted["moonserve_ttft_seconds_count"] == 304
        assert counted["moonserve_completion_tokens_total"] == 304 * 8
        assert counted["moonserve_good_requests_total"] == 304
        assert counted['moonserve_ended_requests_total{outcome="in_time"}'] == 304
        assert counted['moonserve_tenant_completion_tokens_total{tenant="none"}'] == 304 * 8
        assert counted['moonserve_processes{process="front"}'] == 2
        assert counted['moonserve_processes{process="conductor"}'] == 1
        assert counted["moonserve_requests_in_flight"] == 0
        assert up.get("/api/stats")["placed"] == 304
    assert counted["moonserve_connections"] >= 1
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        with urlopen(Request(up.url + path, method="HEAD"), timeout=10) as reply:
            assert (reply.status, reply.read()) == (200, b"")


def _cpu(pid: int) -> int:
    """Ticks of CPU time spent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def streams(up: Up, kill: Any) -> list[list[bytes] | None]:
    """Streams of a thousand tokens at once; `kill` is called when all have begun. Of each its
    events, or None where it broke off.
    """
    begun = Barrier(STREAMS, kill)
    model = up.get("/v1/models")["data"][0]["id"]
    body = {"model": model, "max_tokens": 1000, "temperature": 0, "stream": True}
    body |= {"prompt": [7] * 40, "ignore_eos": True}

    def one(_: int) -> list[bytes] | None:
        with send(up.url, "/v1/completions", body, {}) as reply:
            events = [reply.readline() for _ in range(4)]
            begun.wait(30)
            try:
                events += list(reply)
            except (OSError, HTTPException):
                return None
        whole = [line for line in events if line.startswith(b"data: ")]
        return whole if whole and whole[-1] == b"data: [DONE]\n" else None

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(one, range(STREAMS)))


def test_a_killed_front_loses_its_own_streams_only_and_is_back(up: Up) -> None:
    """Streams of the other front go on to their end; reservations are freed; both serve again."""
    assert complete(up, [5] * 40, 4)
    victim, other = parts(up, "front")
    ended = streams(up, lambda: os.kill(victim, signal.SIGKILL))
    assert 0 < len([it for it in ended if it is not None]) < STREAMS, up.output
    up.settle()
    up.until(lambda: len(parts(up, "front")) == 2, 30)
    assert other in parts(up, "front")
    assert "KILLED BY SIGKILL" in up.output
    assert complete(up, [5] * 40, 4)


def test_a_killed_conductor_is_started_again_and_found(up: Up) -> None:
    """Streams go on to their end without it, and no token is lost. Forwards are answered 503
    meanwhile; workers join the new Conductor, and requests are served."""
    wanted = complete(up, [5] * 40, 8)
    fronts = parts(up, "front")
    [victim] = parts(up, "conductor")

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        up.until(lambda: gone(victim), 10)
        with pytest.raises(HTTPError, match="503"):
            up.get("/api/stats")

    ended = streams(up, kill)
    whole = [it for it in ended if it is not None]
    assert len(whole) == STREAMS, up.output
    assert len({_tokens(it) for it in whole}) == 1
    up.until(lambda: _served(up) == wanted, 60)
    assert parts(up, "front") == fronts
    up.settle()


def _tokens(events: list[bytes]) -> str:
    """The text of a stream."""
    said = [json.loads(it[6:]) for it in events if it.startswith(b"data: {")]
    return "".join(it["choices"][0]["text"] for it in said if it["choices"])


def test_a_conductor_that_hangs_is_given_up_and_found_again(up: Up) -> None:
    """While the Conductor hangs, fronts answer 503 by a deadline; later requests are served."""
    wanted = complete(up, [5] * 40, 8)
    [hung] = parts(up, "conductor")
    os.kill(hung, signal.SIGSTOP)
    try:
        with pytest.raises(HTTPError, match=r"50[23]"):  # it was under way, and has failed
            complete(up, [5] * 40, 8)
        up.until(lambda: _status(up) == 503)  # the other front may notice a moment later
        with pytest.raises(HTTPError, match="503"):
            complete(up, [5] * 40, 8)
    finally:
        os.kill(hung, signal.SIGCONT)
    up.until(lambda: _served(up) == wanted, 60)
    assert parts(up, "conductor") == [hung]
    up.settle()


def _status(up: Up) -> int:
    try:
        complete(up, [5] * 40, 8)
    except HTTPError as error:
        return error.code
    return 200


def _served(up: Up) -> list[int] | None:
    try:
        return complete(up, [5] * 40, 8)
    except OSError:
        return None


def test_ctrl_c_lets_the_streams_of_all_fronts_finish(up: Up) -> None:
    """Streams under way end whole; then no process and no socket is left."""
    assert up.url
    pids = [*up.children().values(), *parts(up, "front"), *parts(up, "conductor")]
    [conductor] = parts(up, "conductor")
    words = _command(conductor).split("\0")
    folder = Path(words[words.index("--socket") + 1]).parent
    assert folder.stat().st_mode & 0o077 == 0
    ended = streams(up, lambda: up.process.send_signal(signal.SIGINT))
    assert all(it is not None and len(it) == len(ended[0] or ()) for it in ended)
    up.until(lambda: up.process.poll() is not None, STOP_S)
    assert up.process.returncode == 0, up.output
    assert all(map(gone, pids))
    assert not folder.exists()
    assert "Traceback" not in up.output

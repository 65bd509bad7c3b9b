"""A fleet of real processes: one Conductor, fronts by socket, TCP and etcd, workers with the fake
engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.etcd import Etcd
from tests.support.store_processes import Process
from tests.support.up import get, send

pytestmark = pytest.mark.model  # fronts read its tokenizer

WORDS = " ".join(f"word{n}" for n in range(300))
ID = "the-clients-own"


class Fleet:
    """The processes of one cluster; `close` ends them all."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.processes: list[Process] = []

    def start(self, *argv: str) -> Process:
        """Start one role."""
        process = Process(*argv)
        self._stack.callback(process.close)
        self.processes.append(process)
        return process

    def listening(self, *argv: str) -> tuple[Process, str]:
        """Start one role, and wait until it listens; it and its URL."""
        process = self.start(*argv)
        until(lambda: any("listening on" in line for line in process.lines), process)
        line = next(line for line in process.lines if "listening on" in line)
        return process, line.split()[-1]

    def workers(self, *where: str) -> None:
        """Two workers that prefill, one that decodes."""
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
            self.start(
                "worker", "--name", name, "--role", role, "--engine", "fake", "--model",
                DEFAULT_MODEL, "--block-size", "16", "--segment-bytes", "16MiB", *where,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What all have printed."""
        return "\n".join("".join(process.lines) for process in self.processes)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """No process yet; all that a test starts end with it."""
    with contextlib.ExitStack() as stack:
        it = Fleet(stack)
        try:
            yield it
        except BaseException:
            print(it.output)
            raise


def until(true: Callable[[], object], of: Process | None = None, within_s: float = 40.0) -> None:
    """Poll until the condition holds; `of` must live meanwhile."""
    end = time.monotonic() + within_s
    while not true():
        late = time.monotonic() >= end or (of is not None and of.process.poll() is not None)
        assert not late, "waited in vain" + ("".join(of.lines) if of else "")
        time.sleep(0.05)


def said(process: Process, words: str) -> bool:
    """Whether a process has printed these words."""
    return words in "".join(process.lines)


def ready(url: str) -> bool:
    """Whether a front has a Conductor with three workers."""
    try:
        return bool(get(url + "/ready")) and len(get(url + "/api/instances")) == 3
    except OSError:
        return False


def ask(url: str, prompt: str, count: int = 8, **headers: str) -> tuple[str, Any]:
    """A completion: the id that the front gave it, and its body."""
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}
    with send(url, "/v1/completions", body | {"ignore_eos": True}, headers) as reply:
        return reply.headers["x-request-id"], json.load(reply)


def cached(reply: Any) -> int:
    """How much of the prompt was found cached."""
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def settled(url: str) -> bool:
    """Whether no reservation is left at the Conductor, and nothing at its store and workers."""
    stats = get(url + "/api/stats")
    left = [stats[key] for key in stats if key == "requests" or "promised" in key]
    left += [stats["store"][key] for key in ("leases", "pending_puts")]
    for instance in get(url + "/api/instances"):
        left += get(instance["url"] + "/debug/ledger").values()
    return not any(left)


def lost(url: str, gone: threading.Event) -> bool:
    """Stream until the front dies: whether the stream ended early. Sets `gone` once it streams."""
    body = {"model": DEFAULT_MODEL, "prompt": WORDS, "max_tokens": 4_000, "ignore_eos": True}
    try:
        with send(url, "/v1/completions", body | {"stream": True}, {}) as reply:
            reply.readline()
            gone.set()
            return b"[DONE]" not in reply.read()
    except (OSError, HTTPException):
        return True


def test_fronts_of_one_conductor_by_socket_and_tcp(fleet: Fleet, tmp_path: Path) -> None:
    """What one front's request left, another's finds, at the same instance. Requests of one id are
    two. A killed front leaves nothing behind, and the other serves on. Ledgers end at zero."""
    path = str(tmp_path / "s")
    _, url = fleet.listening("conductor", "--port", "0", "--socket", path)
    fleet.workers("--gateway", url, "--profile", "")
    near, near_url = fleet.listening("gateway", "--port", "0", "--conductor", path)
    _, far_url = fleet.listening(
        "gateway", "--port", "0", "--conductor", url.removeprefix("http://")
    )
    until(lambda: ready(near_url) and ready(far_url))

    first, reply = ask(near_url, WORDS, **{"x-request-id": ID})
    assert cached(reply) == 0
    chosen = get(f"{far_url}/api/decisions/{first}")["prefill"]
    for front in (far_url, near_url):
        again, reply = ask(front, f"{WORDS} and more", **{"x-request-id": ID})
        assert cached(reply) > 200
        assert get(f"{near_url}/api/decisions/{again}")["prefill"] == chosen
        assert again.startswith(f"{ID}-")
        assert again != first
    with ThreadPoolExecutor(8) as many:
        jobs = [
            many.submit(ask, (near_url, far_url)[n % 2], f"{n} {WORDS}", 8, **{"x-request-id": ID})
            for n in range(24)
        ]
        names = {job.result()[0] for job in jobs}
    assert len(names) == 24
    until(lambda: settled(far_url))

    streams = threading.Event()
    with ThreadPoolExecutor(1) as one:
        streaming = one.submit(lost, near_url, streams)
        assert streams.wait(20)
        until(lambda: get(far_url + "/api/stats")["requests"] == 1)
        os.kill(near.process.pid, signal.SIGKILL)
        assert streaming.result(20), "it ended with its front"
    until(lambda: settled(far_url))
    assert cached(ask(far_url, f"{WORDS} and more")[1]) > 200
    assert "Traceback" not in fleet.output


def test_fronts_find_the_conductor_in_etcd(fleet: Fleet, tmp_path: Path) -> None:
    """So do workers. A gateway with a Conductor of its own is refused with the remedy. Fronts find
    the Conductor that comes after one that was killed, and serve while etcd is away."""
    with contextlib.closing(Etcd(tmp_path)) as etcd:
        there = ("--registry", etcd.url)
        fleet.listening("store", "serve", "--listen", "0", *there)
        first, _ = fleet.listening("conductor", "--port", "0", *there)
        fleet.workers(*there)
        fronts = [
            fleet.listening("gateway", "--port", "0", "--conductor", etcd.url)[1] for _ in range(2)
        ]
        until(lambda: all(map(ready, fronts)))
        assert cached(ask(fronts[0], WORDS)[1]) == 0
        assert cached(ask(fronts[1], WORDS)[1]) > 200
        assert get(fronts[0] + "/api/conductor")["leads"]
        listing = fleet.start("instances", "--registry", etcd.url)
        assert listing.process.wait(20) == 0
        until(partial(said, listing, "leads in term 1"))
        until(lambda: all(f"\n{name}  " in "".join(listing.lines) for name in ("p0", "p1", "d0")))

        for more in ((), ("--workers", "2")):
            second = fleet.start("gateway", "--port", "0", *more, *there)
            assert second.process.wait(30)
            until(partial(said, second, "registry: has a Conductor at http"))

        first.kill()
        until(lambda: not any(map(ready, fronts)), within_s=10)
        health = get(fronts[0] + "/health")
        assert health["status"] == "ok", "it has streams, so nobody may end it for this"
        assert "Conductor does not answer" in "".join(health["alarms"])
        fleet.listening("conductor", "--port", "0", *there)
        until(lambda: all(map(ready, fronts)))
        assert cached(ask(fronts[1], WORDS)[1]) > 200
        until(lambda: all(settled(url) for url in fronts))

        etcd.lose_all()
        time.sleep(1.0)
        assert ask(fronts[0], WORDS)[1]["choices"], "no process needs etcd to serve"
        etcd.start()
        until(lambda: get(fronts[0] + "/api/conductor")["leads"])
        assert all(map(ready, fronts))
    assert "Traceback" not in fleet.output

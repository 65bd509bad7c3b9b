"""`gateway --workers 2` whose supervisor is killed, with real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.up import children_of, gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


class Gateway:
    """A gateway without engines, which needs no model."""

    def __init__(
        self, folder: Path, workers: int = 2, stdin: socket.socket | None = None, **env: str
    ) -> None:
        settings = folder / "cluster.yaml"
        settings.write_text(f"instances: []\nport: 0\nworkers: {workers}\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonserve", "gateway", "--config", str(settings)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), **env},
        )
        assert self.process.stdout is not None
        said = next(line for line in self.process.stdout if line.startswith("listening on "))
        self.url = said.removeprefix("listening on ").strip()
        self.parts = children_of(self.process.pid)

    def end(self) -> None:
        """Kill all of it."""
        for pid in [*self.parts, *children_of(self.process.pid)]:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Gateway]]:
    """Starts gateways, all with one temporary folder; ends them."""
    gateways: list[Gateway] = []

    def one() -> Gateway:
        gateways.append(Gateway(tmp_path))
        return gateways[-1]

    yield one
    for gateway in gateways:
        gateway.end()


def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gateway_tells_its_supervisor_that_it_goes_round(tmp_path: Path, workers: int) -> None:
    """Wait until a gateway listens, also one that supervises its own processes."""
    supervisors, stdin = socket.socketpair()
    gateway = Gateway(tmp_path, workers, stdin=stdin, MOONSERVE_LIFELINE="stdin")
    stdin.close()
    supervisors.settimeout(10)
    try:
        assert supervisors.recv(1)
        supervisors.close()  # which is what the end of ours looks like
        until(lambda: gateway.process.poll() is not None)
    finally:
        gateway.end()


def test_who_is_read_by_nobody_any_more_still_stops_in_order(
    start: Callable[[], Gateway], tmp_path: Path
) -> None:
    """As if its own supervisor was killed, and with it the reader of its lines."""
    gateway = start()
    assert gateway.process.stdout is not None
    gateway.process.stdout.close()
    gateway.process.terminate()
    until(lambda: gateway.process.poll() is not None)
    assert all(map(gone, gateway.parts))
    assert not list(tmp_path.glob("moonserve-*"))


def test_a_killed_supervisor_leaves_nothing(start: Callable[[], Gateway], tmp_path: Path) -> None:
    """Its processes end by themselves; the next start removes its socket, and touches nothing of
    who runs beside it."""
    victim, other = start(), start()
    assert len(victim.parts) == 3
    places = set(tmp_path.glob("moonserve-*"))
    assert len(places) == 2
    victim.process.kill()
    until(lambda: all(map(gone, victim.parts)))
    start()
    now = set(tmp_path.glob("moonserve-*"))
    assert len(now & places) == 1
    assert len(now) == 2
    with urlopen(other.url + "/health", timeout=10) as reply:
        assert reply.status == 200

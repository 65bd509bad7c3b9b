"""A real etcd of one member in a folder of its own; tests that need it skip where it is absent."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


class Etcd:
    """One etcd process; `close` it, whatever happens."""

    def __init__(self, folder: Path, tls: Path | None = None) -> None:
        """tls: the folder of its certificates; None: it speaks in clear."""
        self._tls = tls
        binary = shutil.which("etcd")
        if binary is None:
            pytest.skip("etcd is not installed (Debian's etcd-server)")
        self._binary = binary
        self._folder = folder
        self.port, self._peer_port = _free_port(), _free_port()
        self._health_port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """As --registry takes it."""
        return f"etcd{'s' if self._tls else ''}://127.0.0.1:{self.port}/test"

    def start(self) -> None:
        """Start it, with what it knew before, and wait until it answers."""
        peer = f"http://127.0.0.1:{self._peer_port}"
        client = f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"
        flags = {
            "data-dir": str(self._folder / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "log-level": "error",
            "unsafe-no-fsync": "true",
        }
        if self._tls is not None:
            flags |= {
                "cert-file": str(self._tls / "etcd.crt"),
                "key-file": str(self._tls / "etcd.key"),
                "trusted-ca-file": str(self._tls / "ca.crt"),
                "client-cert-auth": "true",
                "listen-metrics-urls": f"http://127.0.0.1:{self._health_port}",
            }
        argv = [self._binary, *(f"--{name}={value}" for name, value in flags.items())]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(argv, stdout=quiet, stderr=quiet)
        end = time.monotonic() + 20
        while not self._answers():
            assert self.process.poll() is None, "etcd ended"
            assert time.monotonic() < end, "etcd does not answer"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            port = self._health_port if self._tls else self.port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as reply:
                return b"true" in reply.read()
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """kill -9; `start` brings it back."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """At another port meanwhile, where those who knew it do not find it."""
        known, self.port = self.port, _free_port()
        try:
            yield
        finally:
            self.port = known

    def freeze(self) -> None:
        """It does not answer any more, though it is there."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    def thaw(self) -> None:
        """It answers again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def lose_all(self) -> None:
        """Kill it, and drop what it knew."""
        self.kill()
        shutil.rmtree(self._folder / "etcd")

    def close(self) -> None:
        """End it."""
        self.kill()


def _free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])

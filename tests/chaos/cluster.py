"""A real cluster of `moonserve up` with a proxy on every link between its processes.

Each worker advertises a loopback address of its own, such as 127.0.0.11, where a proxy forwards the
ports of its HTTP server and its segments. The worker reaches the gateway, and so the store's
master, by a proxy of its own too. The clients of the tests reach the gateway without a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.proxy import Link
from tests.support.up import STOP_S, TOKEN, Up, children_of, gone, shared_memory_of

ROOT = Path(__file__).parents[2]
WORKERS = ("p0", "p1", "d0", "d1")
_LOOK_S = 0.05
_STARTING_S = 30.0
"""A worker opens its last port within this time of its start."""
_SETTLED_S = 240.0
"""Leases that a killed Conductor had not released end after two minutes."""
PAGE_BYTES = resource.getpagesize()


class Cluster:
    """Two prefill and two decode workers on the fake engine; `start` it, and `end` it always."""

    def __init__(self, folder: Path, *args: str, fronts: int = 1, wrap: Sequence[str] = ()) -> None:
        """folder: for its temporary files and its disk tier; wrap: words before its command."""
        self.folder = folder
        self.pids: set[int] = set()
        """Every process of it that was seen."""
        self.to_gateway = {name: Link() for name in WORKERS}
        self.to_worker = {name: Link() for name in WORKERS}
        self._args = args
        self._fronts = fronts
        self._wrap = wrap
        self._clock = folder / "clock"
        self._http_ports = {name: _free_port() for name in WORKERS}
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all processes, and wait until the gateway is ready with all workers."""
        for name in ("tmp", "disk"):
            (self.folder / name).mkdir()
        self.step_clock(0)
        self.port = _free_port()
        plan: dict[str, dict[str, object]] = {"gateway": {}, "workers": {}}
        for at, name in enumerate(WORKERS):
            link = await self.to_gateway[name].listen("127.0.0.1", 0, self.port)
            plan["gateway"][name] = f"http://127.0.0.1:{link}"
            plan["workers"][name] = (_address(at), self._http_ports[name])
        path = os.pathsep.join(
            [str(ROOT / "tests/chaos/clock"), os.environ.get("PYTHONPATH", ""), str(ROOT)]
        )
        self.up = Up(
            "--prefill", "2", "--decode", "2", "--engine", "fake", "--block-size", "16",
            "--workers", str(self._fronts), *self._args,
            program=(*self._wrap, sys.executable, "-m", "tests.chaos.up", json.dumps(plan)),
            port=self.port,
            environ={
                "PYTHONPATH": path,
                "MOON_CLOCK": str(self._clock),
                "TMPDIR": str(self.folder / "tmp"),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )  # fmt: skip
        self._looking = asyncio.create_task(self._follow())
        self.url = await asyncio.to_thread(lambda: self.up.url)

    def step_clock(self, offset_s: int) -> None:
        """Set the offset of the wall clock of all processes."""
        data = (offset_s * 1_000_000_000).to_bytes(8, "little", signed=True)
        if not self._clock.exists():
            self._clock.write_bytes(data)
        with self._clock.open("r+b") as file:  # in place, since the processes have it mapped
            file.write(data)

    def processes(self) -> dict[str, int]:
        """Pids by name: workers, and either `gateway`, or `supervisor`, `conductor` and fronts."""
        found: dict[str, int] = {}
        for pid in descendants(self.up.process.pid):
            try:
                argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if "--name" in argv:
                found[argv[argv.index("--name") + 1]] = pid
            elif "conductor" in argv:
                found["conductor"] = pid
            elif "--shared" in argv:
                found[f"front{sum(name.startswith('front') for name in found)}"] = pid
            elif "gateway" in argv:
                found["supervisor" if self._fronts > 1 else "gateway"] = pid
        self.pids |= set(found.values())
        return found

    async def _follow(self) -> None:
        """Forward the ports on which the workers listen, which change at every start.

        A dead worker's address refuses connections, as it would without a proxy.
        """
        started: dict[int, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            alive = self.processes()
            for at, name in enumerate(WORKERS):
                link = self.to_worker[name]
                pid = alive.get(name)
                if pid is None:
                    link.forget(link.ports)
                    continue
                now_s = time.monotonic()
                if now_s > started.setdefault(pid, now_s) + _STARTING_S:
                    continue
                wanted = _listening(pid) | {self._http_ports[name]}
                link.forget(link.ports - wanted)
                for port in wanted - link.ports:
                    with contextlib.suppress(OSError):
                        await link.listen(_address(at), port)

    def heal(self) -> None:
        """End the faults of all links."""
        for link in (*self.to_gateway.values(), *self.to_worker.values()):
            link.heal()

    async def settled(self) -> dict[str, int]:
        """Wait until all workers are members and every ledger is zero; return those that are not.

        Without an error: an empty dict.
        """
        end = time.monotonic() + _SETTLED_S
        left = {"never answered": 1}
        while left and time.monotonic() < end:
            await asyncio.sleep(0.3)
            with contextlib.suppress(OSError):  # URLError is one
                left = await asyncio.to_thread(self._unsettled)
        return left

    def _unsettled(self) -> dict[str, int]:
        request = urllib.request.Request(
            self.url + "/api/instances", headers={"authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            members = {it["id"]: it for it in json.load(reply)}
        ledger = {f"{name} is away": 1 for name in WORKERS if name not in members}
        ledger |= self.up.ledgers()
        return {name: count for name, count in ledger.items() if count}

    def use(self) -> dict[str, Use]:
        """What every process holds now."""
        return {name: Use.of(pid) for name, pid in sorted(self.processes().items())}

    def shared_memory_bytes(self) -> int:
        """The bytes of the cluster's regions in /dev/shm."""
        names = shared_memory_of(self.pids)
        return sum((Path("/dev/shm") / name).stat().st_size for name in names)

    async def end(self) -> list[str]:
        """Stop it as Ctrl-C does, and return what is left: processes, memory, files."""
        self.heal()
        self.processes()
        if self._looking is not None:
            self._looking.cancel()
        self.up.process.send_signal(signal.SIGINT)
        end = time.monotonic() + 2 * STOP_S
        while self.up.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.1)
        code = self.up.process.poll()
        left = [f"process {pid}" for pid in sorted(self.pids) if not gone(pid)]
        await asyncio.to_thread(self.up.end)  # kills what is left
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)
        left += [f"/dev/shm/{name}" for name in shared_memory_of(self.pids)]
        left += [f"file {path}" for path in (self.folder / "tmp").iterdir()]
        left += [] if code == 0 else [f"exit code {code}"]
        for link in (*self.to_gateway.values(), *self.to_worker.values()):
            await link.close()
        return left


class Use:
    """What one process holds of the machine."""

    def __init__(self, rss_bytes: int, descriptors: int, threads: int) -> None:
        self.rss_bytes = rss_bytes
        self.descriptors = descriptors
        self.threads = threads

    def least(self, other: Use) -> Use:
        """The smaller of each."""
        return Use(
            min(self.rss_bytes, other.rss_bytes),
            min(self.descriptors, other.descriptors),
            min(self.threads, other.threads),
        )

    @classmethod
    def of(cls, pid: int) -> Use:
        """Of a process that runs."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(
            pages * PAGE_BYTES,
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
        )


def descendants(pid: int) -> list[int]:
    """All processes below this one, in order of their start."""
    found = children_of(pid)
    for one in found:
        found += children_of(one)
    return sorted(found)


def _address(at: int) -> str:
    """The loopback address that this worker advertises; Linux has all of 127.0.0.0/8."""
    return f"127.0.0.{11 + at}"


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _listening(pid: int) -> set[int]:
    """The TCP ports at 127.0.0.1 on which a process listens."""
    inodes = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
            address, _, port = fields[1].partition(":")
            if address == "0100007F":
                ports.add(int(port, 16))
    return ports


def answer(url: str) -> Any:
    """The JSON of a GET, with the cluster's token."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)

"""Put and get through the store, beside memcpy, a plain socket and the real Mooncake Store.

    python bench/store.py [--seconds 1] [--sizes 4KiB,1MiB]

Everything but this process's clients is a process of its own: our master and two
segments; for Mooncake, where the extra `mooncake` is installed, its master and two clients that
lend memory, all over TCP. No client here has memory of its own in the pool, so that every byte
comes from another process: `shm` by shared memory, `tcp` by sockets. put = start + copy + checksum
+ end; get = find + copy + verify; read is a get without the find. Leases are released after the
clock has stopped. Each size is done once alone and once as a batch of 32 (up to 1 MiB), the arms in
turns. `x2` asks for two replicas: Mooncake writes both before a put ends, we do after; the time
until both are there is `x2 all`. memcpy goes through 64 MiB, as the others' bytes are not in a
core's cache either.

Ratios are of speed, of the medians. CPU seconds per GB are of all processes of an arm together.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import uvloop

from common import machine_line
from moonserve.cli.token import token_for
from moonserve.core.errors import ConfigError
from moonserve.core.store.words import PutOptions
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.http.client import HttpClient
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.remote import HttpRpc
from moonserve.live.transfer import mooncake_master
from moonserve.live.transfer.region import clean_stale

SIZES = {"4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20, "16MiB": 16 << 20}
SIZES["64MiB"] = 64 << 20
BATCH = 32
LARGEST_BATCHED = 1 << 20
ROOM = 384 << 20
MEMORY = 64 << 20
TICKS = os.sysconf("SC_CLK_TCK")
RATIOS = [
    ("shm read", "memcpy"), ("shm get", "memcpy"), ("tcp get", "socket"), ("shm get", "mc get"),
    ("tcp get", "mc get"), ("shm put", "mc put"), ("tcp put", "mc put"),
    ("tcp put x2", "mc put x2"),
]  # fmt: skip

CHILDREN: list[subprocess.Popen[str]] = []
"""All that were started; `main` ends those that are left."""

Arm = Callable[[int, int], Awaitable[float]]
"""Moves `count` objects of `size` bytes; the seconds that took."""


def launch(argv: Sequence[str], stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a process, with nothing of the caller's own cluster: neither its token nor settings."""
    environ = {name: it for name, it in os.environ.items() if not name.startswith("MOONSERVE_")}
    CHILDREN.append(
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=stdout, text=True, env=environ)
    )
    return CHILDREN[-1]


def start(*argv: str, until: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process, and wait for a line; its first group."""
    process = launch(argv, subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(until, line):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process, found[1]
    raise SystemExit(f"{' '.join(argv)} ended")


def plain() -> None:
    """Be the plain socket's server: sends as many bytes as are asked for."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(os.urandom(SIZES["64MiB"])))
    while head := sock.recv(8, socket.MSG_WAITALL):
        sock.sendall(memory[: int.from_bytes(head, "little")])


def mooncake_store(master: str, room: int) -> Any:
    """A member of Mooncake's pool."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", room, 64 << 20, "tcp", "", master)
    assert code == 0, code
    return store


def lend(master: str) -> None:
    """Be a member that lends memory, until stdin closes."""
    store = mooncake_store(master, ROOM)
    print("lends", store.get_hostname(), flush=True)
    sys.stdin.read()
    store.close()
    os._exit(0)  # its threads do not end


class Ours:
    """The arms of our store: a master, two segments, a client by shared memory and one by TCP."""

    def __init__(self) -> None:
        program = (sys.executable, "-m", "moonserve")
        serve = ("store", "serve", "--listen", "0", "--recover-s", "0")
        self.master, port = start(*program, *serve, until=r"listening on .*:(\d+)")
        self.url = f"http://127.0.0.1:{port}"
        self.processes = [self.master]
        for name in ("s0", "s1"):
            argv = (
                "segment",
                "--name",
                name,
                "--store-url",
                self.url,
                "--segment-bytes",
                f"{ROOM}",
            )
            self.processes.append(start(*program, *argv, until="(MiB)")[0])
        self.key = 0
        self.source = memoryview(bytearray(os.urandom(64 << 20)))
        self.target = memoryview(bytearray(64 << 20))

    async def open(self) -> dict[str, Arm]:
        """Join it, and say what can be measured."""
        self.http = HttpClient()
        one = PutOptions(preferred=SegmentId("s0"))
        two = PutOptions(preferred=SegmentId("s0"), replicas=2)
        shm, tcp = await self._client("shm", True, one), await self._client("tcp", False, one)
        twice = await self._client("twice", False, two)
        self.clients = [shm, tcp, twice]
        return {
            "shm put": lambda size, count: self.put(shm, size, count),
            "shm get": lambda size, count: self.get(shm, size, count),
            "shm read": lambda size, count: self.get(shm, size, count, found_before=True),
            "tcp put": lambda size, count: self.put(tcp, size, count),
            "tcp get": lambda size, count: self.get(tcp, size, count),
            "tcp put x2": lambda size, count: self.put(twice, size, count),
            "tcp put x2 all": lambda size, count: self.put_all(twice, size, count),
        }

    async def _client(self, name: str, shared: bool, options: PutOptions) -> StoreClient:
        token = token_for(self.url)
        settings = StoreSettings(
            segment=SegmentId(name), epoch=1, capacity_bytes=0, token=token.encode(),
            options=options, shared_memory=shared,
        )  # fmt: skip
        return await StoreClient.open(HttpRpc(self.http, self.url, token), settings)

    async def put(self, client: StoreClient, size: int, count: int) -> float:
        """New objects."""
        items = []
        for index in range(count):
            self.key += 1
            at = index * size % len(self.source)
            items.append((BlockKey(self.key.to_bytes(32, "big")), self.source[at : at + size]))
        self.keys = [key for key, _ in items]
        begun = time.perf_counter()
        assert await client.put(items, None) == count
        return time.perf_counter() - begun

    async def put_all(self, client: StoreClient, size: int, count: int) -> float:
        """New objects, and their second replicas."""
        begun = time.perf_counter()
        await self.put(client, size, count)
        while True:
            lease = LeaseId(f"all-{time.perf_counter_ns()}")
            found = await client.get(self.keys, lease)
            await client.release(lease)
            if all(it is not None and len(it.replicas) == 2 for it in found):
                return time.perf_counter() - begun
            await asyncio.sleep(0.001)

    async def get(
        self, client: StoreClient, size: int, count: int, found_before: bool = False
    ) -> float:
        """What was put last."""
        lease = LeaseId(f"bench-{self.key}-{client.settings.segment}-{time.perf_counter_ns()}")
        into = [self.target[i * size : (i + 1) * size] for i in range(count)]
        begun = time.perf_counter()
        found = await client.find(self.keys, lease)
        if found_before:
            begun = time.perf_counter()
        assert await client.read(found, into) == count
        took = time.perf_counter() - begun
        await client.release(lease)
        return took

    async def close(self) -> None:
        """End it all."""
        for client in self.clients:
            await client.close()
        await self.http.close()
        for process in reversed(self.processes):
            process.terminate()
            process.wait()


class Mooncake:
    """The arms of the real one, or none where it is not installed."""

    def __init__(self, wanted: bool) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.key = self.written = 0
        if not wanted:
            return
        try:
            mooncake_master.require()
        except ConfigError as error:
            print(f"no Mooncake to compare with: {error}", file=sys.stderr)
            return
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = trial.getsockname()[1]
        argv = mooncake_master.command("127.0.0.1", port, 1000)
        self.processes.append(launch(argv))
        time.sleep(1.5)
        hosts = []
        for _ in range(2):
            lent = (sys.executable, __file__, "lend", f"127.0.0.1:{port}")
            process, host = start(*lent, until=r"lends (\S+)")
            self.processes.append(process)
            hosts.append(host)
        self.store = mooncake_store(f"127.0.0.1:{port}", 0)
        from mooncake.store import ReplicateConfig

        self.one, self.two = ReplicateConfig(), ReplicateConfig()
        self.one.preferred_segment = self.two.preferred_segment = hosts[0]
        self.two.replica_num = 2
        self.source = np.random.default_rng(1).integers(0, 255, 64 << 20, dtype=np.uint8)
        self.target = np.zeros(64 << 20, np.uint8)
        for memory in (self.source, self.target):
            assert self.store.register_buffer(memory.ctypes.data, memory.nbytes) == 0

    async def open(self) -> dict[str, Arm]:
        """Say what can be measured."""
        if not self.processes:
            return {}
        return {
            "mc put": lambda size, count: self.put(self.one, size, count),
            "mc get": lambda size, count: self.get(size, count),
            "mc put x2": lambda size, count: self.put(self.two, size, count),
        }

    async def put(self, config: Any, size: int, count: int) -> float:
        """New objects."""
        self.keys = [f"k{self.key + i}" for i in range(count)]
        self.key += count
        self.written += size * count
        if self.written > ROOM // 2:  # what was found is leased, and would be in the way
            self.store.remove_all(True)
            self.written = size * count
        base = self.source.ctypes.data
        places = [base + i * size % (64 << 20) for i in range(count)]
        begun = time.perf_counter()
        codes = self.store.batch_put_from(self.keys, places, [size] * count, config)
        took = time.perf_counter() - begun
        assert not any(codes), codes
        return took

    async def get(self, size: int, count: int) -> float:
        """What was put last."""
        places = [self.target.ctypes.data + i * size for i in range(count)]
        begun = time.perf_counter()
        got = self.store.batch_get_into(self.keys, places, [size] * count)
        took = time.perf_counter() - begun
        assert got == [size] * count, got
        return took

    async def close(self) -> None:
        """End it all."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()


class Memcpy:
    """Plain copies between buffers that were touched before."""

    def __init__(self) -> None:
        # Not numpy's own memory: that asks for huge pages, which nobody else here has.
        self.here, self.there = (
            np.frombuffer(bytearray(os.urandom(MEMORY)), np.uint8) for _ in range(2)
        )
        self.at = 0

    async def copy(self, size: int, count: int) -> float:
        """From where no copy was lately."""
        here, there = self.here.ctypes.data, self.there.ctypes.data
        begun = time.perf_counter()
        for _ in range(count):
            ctypes.memmove(there + self.at, here + self.at, size)
            self.at = (self.at + size) % MEMORY
        return time.perf_counter() - begun


def plain_arm(port: str) -> Arm:
    """Request and answer over a socket."""
    sock = socket.create_connection(("127.0.0.1", int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    into = memoryview(bytearray(MEMORY))

    async def get(size: int, count: int) -> float:
        total = size * count
        begun = time.perf_counter()
        sock.sendall(total.to_bytes(8, "little"))
        assert sock.recv_into(into[:total], total, socket.MSG_WAITALL) == total
        return time.perf_counter() - begun

    return get


def cpu_s(processes: list[subprocess.Popen[str]]) -> float:
    """CPU seconds of this process and those."""
    total = time.process_time()
    for process in processes:
        with open(f"/proc/{process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


async def measure(
    arms: dict[str, Arm], size: int, count: int, seconds: float, processes: list[Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """The median seconds and the CPU seconds per GB of each arm, done in turns.

    CPU is accounted in blocks of several runs, since its clock ticks in hundredths.
    """
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    cpu = dict.fromkeys(arms, 0.0)
    for arm in arms.values():
        await arm(size, count)
    end = time.perf_counter() + seconds * len(arms)
    runs = max(1, (4 << 20) // (size * count))
    while time.perf_counter() < end or len(times["memcpy"]) < 3:
        for name, arm in arms.items():
            before = cpu_s(processes)
            for _ in range(runs):
                times[name].append(await arm(size, count))
            cpu[name] += cpu_s(processes) - before
    per_gb = {name: cpu[name] / (len(times[name]) * size * count / 1e9) for name in arms}
    return {name: statistics.median(taken) for name, taken in times.items()}, per_gb


async def run(sizes: dict[str, int], seconds: float, mooncake_too: bool) -> None:
    server, port = start(sys.executable, __file__, "plain", until=r"^(\d+)$")
    ours, mooncake = Ours(), Mooncake(mooncake_too)
    arms: dict[str, Arm] = {"memcpy": Memcpy().copy, "socket": plain_arm(port)}
    arms |= await ours.open() | await mooncake.open()
    processes = [server, *ours.processes, *mooncake.processes]
    try:
        for name, size in sizes.items():
            for count in (1, BATCH) if size <= LARGEST_BATCHED else (1,):
                p50, cpu = await measure(arms, size, count, seconds, processes)
                print(f"\n{name} x {count}: us, GB/s, CPU s/GB")
                for arm, taken in p50.items():
                    speed = size * count / taken / 1e9
                    print(f"  {arm:<15}{taken * 1e6:>10.1f}{speed:>8.2f}{cpu[arm]:>8.2f}")
                told = [
                    f"{a} / {b} {p50[b] / p50[a]:.2f}" for a, b in RATIOS if a in p50 and b in p50
                ]
                print("  speed: " + "; ".join(told), flush=True)
    finally:
        await ours.close()
        await mooncake.close()
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="per arm and case")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--alone", action="store_true", help="without Mooncake")
    args = parser.parse_args()
    print(machine_line())
    sizes = {name: SIZES[name] for name in args.sizes.split(",")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    try:
        uvloop.run(run(sizes, args.seconds, not args.alone))
    finally:
        for process in reversed(CHILDREN):
            process.kill()
            process.wait()
        clean_stale()  # of segments that had to be killed
    sys.stdout.flush()
    os._exit(0)  # Mooncake's threads do not end


if __name__ == "__main__":
    if sys.argv[1:] == ["plain"]:
        plain()
    elif sys.argv[1:2] == ["lend"]:
        lend(sys.argv[2])
    else:
        main()

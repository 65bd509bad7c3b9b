"""Put and get through the store, beside memcpy and a plain socket, in one interleaved run.

    python bench/store.py [--seconds-per-size 2]

A child process owns the segment and serves it; this process is master and client (calls to the
master are in-process, through the wire's bytes). put = start + copy + checksum + end; get = find +
copy + verify + release. The plain socket is request and answer over loopback TCP to the child.
Ratios are speeds: store / its bare counterpart (memcpy for shm, the plain socket for tcp).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable

import msgspec
import numpy as np

from common import machine_line
from moonserve.core.master import Master
from moonserve.core.pool import Address, Mount, Terms
from moonserve.core.units import BlockKey, LeaseId, SegmentId
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.server import MasterService
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20]
ROOM = 256 << 20
TOKEN = b"bench"
LEASE = LeaseId("bench")
ARMS = ["memcpy", "socket", "shm put", "shm get", "tcp put", "tcp get"]
BARE = {"shm put": "memcpy", "shm get": "memcpy", "tcp put": "socket", "tcp get": "socket"}


def own() -> None:
    """Be the child: a segment, its server, and a plain socket server, until stdin closes."""
    region = Region.create(ROOM)
    server = TransferServer(region, TOKEN)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=plain_server, args=(listener, region), daemon=True).start()
    address = msgspec.json.encode(server.address("127.0.0.1")).decode()
    print(listener.getsockname()[1], address, flush=True)
    sys.stdin.read()
    server.close()
    region.close()


def plain_server(listener: socket.socket, region: Region) -> None:
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := sock.recv(8, socket.MSG_WAITALL):
        sock.sendall(region.view[: struct.unpack("<Q", head)[0]])


def plain_get(sock: socket.socket, into: memoryview) -> None:
    sock.sendall(struct.pack("<Q", len(into)))
    assert sock.recv_into(into, len(into), socket.MSG_WAITALL) == len(into)


class Bench:
    """The arms, each doing one operation of `size` bytes and giving the seconds it took."""

    def __init__(self, shm: StoreClient, tcp: StoreClient, plain: socket.socket) -> None:
        self.clients = {"shm": shm, "tcp": tcp}
        self.plain = plain
        self.source = memoryview(bytearray(os.urandom(SIZES[-1])))
        self.target = memoryview(bytearray(SIZES[-1]))
        self.key = 0

    async def one(self, arm: str, size: int) -> float:
        """Run one arm once."""
        source, target = self.source[:size], self.target[:size]
        if arm == "memcpy":
            here, there = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
            started = time.perf_counter()
            np.copyto(here, there)
            return time.perf_counter() - started
        if arm == "socket":
            started = time.perf_counter()
            plain_get(self.plain, target)
            return time.perf_counter() - started
        client = self.clients[arm[:3]]
        if arm.endswith("put"):
            self.key += 1
            item = (BlockKey(self.key.to_bytes(32, "big")), source)
            started = time.perf_counter()
            assert await client.put([item], None) == 1
            return time.perf_counter() - started
        key = BlockKey(self.key.to_bytes(32, "big"))
        started = time.perf_counter()
        assert await client.read(await client.find([key], LEASE), [target]) == 1
        await client.release(LEASE)
        return time.perf_counter() - started


async def measure(bench: Bench, seconds_per_size: float) -> None:
    print(f"{'size':>8}" + "".join(f"{arm:>20}" for arm in ARMS) + "   (p50 us, GB/s)")
    ratios: list[str] = []
    for size in SIZES:
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for arm in ARMS:  # warm: caches, page tables, connections
            await bench.one(arm, size)
        end = time.perf_counter() + seconds_per_size
        while time.perf_counter() < end or len(times["memcpy"]) < 5:
            for arm in ARMS:
                times[arm].append(await bench.one(arm, size))
        p50 = {arm: statistics.median(taken) for arm, taken in times.items()}
        cells = (f"{p50[arm] * 1e6:>11.1f} {size / p50[arm] / 1e9:>8.2f}" for arm in ARMS)
        print(f"{size >> 10:>5}KiB" + "".join(cells) + f"   n={len(times['memcpy'])}")
        shares = (f"{arm}/{bare} {p50[bare] / p50[arm]:.2f}" for arm, bare in BARE.items())
        ratios.append(f"{size >> 10:>5}KiB  " + "   ".join(shares))
    print("\nratios of speed\n" + "\n".join(ratios))


async def run(port: int, address: Address, seconds_per_size: float) -> None:
    service = MasterService(Master(Terms(), 1), lambda: 0)
    service.master.mount(0, Mount(SegmentId("owner"), 1, ROOM, address))

    async def rpc(op: str, body: bytes) -> bytes:
        return service.handle(op, body)

    def client(name: str, shared: bool) -> Awaitable[StoreClient]:
        # A segment with room for one cache line: everything goes to the child's.
        settings = StoreSettings(
            segment=SegmentId(name), epoch=1, capacity_bytes=64, token=TOKEN, shared_memory=shared
        )
        return StoreClient.open(rpc, settings)

    shm, tcp = await client("shm", True), await client("tcp", False)
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await measure(Bench(shm, tcp, plain), seconds_per_size)
    await shm.close()
    await tcp.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds-per-size", type=float, default=2.0)
    seconds = parser.parse_args().seconds_per_size
    print(machine_line())
    child = subprocess.Popen(
        [sys.executable, __file__, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    port, address = child.stdout.readline().split(" ", 1)
    try:
        asyncio.run(run(int(port), msgspec.json.decode(address, type=Address), seconds))
    finally:
        child.communicate(timeout=10)


if __name__ == "__main__":
    own() if sys.argv[1:] == ["own"] else main()

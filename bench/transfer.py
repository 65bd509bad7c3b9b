"""The Transfer Engine beside memcpy, a plain socket and Mooncake's TransferEngine, interleaved.

    python bench/transfer.py [--seconds 2] [--sizes 4KiB,1MiB]

A child process owns the memory and serves it by TransferServer, also by TLS, by a plain socket and
(where the extra `mooncake` is installed) by Mooncake's engine over TCP; this process reads and
writes it. Each size is done once alone and once as a batch of 32, the arms in turns. `tuned` is the
plain socket with the small buffers that our TCP transport sets between processes of one host. CPU
seconds per GB are of both processes.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path as File
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common import machine_line
from moonserve.core.store.words import Address
from moonserve.live.tls.authority import CA, cert_of, init, key_of
from moonserve.live.tls.contexts import Tls, TlsFiles
from moonserve.live.transfer.client import Slice, Transfer
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer

SIZES = {"4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20, "16MiB": 16 << 20}
SIZES["64MiB"] = 64 << 20
ROOM = 128 << 20
BATCH = 32
TOKEN = b"bench"
SMALL = 256 << 10
HEAD = struct.Struct("<BQ")
RATIOS = [
    ("shm", "memcpy"),
    ("tcp", "socket"),
    ("tcp", "tuned"),
    ("tcp", "mooncake"),
    ("tls", "tcp"),
]

Arm = Callable[[bool, int, int], None]
"""Reads (True) or writes `count` pieces of `size` bytes."""


def mooncake_engine() -> Any:
    """A started TransferEngine over TCP on loopback, or None where it is not installed."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        print(f"no Mooncake to compare with: {error}", file=sys.stderr)
        return None
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def tls_of(folder: File) -> Tls:
    return Tls(TlsFiles(cert_of(folder, "store"), key_of(folder, "store"), cert_of(folder, CA)))


def own(folder: File) -> None:
    """Be the child: the memory and its servers, until stdin closes."""
    region = Region.create(ROOM)
    server = TransferServer(region, TOKEN)
    encrypts = TransferServer(region, TOKEN, tls=tls_of(folder).server)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for listener, small in zip(listeners, (False, True), strict=True):
        threading.Thread(target=plain_server, args=(listener, region, small), daemon=True).start()
    base = np.frombuffer(region.view, np.uint8).ctypes.data
    engine = mooncake_engine()
    if engine is not None:
        assert engine.register_memory(base, ROOM) == 0
    mooncake = f"127.0.0.1:{engine.get_rpc_port()}" if engine is not None else ""
    ports = [listener.getsockname()[1] for listener in listeners]
    addresses = [it.address("127.0.0.1") for it in (server, encrypts)]
    hello = (addresses, ports, mooncake, base)
    print("hello " + msgspec.json.encode(hello).decode(), flush=True)
    sys.stdin.read()
    server.close()
    encrypts.close()
    region.path.unlink()
    os._exit(0)  # Mooncake's threads do not end


def pages() -> memoryview:
    """Private memory that starts on a page, as the segment does; copies depend on that."""
    made = mmap.mmap(-1, ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made[:] = bytes(ROOM)
    return memoryview(made)


def tune(sock: socket.socket, small: bool) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)


def plain_server(listener: socket.socket, region: Region, small: bool) -> None:
    sock, _ = listener.accept()
    tune(sock, small)
    while head := sock.recv(HEAD.size, socket.MSG_WAITALL):
        read, size = HEAD.unpack(head)
        if read:
            sock.sendall(region.view[:size])
        else:
            sock.recv_into(region.view[:size], size, socket.MSG_WAITALL)
            sock.sendall(b"k")


def plain_arm(port: int, small: bool, mine: memoryview) -> Arm:
    sock = socket.create_connection(("127.0.0.1", port))
    tune(sock, small)

    def move(read: bool, size: int, count: int) -> None:
        total = size * count
        if read:
            sock.sendall(HEAD.pack(True, total))
            assert sock.recv_into(mine[:total], total, socket.MSG_WAITALL) == total
        else:
            rest = [HEAD.pack(False, total), mine[:total]]
            sent = sock.sendmsg(rest)
            sock.sendall(mine[sent - HEAD.size : total])
            assert sock.recv(1) == b"k"

    return move


def engine_arm(transfer: Transfer, address: Address, mine: memoryview) -> Arm:
    def move(read: bool, size: int, count: int) -> None:
        places = range(0, size * count, size)
        slices = [Slice(offset, mine[offset : offset + size]) for offset in places]
        run = transfer.read if read else transfer.write
        assert all(run(address, slices, time.monotonic() + 30))

    return move


def memcpy_arm(mine: memoryview) -> Arm:
    here = np.frombuffer(mine, np.uint8)
    there = np.frombuffer(pages(), np.uint8)
    there[:] = np.random.default_rng(1).integers(0, 255, ROOM, dtype=np.uint8)

    def move(read: bool, size: int, count: int) -> None:
        for offset in range(0, size * count, size):
            a, b = here[offset : offset + size], there[offset : offset + size]
            np.copyto(a, b) if read else np.copyto(b, a)

    return move


def mooncake_arm(target: str, base: int, mine: memoryview) -> Arm | None:
    engine = mooncake_engine() if target else None
    if engine is None:
        return None
    here = np.frombuffer(mine, np.uint8).ctypes.data
    assert engine.register_memory(here, ROOM) == 0

    def move(read: bool, size: int, count: int) -> None:
        places = range(0, size * count, size)
        run = engine.batch_transfer_sync_read if read else engine.batch_transfer_sync_write
        ours, theirs = [here + offset for offset in places], [base + offset for offset in places]
        assert run(target, ours, theirs, [size] * count) == 0

    return move


def child_cpu_s(pid: int) -> float:
    fields = File(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Taken(NamedTuple):
    """What one arm took for one piece of work."""

    p50_s: float
    p10_s: float
    """The fastest tenth: what other work on the machine disturbs least."""
    cpu_s_per_gb: float


def measure(
    arms: dict[str, Arm], read: bool, size: int, count: int, seconds: float, pid: int
) -> dict[str, Taken]:
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for move in arms.values():  # warm: caches, page tables, connections
        move(read, size, count)
    names = list(arms)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[names[0]]) < 12:
        names.append(names.pop(0))  # nobody always follows the same
        for name in names:
            arms[name](read, size, count)  # not counted: it finds the others' bytes in the caches
            for _ in range(2):
                started = time.perf_counter()
                arms[name](read, size, count)
                taken[name].append(time.perf_counter() - started)
    got = {}
    for name, move in arms.items():
        p50_s = statistics.median(taken[name])
        rounds = max(3, int(0.15 / p50_s))
        before_s = time.process_time() + child_cpu_s(pid)
        for _ in range(rounds):
            move(read, size, count)
        spent_s = time.process_time() + child_cpu_s(pid) - before_s
        p10_s = statistics.quantiles(taken[name], n=10)[0]
        got[name] = Taken(p50_s, p10_s, spent_s / (rounds * size * count / 1e9))
    return got


def run(arms: dict[str, Arm], sizes: dict[str, int], seconds: float, pid: int) -> None:
    print(f"{'':>16}" + "".join(f"{name:>26}" for name in arms))
    print(f"{'':>16}" + f"{'MB/s  p50 us CPU s/GB':>26}" * len(arms))
    ratios = []
    for label, size in sizes.items():
        for count in (1, BATCH):
            if size * count > ROOM:
                continue
            for read in (True, False):
                got = measure(arms, read, size, count, seconds, pid)
                what = f"{label}{f' x{count}' if count > 1 else ''} {'read' if read else 'write'}"
                cells = (
                    f"{size * count / it.p50_s / 1e6:>10,.0f} {it.p50_s * 1e6:>8,.0f}"
                    f" {it.cpu_s_per_gb:>6.2f}"
                    for it in got.values()
                )
                print(f"{what:>16}" + "".join(cells), flush=True)
                pairs = [(got[a], got[b]) for a, b in RATIOS if a in got and b in got]
                shares = (
                    f"{b.p50_s / a.p50_s:8.2f} {b.p10_s / a.p10_s:5.2f}"
                    f" {b.cpu_s_per_gb / max(a.cpu_s_per_gb, 1e-9):5.2f}"
                    for a, b in pairs
                )
                ratios.append(f"{what:>16}   " + "   ".join(shares))
    heads = "   ".join(f"{f'{a} / {b}':>20}" for a, b in RATIOS if a in arms and b in arms)
    print("\nratios of speed by the medians, by the fastest tenths, and of bytes per CPU second")
    print(f"{'':>16}   {heads}\n" + "\n".join(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="per size, count and direction")
    parser.add_argument("--sizes", default=",".join(SIZES))
    given = parser.parse_args()
    print(machine_line())
    with tempfile.TemporaryDirectory() as folder:
        init(File(folder))
        compare(given, File(folder))


def compare(given: argparse.Namespace, folder: File) -> None:
    child = subprocess.Popen(
        [sys.executable, __file__, "own", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    hello = next(line for line in child.stdout if line.startswith("hello "))[6:]
    kind = tuple[list[Address], list[int], str, int]
    (address, encrypted), ports, mooncake, base = msgspec.json.decode(hello, type=kind)
    trust = tls_of(folder).trust
    mine = pages()
    arms = {
        "memcpy": memcpy_arm(mine),
        "shm": engine_arm(Transfer(TOKEN), address, mine),
        "socket": plain_arm(ports[0], False, mine),
        "tuned": plain_arm(ports[1], True, mine),
        "tcp": engine_arm(Transfer(TOKEN, shared_memory=False), address, mine),
        "tls": engine_arm(Transfer(TOKEN, shared_memory=False, trust=trust), encrypted, mine),
    }
    peer = mooncake_arm(mooncake, base, mine)
    if peer is not None:
        arms["mooncake"] = peer
    try:
        sizes = {label: SIZES[label] for label in given.sizes.split(",")}
        run(arms, sizes, given.seconds, child.pid)
    finally:
        child.communicate(timeout=10)


if __name__ == "__main__":
    own(File(sys.argv[2])) if sys.argv[1:2] == ["own"] else main()

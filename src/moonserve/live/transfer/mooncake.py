"""The transport that uses Mooncake's own TransferEngine, from its wheel: TCP, or RDMA.

The store's client uses it with `--transport mooncake`; there is one per process. An owner serves a
region by it. Peers reach it by the path's Address: host and port are of Mooncake's handshake, and
`region` gives the address and the size of the memory there.

Mooncake's calls cannot be cut off, and a late call may still write. So each link has its own
memory, registered once, for these calls; the link copies bytes between it and the caller's memory.
If a call hangs, the link abandons that memory to it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moonserve.core.errors import ConfigError, DeadlineExceeded, TransferFailed
from moonserve.core.store.words import Address
from moonserve.core.units import Bytes
from moonserve.live.transfer.mooncake_master import require
from moonserve.live.transfer.ports import Op, Path, Slice
from moonserve.live.transfer.region import HEADER_BYTES, Region

_LINK_BYTES = 4 << 20
_SPINS = 50  # checks before the first sleep: a small transfer has ended by then
_REST_S = 50e-6
_MEET_S = 1.5
"""The longest wait for a handshake. It goes on after that, and a later run may find it done."""
_STALL_S = 3.0
"""If no call ends for this time, the link gives up the peer."""


class _Part(NamedTuple):
    """The bytes that one of Mooncake's calls carries: a part of a slice, by the link's memory."""

    slice: int
    ours: memoryview
    theirs: int
    start: int
    size: Bytes


@functools.cache
def transport_of_process(host: str, protocol: str, device: str) -> MooncakeTransport:
    """Return the one transport of this process; see MooncakeTransport."""
    return MooncakeTransport(host, protocol, device)


class MooncakeTransport:
    """Reads and writes segments that another MooncakeTransport serves."""

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        """`host`: the address at which peers reach this process. `device`: for RDMA; empty: all.

        Raises ConfigError with the remedy.
        """
        require("transport")
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:  # loaded only when configured, because the library starts threads
            from mooncake.engine import TransferEngine
        except ImportError as error:
            why = f"Mooncake's library cannot be loaded: {error}"
            raise ConfigError(why, "transport") from None

        self.engine: Any = TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise ConfigError(f"Mooncake's {protocol} cannot start on {host}", "transport")
        if protocol == "rdma" and not self._has_rdma():
            named = f" {device}" if device else ""
            why = f"there is no RDMA device{named} here, so Mooncake would use TCP; write tcp"
            raise ConfigError(why, "mooncake_protocol")
        self._host = host
        self._served: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._left: list[tuple[list[int], np.ndarray[Any, Any]]] = []
        """Calls that may still write, and the memory they write to."""

    def _has_rdma(self) -> bool:
        topology = json.loads(self.engine.get_local_topology())
        return any(any(devices) for devices in topology.values())

    def serve(self, region: Region) -> Address:
        """Let peers read and write a region; return its address for them. Raises ConfigError."""
        base = _address(region.view) - HEADER_BYTES
        size = HEADER_BYTES + len(region.view)
        if self.engine.register_memory(base, size):
            why = f"Mooncake cannot register {size} bytes; RDMA needs a higher `ulimit -l`"
            raise ConfigError(why, "transport")
        self._served[region.identity] = base
        at = f"{base:x}:{len(region.view):x}"
        return Address(self._host, self.engine.get_rpc_port(), at, region.identity)

    def withdraw(self, region: Region) -> None:
        """Stop serving a region before it is unmapped; nothing happens if it was not served."""
        base = self._served.pop(region.identity, None)
        if base is not None:
            self.engine.unregister_memory(base)

    def open(self, path: Path) -> MooncakeLink:
        """See Transport.open."""
        return MooncakeLink(self, path.address)

    def most_lanes(self, path: Path) -> int:
        """See Transport.most_lanes. Each lane has several of Mooncake's sockets behind it."""
        return 2

    def leave(self, calls: list[int], memory: np.ndarray[Any, Any]) -> None:
        """Keep memory while calls may write to it; release memory that no call writes to."""
        with self._lock:  # the status of an ended call may be read only once
            self._left.append((calls, memory))
            still = []
            for left, array in self._left:
                left[:] = [call for call in left if not self.engine.transfer_check_status(call)]
                if left:
                    still.append((left, array))
                else:
                    self.engine.unregister_memory(array.ctypes.data)
            self._left = still


class MooncakeLink:
    """One lane to a segment, with registered memory for one run of calls."""

    def __init__(self, transport: MooncakeTransport, address: Address) -> None:
        base, _, size = address.region.partition(":")
        self._transport = transport
        self._target = f"{address.host}:{address.port}"
        self._header = Region.header(address.identity)
        self._base = int(base, 16) + HEADER_BYTES
        self._capacity = int(size, 16)
        self._memory: np.ndarray[Any, Any] | None = None
        self._verified = False
        self._cut = False
        self._wake = threading.Event()
        self._meeting: threading.Thread | None = None

    def arm(self) -> None:
        """See Link.arm."""
        self._cut = False
        self._wake.clear()

    def run(self, op: Op, slices: Sequence[Slice], deadline_s: float, done: list[bool]) -> None:
        """See Link.run."""
        if not self._verified:
            self._meet(deadline_s)
        parts: list[_Part] = []
        start = 0
        for index, (offset, memory) in enumerate(slices):
            if done[index] or not 0 <= offset <= self._capacity - len(memory):
                continue
            done[index] = not memory
            for at in range(0, len(memory), _LINK_BYTES):
                piece = memory[at : at + _LINK_BYTES]
                if start + len(piece) > _LINK_BYTES:
                    self._finish(op, parts, slices, deadline_s, done)
                    parts = []
                    start = 0
                theirs = self._base + offset + at
                parts.append(_Part(index, piece, theirs, start, len(piece)))
                start += len(piece)
        self._finish(op, parts, slices, deadline_s, done)

    def cut(self) -> None:
        """See Link.cut."""
        self._cut = True
        self._wake.set()

    def close(self) -> None:
        """See Link.close."""
        memory = self._memory
        self._memory = None
        self._verified = False
        if memory is not None:
            self._transport.engine.unregister_memory(memory.ctypes.data)

    def _meet(self, deadline_s: float) -> None:
        """Check that the owner answers and has the expected identity.

        The first call to a peer waits for its handshake without a limit. So a thread of its own
        makes it, at most one per link, and this method does not wait for it too long.
        """
        if self._meeting is None or not self._meeting.is_alive():
            self._wake.clear()
            self._meeting = threading.Thread(target=self._verify, name="kv-meet", daemon=True)
            self._meeting.start()
        if not self._cut:  # a cut before `clear` would not wake this thread
            self._wake.wait(max(0.0, min(deadline_s - time.monotonic(), _MEET_S)))
        if self._verified and not self._cut:
            return
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded("Mooncake's handshake did not end before the deadline")
        raise TransferFailed("no owner answers there, or another owner than expected")

    def _verify(self) -> None:
        engine = self._transport.engine
        memory = np.empty(HEADER_BYTES, np.uint8)
        here = memory.ctypes.data
        there = self._base - HEADER_BYTES
        size = len(self._header)
        good = engine.register_memory(here, HEADER_BYTES) == 0
        good = good and engine.transfer_sync_read(self._target, here, there, size) == 0
        engine.unregister_memory(here)
        self._verified = good and memory[:size].tobytes() == self._header
        self._wake.set()

    def _finish(
        self,
        op: Op,
        parts: list[_Part],
        slices: Sequence[Slice],
        deadline_s: float,
        done: list[bool],
    ) -> None:
        """Carry parts; a slice is done when its last part is."""
        if parts:
            self._carry(op, parts, deadline_s)
        for part in parts:
            slice = slices[part.slice]
            last = part.theirs + part.size == self._base + slice.offset + len(slice.memory)
            done[part.slice] = done[part.slice] or last

    def _carry(self, op: Op, parts: Sequence[_Part], deadline_s: float) -> None:
        engine = self._transport.engine
        if self._memory is None:
            self._memory = np.empty(_LINK_BYTES, np.uint8)
            if engine.register_memory(self._memory.ctypes.data, _LINK_BYTES):
                self._memory = None
                raise TransferFailed("Mooncake cannot register the memory of a link")
        memory = self._memory
        here = memory.ctypes.data
        submit = (
            engine.batch_transfer_async_read if op == "read" else engine.batch_transfer_async_write
        )
        calls: list[int] = []
        for part in parts:
            if op == "write":
                memory[part.start : part.start + part.size] = np.frombuffer(part.ours, np.uint8)
            call = submit(self._target, [here + part.start], [part.theirs], [part.size])
            if call == 0:
                break
            calls.append(call)
        all_started = len(calls) == len(parts)
        if not self._wait(calls, memory, deadline_s) or not all_started:
            self._verified = False
            raise TransferFailed("Mooncake's transfer failed")
        if op == "read":
            for part in parts:
                np.frombuffer(part.ours, np.uint8)[:] = memory[part.start : part.start + part.size]

    def _wait(self, calls: list[int], memory: np.ndarray[Any, Any], deadline_s: float) -> bool:
        """Wait for all calls; return whether all succeeded."""
        engine = self._transport.engine
        good = True
        looks = 0
        stalled_s = time.monotonic() + _STALL_S
        while calls:
            status = engine.transfer_check_status(calls[-1])
            if status:
                calls.pop()
                good = good and status == 1
                stalled_s = time.monotonic() + _STALL_S
                continue
            looks += 1
            now_s = time.monotonic()
            if self._cut or now_s >= min(deadline_s, stalled_s):
                self._memory = None
                self._verified = False
                self._transport.leave(calls, memory)
                if now_s >= deadline_s:
                    raise DeadlineExceeded("Mooncake's transfer did not end before the deadline")
                raise TransferFailed("Mooncake's transfer was cut, or makes no progress")
            if looks > _SPINS:
                time.sleep(_REST_S)
        return good


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)

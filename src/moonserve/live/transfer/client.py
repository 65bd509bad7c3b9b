"""Reads and writes slices of segments: by shared memory on the owner's host, else by TCP.

Blocking; called from threads (several at once), never from an event loop, except for what
`is_near` says is a plain memory copy. It never raises for a lost peer: the answer says which
slices arrived. What arrived may be stale or torn; callers verify checksums.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from moonserve.core.errors import MoonserveError, TransferFailed
from moonserve.core.pool import Address
from moonserve.core.units import Bytes
from moonserve.live.transfer import frames
from moonserve.live.transfer.region import Region

log = logging.getLogger(__name__)

_CONNECT_S = 3.0
_ATTEMPTS = 2  # a pooled connection may have been closed by the peer: one fresh one


class Slice(NamedTuple):
    """`memory` (ours, contiguous, format "B") against as many bytes at `offset` of a segment."""

    offset: Bytes
    memory: memoryview


class Transfer:
    """The way to every segment. Holds attached regions and idle connections until told otherwise.

    Bounds: one region per live address (`retain` drops the rest), `max_idle` idle connections.
    """

    def __init__(self, token: bytes, *, shared_memory: bool = True, max_idle: int = 32) -> None:
        """`shared_memory` False: TCP only, for tests and for measuring."""
        self._token = token
        self._shared_memory = shared_memory
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._regions: dict[bytes, Region] = {}
        self._idle: dict[bytes, list[socket.socket]] = {}

    def adopt(self, region: Region) -> None:
        """Reach a region of our own as if attached; its owner closes it."""
        if self._shared_memory:
            self._regions[region.identity] = region

    def is_near(self, address: Address) -> bool:
        """Whether the segment's memory is mapped already: reading it is a copy and cannot wait."""
        return address.identity in self._regions

    def read(self, address: Address, slices: Sequence[Slice], deadline_s: float) -> list[bool]:
        """Fill each slice's memory from the segment; True where all its bytes arrived.

        `deadline_s` is on time.monotonic's scale.
        """
        return self._run(frames.READ, address, slices, deadline_s)

    def write(self, address: Address, slices: Sequence[Slice], deadline_s: float) -> list[bool]:
        """Copy each slice's memory into the segment; True where the peer has all of it."""
        return self._run(frames.WRITE, address, slices, deadline_s)

    def retain(self, live: Collection[Address]) -> None:
        """Forget every region and connection that leads to none of these addresses."""
        kept = {address.identity for address in live}
        with self._lock:
            # Not closed but let go of: a copy in another thread may still use the mapping.
            self._regions = {key: it for key, it in self._regions.items() if key in kept}
            stale = [sock for key, idle in self._idle.items() if key not in kept for sock in idle]
            self._idle = {key: idle for key, idle in self._idle.items() if key in kept}
        for sock in stale:
            sock.close()

    def close(self) -> None:
        """Forget everything."""
        self.retain(())

    def _run(
        self, op: int, address: Address, slices: Sequence[Slice], deadline_s: float
    ) -> list[bool]:
        region = self._near(address)
        if region is not None:
            return [_copy(op, region.view, it) for it in slices]
        done = [False] * len(slices)
        for attempt in range(_ATTEMPTS):
            try:
                self._tcp(op, address, slices, done, deadline_s, fresh=attempt > 0)
                break
            except (MoonserveError, OSError) as error:
                log.debug("segment at %s:%d: %s", address.host, address.port, error)
        return done

    def _near(self, address: Address) -> Region | None:
        region = self._regions.get(address.identity)
        if region is None and self._shared_memory:
            region = Region.attach(address.region, address.identity)
            if region is not None:
                with self._lock:
                    region = self._regions.setdefault(address.identity, region)
        return region

    def _tcp(
        self,
        op: int,
        address: Address,
        slices: Sequence[Slice],
        done: list[bool],
        deadline_s: float,
        fresh: bool,
    ) -> None:
        """Do what is not done yet; raises when the connection is of no more use."""
        sock = None if fresh else self._take(address)
        if sock is None:
            sock = self._connect(address, deadline_s)
        try:
            for batch in _batches(slices, done):
                _exchange(sock, op, slices, batch, done, deadline_s)
        except BaseException:
            sock.close()
            raise
        self._give(address, sock)

    def _take(self, address: Address) -> socket.socket | None:
        with self._lock:
            idle = self._idle.get(address.identity)
            return idle.pop() if idle else None

    def _give(self, address: Address, sock: socket.socket) -> None:
        with self._lock:
            if sum(map(len, self._idle.values())) < self._max_idle:
                self._idle.setdefault(address.identity, []).append(sock)
                return
        sock.close()

    def _connect(self, address: Address, deadline_s: float) -> socket.socket:
        wait_s = min(deadline_s - time.monotonic(), _CONNECT_S)
        if wait_s <= 0:
            raise TransferFailed("no time left to connect")
        sock = socket.create_connection((address.host, address.port), wait_s)
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = frames.recv_bytes(sock, len(frames.MAGIC) + frames.NONCE_BYTES, deadline_s)
            if not greeting.startswith(frames.MAGIC):
                raise TransferFailed("another protocol listens there")
            nonce = greeting[len(frames.MAGIC) :]
            proof = frames.proof(self._token, nonce, address.identity)
            frames.send_all(sock, [address.identity, proof], deadline_s)
            if frames.recv_bytes(sock, 1, deadline_s)[0] != frames.OK:
                raise TransferFailed("refused: wrong token, or the segment's owner restarted")
        except BaseException:
            sock.close()
            raise
        return sock


def _batches(slices: Sequence[Slice], done: Sequence[bool]) -> list[list[int]]:
    """What is left to do, as indices in frames within the limits."""
    batches: list[list[int]] = []
    size = 0
    for index, it in enumerate(slices):
        if done[index] or len(it.memory) > frames.MAX_FRAME_BYTES:
            continue
        full = len(batches[-1]) == frames.MAX_SLICES if batches else True
        if full or size + len(it.memory) > frames.MAX_FRAME_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += len(it.memory)
    return batches


def _exchange(
    sock: socket.socket,
    op: int,
    slices: Sequence[Slice],
    batch: Sequence[int],
    done: list[bool],
    deadline_s: float,
) -> None:
    """One frame there and back; marks what arrived."""
    head = [frames.HEADER.pack(op, len(batch))]
    head += [frames.SLICE.pack(slices[i].offset, len(slices[i].memory)) for i in batch]
    payload = [slices[i].memory for i in batch] if op == frames.WRITE else []
    frames.send_all(sock, [b"".join(head), *payload], deadline_s)
    if frames.recv_bytes(sock, 1, deadline_s)[0] != frames.OK:
        raise TransferFailed("the peer found the slices out of bounds")
    for index in batch:
        if op == frames.READ:
            frames.recv_exact(sock, slices[index].memory, deadline_s)
        done[index] = True


def _copy(op: int, view: memoryview, it: Slice) -> bool:
    """Copy by memory; False if out of bounds."""
    end = it.offset + len(it.memory)
    if it.offset < 0 or end > len(view):
        return False
    there = np.frombuffer(view[it.offset : end], np.uint8)  # numpy copies without holding the lock
    here = np.frombuffer(it.memory, np.uint8)
    if op == frames.READ:
        np.copyto(here, there)
    else:
        np.copyto(there, here)
    return True

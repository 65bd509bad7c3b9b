"""Which replica the store's client reads, and when it goes to the next."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash

from moonserve.core.store.words import Address, Found, Replica
from moonserve.core.units import SegmentId
from moonserve.live.store import copying
from moonserve.live.store.copying import Copier
from moonserve.live.store.settings import StoreSettings
from moonserve.live.transfer.client import Slice

NAMES = (SegmentId("mute"), SegmentId("well"))


class Peers:
    """A transfer whose first peer is silent; `asked` has the order of the reads."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def is_near(self, address: Address) -> bool:
        return False

    def read(self, address: Address, slices: Sequence[Slice], deadline_s: float) -> list[bool]:
        self.asked.append(address.port)
        for it in slices:
            it.memory[:] = b"x" * len(it.memory)
        return [address.port == 1] * len(slices)


def test_a_segment_that_did_not_deliver_is_read_last_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first of several reads waits for it; after a while it is tried again."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(copying, "time", SimpleNamespace(monotonic=lambda: now.s))
    peers = Peers()
    addresses = {name: Address("h", port, "r", b"i") for port, name in enumerate(NAMES)}
    replicas = tuple(Replica(name, 0) for name in NAMES)
    found = [Found(b"k", 4, xxhash.xxh3_64_intdigest(b"xxxx"), 1, replicas)]
    settings = StoreSettings(segment=SegmentId("c"), epoch=1, capacity_bytes=0, token=b"")

    async def read(copier: Copier) -> list[int]:
        peers.asked.clear()
        fetched = await copier.read(found, [memoryview(bytearray(4))], 10.0)
        assert not fetched.missing
        return list(peers.asked)

    async def body() -> None:
        with ThreadPoolExecutor(1) as threads:
            link = SimpleNamespace(addresses=addresses)
            copier = Copier(cast(Any, link), cast(Any, peers), threads, settings)
            assert await read(copier) == [0, 1]
            assert await read(copier) == [1]
            now.s += copying._ASIDE_S + 1
            assert await read(copier) == [0, 1]

    asyncio.run(body())

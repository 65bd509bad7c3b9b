"""MooncakeStore over a Mooncake of a dict, with knobs for what the real one does only rarely."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
from collections.abc import Awaitable, Callable, Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from moonserve.core.errors import ConfigError, StoreError
from moonserve.core.kv.facts import BlockEvent, BlocksStored
from moonserve.core.units import LeaseId
from moonserve.live.store import mooncake
from moonserve.live.store.mooncake import MooncakeSettings, MooncakeStore
from moonserve.live.store.reports import POOL
from moonserve.live.transfer import mooncake_master
from moonserve.live.transfer.mooncake import MooncakeTransport
from tests.support.pools import LEASE, blocks, key, read_all

SETTINGS = MooncakeSettings(
    master="m:1", segment_bytes=16 << 20, lanes=2, call_s=0.2, transfer_s=0.2
)
MODULE = SimpleNamespace(
    ReplicateConfig=SimpleNamespace, SoftPinAction=SimpleNamespace(ENABLE="enable")
)


class Fake:
    """Objects by name; `hang` blocks transfers, `full` refuses that many puts, `code` all asks."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.hang: Event | None = None
        self.full = 0
        self.code: int | None = None
        self.calls: list[list[str]] = []
        self.pinned: list[str] = []

    def register_buffer(self, place: int, size: int) -> int:
        return 0

    def unregister_buffer(self, place: int) -> int:
        return 0

    def get_hostname(self) -> str:
        return "here"

    def close(self) -> int:
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.objects) if self.code is None else self.code for name in names]

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        return {name: [Replica(len(self.objects[name]))] for name in names}

    def batch_get_into(self, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
        self.calls.append(names)
        if self.hang is not None:
            self.hang.wait()
        for name, place in zip(names, places, strict=True):
            ctypes.memmove(place, self.objects[name], len(self.objects[name]))
        return [len(self.objects[name]) for name in names]

    def batch_put_from(
        self, names: list[str], places: list[int], sizes: list[int], config: Any
    ) -> list[int]:
        self.calls.append(names)
        if self.full:
            self.full -= 1
            return [-200] * len(names)
        for name, place, size in zip(names, places, sizes, strict=True):
            self.objects[name] = ctypes.string_at(place, size)
        if hasattr(config, "soft_pin_action"):
            self.pinned += names
        return [0] * len(names)

    def remove(self, name: str, force: bool) -> int:
        return 0 if self.objects.pop(name, None) else -704


class Replica:
    """What Mooncake says of one copy."""

    def __init__(self, size: int) -> None:
        self.buffer_descriptor = SimpleNamespace(size=size)

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Replica:
        return self


def run(test: Callable[[MooncakeStore, Fake, list[BlockEvent]], Awaitable[None]]) -> None:
    """Run a test on a store over a Fake; it also gets what is told."""

    async def body() -> None:
        told: list[BlockEvent] = []

        async def tell(events: Sequence[BlockEvent]) -> None:
            told.extend(events)

        fake = Fake()
        store = MooncakeStore(MODULE, fake, SETTINGS, tell)
        try:
            await test(store, fake, told)
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(body(), 20))


def test_a_call_that_hangs_ends_for_its_caller_and_never_touches_its_buffer() -> None:
    """Reads are short at their deadline; with all lanes hung the pool is empty, until they end."""

    async def test(it: MooncakeStore, fake: Fake, told: list[BlockEvent]) -> None:
        items = blocks(1000)
        await it.put(items, None)
        found = await it.find([key(0)], LEASE)
        fake.hang = Event()
        into = [memoryview(bytearray(1000))]
        assert await it.read(found, into) == 0
        assert await it.find([key(0)], LEASE) == found  # the other lane
        assert await it.read(found, into) == 0
        assert await it.find([key(0)], LEASE) == []
        assert await it.put(blocks(10, first=5), None) == 0
        fake.hang.set()
        fake.hang = None
        while not await it.find([key(0)], LEASE):
            await asyncio.sleep(0.01)
        assert into[0] == bytes(1000)
        assert await it.read(found, into) == 1

    run(test)


def test_many_large_objects_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit a lane goes in several calls; a larger object gets a larger lane."""
    monkeypatch.setattr(mooncake, "_LANE_BYTES", 10_000)

    async def test(it: MooncakeStore, fake: Fake, told: list[BlockEvent]) -> None:
        items = blocks(4000, 4000, 4000, 30_000, 10)
        assert await it.put(items, None) == 5
        assert sorted(map(len, fake.calls)) == [1, 1, 1, 2]
        got = await read_all(it, [name for name, _ in items])
        assert got == [bytes(memory) for _, memory in items]

    run(test)


def test_a_put_waits_for_the_eviction_it_caused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room a put tries again for a while; a pool that stays full is put short."""
    monkeypatch.setattr(mooncake, "_EVICTION_S", 0.001)

    async def test(it: MooncakeStore, fake: Fake, told: list[BlockEvent]) -> None:
        fake.full = 3
        assert await it.put(blocks(10), LeaseId("a")) == 1
        assert fake.pinned == [key(0).hex()]
        fake.full = 100
        assert await it.put(blocks(10, 10), None) == 1

    run(test)


def test_a_failing_master_is_an_empty_pool_and_no_news() -> None:
    """Error codes are no misses: nothing is told as removed."""

    async def test(it: MooncakeStore, fake: Fake, told: list[BlockEvent]) -> None:
        await it.put(blocks(10), None)
        fake.code = -900
        assert await it.find([key(0)], LEASE) == []
        assert await it.put(blocks(10), None) == 0
        await asyncio.sleep(0.01)
        assert told == [BlocksStored(POOL, (key(0),), None, "dram", 0)]

    run(test)


def test_what_is_told_waits_for_a_gateway_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are told again until the gateway takes them, in order."""
    monkeypatch.setattr("moonserve.live.store.reports._PAUSE_S", 0.001)

    async def body() -> None:
        told: list[BlockEvent] = []
        failures = 3

        async def tell(events: Sequence[BlockEvent]) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise StoreError("away")
            told.extend(events)

        store = MooncakeStore(MODULE, Fake(), SETTINGS, tell)
        await store.put(blocks(10, 10), None)
        await store.put(blocks(10, first=2), None, parent=key(1))
        while len(told) < 2:
            await asyncio.sleep(0.001)
        await store.close()
        assert [event.keys for event in told if isinstance(event, BlocksStored)] == [
            (key(0), key(1)),
            (key(2),),
        ]

    asyncio.run(asyncio.wait_for(body(), 10))


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wheel, no libibverbs1: one line that says what to install."""

    def no_library(name: str) -> None:
        raise OSError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"^store: .*pip install 'moonserve\[mooncake\]'"):
            mooncake_master.require()
        with pytest.raises(ConfigError, match=r"^transport: .*pip install 'moonserve\[mooncake\]'"):
            MooncakeTransport()
    with monkeypatch.context() as patch:
        spec = SimpleNamespace(submodule_search_locations=["here"])
        patch.setattr(importlib.util, "find_spec", lambda name: spec)
        patch.setattr("pathlib.Path.is_file", lambda path: True)
        patch.setattr(ctypes, "CDLL", no_library)
        with pytest.raises(ConfigError, match=r"^store: .*apt-get install libibverbs1"):
            mooncake_master.require()


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"master": ""}, "^mooncake_master: "),
        ({"segment_bytes": 1 << 20}, "^segment_bytes: .*16MiB"),
    ],
)
def test_what_cannot_work_is_a_clear_error(change: dict[str, Any], error: str) -> None:
    """Without a master's address, or with a segment too small for Mooncake, a worker ends."""
    settings = MooncakeSettings(**{"master": "127.0.0.1:1", "segment_bytes": 16 << 20, **change})

    async def tell(events: Sequence[BlockEvent]) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=error):
        asyncio.run(MooncakeStore.open(settings, tell))


@pytest.mark.mooncake
def test_a_card_that_is_not_there_is_not_made_up_for_by_tcp() -> None:
    """Mooncake itself would use TCP, and say nothing."""
    with pytest.raises(ConfigError, match=r"^mooncake_protocol: there is no RDMA device no-such "):
        MooncakeTransport(protocol="rdma", device="no-such")

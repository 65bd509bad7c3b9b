"""The KVStore contract: the same tests over every pool there is (tests/support/pools.py)."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import Iterator

import pytest

from moonserve.core.units import BlockKey, LeaseId
from moonserve.live.transfer import region
from tests.support.pools import EMBEDDED, LEASE, AnyPool, Pools, blocks, key, read_all

KINDS = [*EMBEDDED, pytest.param("mooncake", marks=pytest.mark.mooncake)]
every_pool = pytest.mark.parametrize("kind", KINDS)


def names(items: list[tuple[BlockKey, memoryview]]) -> list[BlockKey]:
    """Their keys."""
    return [name for name, _ in items]


def contents(items: list[tuple[BlockKey, memoryview]]) -> list[bytes]:
    """Their bytes."""
    return [bytes(memory) for _, memory in items]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """The pools of the tests."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves shared memory, or a warning about an unclosed resource."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        yield
        gc.collect()
    assert not [path for path in region._ours() if f"-{os.getpid()}-" in path.name]


@every_pool
def test_what_was_put_is_read(kind: str, pools: Pools) -> None:
    """Objects of all sizes come back equal, in order; a repeated put changes nothing."""

    async def test(it: AnyPool) -> None:
        items = blocks(1, 64, 4096, 100_000, 400_000)
        assert await it.writer.put(items, None) == 5
        assert await it.writer.put(items, None) == 5
        assert await read_all(it.reader, names(items)) == contents(items)
        assert await it.writer.put([], None) == 0

    pools.run(kind, test)


@every_pool
def test_find_gives_the_leading_run(kind: str, pools: Pools) -> None:
    """Objects after the first missing key are not returned."""

    async def test(it: AnyPool) -> None:
        items = blocks(100, 100, 100)
        await it.writer.put([items[0], items[2]], None)
        found = await it.reader.find(names(items), LEASE)
        assert [(f.key, f.size) for f in found] == [(key(0), 100)]
        assert await it.reader.find([], LEASE) == []
        assert await it.reader.read([], []) == 0

    pools.run(kind, test)


@every_pool
def test_what_is_leased_stays_and_the_rest_makes_room(kind: str, pools: Pools) -> None:
    """A full pool evicts unleased objects; leased ones survive, and a put that is too large is
    short."""

    async def test(it: AnyPool) -> None:
        size = it.room * 3 // 16 - 64  # five fit
        items = blocks(*[size] * 7)
        assert await it.writer.put(items[:4], None) == 4
        assert len(await it.reader.find([key(0), key(1)], LEASE)) == 2
        assert await it.writer.put(items[4:], LeaseId("w")) == 3
        assert await read_all(it.reader, [key(0), key(1)]) == contents(items[:2])
        assert await it.reader.find([key(2)], LEASE) == []
        more = blocks(size, size, first=7)
        assert await it.writer.put(more, None) == 0
        await it.leases_end()
        await it.reader.release(LeaseId("never heard of"))
        assert await it.writer.put(more, None) == 2

    pools.run(kind, test)


@every_pool
def test_corrupt_bytes_are_never_returned(kind: str, pools: Pools) -> None:
    """One flipped bit: the read ends before that object, which is dropped and can be put again."""

    async def test(it: AnyPool) -> None:
        items = blocks(5000, 5000, 5000)
        await it.writer.put(items, None)
        await it.corrupt(key(1))
        assert await read_all(it.reader, names(items)) == contents(items[:1])
        assert len(await it.reader.find(names(items), LEASE)) == 1
        assert await it.writer.put(items, None) == 3
        assert await read_all(it.reader, names(items)) == contents(items)

    pools.run(kind, test)


@every_pool
def test_what_is_lost_after_it_was_found_is_a_short_read(kind: str, pools: Pools) -> None:
    """A reader whose object vanished, or was overwritten, gets the objects before it."""

    async def test(it: AnyPool) -> None:
        items = blocks(5000, 5000)
        await it.writer.put(items, None)
        found = await it.reader.find(names(items), LEASE)
        await it.lose(key(1))
        assert await it.writer.put(blocks(5000, first=9), None) == 1
        into = [memoryview(bytearray(5000)) for _ in found]
        assert await it.reader.read(found, into) == 1
        assert into[0] == items[0][1]

    pools.run(kind, test)


@every_pool
def test_half_written_objects_are_never_seen(kind: str, pools: Pools) -> None:
    """During a put, others find all of an object or nothing; a cancelled put can be repeated."""

    async def test(it: AnyPool) -> None:
        for number in range(5):
            items = blocks(it.room // 16, first=number)
            putting = asyncio.create_task(it.writer.put(items, None))
            while not putting.done():
                assert await read_all(it.reader, names(items)) in ([], contents(items))
                await asyncio.sleep(0.001)  # the threads that carry bytes need the interpreter too
            assert await putting == 1
            assert await read_all(it.reader, names(items)) == contents(items)
        items = blocks(it.room // 16, first=9)
        putting = asyncio.create_task(it.writer.put(items, None))
        await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert await it.writer.put(items, None) == 1
        assert await read_all(it.reader, names(items)) == contents(items)

    pools.run(kind, test)


@every_pool
def test_many_at_once(kind: str, pools: Pools) -> None:
    """Concurrent puts and reads of the same and of other objects all succeed."""

    async def test(it: AnyPool) -> None:
        items = blocks(*[3000] * 12)

        async def one(number: int) -> None:
            mine = items[: number % 12 + 1]
            hand = it.writer if number % 2 else it.reader
            lease = LeaseId(f"r{number}")
            assert await it.writer.put(mine, lease) == len(mine)
            found = await hand.find(names(mine), lease)
            into = [memoryview(bytearray(f.size)) for f in found]
            assert await hand.read(found, into) == len(mine)
            assert [bytes(memory) for memory in into] == contents(mine)
            await hand.release(lease)

        await it.writer.put(items, None)
        await asyncio.gather(*(one(number) for number in range(30)))

    pools.run(kind, test)


@every_pool
def test_a_master_out_of_reach_is_an_empty_pool(kind: str, pools: Pools) -> None:
    """No call raises; when a new master comes, the pool works again, without the old objects."""

    async def test(it: AnyPool) -> None:
        items = blocks(5000)
        await it.writer.put(items, None)
        await it.go_down()
        assert await it.reader.find([key(0)], LEASE) == []
        assert await it.writer.put(items, None) == 0
        await it.reader.release(LEASE)
        await it.come_back()
        while await it.writer.put(items, None) == 0:
            await asyncio.sleep(0.1)
        while not await it.reader.find([key(0)], LEASE):
            await asyncio.sleep(0.1)
        assert await read_all(it.reader, [key(0)]) == contents(items)

    pools.run(kind, test)


@every_pool
def test_the_index_receives_every_block(kind: str, pools: Pools) -> None:
    """Puts reach the Conductor as pieces of their chain, once; so do missed blocks."""

    async def test(it: AnyPool) -> None:
        items = blocks(100, 100, 100, 100)
        await it.writer.put(items[:2], None)
        await it.writer.put(items[2:], None, parent=key(1))
        await it.writer.put(items, None)
        index = await it.told()
        assert (index.match(names(items)).pool, index.entries) == (4, 4)
        await it.lose(key(2))
        await it.reader.find(names(items), LEASE)
        assert (await it.told()).match(names(items)).pool == 2
        await it.writer.put(items, None)
        assert (await it.told()).match(names(items)).pool == 4

    pools.run(kind, test)

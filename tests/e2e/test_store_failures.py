"""Members of a pool of real processes are killed; what may be lost then, and what may not."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from moonserve.core.errors import StoreError
from moonserve.core.store.words import PutOptions
from moonserve.core.units import SegmentId
from moonserve.live.store.client import StoreClient
from moonserve.live.store.objects import Objects
from tests.support.store_processes import TWICE, Pool, answers, content, put, replicas, run, until


def test_a_killed_owner_costs_no_read_of_what_lies_twice() -> None:
    """Under load, kill -9 of an owner: all reads of doubled objects give their bytes, single ones
    fail in time and say why, and soon everything lies twice again.
    """

    async def test(it: Pool) -> None:
        client = await it.client("reader")
        names = [f"twice-{n}" for n in range(60)]
        await asyncio.gather(*(put(client, name) for name in names))
        on_a = PutOptions(preferred=SegmentId("a"), blocks=False)
        await asyncio.gather(*(put(client, f"once-{n}", on_a) for n in range(5)))

        async def all_twice() -> bool:
            lie = await replicas(client)
            return all(len(lie[name]) == 2 for name in names)

        await until(all_twice)
        assert any("a" in places for name, places in (await replicas(client)).items())
        stop = asyncio.Event()
        reads = 0
        written: list[float] = []

        async def read_on(seed: int) -> None:
            nonlocal reads
            rng = random.Random(seed)
            while not stop.is_set():
                some = rng.sample(names, 3)
                got = await Objects(client).get([name.encode() for name in some])
                assert got == [content(name) for name in some]
                reads += 1

        async def write_on() -> None:
            while not stop.is_set():
                await put(client, f"new-{len(written)}")
                written.append(time.monotonic())
                await asyncio.sleep(0.02)

        load = [asyncio.create_task(read_on(seed)) for seed in range(4)]
        load.append(asyncio.create_task(write_on()))
        await asyncio.sleep(0.5)
        it.segments["a"].kill()
        killed, before = time.monotonic(), reads
        with pytest.raises(StoreError, match=r"6f6e63652d30 is (out of reach|lost): segment a"):
            await Objects(client, 1.0).get([b"once-0"])
        assert time.monotonic() < killed + 4

        async def gone() -> bool:
            return all("a" not in places for places in (await replicas(client)).values())

        await until(gone)
        await until(all_twice)
        stop.set()
        await asyncio.gather(*load)
        assert reads > before + 10
        print(
            f"{reads} reads of 3, {len(written)} puts, mended in {time.monotonic() - killed:.1f} s"
        )
        late = [f"new-{n}".encode() for n, at in enumerate(written) if at > killed + 0.5]
        assert await Objects(client).get(late) == [content(name.decode()) for name in late]
        assert await Objects(client).get([b"once-0"]) == [None]

    run(test)


def test_a_killed_master_forgets_nothing_readable() -> None:
    """kill -9 of the master under load, and its restart: what any put had ended is read then."""

    async def test(it: Pool) -> None:
        member = await it.client("m", capacity_bytes=16 << 20)
        client = await it.client("reader")
        ended: list[str] = []
        removed: list[str] = []
        stop = asyncio.Event()

        async def write_on(who: StoreClient, kind: str, options: PutOptions) -> None:
            number = 0
            while not stop.is_set():
                name = f"{kind}-{number}"
                number += 1
                await put(who, name, options)
                ended.append(name)
                await asyncio.sleep(0.01)

        once = PutOptions(blocks=False)
        load = [
            asyncio.create_task(write_on(member, "own", once)),
            asyncio.create_task(write_on(client, "other", once)),
            asyncio.create_task(write_on(client, "twice", TWICE)),
        ]
        await asyncio.sleep(1.0)
        gone = [ended.pop(0).encode() for _ in range(3)]
        assert [it.outcome for it in await client.remove(gone)] == ["removed"] * 3
        removed += [name.decode() for name in gone]
        it.master.kill()
        killed, before = time.monotonic(), len(ended)
        await it.start_master()
        await until(lambda: answers(client))
        print(f"answers {time.monotonic() - killed:.1f} s after, {before} objects before")
        await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*load)
        assert len(ended) > before
        for name in ended:
            assert await Objects(client).get([name.encode()]) == [content(name)], name
        assert await client.exists([name.encode() for name in removed]) == [False] * 3
        it.master.process.send_signal(signal.SIGTERM)
        await it.master.says("stopped")

    run(test)


def test_a_killed_owner_finds_on_disk_what_lay_there(tmp_path: Path) -> None:
    """What memory had no room for lies on disk; kill -9 of the owner, and its restart, keep it."""

    async def test(it: Pool) -> None:
        client = await it.client("reader")
        it.segments["b"].kill()
        it.segments["c"].kill()
        await it.start_segment("small", memory="1MiB")
        on = PutOptions(preferred=SegmentId("small"), blocks=False)
        it.segments["a"].process.send_signal(signal.SIGTERM)
        await it.segments["a"].says("stopped")

        async def on_disk() -> list[str]:
            lie = await replicas(client)
            return [name for name, places in lie.items() if "small-disk" in places]

        async def many() -> bool:
            return len(await on_disk()) > 30

        async def many_are_put() -> bool:
            # One at a time: puts that outrun the disk evict what it has no time for.
            nonlocal number
            number += 1
            await put(client, f"on-{number}", on)
            return await many()

        number = 0
        await until(many_are_put)
        lay = await on_disk()
        it.segments["small"].kill()
        await it.start_segment("small", memory="1MiB")
        await until(many)
        for name in lay:
            (got,) = await Objects(client).get([name.encode()])
            assert got == content(name), name

    run(test, tmp_path)

"""Decode fetches KV while prefill computes: a whole cluster on one loop, with a slow link.

With -s it prints the stages; bench/overlap.py does so with a real model.
"""

from __future__ import annotations

import asyncio

from moonserve.live.engine.fake import fake_cost
from moonserve.live.worker.metrics import KVStage
from tests.support.inproc import BLOCK, Site, site
from tests.support.records import record_of

PROMPT = list(range(2_000, 2_000 + 4_096))
CHUNK = 512
BLOCKS = len(PROMPT) // BLOCK
PER_TOKEN_US = 300
READ_US = 4_000


async def cluster(it: Site) -> None:
    """A chunk takes 154 ms to compute and 128 ms to read: both are busy most of the time."""
    await it.add("p0", "prefill", fake_cost(0, PER_TOKEN_US, 0), blocks=300)
    await it.add("d0", "decode", blocks=300, read_us=READ_US)


def tell(published: list[KVStage], pulled: list[KVStage]) -> None:
    """Print the stages in milliseconds, and what was left when prefill had ended."""
    zero_us = min(stage.began_us for stage in published)
    rows = [("prefill", stage) for stage in published] + [("decode", stage) for stage in pulled]
    print()
    for who, stage in sorted(rows, key=lambda row: row[1].ended_us):
        began, ended = ((us - zero_us) / 1_000 for us in (stage.began_us, stage.ended_us))
        print(f"{who:<8}{stage.what:<12}{stage.blocks:>4} blocks {began:8.1f} to {ended:8.1f} ms")
    [end_us] = [stage.began_us for stage in published if stage.what == "handed_over"]
    [here_us] = [stage.ended_us for stage in pulled if stage.what == "loaded"]
    moved_us = sum(s.ended_us - s.began_us for s in pulled if s.what in ("ahead", "read"))
    left_us = here_us - end_us
    print(
        f"transfer {moved_us / 1_000:.0f} ms, of which {left_us / 1_000:.0f} ms were left after"
        f" prefill's last pass: {left_us / moved_us:.1%}"
    )


def test_only_the_last_chunk_is_left_when_prefill_ends() -> None:
    """Of 4,096 tokens, decode has all that was published before the last chunk."""

    async def main() -> None:
        async with site() as it:
            await cluster(it)
            assert await it.tokens(PROMPT, 20) == it.reference(PROMPT, 20)
            published = it.workers["p0"].runner.stages()
            pulled = it.workers["d0"].runner.stages()
            tell(published, [stage for stage in pulled if stage.what != "put"])
            ahead = sum(stage.blocks for stage in pulled if stage.what == "ahead")
            after = sum(stage.blocks for stage in pulled if stage.what == "read")
            assert ahead + after == BLOCKS
            assert after <= 2 * CHUNK // BLOCK
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_disconnect_during_the_prefetch_leaves_nothing() -> None:
    """If a client disconnects while blocks are on their way, every ledger goes back to zero."""

    async def main() -> None:
        async with site() as it:
            await cluster(it)
            asked = asyncio.create_task(it.tokens(PROMPT, 20, **{"x-request-id": "gone"}))
            while it.workers["d0"].runner.ledger().blocks_used < CHUNK // BLOCK:
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await it.settle()
            assert record_of(it.gateway.conductor, "gone").outcome == "cancelled"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_decode_worker_lost_during_the_prefetch_costs_nothing() -> None:
    """Decode goes to another worker, which loads all KV."""

    async def main() -> None:
        async with site() as it:
            await cluster(it)
            await it.add("d1", "decode", blocks=300)
            asked = asyncio.create_task(it.tokens(PROMPT, 20))
            names = ("d0", "d1")
            while not any(it.workers[name].runner.ledger().blocks_used for name in names):
                await asyncio.sleep(0.01)
            [pulling] = [name for name in names if it.workers[name].runner.ledger().ahead]
            await it.lose(pulling)
            assert await asked == it.reference(PROMPT, 20)
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))

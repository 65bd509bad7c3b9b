"""A long prompt in parts on a whole cluster on one loop: right tokens, clean retries, no leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from moonserve.core.actions import Prefill
from moonserve.core.errors import BadRequest
from moonserve.core.pipeline import Stage
from moonserve.core.units import InstanceId, RequestId
from moonserve.live.engine.fake import fake_cost
from tests.support.inproc import BLOCK, Site, site

PROMPT = list(range(2_000, 2_000 + 1_003))
SLOW = fake_cost(0, 400, 0)


def split(it: Site, names: Sequence[str], cuts: Sequence[int]) -> None:
    """The next prefill of a long prompt is done by these, whatever the Conductor chose."""
    core = it.gateway.conductor.core
    step: Any = core.step
    left = [True]

    def stepped(now_us: int, facts: Any) -> list[Any]:
        return [rewritten(action) for action in step(now_us, facts)]

    def rewritten(action: Any) -> Any:
        if not isinstance(action, Prefill) or action.decision.prompt_tokens < 500 or not left:
            return action
        left.clear()
        bounds = [action.decision.reused_tokens, *cuts, action.decision.prompt_tokens]
        stages = tuple(
            Stage(InstanceId(name), bounds[at], bounds[at + 1]) for at, name in enumerate(names)
        )
        infos = tuple(core.view.instances[InstanceId(name)].info for name in names)
        decision = msgspec.structs.replace(action.decision, stages=stages, prefill=infos[-1].id)
        return msgspec.structs.replace(action, to=infos[-1], decision=decision, group=infos)

    core.step = stepped  # type: ignore[method-assign]


async def cluster(it: Site, prefills: int = 3) -> list[str]:
    """Slow prefill workers, the names of which are given, and one decode worker."""
    names = [f"p{at}" for at in range(prefills)]
    for name in names:
        await it.add(name, "prefill", SLOW, blocks=160)
    await it.add("d0", "decode", blocks=160)
    return names


def record(it: Site, request: str) -> Any:
    """What became of it."""
    return it.gateway.conductor.records[RequestId(request)]


@pytest.mark.parametrize("cuts", [[496], [320, 704]])
def test_parts_give_the_same_tokens_sooner(cuts: list[int]) -> None:
    """Through gateway, wire and store, a prompt in parts gives one engine's tokens; the second time
    its blocks are reused, whoever computed them.
    """

    async def main() -> None:
        async with site() as it:
            names = await cluster(it, len(cuts) + 1)
            split(it, names, cuts)
            headers = {"x-request-id": "parts"}
            assert await it.tokens(PROMPT, 20, **headers) == it.reference(PROMPT, 20)
            assert record(it, "parts").attempts == 1
            spans = [
                [stage for stage in it.workers[name].runner.stages() if stage.what == "computed"]
                for name in names
            ]
            assert [span[0].blocks for span in spans] == [
                -(-(end - start) // BLOCK)
                for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True)
            ]
            assert spans[-1][0].began_us < spans[0][0].ended_us, "they overlap"
            again = {"x-request-id": "again"}
            assert await it.tokens(PROMPT, 20, **again) == it.reference(PROMPT, 20)
            assert record(it, "again").cached_tokens == len(PROMPT) // BLOCK * BLOCK
            longer = [*PROMPT, *range(600)]
            split(it, names[:2], [len(PROMPT) // BLOCK * BLOCK + 320])
            reused = {"x-request-id": "reused"}
            assert await it.tokens(longer, 9, **reused) == it.reference(longer, 9)
            assert record(it, "reused").cached_tokens == len(PROMPT) // BLOCK * BLOCK
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


async def in_the_middle(it: Site, name: str) -> None:
    """Return when this worker has a part's blocks."""
    async with asyncio.timeout(10):
        while not it.workers[name].runner.ledger().blocks_used:
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.03)


@pytest.mark.parametrize("lost", ["p0", "p1", "p2"])
def test_a_worker_lost_in_the_middle_costs_one_retry(lost: str) -> None:
    """Whichever of three is gone, the prompt is prefilled once more; the client sees nothing."""

    async def main() -> None:
        async with site() as it:
            names = await cluster(it)
            split(it, names, [320, 704])
            asked = asyncio.create_task(it.tokens(PROMPT, 12, **{"x-request-id": "x"}))
            await in_the_middle(it, "p2")
            await it.lose(lost)
            assert await asked == it.reference(PROMPT, 12)
            assert record(it, "x").attempts == 2
            assert record(it, "x").decision.prefill != lost
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    """All parts end with it: blocks, leases, puts and promises are gone."""

    async def main() -> None:
        async with site() as it:
            names = await cluster(it)
            split(it, names, [320, 704])
            asked = asyncio.create_task(it.tokens(PROMPT, 12, **{"x-request-id": "gone"}))
            await in_the_middle(it, "p2")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await it.settle()
            assert record(it, "gone").outcome == "cancelled"
            assert await it.tokens(PROMPT, 5) == it.reference(PROMPT, 5)
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_that_refuses_its_part_costs_one_retry() -> None:
    """A member that would not do it fails the group, but not the request."""

    def refuse(job: Any) -> None:
        raise BadRequest("not here")

    async def main() -> None:
        async with site() as it:
            names = await cluster(it)
            chains: Any = it.workers["p1"].runner.chains
            chains.check = refuse
            split(it, names, [320, 704])
            assert await it.tokens(PROMPT, 12, **{"x-request-id": "x"}) == it.reference(PROMPT, 12)
            assert record(it, "x").attempts == 2
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))

"""A long prompt in parts on a whole cluster on one loop: right tokens, clean retries, no leaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonserve.core.errors import BadRequest, EngineFailed
from moonserve.core.units import RequestId
from moonserve.live.engine.fake import fake_cost
from tests.support.inproc import BLOCK, Site, site
from tests.support.records import record_of

PROMPT = list(range(2_000, 2_000 + 1_003))
FULL = len(PROMPT) // BLOCK * BLOCK
SLOW = fake_cost(0, 400, 0)
SOON = {"x-moonserve-ttft-slo-ms": "0.001"}
"""An objective that one instance would miss, and that none can meet."""


async def cluster(it: Site, prefills: int = 3) -> list[str]:
    """Slow prefill workers, the names of which are given, and one decode worker."""
    names = [f"p{at}" for at in range(prefills)]
    for name in names:
        await it.add(name, "prefill", SLOW, blocks=160)
    await it.add("d0", "decode", blocks=160)
    return names


def record(it: Site, request: str) -> Any:
    """What became of it."""
    return record_of(it.gateway.conductor, request)


async def ask(it: Site, prompt: list[int], name: str, count: int = 12) -> None:
    """The tokens are right."""
    headers = {"x-request-id": name, **SOON}
    assert await it.tokens(prompt, count, **headers) == it.reference(prompt, count)


@pytest.mark.parametrize("workers", [2, 3])
def test_parts_give_the_same_tokens_sooner(workers: int) -> None:
    """Through gateway, wire and store, a prompt in parts gives one engine's tokens; later prompts
    reuse its blocks, whoever computed them.
    """

    async def main() -> None:
        async with site(admission="none") as it:
            await cluster(it, workers)
            await ask(it, PROMPT, "parts")
            assert record(it, "parts").attempts == 1
            stages = record(it, "parts").decision.stages
            assert len(stages) == workers
            spans = []
            for stage in stages:
                noted = it.workers[stage.instance].runner.stages()
                [span] = [each for each in noted if each.what == "computed"]
                assert span.blocks == -(-(stage.end - stage.start) // BLOCK)
                spans.append(span)
            assert spans[-1].began_us < spans[0].ended_us, "they overlap"
            await ask(it, PROMPT, "again")
            assert record(it, "again").measured.cached_tokens == FULL
            await ask(it, [*PROMPT, *range(900)], "longer")
            assert len(record(it, "longer").decision.stages) == workers
            assert record(it, "longer").measured.cached_tokens == FULL
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


async def in_the_middle(it: Site, request: str) -> list[str]:
    """Return when the last of the group computes; who they are, in order."""
    async with asyncio.timeout(10):
        while not (known := it.gateway.conductor.account.find(RequestId(request))) or not (
            known.decision and known.decision.stages
        ):
            await asyncio.sleep(0.002)
        names = [stage.instance for stage in known.decision.stages]
        while not it.workers[names[-1]].runner.ledger().blocks_used:
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.03)
    return names


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_worker_lost_in_the_middle_costs_one_retry(lost: int) -> None:
    """Whichever of three is gone, the prompt is prefilled once more; the client sees nothing."""

    async def main() -> None:
        async with site(admission="none") as it:
            await cluster(it)
            asked = asyncio.create_task(ask(it, PROMPT, "x"))
            name = (await in_the_middle(it, "x"))[lost]
            await it.lose(name)
            await asked
            assert record(it, "x").attempts == 2
            decision = record(it, "x").decision
            assert name not in [decision.prefill, *[stage.instance for stage in decision.stages]]
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_that_hangs_and_falls_silent_ends_the_group() -> None:
    """The Conductor breaks off all parts when it takes any member for gone, and places anew."""

    async def hang(*args: Any) -> None:
        await asyncio.sleep(6)
        raise EngineFailed("after all")

    async def main() -> None:
        async with site(admission="none", dead_after_us=2_000_000) as it:
            await cluster(it)
            silent = it.workers["p1"]
            it.engines["p1"].run = hang  # type: ignore[assignment,method-assign]
            asked = asyncio.create_task(ask(it, PROMPT, "x"))
            async with asyncio.timeout(10):
                while not silent.runner.ledger().blocks_used:
                    await asyncio.sleep(0.01)
            it.members.pop("p1").cancel()
            await asked
            assert record(it, "x").attempts == 2
            assert silent.runner.ledger().blocks_used, "it was not waited for"
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    """All parts end with it: blocks, leases, puts and promises are gone."""

    async def main() -> None:
        async with site(admission="none") as it:
            await cluster(it)
            asked = asyncio.create_task(ask(it, PROMPT, "gone"))
            await in_the_middle(it, "gone")
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await it.settle()
            assert record(it, "gone").outcome == "cancelled"
            await ask(it, PROMPT, "next")
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_that_refuses_its_part_costs_one_retry() -> None:
    """A member that would not do it fails the group, but not the request."""

    def refuse(job: Any) -> None:
        raise BadRequest("not here")

    async def main() -> None:
        async with site(admission="none") as it:
            await cluster(it)
            chains: Any = it.workers["p1"].runner.parts
            chains.check = refuse
            await ask(it, PROMPT, "x")
            assert record(it, "x").attempts == 2
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_many_prompts_in_parts_at_once() -> None:
    """Groups that share workers, with plain prompts between them: all right, nothing left."""

    async def main() -> None:
        async with site(admission="none") as it:
            await cluster(it)
            prompts = [[token + 7 * at for token in PROMPT[: 400 + 100 * at]] for at in range(6)]
            first = asyncio.create_task(ask(it, prompts[0], "x0"))
            await in_the_middle(it, "x0")  # idle instances share it; busy ones would not
            asked = [ask(it, prompt, f"x{at}") for at, prompt in enumerate(prompts) if at]
            plain = [it.tokens(prompt[:90], 5) for prompt in prompts]
            await asyncio.gather(first, *asked, *plain)
            await it.settle()

    asyncio.run(asyncio.wait_for(main(), 60))

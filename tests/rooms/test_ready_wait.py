"""New requests while no instance can serve them: they wait in order, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from moonserve.core.errors import ModelNotFound, NobodyAlive
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Draining, Joined, Left
from moonserve.live.api.ready_wait import ReadyWait
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.engines import Models
from moonserve.live.ports import ModelCard
from tests.support.cluster import info
from tests.support.inproc import site

PROMPT = list(range(2, 40))
UP = ModelCard("m", 100, True)
DOWN = ModelCard("m", 100, False)


class Cards:
    """The cards of a backend, as they change."""

    def __init__(self, now: ModelCard | Exception) -> None:
        self.now = now
        self.looks = 0

    def __call__(self, model: str) -> ModelCard:
        self.looks += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine with a deadline."""

    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


def test_a_request_waits_until_its_model_is_up() -> None:
    """In the order in which requests came, one that comes when others wait included."""

    async def test() -> None:
        cards = Cards(DOWN)
        ready = ReadyWait(cards, 10_000_000)
        went: list[int] = []

        async def ask(number: int) -> None:
            assert (await ready.card("m")).alive
            went.append(number)

        asked = [asyncio.create_task(ask(number)) for number in range(50)]
        await asyncio.sleep(0)
        cards.now = UP
        asked.append(asyncio.create_task(ask(50)))
        await asyncio.gather(*asked)
        assert went == list(range(51))
        assert cards.looks < 60, "one look for all that wait for the same model"

    run(test)


def test_the_wait_ends() -> None:
    """With the reason that the backend knows, or with a card: the Conductor knows the reason."""

    async def test() -> None:
        with pytest.raises(NobodyAlive, match="no engine has joined"):
            await ReadyWait(Cards(NobodyAlive("no engine has joined")), 60_000).card("m")
        for wait_us in (0, 60_000):
            assert await ReadyWait(Cards(DOWN), wait_us).card("m") == DOWN

    run(test)


def test_the_error_names_the_drained_instances_of_the_model() -> None:
    """A model whose instances are all drained is known, also if others are served."""

    async def test() -> None:
        loop = ConductorLoop(Conductor(), lambda lease: None)
        drained = [info("p0", "prefill"), info("d0", "decode")]
        other = msgspec.structs.replace(info("e0", "both"), model="other")
        loop.tell(*map(Joined, drained), Joined(other))
        loop.tell(*(Draining(it.id, it.epoch) for it in drained))
        loop.settle()
        with pytest.raises(NobodyAlive) as caught:
            Models(loop).of("m")
        assert str(caught.value) == (
            "no instance for model m gets new work; drained: d0, p0;"
            " `moonserve drain NAME --resume` for each"
        )
        with pytest.raises(ModelNotFound):
            Models(loop).of("unknown")
        loop.stop()

    run(test)


def test_the_error_tells_lost_engines_from_those_that_never_came() -> None:
    """A model that was served here is named; of another, nobody knows whether it was."""

    async def test() -> None:
        loop = ConductorLoop(Conductor(), lambda lease: None)
        models = Models(loop)
        with pytest.raises(NobodyAlive, match="gets new work: none has joined, or all are lost"):
            models.of("m")
        joined = info("p0", "prefill")
        loop.tell(Joined(joined))
        loop.settle()
        assert [it.name for it in models.cards()] == [joined.model]
        loop.tell(Left(joined.id, joined.epoch, "killed"))
        loop.settle()
        assert models.cards() == []
        with pytest.raises(
            NobodyAlive, match=f"model {joined.model} gets new work: all are lost; GET /health"
        ):
            models.of(joined.model)
        with pytest.raises(NobodyAlive, match="gets new work: none has joined, or all are lost"):
            models.of("another")
        loop.stop()

    run(test)


def test_an_unknown_model_is_an_error_at_once_and_later() -> None:
    """Also if it turns out to be unknown while requests wait."""

    async def test() -> None:
        unknown = ModelNotFound("not served here", "model")
        with pytest.raises(ModelNotFound):
            await ReadyWait(Cards(unknown), 10_000_000).card("m")
        cards = Cards(DOWN)
        asked = asyncio.create_task(ReadyWait(cards, 10_000_000).card("m"))
        await asyncio.sleep(0)
        cards.now = unknown
        with pytest.raises(ModelNotFound):
            await asked

    run(test)


def test_a_process_that_ends_lets_nobody_wait() -> None:
    """Those that wait, and later ones, are answered with what is known then."""

    async def test() -> None:
        ready = ReadyWait(Cards(DOWN), 10_000_000)
        asked = [asyncio.create_task(ready.card("m")) for _ in range(3)]
        await asyncio.sleep(0)
        ready.stop()
        assert await asyncio.gather(*asked) == [DOWN] * 3
        assert await ready.card("m") == DOWN

    run(test)


def test_requests_outlast_the_restart_of_a_whole_cluster() -> None:
    """They come before any worker, and are served when a pair has joined; one that leaves does not
    hold up the others."""

    async def test() -> None:
        async with site(wait_ready=20_000_000) as at:
            asked = [asyncio.create_task(at.tokens(PROMPT, 3)) for _ in range(3)]
            gone = asyncio.create_task(at.tokens(PROMPT, 3))
            front = at.gateway._front
            assert front is not None
            while front.metrics.in_flight < 4:
                await asyncio.sleep(0.005)
            gone.cancel()
            await at.add("p0", "prefill")
            await asyncio.sleep(0.12)
            assert not any(task.done() for task in asked), "half a pair serves nobody"
            await at.add("d0", "decode")
            assert await asyncio.gather(*asked) == [at.reference(PROMPT, 3)] * 3
            await at.settle()

    run(test)

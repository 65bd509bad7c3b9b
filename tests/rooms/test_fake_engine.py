"""FakeEngine as a detector: every kind of wrong KV shows in the tokens."""

from __future__ import annotations

import asyncio

from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.request import Sampling
from moonserve.core.units import RequestId
from moonserve.live.engine.fake import FakeEngine, fake_cost

FREE = fake_cost(0, 0, 0)
PROMPT = tuple(range(40, 50))
R = RequestId("r")


def engine(**options: object) -> FakeEngine:
    """A small FakeEngine that takes no time."""
    return FakeEngine(block_size=4, num_blocks=8, cost=FREE, **options)  # type: ignore[arg-type]


async def token_after(made: FakeEngine, start: int, blocks: tuple[int, ...] = (0, 1, 2)) -> int:
    """The next token when only positions from `start` on are computed now."""
    work = Pass((Chunk(R, PROMPT[start:], start, blocks, Sampling(temperature=0)),))
    return (await made.run(work)).sampled[R]


def test_right_kv_gives_the_reference() -> None:
    """A whole prompt, and one whose first blocks were there, give the reference's token."""

    async def main() -> None:
        made = engine()
        [expected] = made.reference(PROMPT, 1)
        assert await token_after(made, 0) == expected
        assert await token_after(made, 8) == expected

    asyncio.run(main())


def test_wrong_kv_changes_the_token() -> None:
    """Missing, swapped and foreign blocks each give another token than the reference."""

    async def main() -> None:
        made = engine()
        [expected] = made.reference(PROMPT, 1)
        assert await token_after(made, 4) != expected, "block 0 was never written"
        await token_after(made, 0)
        assert await token_after(made, 8, (1, 0, 2)) != expected, "blocks in the wrong order"
        made.block(1)[0] ^= 1
        assert await token_after(made, 8) != expected, "one flipped bit"

    asyncio.run(main())


def test_eos_only_when_asked() -> None:
    """Tokens are words, and EOS comes only with eos_one_in."""
    plain = engine().reference(PROMPT, 300)
    assert all(1000 <= token < 8000 for token in plain)
    assert 2 in engine(eos_one_in=10).reference(PROMPT, 300)


def test_time_follows_the_cost() -> None:
    """A pass sleeps for its bases, prefill tokens and decoding requests, and tells how long it
    really took: on a busy machine longer."""
    slept: list[int] = []

    class Clock:
        def now_us(self) -> int:
            return sum(slept) + 7 * len(slept)

        async def sleep_us(self, us: int) -> None:
            slept.append(us)

    made = FakeEngine(block_size=4, num_blocks=8, cost=fake_cost(5, 10, 100), clock=Clock())
    work = Pass((Chunk(R, PROMPT, 0, (0, 1, 2)), Chunk(RequestId("d"), (1,), 0, (3,))))
    result = asyncio.run(made.run(work))
    assert slept == [5 + 100 + 100]
    assert result.elapsed_us == slept[0] + 7

"""What every Engine must do, whatever computes inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.errors import EngineFailed
from moonserve.core.request import Sampling
from moonserve.core.units import RequestId
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.ports import Engine
from tests.support.tiny import write_folder

BLOCK = 4
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=11)
Make = Callable[[], Engine]
PROMPT = [5, 9, 33, 7, 21, 60, 2, 14, 90, 41, 8]


def fake() -> Engine:
    """A FakeEngine with a vocabulary as small as the prompts here."""
    return FakeEngine(
        block_size=BLOCK,
        num_blocks=32,
        vocab_size=100,
        words=range(3, 100),
        cost=fake_cost(0, 0, 0),
    )


@pytest.fixture(params=["fake", "torch"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes engines that are equal, each with a pool of its own."""
    if request.param == "fake":
        return fake
    pytest.importorskip("torch")
    from moonserve.live.engine.torch_engine import TorchEngine

    folder = write_folder(tmp_path / "tiny")
    return lambda: TorchEngine.load(
        folder, dtype="float32", block_size=BLOCK, num_blocks=32, threads=1
    )


def chunk(
    name: str, known: Sequence[int], start: int, end: int, first_block: int, sampling: Sampling
) -> Chunk:
    """Positions start..end-1 of `known`, in consecutive blocks."""
    blocks = range(first_block, first_block - (-end // BLOCK))
    return Chunk(
        RequestId(name),
        tuple(known[start:end]),
        start,
        tuple(blocks),
        sampling if end == len(known) else None,
    )


async def go_on(
    engine: Engine,
    known: list[int],
    start: int,
    count: int,
    *,
    first_block: int = 0,
    step: int = 100,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """Compute from `start`, `step` tokens a pass, until `count` tokens were made."""
    known = list(known)
    made: list[int] = []
    while len(made) < count:
        end = min(start + step, len(known))
        work = Pass((chunk("r", known, start, end, first_block, sampling),))
        result = await engine.run(work)
        start = end
        if end == len(known):
            made.append(result.sampled[RequestId("r")])
            known.append(made[-1])
        else:
            assert result.sampled == {}
    return made


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_chunks_do_not_change_tokens(make: Make, sampling: Sampling) -> None:
    """A prompt computed in chunks of any size gives the tokens of one computed whole."""

    async def main() -> None:
        whole = await go_on(make(), PROMPT, 0, 6, sampling=sampling)
        for step in (1, 3, 4, 7):
            got = await go_on(make(), PROMPT, 0, 6, step=step, first_block=9, sampling=sampling)
            assert got == whole, step

    asyncio.run(main())


def test_requests_of_one_pass_do_not_mix(make: Make) -> None:
    """Requests run together, prefill beside decode, give the tokens each gives alone."""

    async def main() -> None:
        others = [[1, 2, 3], [50, 51, 52, 53, 54], [9, 9]]
        alone = [await go_on(make(), prompt, 0, 5) for prompt in [PROMPT, *others]]
        engine = make()
        known = [list(prompt) for prompt in [PROMPT, *others]]
        computed = [0, 0, 0, 0]
        for turn in range(8):
            work = []
            for i, tokens in enumerate(known[: turn + 1]):  # one more request joins each turn
                if len(tokens) < len([PROMPT, *others][i]) + 5:
                    work.append(chunk(f"r{i}", tokens, computed[i], len(tokens), 8 * i, GREEDY))
                    computed[i] = len(tokens)
            result = await engine.run(Pass(tuple(work)))
            for i in range(4):
                token = result.sampled.get(RequestId(f"r{i}"))
                if token is not None:
                    known[i].append(token)
        assert [tokens[-5:] for tokens in known] == alone

    asyncio.run(main())


def test_block_bytes_are_the_kv(make: Make) -> None:
    """Blocks copied into another engine's pool, at other indices, continue with equal tokens."""

    async def main() -> None:
        source, target = make(), make()
        assert source.shape == target.shape, "equal engines have equal layout and revision"
        expected = await go_on(source, PROMPT, 0, 4)
        for index in range(3):
            target.block(20 + index)[:] = source.block(index)
        known = [*PROMPT, expected[0]]
        assert await go_on(target, known, len(PROMPT), 3, first_block=20) == expected[1:]

    asyncio.run(main())


def test_blocks_are_plain_writable_bytes(make: Make) -> None:
    """A block is block_bytes of contiguous, writable memory, and always the same memory."""
    engine = make()
    block = engine.block(1)
    assert (block.format, block.nbytes, block.ndim) == ("B", engine.shape.block_bytes, 1)
    assert block.c_contiguous
    assert not block.readonly
    block[0] = 77
    assert engine.block(1)[0] == 77
    assert engine.block(0)[0] != 77 or engine.block(2)[0] != 77


def test_seed_alone_decides_what_is_drawn(make: Make) -> None:
    """Equal seeds give equal tokens; other seeds give others."""

    async def main() -> None:
        first = await go_on(make(), PROMPT, 0, 8, sampling=DRAWN)
        other = Sampling(temperature=1.0, seed=12)
        assert await go_on(make(), PROMPT, 0, 8, sampling=DRAWN) == first
        assert await go_on(make(), PROMPT, 0, 8, sampling=other) != first

    asyncio.run(main())


def test_layers_come_as_they_are_asked_for(make: Make) -> None:
    """A pass waits at each layer for the KV of what is before its chunk, in order; what it has
    computed itself of that layer is shown then.
    """

    async def main() -> None:
        alone, first, second = make(), make(), make()
        [token] = await go_on(alone, PROMPT, 0, 1)
        await first.run(Pass((chunk("r", PROMPT, 0, BLOCK, 3, GREEDY),)))
        size = second.shape.block_bytes // second.shape.layers

        class Layerwise:
            def __init__(self) -> None:
                self.told: list[int] = []

            async def reached(self, layer: int) -> None:
                self.told.append(layer)
                part = slice(layer * size, (layer + 1) * size)
                assert any(second.block(11)[part]), "its own KV of this layer"
                await asyncio.sleep(0.001)
                second.block(10)[part] = first.block(3)[part]

        layers = Layerwise()
        work = Pass((chunk("r", PROMPT, BLOCK, len(PROMPT), 10, GREEDY),))
        assert (await second.run(work, layers)).sampled == {RequestId("r"): token}
        assert layers.told == list(range(second.shape.layers))

    asyncio.run(main())


def test_who_fails_a_layer_fails_the_pass(make: Make) -> None:
    """What a layer's wait raises is what the pass raises, and the next pass runs."""

    class Lost:
        async def reached(self, layer: int) -> None:
            if layer == 1:
                raise EngineFailed("lost")

    async def main() -> None:
        engine = make()
        work = Pass((chunk("r", PROMPT, 0, len(PROMPT), 3, GREEDY),))
        with pytest.raises(EngineFailed, match="lost"):
            await engine.run(work, Lost())
        assert await go_on(engine, PROMPT, 0, 2) == await go_on(make(), PROMPT, 0, 2)

    asyncio.run(main())

"""The passes a worker runs before it joins."""

from __future__ import annotations

import asyncio

import pytest

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.schedule.facts import Role
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.ports import Layers
from moonserve.live.worker.passes import warm_up


class Watched(FakeEngine):
    """The fake engine, which fails on blocks or positions that do not fit; keeps what it ran."""

    def __init__(self, num_blocks: int, max_len: int) -> None:
        super().__init__(
            block_size=16, num_blocks=num_blocks, max_len=max_len, vocab_size=64, words=range(64)
        )
        self.ran: list[Pass] = []

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Run and remember."""
        self.ran.append(work)
        for chunk in work.chunks:
            assert max(chunk.blocks) < self.shape.num_blocks
            assert chunk.start + len(chunk.tokens) <= self.shape.max_len
        used = [block for chunk in work.chunks for block in chunk.blocks]
        assert len(used) == len(set(used)), "two requests of a pass share a block"
        return await super().run(work, layers)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize(
    ("num_blocks", "max_len"), [(128, 4096), (64, 300), (4, 64), (2, 16), (1, 8)]
)
def test_warm_up_fits_any_pool(role: Role, num_blocks: int, max_len: int) -> None:
    """Every pass fits the pool and the context; the role's own kind is measured where it fits."""
    engine = Watched(num_blocks, max_len)
    samples = asyncio.run(warm_up(engine, role, 512))
    assert len(samples) <= max(0, len(engine.ran) - 1)
    assert len(samples) == len({id(work) for work in engine.ran[1:]})
    if num_blocks >= 64:
        assert any(s.prefill_new >= 128 for s in samples) == (role != "decode")
        assert any(s.decode_seqs == 4 for s in samples) == (role != "prefill")


class Delayed(Watched):
    """Every pass takes 10 µs a token, or a pass, and the chosen ones a hundred times that."""

    def __init__(self, slow: set[int]) -> None:
        super().__init__(128, 4096)
        self.slow = slow

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Return made-up times; the n-th pass may be a slow one."""
        tokens = sum(len(chunk.tokens) for chunk in work.chunks)
        us = 10 * (tokens if tokens > len(work.chunks) else 1)
        self.ran.append(work)
        return PassResult({}, us * (100 if len(self.ran) - 1 in self.slow else 1))


@pytest.mark.parametrize("slow", [{1}, {2, 4}, {9}, {3, 4, 14}, {0}])
def test_a_delayed_pass_is_measured_again(slow: set[int]) -> None:
    """Whichever passes were delayed once, the reported times are those of undisturbed passes."""
    engine = Delayed(slow)
    samples = asyncio.run(warm_up(engine, "both", 512))
    for sample in samples:
        tokens = sample.prefill_new
        assert sample.elapsed_us == 10 * (tokens or 1)
    assert len(engine.ran) == 1 + len(samples) + len(slow - {0})

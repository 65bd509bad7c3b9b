"""The passes a worker runs before it joins."""

from __future__ import annotations

import asyncio

import pytest

from moonserve.core.batch import Pass, PassResult
from moonserve.core.facts import Role
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.ports import Layers
from moonserve.live.worker.warm import warm_up


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
    assert len(samples) == max(0, len(engine.ran) - 1)
    if num_blocks >= 64:
        assert any(s.prefill_new >= 128 for s in samples) == (role != "decode")
        assert any(s.decode_seqs == 4 for s in samples) == (role != "prefill")

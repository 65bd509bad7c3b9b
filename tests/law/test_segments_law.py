"""Extents against a bitmap, one mark per cache line."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.store.catalog import Extents
from moonserve.core.store.words import ALIGN

LINES = 24


class ExtentsAgainstBitmap(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(LINES * ALIGN)
        self.taken = [False] * LINES
        self.live: dict[int, int] = {}

    @rule(size=st.integers(1, 6 * ALIGN))
    def allocate(self, size: int) -> None:
        need = -(-size // ALIGN)
        fits = [at for at in range(LINES - need + 1) if not any(self.taken[at : at + need])]
        offset = self.extents.allocate(size)
        assert offset == (fits[0] * ALIGN if fits else None)
        if offset is not None:
            self.taken[offset // ALIGN : offset // ALIGN + need] = [True] * need
            self.live[offset] = need

    @rule(line=st.integers(0, LINES + 2), size=st.integers(1, 6 * ALIGN))
    def reserve(self, line: int, size: int) -> None:
        need = -(-size // ALIGN)
        fits = line + need <= LINES and not any(self.taken[line : line + need])
        assert self.extents.reserve(line * ALIGN, size) == fits
        assert not self.extents.reserve(line * ALIGN + 1, size)
        if fits:
            self.taken[line : line + need] = [True] * need
            self.live[line * ALIGN] = need

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        need = self.live.pop(offset)
        self.extents.free(offset, need * ALIGN)
        self.taken[offset // ALIGN : offset // ALIGN + need] = [False] * need

    @invariant()
    def ledger_balances(self) -> None:
        assert self.extents.used_bytes == sum(self.taken) * ALIGN
        assert self.extents.free_bytes == (LINES - sum(self.taken)) * ALIGN


TestExtents = ExtentsAgainstBitmap.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""What a policy remembers from one decision to the next.

The Conductor keeps one PolicyState. It replaces it with the one that `decide` returns and, for
policies that look back, with the one that `assigned` returns. A dry run drops the new state, so
that it leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from moonserve.core.units import InstanceId, Micros

if TYPE_CHECKING:
    from random import Random  # noqa: TID251 - for its type only

HISTORY_US: Micros = 180_000_000
"""How long an assignment is remembered."""

Assignments = tuple[tuple[Micros, Micros], ...]
"""(time, prefill work) of one instance's assignments, the newest last."""


class PolicyState(msgspec.Struct, frozen=True):
    """A value: nothing in it is changed once it was handed to a decision."""

    rng: Random | None = None
    """For policies that draw; None: they take the first of what they would draw from."""
    turn: int = 0
    """Decisions so far."""
    history: Mapping[InstanceId, Assignments] = {}
    """Recent assignments, for policies that look back."""

    def advanced(self) -> PolicyState:
        """The state after one more decision."""
        return PolicyState(self.rng, self.turn + 1, self.history)

    def redrawable(self) -> PolicyState:
        """The same with a generator of its own: drawing from it leaves this one as it is."""
        if self.rng is None:
            return self
        rng = type(self.rng)()
        rng.setstate(self.rng.getstate())
        return PolicyState(rng, self.turn, self.history)

    def assigned(self, instance: InstanceId, now_us: Micros, work_us: Micros) -> PolicyState:
        """The state with one more assignment; those older than HISTORY_US are forgotten."""
        since_us = now_us - HISTORY_US
        past = [it for it in self.history.get(instance, ()) if it[0] >= since_us]
        history = {**self.history, instance: (*past, (now_us, work_us))}
        return PolicyState(self.rng, self.turn, history)

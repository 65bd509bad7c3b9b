"""With hindsight: how many refused requests could have been served in the room that a run left
free.

sim.metrics asks. It is an idealised replay, so an upper bound. Each completed request keeps the
time that it had. The refused ones are added one after the other, in order of arrival, if that
breaks no goal. Lengths are known. Prefill is one fluid: a prompt gets at most what one instance
does. KV moves in no time. A request that joins a decode instance does not slow the others there,
but their time between tokens must stay within the goal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonserve.core.units import Micros
from moonserve.sim.cluster import Simulation
from moonserve.sim.node import Node
from moonserve.sim.served import Served

_BIN_US = 1_000_000
_MOST_BINS = 200_000
Series = NDArray[np.float64]


def could_have_been_served(sim: Simulation) -> int | None:
    """How many refused requests fit; None if instances do both, because their passes are shared."""
    refused = [one for one in sim.served if one.outcome == "refused"]
    if sim.setup.mixed or not refused:
        return None if sim.setup.mixed else 0
    free = _Free(sim)
    return sum(free.takes(one) for one in refused)


class _Free:
    """Free time: of prefill, and places on each decode instance."""

    def __init__(self, sim: Simulation) -> None:
        setup, rows = sim.setup, sim.trace.rows
        self._cost = setup.profile.cost()
        self._goal = setup.goal
        first_us = rows[0].at_us
        span_us = 2 * (sim.clock.now_us - first_us) + 60 * _BIN_US
        self._bin_us = max(_BIN_US, -(-span_us // _MOST_BINS))
        self._first_us = first_us
        count = span_us // self._bin_us + 1
        self._idle_us = np.full(count, float(len(sim.prefills) * self._bin_us))
        self._decodes = {node.name: (np.zeros(count), np.zeros(count)) for node in sim.decodes}
        """By node name: requests, and tokens of context."""
        self._kv_tokens = setup.profile.kv_tokens
        for one in sim.served:
            if one.outcome == "completed":
                self._keep(one)
        self._idle_us = self._idle_us.clip(0, None)

    def takes(self, one: Served) -> bool:
        """Whether there is room for this request; if so, it takes the room."""
        decision = one.decision
        if decision is not None:
            best = decision.chosen
            work_us = best.transfer_us + best.compute_us
        else:
            work_us = self._cost.prefill_us(one.row.input_tokens, 0, one.row.input_tokens)
        first = self._bin(one.arrived_us)
        goal_us = self._goal.ttft_us
        last = len(self._idle_us) if goal_us is None else self._bin(one.arrived_us + goal_us)
        taken = self._idle_us[first:last].clip(0, self._bin_us)
        done = np.cumsum(taken)
        count = int(np.searchsorted(done, work_us)) + 1
        if count > len(done) or not self._decode(one, first + count):
            return False
        taken = taken[:count]
        taken[-1] -= done[count - 1] - work_us
        self._idle_us[first : first + count] -= taken
        return True

    def _decode(self, one: Served, begin: int) -> bool:
        """Put it on the emptiest instance if all goals hold as long as it decodes."""
        tokens, context = one.row.output_tokens, one.row.input_tokens + one.row.output_tokens / 2
        base, per_seq, per_context = self._cost.step_us
        goal_us, end = self._goal.tbt_us, len(self._idle_us)
        if goal_us is not None:  # it takes at most this long, or misses the goal
            end = min(end, begin + tokens * goal_us // self._bin_us + 2)
        for seqs, held in sorted(self._decodes.values(), key=lambda it: float(it[0][begin])):
            joined = held[begin:end] + context
            steps = base + per_seq * (seqs[begin:end] + 1) + per_context * joined
            after = np.searchsorted(np.cumsum(self._bin_us / steps), tokens) + 1
            slow = goal_us is not None and steps[:after].max() > goal_us
            full = joined[:after].max() > self._kv_tokens
            if after <= len(steps) and not slow and not full:
                seqs[begin : begin + after] += 1
                held[begin : begin + after] += context
                return True
        return False

    def _keep(self, one: Served) -> None:
        """Take the room that a completed request had."""
        if one.prefilled_us is not None and one.prefill_us:
            end_us = one.prefilled_us - self._first_us
            begin_us = max(0, end_us - one.prefill_us)
            begin, after = begin_us // self._bin_us, -(-end_us // self._bin_us)
            edges = np.arange(begin, after + 1) * self._bin_us
            self._idle_us[begin:after] -= np.diff(edges.clip(begin_us, end_us))
        context = one.row.input_tokens + one.row.output_tokens / 2
        for node, call in one.calls:
            if call.spans and node.name in self._decodes:
                begin, after = self._bins(*_span_us(node, call.spans))
                seqs, held = self._decodes[node.name]
                seqs[begin:after] += 1
                held[begin:after] += context

    def _bin(self, at_us: Micros) -> int:
        return min(len(self._idle_us) - 1, max(0, (at_us - self._first_us) // self._bin_us))

    def _bins(self, begin_us: Micros, end_us: Micros) -> tuple[int, int]:
        """The first bin, and the one after the last; at least one bin."""
        begin = self._bin(begin_us)
        return begin, max(begin + 1, round((end_us - self._first_us) / self._bin_us))


def _span_us(node: Node, spans: Sequence[Sequence[int]]) -> tuple[Micros, Micros]:
    """From its first token there to its last."""
    return node.ends[spans[0][0]], node.ends[spans[-1][1] - 1]

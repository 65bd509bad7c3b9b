"""Whether a request whose prefill has ended may begin to decode: at once, later, elsewhere or not.

Kept by the Conductor. The prediction on arrival may have been wrong; then decode has no room within
the objectives. Refusing it wastes its prefill, but breaks no other request's time between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.kv.facts import OfBlocks
from moonserve.core.request import Slo
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.decision import Decision
from moonserve.core.schedule.decode_forecast import DecodeForecast, grown_us
from moonserve.core.schedule.facts import Arrived, Fact
from moonserve.core.schedule.forecast import place_us
from moonserve.core.schedule.handoff import Handoff
from moonserve.core.schedule.objectives import Objectives, misses
from moonserve.core.schedule.residency import Residency
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens


class DecodeEntry:
    """See the module."""

    def __init__(self, tuning: Tuning, objectives: Objectives, forecast: DecodeForecast) -> None:
        self._tuning = tuning
        self._objectives = objectives
        self._forecast = forecast

    def choose(
        self,
        life: Handoff,
        view: InstanceView,
        others: Sequence[InstanceView],
        decision: Decision,
        now_us: Micros,
    ) -> tuple[InstanceView, Refuse | None]:
        """The instance where it may decode now, or why none; `view` is where it was promised.

        With predictive admission another instance may take it. And if all places are taken there it
        does not begin: then its first token waits, not the tokens after it.
        """
        request = life.request
        slo = self._objectives.own(request)
        if slo.tbt_us is None and view.strictest_us() is None:
            return view, None
        context = self._forecast.context(life.length)
        residency = view.residencies.promised.get(request.id)
        if residency is None:
            residency = self._forecast.residency(request, life.length, now_us)
        over_us = _over_us(view, context, residency, slo) if view.cost.known else 0
        mode = self._tuning.mode(request.priority)
        full = not view.has_place
        if full and mode == "predictive" and slo.tbt_us is not None:
            over_us = max(1, over_us)
        if mode == "none" or over_us <= 0:
            return view, None
        if mode == "predictive":
            other = min(others, key=lambda one: _over_us(one, context, residency, slo))
            if _over_us(other, context, residency, slo) <= 0 and other.has_slot(context):
                return other, None
        tbt_us = _joined_us(view, context, residency)
        why = misses("TBT", tbt_us, tbt_us - over_us)
        if full:
            why = f"all {view.info.max_seqs} places in decode on {view.info.id} are taken"
        why += ", found when its prefill had ended"
        return view, Refuse(request.id, why, "tbt_slo_late", MICROS_PER_SECOND, decision)

    def patient_us(self, life: Handoff) -> Micros:
        """Until when a request waits for room in decode; 0: it does not wait.

        Two passes before its TTFT objective ends.
        """
        request = life.request
        if self._tuning.mode(request.priority) != "predictive":
            return 0
        slo = self._objectives.own(request)
        if slo.ttft_us is None:
            return life.arrived_us + self._tuning.patience_us
        return life.arrived_us + slo.ttft_us - 2 * (slo.tbt_us or 0)

    def is_stirred(self, facts: Sequence[Fact], held: Sequence[Handoff], now_us: Micros) -> bool:
        """Whether requests that wait for room may begin by these facts, or have waited enough.

        Arrivals alone make no room.
        """
        if not facts or not all(isinstance(fact, Arrived | OfBlocks) for fact in facts):
            return True
        return any(now_us >= self.patient_us(life) for life in held)


def _joined_us(view: InstanceView, context: Tokens, residency: Residency) -> Micros:
    """The time between tokens of one that joins now; with all places taken, until one is free."""
    tbt_us = grown_us(view, context)
    seqs = view.info.max_seqs
    there = len(view.residencies.active) + view.residencies.external.running
    behind = max(0, there + 1 - seqs)
    return tbt_us + round(behind * place_us(residency, tbt_us, seqs))


def _over_us(view: InstanceView, context: Tokens, residency: Residency, slo: Slo) -> Micros:
    """By how much one that joins now would miss the tightest goal there, its own included."""
    tbt_us = _joined_us(view, context, residency)
    goals_us = [us for us in (slo.tbt_us, view.strictest_us()) if us is not None]
    return tbt_us - min(goals_us, default=tbt_us)

"""When a refused client should return: the Retry-After of every refusal.

Kept by the Conductor. Booking a refusal takes a slot of the RetryCalendar, behind the clients that
were refused before it. An objective that an idle cluster could not meet either gets no time at all.
"""

from __future__ import annotations

import msgspec

from moonserve.core.request import Request
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.decode_forecast import GROWTH, DecodeForecast
from moonserve.core.schedule.groups import work_us
from moonserve.core.schedule.handoff import Handoff
from moonserve.core.schedule.objectives import Objectives
from moonserve.core.schedule.retry import LATEST_US, RetryCalendar
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView
from moonserve.core.units import Micros, shown_us

_COLD_US: Micros = 20_000
"""Clients refused by costs that are not measured return this far apart: soon, not all at once."""


class RetryAfter:
    """See the module."""

    def __init__(
        self,
        tuning: Tuning,
        objectives: Objectives,
        forecast: DecodeForecast,
        calendar: RetryCalendar,
    ) -> None:
        self._tuning = tuning
        self._objectives = objectives
        self._forecast = forecast
        self._calendar = calendar

    def book(self, life: Handoff, refusal: Refuse, view: ClusterView, now_us: Micros) -> Refuse:
        """Give the client a slot of the calendar; returns the refusal with that time.

        For want of room in decode the first slot is when some of the decodes will have ended.
        """
        request = life.request
        first_us = refusal.retry_after_us
        if first_us is None or refusal.reason == "kv_memory":
            return refusal
        if least_us := self._unreachable_us(request, refusal, view):
            why = f"{refusal.why}; an idle cluster would take {shown_us(least_us)}, so no retry"
            why += " helps: set a looser objective"
            return msgspec.structs.replace(refusal, why=why, retry_after_us=None)
        interval_us = self._interval_us(request, refusal, view, now_us)
        decision = refusal.decision
        if refusal.reason != "ttft_slo" and decision is not None:
            chosen = view.instances.get(decision.decode)
            if chosen is not None and not self._calendar.next_us(request.model, now_us):
                length = decision.prompt_tokens
                first_us = self._forecast.room_us(chosen, length, first_us, now_us)
        wait_us = self._calendar.book(request, life.prompt_keys, now_us, first_us, interval_us)
        why = refusal.why
        if wait_us > LATEST_US:
            why += f"; room is predicted in {wait_us / 1e6:.0f} s"
        return msgspec.structs.replace(refusal, why=why, retry_after_us=min(LATEST_US, wait_us))

    def _interval_us(
        self, request: Request, refusal: Refuse, view: ClusterView, now_us: Micros
    ) -> float:
        """How long from one free place to the next."""
        interval_us = self._forecast.interval_us(request, view.decodes(request.model), now_us)
        decision = refusal.decision
        if decision is None or refusal.reason != "ttft_slo":
            return interval_us
        chosen = view.instances.get(decision.prefill)
        if chosen is not None and not chosen.cost.known:
            return min(interval_us or _COLD_US, _COLD_US)
        work_us = sum([share.work_us for share in decision.shares])
        return max(interval_us, work_us / max(1, len(view.prefills(request.model))))

    def _unreachable_us(self, request: Request, refusal: Refuse, view: ClusterView) -> Micros:
        """What it would take at least with no other request, where that misses its objective.

        0 where an idle cluster would meet it, or where that is not known.
        """
        slo = self._objectives.own(request)
        if refusal.reason.startswith("tbt_slo"):
            least_us = self._least_tbt_us(request, view)
            goal_us = slo.tbt_us
        elif refusal.reason == "ttft_slo" and refusal.decision is not None:
            goal_us = slo.ttft_us
            first = refusal.decision.chosen
            if goal_us is None or first.transfer_us + first.compute_us <= goal_us:
                return 0
            least_us = self._least_ttft_us(request, refusal, view)
        else:
            return 0
        return least_us if goal_us is not None and least_us > goal_us else 0

    def _least_tbt_us(self, request: Request, view: ClusterView) -> Micros:
        context = self._forecast.context(request.length)
        steps = [one.cost.decode_step_us(1, context) for one in view.decodes(request.model)]
        return round(GROWTH * min(steps, default=0))

    def _least_ttft_us(self, request: Request, refusal: Refuse, view: ClusterView) -> Micros:
        """By any candidate, or any group; 0 where costs are not known."""
        decision = refusal.decision
        prefills = view.prefills(request.model)
        if decision is None or not all(one.cost.known for one in prefills):
            return 0
        pool = decision.pool_tokens // prefills[0].info.namespace.block_size
        slo = self._objectives.own(request)
        rows = [decision.chosen, *refusal.candidates]
        return min(
            *[one.transfer_us + one.compute_us for one in rows],
            *[
                work_us([one, *prefills], request.length, pool, slo, self._tuning)
                for one in prefills
            ],
        )

"""What admission knows: objectives, what is promised in decode, and when there will be room.

`Outlook` is kept by the Conductor; core.schedule.admission makes refusals of what it says, and
here they are told when to come again. Sources as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.kv.facts import OfBlocks
from moonserve.core.request import Held, Request, Slo
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.facts import Arrived, ClientGone, DecodeEnded, Fact, PrefillEnded
from moonserve.core.schedule.forecast import forecast, place_us, room_in_us
from moonserve.core.schedule.handoff import Handoff, LifeFact
from moonserve.core.schedule.placement import Decision, Look
from moonserve.core.schedule.policies import policy_of, work_us
from moonserve.core.schedule.prediction_errors import PredictionErrors
from moonserve.core.schedule.residency import Stay, predictor_of
from moonserve.core.schedule.retry import LATEST_US, Told
from moonserve.core.schedule.tenants import Tenants
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId, Tokens

_TAIL = 10
"""A request's TBT is the mean of the longest of so many of its gaps, at least of one (FAST'25)."""
_UNSEEN, _SEEN = 8, 256
"""Outputs that weigh as much as knowing nothing, and as many as are remembered."""
_COLD_US: Micros = 20_000
"""Apart come those who are refused by costs that nobody measured: soon, and not all at once."""
_SAID_US: Micros = 1_000
"""Less is not worth a word in a message."""
_GROWTH = 1.01
"""Contexts grow while they decode: so much is kept of every TBT objective."""


class Outlook:
    """What is expected of outputs and of the load of decode, and how far off that was.

    length_of: for the oracle.
    """

    def __init__(
        self, tuning: Tuning, length_of: Callable[[RequestId], Tokens] | None = None
    ) -> None:
        self._tuning = tuning
        self._predictor = predictor_of(tuning.predictor, length_of)
        self._tenants, self.told = Tenants(), Told()
        self._turns = policy_of(tuning.policy).late
        """Whether tenants take turns where requests wait."""
        self._outputs = 0.0
        """Mean output length seen, newer ones counting more."""
        self.expected_tokens: Tokens = 0
        """The same: the output to be expected of anybody."""
        self._joined_share, self._seen = 0.0, 0
        """Mean over outputs of the part that the first gap has in a TBT as it is measured."""
        self.errors = PredictionErrors()

    def context(self, length: Tokens) -> Tokens:
        """What a prompt of this length comes to, with the output to be expected."""
        return length + self.expected_tokens

    def slo(self, request: Request) -> Slo:
        """Its own objectives, or the cluster's."""
        return own_slo(request, self._tuning)

    def asked(self, request: Request, now_us: Micros) -> None:
        """It came; whatever becomes of it."""
        self._tenants.asked(request.tenant, len(request.prompt), now_us)
        self.told.came(request, now_us)

    def held_to(self, request: Request, prefills: Sequence[InstanceView], now_us: Micros) -> Held:
        """The objectives that it must be predicted to meet.

        Low priority is refused first, and so is a tenant that was given more than its part. Where
        refusals told others to come now, they are taken to be before it, each like this one.
        """
        slo, share, whys = self.slo(request), 1.0, list[str]()
        if slo.ttft_us is None and slo.tbt_us is None:
            return Held(slo)
        told = self._told_ahead(request, now_us)
        if told and slo.ttft_us is not None:
            view, length = prefills[0], len(request.prompt)
            each_us = view.cost.prefill_us(length, 0, view.info.chunk_tokens) / len(prefills)
            less_us = min(slo.ttft_us, round(told * each_us))
            slo = Slo(slo.ttft_us - less_us, slo.tbt_us)
            if less_us >= _SAID_US:
                whys.append(f"less {less_us / 1e3:.0f} ms for {told:.1f} told to come before it")
        low = self._tuning.low_share
        if request.priority < 0:
            share = low
            whys.append(f"{low:.3g} of its own, since it is of a priority below 0")
        part = 1.0 if self._turns else max(low, self._tenants.share(request.tenant, now_us))
        if part != 1.0:  # by both: within a tenant the low go first all the same
            share *= part
            whose = f"of tenant {request.tenant!r}, given more than its part"
            whys.append(f"{part:.3g} of its own, since it is {whose}")
        if share != 1.0:
            ttft_us, tbt_us = slo.ttft_us, slo.tbt_us
            slo = Slo(
                None if ttft_us is None else round(share * ttft_us),
                None if tbt_us is None else round(share * tbt_us),
            )
        return Held(slo, ", ".join(whys))

    def look(self, request: Request, length: Tokens, now_us: Micros, among: int = 1) -> Look | None:
        """How admission sees the load of decode; None where those promised there say it.

        among: on how many instances those whom refusals told to come now will be.
        """
        context = self.context(length)
        mode = "none" if self._turns else self._tuning.mode(request.priority)
        if mode == "early":
            return lambda view, ends_us: (view.tbt_now_us(context), _grown_us(view, context))
        if mode != "predictive":
            return None

        def ahead(view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
            ttft_us, share = self.slo(request).ttft_us, self._tuning.held_share
            if self.told.is_due(request):
                share = max(share, self._tuning.due_share)
            allowed_us = self._tuning.patience_us if ttft_us is None else ttft_us
            stay = self._predictor.stay(request, context, ends_us)
            deviations = self._tuning.deviations
            step = view.cost.step_us
            wait_us = round(share * max(0, allowed_us - (ends_us - now_us)))
            seqs = view.info.max_seqs
            found = forecast(
                view.stays, step, stay, self._predictor, now_us, deviations, wait_us, seqs
            )
            unseen_us = self._tuning.overtaken * view.stays.unseen_us(
                ends_us - now_us, now_us, step
            )
            _, per_seq, per_context = step
            told = self._told_ahead(request, now_us) / among
            unseen_us += told * (per_seq + per_context * context)
            growth = self._growth if view.decodes else _GROWTH  # no pass to wait for
            return round(found[0] + unseen_us), round(growth * (found[1] + unseen_us))

        return ahead

    @property
    def _growth(self) -> float:
        """What TBT as measured will be, as a multiple of the pass that one joins."""
        return _GROWTH + self._tuning.join_passes * self._joined_share

    def _told_ahead(self, request: Request, now_us: Micros) -> float:
        """How many that were refused before go before it: where others wait, nobody."""
        if (
            self._turns
            or request.priority > 0
            or self._tuning.mode(request.priority) != "predictive"
        ):
            return 0.0
        return self.told.ahead(request, now_us)

    def promise(
        self,
        request: Request,
        length: Tokens,
        view: InstanceView,
        now_us: Micros,
        lag_us: Micros,
        tbt_us: Micros,
    ) -> None:
        """Count it there, so long from now on; a goal missed from the start binds nobody else."""
        goal_us, context = self.slo(request).tbt_us, self.context(length)
        missed = goal_us is not None and tbt_us > goal_us
        if request.id not in view.stays.promised:
            self.told.admitted(request)
            self._tenants.given(request.tenant, length)
        stay = self._predictor.stay(request, context, now_us + lag_us)
        stay.lag_us = lag_us
        view.promise_decode(request.id, context, None if missed else goal_us, stay)

    def arrives(
        self,
        request: Request,
        view: InstanceView,
        views: Sequence[InstanceView],
        context: Tokens,
        decision: Decision,
        now_us: Micros,
    ) -> tuple[InstanceView, Refuse | None]:
        """Its prefill has ended: where it decodes, or why not.

        Refused where decode has no room within the goals there and its own: that prefill is wasted,
        but nobody's time between tokens is broken. With predictive admission it may go elsewhere;
        and without a place it is not begun: its first token waits, not those after it.
        """
        slo = self.slo(request)
        if slo.tbt_us is None and view.strictest_us() is None:
            return view, None
        stay = view.stays.promised.get(request.id)
        if stay is None:
            stay = self._predictor.stay(request, context, now_us)
        over_us = _over_us(view, context, stay, slo) if view.cost.known else 0
        mode, full = self._tuning.mode(request.priority), not view.has_place
        if full and mode == "predictive" and slo.tbt_us is not None:
            over_us = max(1, over_us)
        if mode == "none" or over_us <= 0:
            return view, None
        if mode == "predictive":
            other = min(views, key=lambda one: _over_us(one, context, stay, slo))
            if _over_us(other, context, stay, slo) <= 0 and other.has_slot(context):
                return other, None
        tbt_us = _joined_us(view, context, stay)
        why = misses("TBT", tbt_us, tbt_us - over_us)
        if full:
            why = f"all {view.info.max_seqs} places in decode on {view.info.id} are taken"
        why += ", found when its prefill had ended"
        return view, Refuse(request.id, why, "tbt_slo_late", MICROS_PER_SECOND, decision)

    def patient_us(self, request: Request, arrived_us: Micros) -> Micros:
        """Until when one waits for room in decode; 0: it does not. Two passes before its TTFT."""
        if self._tuning.mode(request.priority) != "predictive":
            return 0
        slo = self.slo(request)
        if slo.ttft_us is None:
            return arrived_us + self._tuning.patience_us
        return arrived_us + slo.ttft_us - 2 * (slo.tbt_us or 0)

    def stirs(self, facts: Sequence[Fact], held: Sequence[Handoff], now_us: Micros) -> bool:
        """Whether those who wait for room in decode may go on, or have waited enough.

        Not by arrivals alone: those make no room.
        """
        if not facts or not all(isinstance(fact, Arrived | OfBlocks) for fact in facts):
            return True
        return any(now_us >= self.patient_us(one.request, one.arrived_us) for one in held)

    def ended(
        self, fact: LifeFact, request: Request, view: InstanceView | None, now_us: Micros
    ) -> None:
        """Its life ended by this fact; it may have decoded there."""
        stay = view.stays.active.get(request.id) if view is not None else None
        match fact:
            case DecodeEnded(tokens=tokens):
                self._decoded(request, stay, tokens, now_us)
            case PrefillEnded():
                self._predictor.ended(request, 1, None)
            case ClientGone() if stay is not None and view is not None:
                passes = view.stays.passes(now_us, view.cost.step_us) - stay.began_tokens
                self._predictor.left(request, max(1, round(passes)))
            case _:
                pass

    def _decoded(self, request: Request, stay: Stay | None, tokens: Tokens, now_us: Micros) -> None:
        """Its output is whole; without a stay where that instance restarted meanwhile."""
        self._outputs += (tokens - self._outputs) / 64
        self.expected_tokens = round(self._outputs)
        share = 1 / max(1, (tokens - 1) // _TAIL) if tokens > 1 else 0.0
        self._seen = min(self._seen + 1, _SEEN)
        self._joined_share += (share - self._joined_share) / (_UNSEEN + self._seen)
        if stay is not None:
            self.errors.output.add(stay.expected, tokens)
            self._predictor.ended(request, tokens, now_us - stay.due_us)

    def with_drain(
        self, request: Request, refusal: Refuse, view: ClusterView, now_us: Micros
    ) -> Refuse:
        """A refusal says when there will be room, behind those who were refused before it.

        For want of room in decode that is when some who decode will have ended.
        """
        first_us, decision = refusal.retry_after_us, refusal.decision
        if first_us is None or refusal.reason == "kv_memory":
            return refusal
        if least_us := self._unreachable(request, refusal, view):
            why = f"{refusal.why}; an idle cluster would take {least_us / 1e3:.10g} ms, so no retry"
            why += " helps: it takes a looser objective"
            return msgspec.structs.replace(refusal, why=why, retry_after_us=None)
        decodes = view.decodes(request.model)
        interval_us, context = 0.0, self.context(len(request.prompt))
        expected = max(1.0, self._predictor.stay(request, context, now_us).expected)
        ends = [max(1, one.decodes) / (expected * max(1, one.tbt_us(context))) for one in decodes]
        if any(ends):
            interval_us = 1 / sum(ends)
        if decision is not None:
            chosen, cold = view.instances.get(decision.decode), view.instances.get(decision.prefill)
            if refusal.reason == "ttft_slo" and cold is not None and not cold.cost.known:
                interval_us = min(interval_us or _COLD_US, _COLD_US)
            elif refusal.reason == "ttft_slo":
                work_us = sum([share.work_us for share in decision.shares])
                interval_us = max(interval_us, work_us / max(1, len(view.prefills(request.model))))
            elif chosen is not None and not self.told.next_us(request.model, now_us):
                first_us = self._room_us(chosen, decision.prompt_tokens, first_us, now_us)
        wait_us, why = self.told.tell(request, now_us, first_us, interval_us), refusal.why
        if wait_us > LATEST_US:
            why += f"; there is predicted to be room in {wait_us / 1e6:.0f} s"
        return msgspec.structs.replace(refusal, why=why, retry_after_us=min(LATEST_US, wait_us))

    def _unreachable(self, request: Request, refusal: Refuse, view: ClusterView) -> Micros:
        """What it would take at least with nobody else, where that misses its objective; else 0."""
        slo, decision, length = self.slo(request), refusal.decision, len(request.prompt)
        if refusal.reason.startswith("tbt_slo"):
            context = self.context(length)
            steps = [one.cost.decode_step_us(1, context) for one in view.decodes(request.model)]
            least_us, goal_us = round(_GROWTH * min(steps, default=0)), slo.tbt_us
        elif refusal.reason == "ttft_slo" and decision is not None:
            first, goal_us = decision.candidates[0], slo.ttft_us
            least_us = first.transfer_us + first.compute_us
            if goal_us is None or least_us <= goal_us:
                return 0
            prefills = view.prefills(request.model)
            if not all(one.cost.known for one in prefills):
                return 0
            pool = decision.pool_tokens // prefills[0].info.namespace.block_size
            least_us = min(
                least_us,
                *[one.transfer_us + one.compute_us for one in decision.candidates],
                *[work_us([one, *prefills], length, pool, slo, self._tuning) for one in prefills],
            )
        else:
            return 0
        return least_us if goal_us is not None and least_us > goal_us else 0

    def _room_us(
        self, view: InstanceView, context: Tokens, least_us: Micros, now_us: Micros
    ) -> Micros:
        """Until one more may decode there, if nobody comes."""
        goal_us = view.strictest_us()
        if goal_us is None or not view.decodes:
            return least_us
        step = view.cost.step_us
        seqs, goal_us = view.info.max_seqs, round(goal_us / self._growth)
        return room_in_us(view.stays, step, context, goal_us, self._predictor, now_us, seqs)


def _grown_us(view: InstanceView, context: Tokens) -> Micros:
    return round(_GROWTH * view.tbt_now_us(context))


def _joined_us(view: InstanceView, context: Tokens, stay: Stay) -> Micros:
    """The time between tokens of one that joins now; with all places taken, until one is free."""
    tbt_us, seqs = _grown_us(view, context), view.info.max_seqs
    behind = max(0, len(view.stays.active) + view.stays.others.running + 1 - seqs)
    return tbt_us + round(behind * place_us(stay, tbt_us, seqs))


def _over_us(view: InstanceView, context: Tokens, stay: Stay, slo: Slo) -> Micros:
    """By how much one that joins now would miss the tightest goal there, its own included."""
    tbt_us = _joined_us(view, context, stay)
    goals_us = [us for us in (slo.tbt_us, view.strictest_us()) if us is not None]
    return tbt_us - min(goals_us, default=tbt_us)


def own_slo(request: Request, tuning: Tuning) -> Slo:
    """A request's own objectives, or the cluster's; a single token has no time between tokens."""
    slo, of_all = request.slo, tuning.slo
    if of_all.ttft_us is not None or of_all.tbt_us is not None:
        slo = slo.over(of_all)
    return slo if request.stopping.max_tokens > 1 else Slo(slo.ttft_us)


def misses(what: str, predicted_us: Micros, goal_us: Micros) -> str:
    """An objective that is predicted to be missed, in words."""
    predicted_ms, goal_ms = predicted_us / 1e3, goal_us / 1e3
    return f"predicted {what} of {predicted_ms:.10g} ms misses the objective of {goal_ms:.10g} ms"

"""Who is refused, and with which words.

Functions from what is predicted to a Refuse, or to None. Called by the Conductor only. Sources:
FAST'25 "Mooncake", Algorithm 1's last lines: TTFT and TBT are held against their objectives; arXiv
2407.00079, section 7: early rejection, by the load of decode now or when this prefill will end.
Costs that nobody measured yet refuse nobody: a cold instance takes what it has places for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.actions import Refuse
from moonserve.core.forecast import forecast, place_us, room_in_us
from moonserve.core.placement import Decision, Look
from moonserve.core.policies import Tuning, Verdict, policy_of
from moonserve.core.predict import Errors, Stay, predictor_of
from moonserve.core.request import Request, Slo
from moonserve.core.tenants import Tenants
from moonserve.core.told import Told
from moonserve.core.units import MICROS_PER_SECOND, Micros, RequestId, Tokens
from moonserve.core.view import ClusterView, InstanceView
from moonserve.core.waiting import Waiter, WaitingRoom

_TAIL = 10
"""A request's TBT is the mean of the longest of so many of its gaps, at least of one (FAST'25)."""
_UNSEEN, _SEEN = 8, 256
"""Outputs that weigh as much as knowing nothing, and as many as are remembered."""
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
        self._joined_share, self._seen = 0.0, 0
        """Mean over outputs of the part that the first gap has in a TBT as it is measured."""
        self.tbt_errors, self.output_errors = Errors(), Errors()
        """Predicted against actual: TBT (us) when prefill ends, and output lengths (tokens)."""

    @property
    def expected_tokens(self) -> Tokens:
        """The output to be expected of anybody."""
        return round(self._outputs)

    def context(self, length: Tokens) -> Tokens:
        """What a prompt of this length comes to, with the output to be expected."""
        return length + self.expected_tokens

    def slo(self, request: Request) -> Slo:
        """Its own objectives, or the cluster's."""
        return request.slo.over(self._tuning.slo)

    def asked(self, request: Request, now_us: Micros) -> None:
        """It came; whatever becomes of it."""
        self._tenants.asked(request.tenant, len(request.prompt), now_us)
        self.told.came(request, now_us)

    def held_to(self, request: Request, prefills: Sequence[InstanceView], now_us: Micros) -> Slo:
        """The objectives that it must be predicted to meet.

        Low priority is refused first, and so is a tenant that was given more than its part. Where
        refusals told others to come now, they are taken to be before it, each like this one.
        """
        slo, share, low = self.slo(request), 1.0, self._tuning.low_share
        told = self._told_ahead(request, now_us)
        if told and slo.ttft_us is not None:
            view, length = prefills[0], len(request.prompt)
            work_us = view.cost.prefill_us(length, 0, view.info.chunk_tokens)
            slo = Slo(slo.ttft_us - round(told * work_us / len(prefills)), slo.tbt_us)
        if request.priority < 0:
            share = low
        elif not self._turns:
            share = max(low, self._tenants.share(request.tenant))
        if share == 1.0:
            return slo
        ttft_us, tbt_us = slo.ttft_us, slo.tbt_us
        return Slo(
            None if ttft_us is None else round(share * ttft_us),
            None if tbt_us is None else round(share * tbt_us),
        )

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

        ttft_us, share = self.slo(request).ttft_us, self._tuning.held_share
        allowed_us = self._tuning.patience_us if ttft_us is None else ttft_us

        def ahead(view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
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
        why = _misses("TBT", tbt_us, tbt_us - over_us)
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

    def ended(
        self, request: Request, view: InstanceView | None, tokens: Tokens, now_us: Micros
    ) -> None:
        """It decoded there until now, or elsewhere, if that restarted meanwhile."""
        self._outputs += (tokens - self._outputs) / 64
        share = 1 / max(1, (tokens - 1) // _TAIL) if tokens > 1 else 0.0
        self._seen = min(self._seen + 1, _SEEN)
        self._joined_share += (share - self._joined_share) / (_UNSEEN + self._seen)
        stay = view.stays.active.get(request.id) if view is not None else None
        if stay is not None:
            self.output_errors.add(stay.expected, tokens)
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
        decodes = view.decodes(request.model)
        interval_us, context = 0.0, self.context(len(request.prompt))
        expected = max(1.0, self._predictor.stay(request, context, now_us).expected)
        ends = [max(1, one.decodes) / (expected * max(1, one.tbt_us(context))) for one in decodes]
        if any(ends):
            interval_us = 1 / sum(ends)
        if decision is not None:
            chosen = view.instances.get(decision.decode)
            if refusal.reason == "ttft_slo":
                work_us = sum([share.work_us for share in decision.shares])
                interval_us = max(interval_us, work_us / max(1, len(view.prefills(request.model))))
            elif chosen is not None and not self.told.next_us(request.model, now_us):
                first_us = self._room_us(chosen, decision.prompt_tokens, first_us, now_us)
        wait_us = self.told.tell(request, now_us, first_us, interval_us)
        return msgspec.structs.replace(refusal, retry_after_us=wait_us)

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
    behind = max(0, len(view.stays.active) + 1 - seqs)
    return tbt_us + round(behind * place_us(stay, tbt_us, seqs))


def _over_us(view: InstanceView, context: Tokens, stay: Stay, slo: Slo) -> Micros:
    """By how much one that joins now would miss the tightest goal there, its own included."""
    tbt_us = _joined_us(view, context, stay)
    goals_us = [us for us in (slo.tbt_us, view.strictest_us()) if us is not None]
    return tbt_us - min(goals_us, default=tbt_us)


def refuses_ttft(tuning: Tuning, priority: int) -> bool:
    """Whether a TTFT predicted to be missed refuses a request of this priority."""
    return tuning.mode(priority) != "none"


def refuses_some(tuning: Tuning) -> bool:
    """Whether it refuses a request of any priority."""
    return any(refuses_ttft(tuning, priority) for priority in (-1, 0, 1))


def unwanted(
    request: Request, verdict: Verdict, slo: Slo, tuning: Tuning, view: ClusterView
) -> Refuse | None:
    """What is predicted to miss an objective that refuses."""
    decision, predicted_us = verdict.decision, verdict.decision.predicted_ttft_us
    known = view.instances[decision.prefill].cost.known
    refuses = known and refuses_ttft(tuning, request.priority)
    own_us = request.slo.over(tuning.slo).ttft_us
    # Held to less, it leaves room for others: where nobody is before it, to nobody.
    gives_way = decision.candidates[0].queue_us > 0 or own_us is None or predicted_us > own_us
    if verdict.misses_ttft and refuses and slo.ttft_us is not None and gives_way:
        why = _misses("TTFT", predicted_us, slo.ttft_us)
        wait_us = max(MICROS_PER_SECOND, predicted_us - slo.ttft_us)
        return Refuse(request.id, why, "ttft_slo", wait_us, decision)
    return unwanted_in_decode(request, verdict, slo, tuning, view)


def unwanted_in_decode(
    request: Request, verdict: Verdict, slo: Slo, tuning: Tuning, view: ClusterView
) -> Refuse | None:
    """What is predicted to miss its own TBT objective or to break another's, where that refuses."""
    chosen, own_us = view.instances[verdict.decision.decode], request.slo.over(tuning.slo).tbt_us
    if tuning.mode(request.priority) not in ("early", "predictive") or not chosen.cost.known:
        return None
    gives_way = chosen.decodes > 0 or own_us is None or verdict.tbt_us > own_us
    if slo.tbt_us is not None and verdict.tbt_us > slo.tbt_us and gives_way:
        goal_us, why = slo.tbt_us, _misses("TBT", verdict.tbt_us, slo.tbt_us)
    elif verdict.breaks_us is not None:
        goal_us = verdict.breaks_us
        why = f"predicted TBT of {verdict.tbt_us / 1e3:.10g} ms would break the objective of "
        why += f"{goal_us / 1e3:.10g} ms of a request that decodes on {verdict.decision.decode}"
    else:
        return None
    return Refuse(request.id, why, "tbt_slo", MICROS_PER_SECOND, verdict.decision)


def _misses(what: str, predicted_us: Micros, goal_us: Micros) -> str:
    predicted_ms, goal_ms = predicted_us / 1e3, goal_us / 1e3
    return f"predicted {what} of {predicted_ms:.10g} ms misses the objective of {goal_ms:.10g} ms"


def yields(
    request: Request, verdict: Verdict, slo: Slo, decodes: Sequence[InstanceView], is_late: bool
) -> bool:
    """Whether a waiter whose binding would miss a TBT objective is to wait for room in decode.

    Where nobody else decodes nothing is gained by waiting. An objective that could not be met even
    there is given up, and so is one of its own (not the cluster's) where it `is_late`: past the
    time by which it should have begun. Those of the members never are.
    """
    chosen = verdict.decision.decode
    if not verdict.misses_tbt or not any(v.decodes for v in decodes if v.info.id == chosen):
        return False
    if verdict.breaks_us is not None or slo.tbt_us is None:
        return True
    context = verdict.decision.prompt_tokens
    alone_us = min(view.cost.decode_step_us(1, context) for view in decodes)
    return alone_us <= slo.tbt_us and not (is_late and request.slo.tbt_us is not None)


def too_late(waiter: Waiter, room: WaitingRoom, servers: int, now_us: Micros) -> Refuse:
    """One that waited until its TTFT objective could not be met any more, and for what."""
    waited_us = now_us - waiter.arrived_us
    why = f"a prefill of {waiter.work_us / 1e6:.3g} s"
    if waited_us:
        why += f" after {waited_us / 1e6:.3g} s of waiting"
    why += " misses the TTFT objective"
    reason = "ttft_slo"
    if waiter.request in room.crowded:
        why += ": decode had no room for it within the TBT objectives"
        reason = "tbt_slo"
    return Refuse(waiter.request, why, reason, _backlog_us(room, servers))


def too_many(request: Request, room: WaitingRoom, servers: int) -> Refuse:
    """One more would not fit where requests wait."""
    why = f"{len(room)} requests for model {request.model} wait already"
    return Refuse(request.id, why, "queue_full", _backlog_us(room, servers))


def _backlog_us(room: WaitingRoom, servers: int) -> Micros:
    """How long those who wait will take the prefill instances, at least a second."""
    return max(MICROS_PER_SECOND, room.work_us // max(1, servers))


def fits(tokens: Tokens, *roles: Sequence[InstanceView]) -> bool:
    """Whether some instance of each role, when idle, has KV memory for so much context."""
    return all(any(view.kv_tokens >= tokens for view in views) for views in roles)


def nobody(
    request: Request,
    prefills: Sequence[InstanceView],
    decodes: Sequence[InstanceView],
    now_us: Micros,
) -> Refuse:
    """No pair of instances takes it: not alive, or full, or too small."""
    if not prefills or not decodes:
        role = "decode" if prefills else "prefill"
        return Refuse(request.id, f"no {role} instance for model {request.model} is alive")
    for role, views in (("prefill", prefills), ("decode", decodes)):
        if not fits(len(request.prompt), views):
            why = f"no {role} instance of model {request.model} has KV memory for "
            why += f"{len(request.prompt)} tokens"
            return Refuse(request.id, why, "kv_memory", MICROS_PER_SECOND)
    full = "decode" if any(view.takes_prefill for view in prefills) else "prefill"
    why = f"every {full} instance of model {request.model} is full"
    wait_us = max(MICROS_PER_SECOND, min(view.queue_us(now_us) for view in prefills))
    return Refuse(request.id, why, "instances_full", wait_us)

"""Which requests are refused, on arrival and when their prefill has ended, and the refusal's text.

Only the Conductor calls it. On arrival, functions turn predictions into a Refuse, or None. When a
prefill has ended, DecodeEntry says whether the request may decode: at once, later, elsewhere or
not. A refusal at that time wastes the prefill, but breaks no other request's time between tokens.

Uncertainty counts in favour of serving. An instance whose costs are not measured yet takes as many
prompts as are needed to measure them. It takes more as long as it would be in time if it were as
fast as it may be: several times faster than a laptop, or somewhat faster than its like.

Sources: FAST'25 "Mooncake", Algorithm 1's last lines: TTFT and TBT are compared with their
objectives; arXiv 2407.00079, section 7: early rejection, by the load of decode now or when this
prefill will end.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from moonserve.core.kv.facts import OfBlocks
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Decision, Reason, Refuse
from moonserve.core.schedule.adoption import StepFact
from moonserve.core.schedule.cost import KNOWN_FROM
from moonserve.core.schedule.decide import Verdict
from moonserve.core.schedule.decode_forecast import GROWTH, DecodeForecast
from moonserve.core.schedule.facts import Arrived
from moonserve.core.schedule.forecast import place_us
from moonserve.core.schedule.handoff import Handoff
from moonserve.core.schedule.objectives import Objectives, misses, own_slo
from moonserve.core.schedule.residency import Residency
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView, allowed
from moonserve.core.schedule.waiting import Waiter, WaitingRoom
from moonserve.core.units import MICROS_PER_SECOND, InstanceId, Micros, Tokens, shown_us

_NAMED = 3
"""The most instances that an error names."""
_LEAST = itemgetter(0, 1, 2)


def refuses_ttft(tuning: Tuning, priority: int) -> bool:
    """Whether a TTFT predicted to be missed refuses a request of this priority."""
    return tuning.mode(priority) != "none"


def refuses_some(tuning: Tuning) -> bool:
    """Whether a missed TTFT refuses a request of any priority."""
    return any(refuses_ttft(tuning, priority) for priority in (-1, 0, 1))


def unwanted(
    request: Request, verdict: Verdict, tuning: Tuning, view: ClusterView
) -> Refuse | None:
    """A refusal, if the verdict is predicted to miss an objective that refuses."""
    decision = verdict.decision
    slo = verdict.slo
    if not verdict.misses_ttft or slo.ttft_us is None:
        return unwanted_in_decode(request, verdict, slo, tuning, view)
    chosen = view.instances[decision.prefill]
    predicted_us = decision.predicted_ttft_us
    known = chosen.cost.known
    waited_us = decision.waited_us
    at_best_us = waited_us + (predicted_us - waited_us) / chosen.cost.optimism
    refuses = refuses_ttft(tuning, request.priority) and (
        known or (chosen.prefills >= KNOWN_FROM and at_best_us > slo.ttft_us)
    )
    own_us = own_slo(request, tuning).ttft_us
    # A tightened objective leaves room for other requests; without a queue there are none.
    gives_way = decision.chosen.queue_us > 0 or own_us is None or predicted_us > own_us
    if refuses and gives_way:
        why = misses("TTFT", predicted_us, slo.ttft_us) + _tightened(verdict, slo)
        if own_us is not None and predicted_us > own_us:
            why = misses("TTFT", predicted_us, own_us)
        wait_us = max(MICROS_PER_SECOND, predicted_us - slo.ttft_us)
        if not known:
            why += ": the costs of its instance are not measured yet"
            wait_us = MICROS_PER_SECOND
        return Refuse(request.id, why, "ttft_slo", wait_us, decision, verdict.candidates)
    return unwanted_in_decode(request, verdict, slo, tuning, view)


def unwanted_in_decode(
    request: Request, verdict: Verdict, slo: Slo, tuning: Tuning, view: ClusterView
) -> Refuse | None:
    """A refusal, if it is predicted to miss its TBT objective or to break that of another request.

    A request for a single token is not refused: it takes part in no pass of decode.
    """
    if verdict.breaks_us is None and (slo.tbt_us is None or verdict.tbt_us <= slo.tbt_us):
        return None
    chosen = view.instances[verdict.decision.decode]
    own_us = own_slo(request, tuning).tbt_us
    if tuning.mode(request.priority) not in ("early", "predictive") or not chosen.cost.known:
        return None
    gives_way = chosen.decodes > 0 or own_us is None or verdict.tbt_us > own_us
    if slo.tbt_us is not None and verdict.tbt_us > slo.tbt_us and gives_way:
        why = misses("TBT", verdict.tbt_us, slo.tbt_us) + _tightened(verdict, slo)
        if own_us is not None and verdict.tbt_us > own_us:
            why = misses("TBT", verdict.tbt_us, own_us)
    elif verdict.breaks_us is not None and request.stopping.max_tokens > 1:
        why = f"predicted TBT of {shown_us(verdict.tbt_us)} would break the objective of "
        why += f"{shown_us(verdict.breaks_us)} of a request that decodes on {chosen.info.id}"
    else:
        return None
    decision = verdict.decision
    return Refuse(request.id, why, "tbt_slo", MICROS_PER_SECOND, decision, verdict.candidates)


def _tightened(verdict: Verdict, slo: Slo) -> str:
    """Why the objective is tighter than the request's own, in parentheses; else nothing."""
    why = verdict.decision.tightened
    return f" ({why})" if why and slo is verdict.slo else ""


def yields(
    request: Request, verdict: Verdict, slo: Slo, decodes: Sequence[InstanceView], is_late: bool
) -> bool:
    """Whether a request whose binding would miss a TBT objective should wait for room in decode.

    If no other request decodes there, waiting gains nothing; if the costs there are not known, that
    is not known. An objective that an idle instance would miss too is given up. So is the request's
    own one (not the cluster's) if it `is_late`: past the time by which it should have begun.
    Objectives of the members are never given up.
    """
    if not verdict.misses_tbt:
        return False
    chosen = verdict.decision.decode
    if not any(view.decodes and view.cost.known for view in decodes if view.info.id == chosen):
        return False
    if verdict.breaks_us is not None or slo.tbt_us is None:
        return True
    context = verdict.decision.prompt_tokens
    alone_us = min(view.cost.decode_step_us(1, context) for view in decodes)
    return alone_us <= slo.tbt_us and not (is_late and request.slo.tbt_us is not None)


def too_late(waiter: Waiter, room: WaitingRoom, servers: int, now_us: Micros) -> Refuse:
    """The refusal of a request that waited until its TTFT objective could not be met any more.

    Where it waited for room in decode, the refusal names the TBT objectives: they kept it waiting.
    """
    waited_us = now_us - waiter.arrived_us
    after = f"after {waited_us / 1e6:.3g} s of waiting, " if waited_us else ""
    why = f"{after}a prefill of {waiter.work_us / 1e6:.3g} s misses the TTFT objective"
    reason: Reason = "ttft_slo"
    if room.is_crowded(waiter.request):
        why = f"{after}decode had no room for it within the TBT objectives"
        reason = "tbt_slo"
    return Refuse(waiter.request, why, reason, _backlog_us(room, servers))


def too_many(request: Request, room: WaitingRoom, servers: int) -> Refuse:
    """The refusal of a request for which the waiting room has no place."""
    why = f"{len(room)} requests for model {request.model} wait already"
    return Refuse(request.id, why, "queue_full", _backlog_us(room, servers))


def _backlog_us(room: WaitingRoom, servers: int) -> Micros:
    """How long the prefill instances need for all waiting requests, at least a second."""
    return max(MICROS_PER_SECOND, room.work_us // max(1, servers))


def fits(tokens: Tokens, *roles: Sequence[InstanceView]) -> bool:
    """Whether an instance of each role, when idle, has KV memory for this context."""
    return all(any(view.kv_tokens >= tokens for view in views) for views in roles)


def nobody(request: Request, length: Tokens, view: ClusterView, now_us: Micros) -> Refuse:
    """The refusal if no pair of instances takes it: not alive, full, or too small.

    length: of its prompt and the tokens generated so far.
    """
    prefills = allowed(view.prefills(request.model), request.among)
    decodes = allowed(view.decodes(request.model), request.among)
    if not prefills or not decodes:
        where = "of those that the request may use, " if request.among else ""
        return Refuse(request.id, where + _lacking(request.model, view, request.among))
    for role, views in (("prefill", prefills), ("decode", decodes)):
        if not fits(length, views):
            why = f"no {role} instance of model {request.model} has KV memory for "
            why += f"{length} tokens"
            return Refuse(request.id, why, "kv_memory", MICROS_PER_SECOND)
    full = "decode" if any(view.takes_prefill for view in prefills) else "prefill"
    why = f"every {full} instance of model {request.model} is full"
    wait_us = max(MICROS_PER_SECOND, min(view.queue_us(now_us) for view in prefills))
    return Refuse(request.id, why, "instances_full", wait_us)


def _lacking(model: str, view: ClusterView, among: Sequence[InstanceId]) -> str:
    """Which role of a pair is missing, in words."""
    views = allowed(list(view.instances.values()), among)
    roles = [it.info.role for it in views if it.info.model == model and not it.drained]
    if "prefill" in roles and "decode" in roles:
        return f"no prefill and decode instance for model {model} have a connector in common"
    role = "decode " if "prefill" in roles else "prefill " if "decode" in roles else ""
    able = (role.strip(), "both") if role else ("prefill", "decode", "both")
    drained = sorted(
        it.info.id for it in views if it.info.model == model and it.drained and it.info.role in able
    )
    if drained:
        return all_drained(model, drained, role)
    return f"no {role}instance for model {model} is alive"


def all_drained(model: str, names: Sequence[InstanceId], role: str = "") -> str:
    """Why no request of this model is served; names: of the drained instances; role: ends with a
    space, empty: all roles."""
    remedy = resume_command(names, "one of them" if role else "each")
    drained = f"drained: {first_names(names)}"
    return f"no {role}instance for model {model} gets new work; {drained}; {remedy}"


def first_names(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are: an error stays readable."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def resume_command(names: Sequence[str], which: str) -> str:
    """What gives drained instances work again; which: of several, those that it takes."""
    if len(names) == 1:
        return f"`moonserve drain {names[0]} --resume`"
    return f"`moonserve drain NAME --resume` for {which}"


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
            rows = [(_over_us(it, context, residency, slo), it) for it in others]
            room = [(us, it.decodes, it.used, it) for us, it in rows if us <= 0]
            if room:
                least = min(room, key=_LEAST)[-1]
                if least.has_slot(context):
                    return least, None
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

    def is_stirred(
        self, facts: Sequence[StepFact], held: Sequence[Handoff], now_us: Micros
    ) -> bool:
        """Whether requests that wait for room may begin by these facts, or have waited enough.

        Arrivals alone make no room.
        """
        if not facts or not all(isinstance(fact, Arrived | OfBlocks) for fact in facts):
            return True
        return any(now_us >= self.patient_us(life) for life in held)


def _joined_us(view: InstanceView, context: Tokens, residency: Residency) -> Micros:
    """The time between tokens of one that joins now; with all places taken, until one is free.

    A request that waits asks for each instance in each step: so what InstanceView.tbt_now_us and
    grown_us compute is written out.
    """
    load = view.residencies
    external = load.external
    base, per_seq, per_context = view.cost.step_us
    there = len(load.active) + external.running + 1
    held = load.context + external.context + context
    tbt_us = round(GROWTH * round(max(1.0, base + per_seq * there + per_context * held)))
    seqs = view.info.max_seqs
    if there > seqs:
        tbt_us += round((there - seqs) * place_us(residency, tbt_us, seqs))
    return tbt_us


def _over_us(view: InstanceView, context: Tokens, residency: Residency, slo: Slo) -> Micros:
    """By how much one that joins now would miss the tightest goal there, its own included."""
    own_us = slo.tbt_us
    goal_us = view.strictest_us()
    if own_us is not None and (goal_us is None or own_us < goal_us):
        goal_us = own_us
    return 0 if goal_us is None else _joined_us(view, context, residency) - goal_us

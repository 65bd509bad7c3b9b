"""Who is refused, and with which words: before any work is spent on it.

Functions from what is predicted to a Refuse, or to None. Called by the Conductor only. Source:
FAST'25 "Mooncake", Algorithm 1's last lines: TTFT and TBT are held against their objectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.actions import Refuse
from moonserve.core.policies import Tuning, Verdict
from moonserve.core.request import Request, Slo
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens
from moonserve.core.view import InstanceView
from moonserve.core.waiting import Waiter


def refuses_ttft(tuning: Tuning) -> bool:
    """Whether a TTFT predicted to be missed refuses a request."""
    return tuning.refuse in ("ttft", "both")


def unwanted(request: Request, verdict: Verdict, slo: Slo, tuning: Tuning) -> Refuse | None:
    """What is predicted to miss an objective that refuses."""
    decision = verdict.decision
    if verdict.misses_ttft and refuses_ttft(tuning) and slo.ttft_us is not None:
        what, predicted_us, goal_us = "TTFT", decision.predicted_ttft_us, slo.ttft_us
    elif verdict.misses_tbt and tuning.refuse == "both" and slo.tbt_us is not None:
        what, predicted_us, goal_us = "TBT", decision.predicted_tbt_us, slo.tbt_us
    else:
        return None
    why = f"predicted {what} of {predicted_us / 1e3:.10g} ms misses the objective of "
    why += f"{goal_us / 1e3:.10g} ms"
    wait_us = max(MICROS_PER_SECOND, predicted_us - goal_us)
    return Refuse(request.id, why, f"{what.lower()}_slo", wait_us, decision)


def too_late(waiter: Waiter, backlog_us: Micros, now_us: Micros) -> Refuse:
    """One that waited until its objective could not be met any more."""
    waited_us = now_us - waiter.arrived_us
    why = f"a prefill of {waiter.work_us / 1e6:.3g} s"
    if waited_us:
        why += f" after {waited_us / 1e6:.3g} s of waiting"
    why += " misses the TTFT objective"
    return Refuse(waiter.request, why, "ttft_slo", max(MICROS_PER_SECOND, backlog_us))


def too_many(request: Request, waiting: int, backlog_us: Micros) -> Refuse:
    """One more would not fit where requests wait."""
    why = f"{waiting} requests for model {request.model} wait already"
    return Refuse(request.id, why, "queue_full", max(MICROS_PER_SECOND, backlog_us))


def fits(views: Sequence[InstanceView], tokens: Tokens) -> bool:
    """Whether some instance, when idle, has KV memory for so much context."""
    return any(view.kv_tokens >= tokens for view in views)


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
        if not fits(views, len(request.prompt)):
            why = f"no {role} instance of model {request.model} has KV memory for "
            why += f"{len(request.prompt)} tokens"
            return Refuse(request.id, why, "kv_memory", MICROS_PER_SECOND)
    full = "decode" if any(view.takes_prefill for view in prefills) else "prefill"
    why = f"every {full} instance of model {request.model} is full"
    wait_us = max(MICROS_PER_SECOND, min(view.queue_us(now_us) for view in prefills))
    return Refuse(request.id, why, "instances_full", wait_us)

"""One sentence on how the cluster does: what became of the last minute's requests, and why.

The page and the terminal show it. It reads sums of core.schedule.history, and decides nothing.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.history import MINUTE, Pools, Tally

Binding: TypeAlias = Literal["prefill", "decode", "none"]
Level: TypeAlias = Literal["good", "late", "bad", "idle"]
_FULL = 0.75
"""A pool that is at least this full may be what others wait for."""
_GOOD = 0.99
_POOR = 0.9
_WHY = {
    "nobody_alive": "no instance was there for them",
    "instances_full": "every instance was full",
    "queue_full": "too many requests waited already",
    "kv_memory": "no instance has the KV memory for them",
    "ttft_slo": "they would have missed their TTFT objective",
    "tbt_slo": "decode had no room within the TBT objectives",
    "tbt_slo_late": "decode had no room when their prefill had ended",
    "duplicate_request_id": "another request had their id",
}
_OF_PREFILL = ("ttft_slo",)
_OF_DECODE = ("tbt_slo", "tbt_slo_late", "kv_memory")


class ClusterVerdict(msgspec.Struct, frozen=True):
    """How the cluster does."""

    level: Level
    text: str
    binding: Binding
    """The pool that limits the cluster now."""


def pressures(pools: Pools, slo: Slo) -> tuple[float, float]:
    """How near prefill and decode are to what they can do; 1: they can do no more.

    pools: means over the last minute, or the levels of one moment.
    """
    prefill = pools.prefill_busy
    if slo.ttft_us is not None:
        prefill = max(prefill, pools.queue_ms * 1_000 / max(1, slo.ttft_us))
    decode = max(pools.decode_slots, pools.decode_kv)
    if slo.tbt_us is not None:
        decode = max(decode, pools.step_ms * 1_000 / max(1, slo.tbt_us))
    return prefill, decode


def binding(tally: Tally, pools: Pools, slo: Slo) -> Binding:
    """Which pool limits the cluster: by what was refused, else by how full they are."""
    by_prefill = sum(tally.refused.get(reason, 0) for reason in _OF_PREFILL)
    by_decode = sum(tally.refused.get(reason, 0) for reason in _OF_DECODE)
    if by_prefill != by_decode:
        return "prefill" if by_prefill > by_decode else "decode"
    prefill, decode = pressures(pools, slo)
    if max(prefill, decode) < _FULL:
        return "none"
    return "prefill" if prefill >= decode else "decode"


def verdict(tally: Tally, seconds: int, pools: Pools, slo: Slo, alarms: int) -> ClusterVerdict:
    """The sentence. tally: of the last `seconds` seconds; pools: means over them; alarms: how many
    are open."""
    span = "the last minute" if seconds >= MINUTE else f"the last {max(1, seconds)} s"
    refused = sum(tally.refused.values())
    judged = tally.in_time + tally.late + tally.failed + refused
    missing = [
        role
        for role, number in (("prefill", pools.prefills), ("decode", pools.decodes))
        if not number
    ]
    if missing:
        text = f"No {' and no '.join(missing)} instance is there, so nothing can be served"
        text += f"; {refused:,} requests were refused in {span}." if refused else "."
        return ClusterVerdict("bad", text, "none")
    if not judged:
        instances = f"{pools.prefills} prefill and {pools.decodes} decode"
        now = f"{pools.under_way:,} are under way" if pools.under_way else "none is under way"
        return ClusterVerdict(
            "late" if alarms else "idle",
            f"No request ended in {span}; {now}. Instances: {instances}.",
            "none",
        )
    binds = binding(tally, pools, slo)
    share = tally.in_time / judged
    goal = "served" if slo == Slo() else "in time"
    said = f"All {judged:,}" if tally.in_time == judged else f"{percent(share)} of {judged:,}"
    text = f"{said} requests of {span} were {goal}{_binding(binds, pools, slo)}"
    if losses := _losses(tally, judged):
        text += f": {losses}"
    level: Level = "good" if share >= _GOOD else "late" if share >= _POOR else "bad"
    return ClusterVerdict("late" if alarms and level == "good" else level, text + ".", binds)


def _binding(binds: Binding, pools: Pools, slo: Slo) -> str:
    """Which pool binds, and how full it is."""
    if binds == "none":
        return ""
    pressure = pressures(pools, slo)[0 if binds == "prefill" else 1]
    full = f" ({percent(min(1.0, pressure))} full)" if pressure >= _FULL else ""
    return f"; {binds} binds{full}"


def _losses(tally: Tally, judged: int) -> str:
    """What became of the others, the largest part first."""
    refused = sum(tally.refused.values())
    why = ""
    if refused:
        reason, most = max(tally.refused.items(), key=itemgetter(1))
        mostly = "" if most == refused else "mostly "
        why = f", {mostly}because {_WHY.get(reason, f'of {reason}')}"
    parts = [
        (tally.late, "came late"),
        (tally.failed, "failed"),
        (refused, f"were refused{why}"),
    ]
    parts = sorted((part for part in parts if part[0]), key=itemgetter(0), reverse=True)
    return ", ".join(f"{percent(number / judged)} {what}" for number, what in parts)


def percent(share: float) -> str:
    """Rounded down, so that only all is 100%, and at least 1 if there is any."""
    return f"{max(1, int(100 * share + 1e-9))}%" if share > 0 else "0%"

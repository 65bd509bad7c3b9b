"""Placement policies by name: which prefill instance, and how its terms are weighed.

Each is a short function from Options to one score per instance, the lowest wins, the first of
equals; its source stands in its docstring. The peers' published rules are in
core.schedule.peer_policies. Used by the Conductor, live and in simulation alike; a policy never
changes a view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.request import Held, Slo
from moonserve.core.schedule import connectors
from moonserve.core.schedule.facts import Connector
from moonserve.core.schedule.groups import groups, split
from moonserve.core.schedule.peer_policies import (
    PREBLE_WINDOW_US,
    dynamo_overlap,
    llmd_scorers,
    preble_e2,
    sglang_cache_aware,
)
from moonserve.core.schedule.pipeline import Group, Work
from moonserve.core.schedule.placement import (
    Ask,
    Candidates,
    Decision,
    Estimate,
    Fetch,
    Look,
    Options,
    choose_decode,
    preferred,
    roomy_decode,
)
from moonserve.core.schedule.tuning import Admission as Admission
from moonserve.core.schedule.tuning import Tuning as Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.schedule.waiting import PATIENCE_US
from moonserve.core.units import InstanceId, Micros, Tokens

if TYPE_CHECKING:
    from random import Random  # noqa: TID251 - for its type only

KEPT = 16
"""Candidates that a decision keeps."""

PRESSED, PRESSED_SHARE = 0.25, 0.9
"""late_binding: who has waited this share of its TTFT objective may fill decode up to that."""

OVERLOADED = 0.9
"""alpha_beta: an instance this loaded takes nothing while another is less so."""
ALPHA, BETA = 0.7, 0.3


class Memory:
    """What rules with a state remember from decision to decision; one per Conductor."""

    def __init__(self, rng: Random | None = None) -> None:
        self.rng = rng
        self.turn = 0
        self.history: dict[InstanceId, deque[tuple[Micros, Micros]]] = {}
        """Recent (time, work) of each instance's assignments, for rules that look back."""

    def assigned(self, instance: InstanceId, now_us: Micros, work_us: Micros) -> None:
        """Note an assignment; those older than the window are forgotten."""
        past = self.history.setdefault(instance, deque())
        past.append((now_us, work_us))
        while past[0][0] < now_us - PREBLE_WINDOW_US:
            past.popleft()


Score: TypeAlias = Callable[[Options, Memory], Sequence[float]]


class Policy(msgspec.Struct, frozen=True):
    """A rule, and what it may do."""

    score: Score
    fetch: Fetch
    copies: bool = False
    """Whether what is fetched is kept where it was fetched to."""
    late: bool = False
    """Requests wait at the Conductor until an instance is about to be free."""
    looks_back: bool = False
    """It reads Memory.history."""


def random(made: Options, memory: Memory) -> Sequence[float]:
    """Any instance, by a seeded draw (the papers' first baseline); from its own cache only."""
    assert memory.rng is not None, "the random policy needs a seeded generator"
    return [memory.rng.random() for _ in made.views]


def round_robin(made: Options, memory: Memory) -> Sequence[float]:
    """One after the other, in order of ids."""
    memory.turn += 1
    count = len(made.views)
    return [(row - memory.turn) % count for row in range(count)]


def least_loaded(made: Options, memory: Memory) -> Sequence[float]:
    """The shortest queue in predicted seconds (the papers' load balancing)."""
    return made.queue_us


def cache_aware(made: Options, memory: Memory) -> Sequence[float]:
    """Lowest T_queue + T_prefill from the instance's own prefix: FAST'25 section 6.1, local part.

    Algorithm 1 without its transfer branch.
    """
    return [q + c for q, c in zip(made.queue_us, made.compute_us, strict=True)]


def alpha_beta(made: Options, memory: Memory) -> Sequence[float]:
    """alpha * cached/total + beta * (1 - load), overloaded instances only where all are.

    The simple score of early Mooncake write-ups; it is in neither paper. Load is the predicted
    queue against the longest one here, or against ten seconds where all are shorter.
    """
    full = max(10_000_000, *made.queue_us)
    scores = []
    for local, queue_us in zip(made.local, made.queue_us, strict=True):
        load = queue_us / full
        good = ALPHA * local / made.prompt_blocks + BETA * (1 - load)
        scores.append(-good if load < OVERLOADED else 1.0 + load)
    return scores


def kvcache_centric(made: Options, memory: Memory) -> Sequence[float]:
    """Algorithm 1, FAST'25 page 8: the lowest T_transfer + T_queue + T_prefill."""
    return made.ttft_us()


POLICIES: Mapping[str, Policy] = {
    "random": Policy(random, "never"),
    "round_robin": Policy(round_robin, "never"),
    "least_loaded": Policy(least_loaded, "never"),
    "cache_aware": Policy(cache_aware, "never"),
    "alpha_beta": Policy(alpha_beta, "never"),
    "kvcache_centric": Policy(kvcache_centric, "threshold", copies=True),
    "late_binding": Policy(kvcache_centric, "cheaper", late=True),
    "sglang_cache_aware": Policy(sglang_cache_aware, "never"),
    "dynamo_overlap": Policy(dynamo_overlap, "never"),
    "llmd_scorers": Policy(llmd_scorers, "never"),
    "preble_e2": Policy(preble_e2, "never", looks_back=True),
}
"""late_binding is Algorithm 1's estimate among the instances about to be free, for the request that
core.schedule.waiting picks; what is fetched is not kept twice."""


def policy_of(name: str) -> Policy:
    """A policy by its name. Raises ConfigError."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"{name} is none of {', '.join(POLICIES)}", "policy") from None


class Verdict(msgspec.Struct, frozen=True):
    """A decision, and which objectives it is predicted to miss."""

    decision: Decision
    slo: Slo
    """What it was held to."""
    misses_ttft: bool
    misses_tbt: bool
    """Its own, or that of one that decodes there."""
    tbt_us: Micros
    """Predicted once it has joined, with the output to be expected; the most, where forecast."""
    breaks_us: Micros | None
    """The tightest TBT objective that this breaks for one that decodes there."""


def decide(
    ask: Ask,
    prefills: list[InstanceView],
    decodes: list[InstanceView],
    held: Held,
    tuning: Tuning,
    memory: Memory,
    now_us: Micros,
    avoid: Collection[InstanceId] = (),
    look: Look | None = None,
    others: list[InstanceView] | None = None,
) -> Verdict | None:
    """Choose both instances; None when no instance of a role takes one more such request.

    `avoid` names instances that just failed this request: taken only when nobody else is left.
    `look` says how full decode will be, where those promised there do not say it well. `others` may
    be stages of a group beside the prefill instance chosen; else `prefills` may.
    Hard constraints come before any score: a free place in the queue, KV memory for the prompt.
    """
    policy, slo, need = POLICIES[tuning.policy], held.slo, ask.length
    prefills = [v for v in prefills if v.takes_prefill and v.kv_tokens >= need]
    decodes = [v for v in decodes if v.takes_decode and v.kv_tokens >= need]
    if not prefills or not decodes:
        return None
    size, threshold = prefills[0].info.namespace.block_size, tuning.kvcache_balancing_threshold
    estimate = Estimate(ask, size, policy.fetch, threshold, tuning.cross_rack)
    foreign, alone = connectors.is_foreign(decodes[0]), False
    if foreign:
        lone = connectors.alone(ask, estimate, preferred(decodes, avoid), tuning.alone_tokens)
        prefills, alone = lone or connectors.able(ask, prefills, decodes), bool(lone)
        if not prefills:
            return None
    prefills = preferred(prefills, avoid)
    likely = _likely(estimate, prefills, now_us) if policy.score is kvcache_centric else prefills
    made = estimate.options(likely, now_us)
    made.scores = policy.score(made, memory)
    row = _best(made)
    group, why_none = _group(made, row, preferred(others or prefills, avoid), slo, tuning)
    near = likely[row]
    ttft_us = made.transfer_us[row] + made.queue_us[row] + made.compute_us[row]
    if group is not None:
        last, ttft_us = group.stages[-1].instance, group.ttft_us
        near = next(v for v in others or prefills if v.info.id == last)
    if foreign:
        decodes = [near] if alone else connectors.mates(near, decodes)
    decodes = preferred(decodes, avoid)
    context = ask.length + ask.expected_tokens
    share = _tbt_share(ask.waited_us, slo, tuning) if policy.late else 1.0
    goal_us = None if slo.tbt_us is None else round(slo.tbt_us * share)
    decode, meets = choose_decode(context, decodes, goal_us, near, leaves=policy.late)
    late = slo.ttft_us is not None and ask.waited_us + ttft_us > slo.ttft_us
    refused = late and near.cost.known and made.queue_us[row] > 0
    if look is None or refused:
        likely_us, tbt_us = decode.tbt_us(ask.length), decode.tbt_us(context)
    else:
        decode, likely_us, tbt_us = roomy_decode(
            decode, decodes, context, goal_us, look, now_us + ttft_us
        )
    joint = foreign and decode is near
    way = near.info.connector if foreign else "embedded"
    decision = _decision(made, row, len(prefills), decode, likely_us, tuning, held, way, joint)
    if group is not None:
        decision = decision.shared(group)
    elif not alone and foreign and near.info.role == "decode":
        decision = msgspec.structs.replace(decision, alone=connectors.NOBODY_GIVES)
    elif why_none:
        decision = msgspec.structs.replace(decision, alone=why_none)
    strictest_us = decode.strictest_us()
    breaks_us = strictest_us if strictest_us is not None and tbt_us > strictest_us else None
    return Verdict(decision, slo, late, not meets, tbt_us, breaks_us)


def _group(
    made: Options, row: int, others: list[InstanceView], slo: Slo, tuning: Tuning
) -> tuple[Group | None, str]:
    """Who prefills it beside the chosen one, or why nobody does; see core.groups."""
    if tuning.cpp < 2:
        return None, ""
    ask, load_us, compute_us = made.ask, made.transfer_us[row], made.compute_us[row]
    start, size = made.reused[row] * made.block_size, made.block_size
    most, form, cross_rack = tuning.cpp, tuning.cpp_form, tuning.cross_rack
    work = Work(start, ask.length, size, load_us, most, form, cross_rack)
    alone_us = (load_us + made.queue_us[row] + compute_us, load_us + compute_us)
    within_us = None if slo.ttft_us is None else slo.ttft_us - ask.waited_us
    return split(made.views[row], others, work, alone_us, within_us, made.now_us)


def work_us(
    prefills: Sequence[InstanceView], length: Tokens, pool: int, slo: Slo, tuning: Tuning
) -> Micros:
    """What a prefill takes with nobody before it: one instance, or a group where one is too slow.

    pool: leading blocks of the prompt that somebody holds.
    """
    first, size = prefills[0], prefills[0].info.namespace.block_size
    start = min(pool, (length - 1) // size) * size
    alone_us = first.cost.prefill_us(length, start, first.info.chunk_tokens)
    if tuning.cpp < 2 or slo.ttft_us is None or alone_us <= slo.ttft_us:
        return alone_us
    work = Work(start, length, size, 0, tuning.cpp, tuning.cpp_form, tuning.cross_rack)
    found = groups(first, prefills, work, None, slo.ttft_us)
    return min([group.ttft_us for group in found], default=alone_us)


def _tbt_share(waited_us: Micros, slo: Slo, tuning: Tuning) -> float:
    """The share of its TBT objective that a request may take up, the more once it has waited."""
    pressed = waited_us > PRESSED * (PATIENCE_US if slo.ttft_us is None else slo.ttft_us)
    return max(tuning.tbt_share, PRESSED_SHARE) if pressed else tuning.tbt_share


def _likely(
    estimate: Estimate, views: list[InstanceView], now_us: Micros
) -> Sequence[InstanceView]:
    """Those that may be among the KEPT with the lowest TTFT; of the others, none is, for certain.

    An instance's TTFT is at least what is left of its queue and the least of transfer and compute:
    who exceeds with these what KEPT others need is out.
    """
    if len(views) <= 2 * KEPT:
        return views
    last_us = sorted([view.idle_us for view in views])[KEPT - 1]
    soonest = estimate.options([view for view in views if view.idle_us <= last_us][:KEPT], now_us)
    least_us = estimate.least_us(dict.fromkeys([view.kind for view in views]))
    limit_us = now_us + sorted(soonest.ttft_us())[KEPT - 1] - least_us
    return [view for view in views if view.idle_us <= limit_us]


def _best(made: Options) -> int:
    """The lowest score; of equals, who decodes for fewest (where that is its task too), the first.

    Queues of prefill say nothing of decode: without it a coupled cluster's first instances get all.
    """
    best = min(made.scores)
    rows = [row for row, score in enumerate(made.scores) if score == best]
    return min(rows, key=made.decodes.__getitem__)


def _decision(
    made: Options,
    row: int,
    considered: int,
    decode: InstanceView,
    tbt_us: Micros,
    tuning: Tuning,
    held: Held,
    connector: Connector,
    joint: bool,
) -> Decision:
    candidates = Candidates(made, row, KEPT)
    chosen = candidates[0]
    return Decision(
        policy=tuning.policy,
        prefill=chosen.instance,
        decode=decode.info.id,
        prompt_tokens=made.ask.length,
        reused_tokens=chosen.reused_tokens,
        holder=chosen.holder,
        copies=POLICIES[tuning.policy].copies,
        waited_us=made.ask.waited_us,
        predicted_ttft_us=made.ask.waited_us + chosen.ttft_us,
        predicted_tbt_us=tbt_us,
        pool_tokens=made.ask.match.pool * made.block_size,
        candidates=candidates if len(made.views) <= 2 * KEPT else tuple(candidates),
        considered=considered,
        held=held.why,
        connector=connector,
        joint=joint,
    )

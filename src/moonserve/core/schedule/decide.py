"""One placement decision: candidates, then a prefill instance, then a decode instance.

`decide` is a function: the same request, instances, state, settings and time give the same answer,
and nothing is changed. The new state of the policy is part of the answer. The Conductor calls it;
reserving what was decided is the Conductor's task, so that a decision without that is a dry run.

    candidates   hard constraints: a free place, KV memory, a connector in common
    prefill      every candidate's terms (core.schedule.estimate), weighed by the policy
    group        instances that share a prompt too long for one (core.schedule.groups)
    decode       the lowest time between tokens that breaks no objective
    verdict      the decision in plain data, and which objectives it is predicted to miss
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule import connectors
from moonserve.core.schedule.actions import Candidate, Decision
from moonserve.core.schedule.estimate import (
    Ask,
    Candidates,
    Estimate,
    Held,
    Options,
    Roles,
    choose_decode,
    evicted,
    roomy_decode,
)
from moonserve.core.schedule.groups import split
from moonserve.core.schedule.pipeline import Group, Work
from moonserve.core.schedule.policies import Policy, policy_of
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView, preferred
from moonserve.core.schedule.waiting import PATIENCE_US
from moonserve.core.units import Micros

KEPT = 16
"""Candidates that a decision can show."""

SPARED = 0.5
"""The share of evicted blocks that later requests are taken to ask for."""
PRESSED = 0.25
"""Late binding: a request is pressed once it has waited this share of its TTFT objective."""
PRESSED_SHARE = 0.9
"""Late binding: a pressed request may fill decode up to this share of the TBT objective."""


class Verdict(msgspec.Struct, frozen=True):
    """A decision, and which objectives it is predicted to miss."""

    decision: Decision
    candidates: Sequence[Candidate]
    """The chosen one, then the best of those it won against, KEPT in all."""
    slo: Slo
    """The objectives that the request was held to."""
    misses_ttft: bool
    misses_tbt: bool
    """Its own, or that of a request that decodes there."""
    tbt_us: Micros
    """Predicted TBT after it has joined, at its expected final length. With a forecast: the highest
    value."""
    breaks_us: Micros | None
    """The tightest TBT objective that this breaks for a request that decodes there."""
    state: PolicyState
    """What the policy remembers from now on."""


class _Field(msgspec.Struct):
    """The candidates of both roles."""

    prefills: Sequence[InstanceView]
    decodes: Sequence[InstanceView]
    estimate: Estimate
    held: Held
    """How full their stores are."""
    external: bool
    """Whether they are external engines; all instances of a model are, or none is."""
    alone: bool = False
    """Whether a decode instance is to do all of it by itself."""


class _Prefill(msgspec.Struct):
    """The prefill instance, or the group, that was chosen."""

    options: Options
    scores: Sequence[float]
    row: int
    """Of the chosen instance; of a group, the first stage."""
    last: InstanceView
    """Where all KV is when the prefill has ended."""
    ttft_us: Micros
    group: Group | None = None
    why_alone: str | None = None


class _Decode(msgspec.Struct):
    """The decode instance that was chosen."""

    view: InstanceView
    meets: bool
    """Whether every objective is met there by what is promised now."""
    likely_us: Micros
    """Predicted TBT: the mean."""
    most_us: Micros
    """Predicted TBT after it has joined, at its expected final length. With a forecast: the highest
    value."""


def decide(
    ask: Ask, roles: Roles, state: PolicyState, tuning: Tuning, now_us: Micros
) -> Verdict | None:
    """Choose both instances; None when no instance of a role takes one more such request."""
    policy = policy_of(tuning.policy)
    field = _candidates(ask, roles, policy, tuning)
    if field is None:
        return None
    if policy.draws:
        state = state.redrawable()
    prefill = _choose_prefill(field, policy, state, now_us)
    if tuning.cpp > 1:
        partners = roles.partners or field.prefills
        _share(prefill, ask, preferred(partners, ask.avoid), partners, tuning)
    decode = _choose_decode(ask, field, prefill, policy, tuning, now_us)
    return _verdict(ask, field, prefill, decode, policy, state.advanced(), tuning)


def _candidates(ask: Ask, roles: Roles, policy: Policy, tuning: Tuning) -> _Field | None:
    """The instances that can take the request. Those that failed this request: only if no other is
    left."""
    need = ask.length
    prefills = [v for v in roles.prefills if v.takes_prefill and v.kv_tokens >= need]
    decodes = [v for v in roles.decodes if v.takes_decode and v.kv_tokens >= need]
    if ask.rank and not prefills:
        prefills = [v for v in roles.prefills if v.spares_prefill(ask.rank, need)]
    if ask.rank and not decodes:
        decodes = [v for v in roles.decodes if v.spares_decode(ask.rank, need)]
    if not prefills or not decodes:
        return None
    block_size = prefills[0].info.namespace.block_size
    estimate = Estimate(ask, roles, block_size, policy.fetch, tuning)
    if not connectors.is_external(decodes[0]):
        able = preferred(prefills, ask.avoid)
        return _Field(able, decodes, estimate, roles.held, external=False)
    lone = connectors.alone(ask, estimate, preferred(decodes, ask.avoid), tuning.alone_tokens)
    prefills = lone or connectors.able(ask, prefills, decodes)
    if not prefills:
        return None
    able = preferred(prefills, ask.avoid)
    return _Field(able, decodes, estimate, roles.held, external=True, alone=bool(lone))


def _choose_prefill(field: _Field, policy: Policy, state: PolicyState, now_us: Micros) -> _Prefill:
    """The candidate with the lowest score; see `_best` for ties."""
    views = field.prefills
    if policy.prunes:
        views = _likely(field.estimate, views, now_us)
    options = field.estimate.options(views, now_us)
    scores = policy.score(options, state)
    row = _best(options, scores, policy, field.held)
    ttft_us = options.transfer_us[row] + options.queue_us[row] + options.compute_us[row]
    return _Prefill(options, scores, row, views[row], ttft_us)


def _likely(
    estimate: Estimate, views: Sequence[InstanceView], now_us: Micros
) -> Sequence[InstanceView]:
    """The instances that may be among the KEPT with the lowest TTFT; no other can be.

    An instance's TTFT is at least (the rest of its queue) + (the smallest transfer + compute of any
    kind). An instance for which this exceeds the TTFT of KEPT others is left out.
    """
    if len(views) <= 2 * KEPT:
        return views
    last_us = sorted([view.idle_us for view in views])[KEPT - 1]
    soonest = estimate.options([view for view in views if view.idle_us <= last_us][:KEPT], now_us)
    least_us = estimate.least_us(dict.fromkeys([view.kind for view in views]))
    limit_us = now_us + sorted(soonest.ttft_us())[KEPT - 1] - least_us
    return [view for view in views if view.idle_us <= limit_us]


def _best(options: Options, scores: Sequence[float], policy: Policy, held: Held) -> int:
    """The row with the lowest score. Ties go to what costs later requests least.

    Predicted times tie if they differ by no more than the prediction of this prefill may err, so
    that an instance whose fit is a little lower does not draw all requests. If the best must evict,
    an instance whose store has room ties too, if it is later by no more than SPARED of the time in
    which the evicted blocks would be computed again. Of equal rows:

    1. The fewest decodes: queues of prefill say nothing of decode, and of instances that do both
       the first would get all requests.
    2. The fewest blocks that the store must evict: else one store fills while others are empty.
    3. The longest prefix of its own: the fewest blocks are stored a second time.
    4. The instance that was not used for the longest time, then the first id.
    """
    best = limit = min(scores)
    first = scores.index(best)
    view = options.views[first]
    if policy.times and view.cost.error:
        limit += view.cost.error * (options.transfer_us[first] + options.compute_us[first])
    rows = [row for row, score in enumerate(scores) if score <= limit]
    if len(rows) == 1 and not view.store_blocks:
        return first
    views = options.views
    blocks = options.ask.length // options.block_size
    there = options.local if policy.copies else options.reused

    def needs(row: int) -> int:
        return evicted(views[row], blocks - there[row], held)

    if policy.times and (count := needs(first)):
        again_us = count * options.compute_us[first] / max(1, blocks - options.reused[first])
        spared = best + SPARED * again_us
        rows += [
            row
            for row, score in enumerate(scores)
            if limit < score <= spared and there[row] <= there[first] and not needs(row)
        ]
    if len(rows) == 1:
        return first
    local = options.local
    if view.store_blocks or any(local[row] for row in rows):
        decodes = options.decodes
        return min(
            rows,
            key=lambda row: (decodes[row], needs(row), -local[row], views[row].used, row),
        )
    orders = [views[row].order for row in rows]
    return rows[orders.index(min(orders))]


def _share(
    prefill: _Prefill,
    ask: Ask,
    members: Sequence[InstanceView],
    partners: Sequence[InstanceView],
    tuning: Tuning,
) -> None:
    """Let a group prefill the prompt where one instance alone is too slow for its objective."""
    options = prefill.options
    row = prefill.row
    load_us = options.transfer_us[row]
    spent_us = load_us + options.compute_us[row]
    work = Work(
        start=options.reused[row] * options.block_size,
        length=ask.length,
        block_size=options.block_size,
        load_us=load_us,
        most=tuning.cpp,
        form=tuning.cpp_form,
        cross_rack=tuning.cross_rack,
    )
    slo = ask.slo.slo
    within_us = None
    if slo.ttft_us is not None:  # while costs are not known, no group is formed by a guess
        within_us = round(prefill.last.cost.optimism * (slo.ttft_us - ask.waited_us))
    alone_us = (prefill.ttft_us, spent_us)
    group, why = split(options.views[row], members, work, alone_us, within_us, options.now_us)
    prefill.group = group
    prefill.why_alone = why
    if group is not None:
        prefill.ttft_us = group.ttft_us
        last = group.stages[-1].instance
        prefill.last = next(view for view in partners if view.info.id == last)


def _choose_decode(
    ask: Ask,
    field: _Field,
    prefill: _Prefill,
    policy: Policy,
    tuning: Tuning,
    now_us: Micros,
) -> _Decode:
    """The instance that goes on from the KV of the prefill."""
    near = prefill.last
    decodes = field.decodes
    if field.external:
        decodes = [near] if field.alone else connectors.mates(near, decodes)
    decodes = preferred(decodes, ask.avoid)
    slo = ask.slo.slo
    context = ask.length + ask.expected_tokens
    goal_us = slo.tbt_us
    if policy.late and goal_us is not None:
        goal_us = round(goal_us * _tbt_share(ask.waited_us, slo, tuning))
    view, meets = choose_decode(context, decodes, goal_us, near, leaves=policy.late)
    if ask.decode_load is None or _is_refused(ask, prefill):
        return _Decode(view, meets, view.tbt_us(ask.length), view.tbt_us(context))
    ends_us = now_us + prefill.ttft_us
    found = roomy_decode(view, decodes, context, goal_us, ask.decode_load, ends_us)
    return _Decode(found[0], meets, found[1], found[2])


def _is_refused(ask: Ask, prefill: _Prefill) -> bool:
    """Whether admission will refuse it for its TTFT: then no forecast of decode is needed."""
    behind = prefill.options.queue_us[prefill.row] > 0
    return behind and prefill.last.cost.known and _misses_ttft(ask, prefill)


def _misses_ttft(ask: Ask, prefill: _Prefill) -> bool:
    goal_us = ask.slo.slo.ttft_us
    return goal_us is not None and ask.waited_us + prefill.ttft_us > goal_us


def _tbt_share(waited_us: Micros, slo: Slo, tuning: Tuning) -> float:
    """The share of its TBT objective that a request may take up: more once it is pressed."""
    patience_us = PATIENCE_US if slo.ttft_us is None else slo.ttft_us
    if waited_us > PRESSED * patience_us:
        return max(tuning.tbt_share, PRESSED_SHARE)
    return tuning.tbt_share


def _verdict(
    ask: Ask,
    field: _Field,
    prefill: _Prefill,
    decode: _Decode,
    policy: Policy,
    state: PolicyState,
    tuning: Tuning,
) -> Verdict:
    """The decision in plain data."""
    options = prefill.options
    last = prefill.last
    view = decode.view
    candidates = Candidates(options, prefill.scores, prefill.row, KEPT)
    why_alone = prefill.why_alone
    hands_on = prefill.group is not None or not field.external or field.alone
    if not hands_on and last.info.role == "decode":
        why_alone = connectors.NOBODY_GIVES
    decision = Decision(
        policy=tuning.policy,
        prefill=last.info.id,
        decode=view.info.id,
        prompt_tokens=ask.length,
        copies=policy.copies,
        waited_us=ask.waited_us,
        predicted_ttft_us=ask.waited_us + prefill.ttft_us,
        predicted_tbt_us=decode.likely_us,
        pool_tokens=ask.match.pool * options.block_size,
        chosen=candidates.chosen,
        considered=len(field.prefills),
        stages=() if prefill.group is None else prefill.group.stages,
        alone=why_alone,
        tightened=ask.slo.why,
        connector=last.info.connector if field.external else "embedded",
        joint=field.external and view is last,
    )
    strictest_us = view.strictest_us()
    breaks = strictest_us is not None and decode.most_us > strictest_us
    return Verdict(
        decision,
        candidates if len(options.views) <= 2 * KEPT else tuple(candidates),
        ask.slo.slo,
        misses_ttft=_misses_ttft(ask, prefill),
        misses_tbt=not decode.meets,
        tbt_us=decode.most_us,
        breaks_us=strictest_us if breaks else None,
        state=state,
    )

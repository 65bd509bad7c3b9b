"""A decision in the plainest way: every instance is priced, every rule is a loop over all.

It is the specification of core.schedule.decide, which looks at few. Only the terms of a candidate
(Estimate), a policy's scores, groups and the making of plain data are shared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.schedule import connectors, search
from moonserve.core.schedule import decide as fast
from moonserve.core.schedule import estimate as pricing
from moonserve.core.schedule.decide import KEPT, Verdict
from moonserve.core.schedule.estimate import (
    Ask,
    DecodeLoad,
    Estimate,
    Options,
    Roles,
    evicted,
    meets_goals,
)
from moonserve.core.schedule.policies import Policy, policy_of
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Decodes, InstanceView, Prefills, preferred
from moonserve.core.units import Micros, Tokens


def plain_decide(
    ask: Ask, roles: Roles, state: PolicyState, tuning: Tuning, now_us: Micros
) -> tuple[Verdict, Options, Sequence[float]] | None:
    """The verdict, and the terms and scores of all candidates."""
    policy = policy_of(tuning.policy)
    found = candidates(ask, roles, policy, tuning)
    if found is None:
        return None
    prefills, decodes, estimate, alone = found
    external = connectors.is_external(decodes[0])
    options = estimate.options(prefills, now_us)
    scores = policy.score(options, state)
    row = best_row(options, scores, policy, roles)
    ttft_us = options.transfer_us[row] + options.queue_us[row] + options.compute_us[row]
    assert ttft_us == options.ttft_us[row]
    prefill = fast._Prefill(options, scores, row)
    if tuning.cpp > 1:
        partners = prefills if roles.partners is None else roles.partners
        fast._share(prefill, ask, preferred(partners, ask.avoid), partners, tuning)
    decode = decode_for(ask, prefill, decodes, external, alone, policy, tuning, now_us)
    field = fast._Field(Prefills(prefills), Decodes(decodes), estimate, roles.held, external, alone)
    made = fast._verdict(ask, field, prefill, decode, policy, state.advanced(), tuning)
    return made, options, scores


def candidates(
    ask: Ask, roles: Roles, policy: Policy, tuning: Tuning
) -> tuple[list[InstanceView], list[InstanceView], Estimate, bool] | None:
    """Prefill and decode instances that take the request, and whether one does all of it."""
    need = ask.length
    every_prefill, every_decode = roles.prefills.members, roles.decodes.members
    prefills = [v for v in every_prefill if v.takes_prefill and v.kv_tokens >= need]
    decodes = [v for v in every_decode if v.takes_decode and v.kv_tokens >= need]
    if ask.rank and not prefills:
        prefills = [v for v in every_prefill if v.spares_prefill(ask.rank, need)]
    if ask.rank and not decodes:
        decodes = [v for v in every_decode if v.spares_decode(ask.rank, need)]
    if not prefills or not decodes:
        return None
    size = prefills[0].info.namespace.block_size
    estimate = Estimate(ask, roles, size, policy.fetch, tuning)
    alone = False
    if connectors.is_external(decodes[0]):
        near = preferred(decodes, ask.avoid)
        lone = connectors.alone(ask, estimate, near, tuning.alone_tokens)
        alone = bool(lone)
        prefills = lone or able(ask, prefills, decodes)
        if not prefills:
            return None
    return list(preferred(prefills, ask.avoid)), decodes, estimate, alone


def able(
    ask: Ask, prefills: Sequence[InstanceView], decodes: Sequence[InstanceView]
) -> list[InstanceView]:
    """External ones that have a decode instance."""
    ways = {view.info.connector for view in decodes}
    if ask.whole:
        ways &= {"sglang"}
    return [
        view
        for view in prefills
        if (view in decodes if connectors.hands_nothing_on(view) else view.info.connector in ways)
    ]


def best_row(options: Options, scores: Sequence[float], policy: Policy, roles: Roles) -> int:
    """The row that wins, by the rules in the docstrings of `_best` and `_sparing`."""
    views = options.views
    blocks = options.ask.length // options.block_size
    there = options.local if policy.copies else options.reused
    lowest = min(scores)

    def work_us(row: int) -> Micros:
        return options.transfer_us[row] + options.compute_us[row]

    def needs(row: int) -> int:
        return evicted(views[row], blocks - there[row], roles.held)

    def order(row: int) -> tuple[int, int, int]:
        return views[row].decodes, views[row].used, row

    def key(row: int) -> tuple[int, int, int, int, int]:
        return views[row].decodes, needs(row), -options.local[row], views[row].used, row

    def ties(row: int) -> bool:
        error = views[row].cost.error if policy.times else 0.0
        return scores[row] - lowest <= error * work_us(row)

    runs = runs_of(options, roles)
    cut = 0 if len(runs) <= pricing.HOLDERS else runs[pricing.HOLDERS]
    tied = [row for row in range(len(views)) if ties(row)]
    if len(tied) > search.LOOKED:
        others = sorted([row for row in tied if options.local[row] <= cut], key=order)
        tied = [row for row in tied if options.local[row] > cut] + others[: search.LOOKED]
    best = min(tied, key=key)
    if not policy.times or not needs(best):
        return best
    again_us = needs(best) * options.compute_us[best] / max(1, blocks - options.reused[best])
    looked = sorted(range(len(views)), key=order)[: search.LOOKED]
    spared = [
        row
        for row in looked
        if scores[row] <= lowest + fast.SPARED * again_us
        and there[row] <= there[best]
        and not needs(row)
    ]
    return min([best, *spared], key=key)


def runs_of(options: Options, roles: Roles) -> list[int]:
    """The runs of all holders, the longest first, no longer than what can be reused."""
    ask = options.ask
    usable = (ask.length - 1) // options.block_size
    runs = dict(ask.match.by_holder)
    for segment, blocks in ask.pending.items():
        runs[segment] = max(blocks, runs.get(segment, 0))
    for segment, share in roles.doubts.items():
        if runs.get(segment):
            runs[segment] = max(1, int(share * runs[segment]))
    return sorted([min(usable, blocks) for blocks in runs.values()], reverse=True)


def decode_for(
    ask: Ask,
    prefill: fast._Prefill,
    decodes: Sequence[InstanceView],
    external: bool,
    alone: bool,
    policy: Policy,
    tuning: Tuning,
    now_us: Micros,
) -> fast._Decode:
    """The decode instance that goes on."""
    near = prefill.last
    if external and (alone or connectors.hands_nothing_on(near)):
        decodes = [near]
    elif external:
        decodes = connectors.speaking(near.info.connector, decodes)
    decodes = preferred(decodes, ask.avoid)
    slo = ask.slo.slo
    context = ask.length + ask.expected_tokens
    goal_us = slo.tbt_us
    if policy.late and goal_us is not None:
        goal_us = round(goal_us * fast._tbt_share(ask.waited_us, slo, tuning))
    view, meets = plain_decode(context, decodes, goal_us, near, leaves=policy.late)
    if ask.decode_load is None or fast._is_refused(ask, prefill):
        return fast._Decode(view, meets, view.tbt_us(ask.length), view.tbt_us(context))
    ends_us = now_us + prefill.ttft_us
    chosen, mean_us, most_us = plain_roomy(
        view, decodes, context, goal_us, ask.decode_load, ends_us
    )
    return fast._Decode(chosen, meets, mean_us, most_us)


def plain_decode(
    context: Tokens,
    views: Sequence[InstanceView],
    goal_us: Micros | None,
    near: InstanceView | None,
    leaves: bool,
) -> tuple[InstanceView, bool]:
    """The decode instance, by the docstring of choose_decode."""
    home = near if near in views else None
    if home is not None and (home.has_slot(context) or not any(v.has_slot(context) for v in views)):
        meets_here = meets_goals(home, home.tbt_us(context), goal_us)
        if meets_here or not leaves:
            return home, meets_here
    free = [view for view in views if view.room_tokens >= context] or list(views)
    if home in free:
        assert home is not None
        free = [home, *[view for view in free if view is not home]]
    met = [view for view in free if meets_goals(view, view.tbt_us(context), goal_us)]
    best = lowest(free, context)
    rack = "" if near is None else near.info.rack
    if best in met and (not rack or best.info.rack == rack):
        return best, True
    left = met or free
    best = lowest(left, context)
    within_us = best.tbt_us(context) * 1.02
    same = [v for v in left if v.info.rack == rack and v.tbt_us(context) <= within_us]
    if rack and best.info.rack != rack and same:
        best = min(same, key=lambda view: view.order)
    return best, bool(met)


def lowest(views: Sequence[InstanceView], context: Tokens) -> InstanceView:
    """The first by order of those whose TBT is as low as the lowest, by what that may err."""
    first = min(views, key=lambda view: view.tbt_us(context))
    limit_us = first.tbt_us(context) * (1 + first.cost.error)
    return min([v for v in views if v.tbt_us(context) <= limit_us], key=lambda view: view.order)


def plain_roomy(
    first: InstanceView,
    views: Sequence[InstanceView],
    context: Tokens,
    goal_us: Micros | None,
    load: DecodeLoad,
    ends_us: Micros,
) -> tuple[InstanceView, Micros, Micros]:
    """By the docstring of roomy_decode."""
    if goal_us is None and first.strictest_us() is None:
        tbt_us = first.tbt_us(context)
        return first, tbt_us, tbt_us
    found = load.tbt_us(first, ends_us)
    if meets_goals(first, found[1], goal_us):
        return first, *found
    free = [view for view in views if view.room_tokens >= context and view is not first]
    for view in sorted(free, key=lambda view: view.tbt_us(context))[:3]:
        other = load.tbt_us(view, ends_us)
        if meets_goals(view, other[1], goal_us):
            return view, *other
    return first, *found


def runners_up(options: Options, scores: Sequence[float], winner: str) -> list[float]:
    """The scores of all but the winner, the lowest first."""
    pairs = zip(options.views, scores, strict=True)
    return sorted(score for view, score in pairs if view.info.id != winner)[: KEPT - 1]

"""One placement decision: candidates, then a prefill instance, then a decode instance.

`decide` is a function: the same request, instances, state, settings and time give the same answer,
and nothing is changed. The new state of the policy is part of the answer. The Conductor calls it;
reserving what was decided is the Conductor's task, so that a decision without that is a dry run.

    candidates   hard constraints: a free place, KV memory, a connector in common
    prefill      the terms (core.schedule.estimate) of each candidate that can still win
                 (core.schedule.search), weighed by the policy
    group        instances that share a prompt too long for one (core.schedule.groups)
    decode       the lowest time between tokens that breaks no objective
    verdict      the decision in plain data, and which objectives it is predicted to miss
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.frozen import Frozen
from moonserve.core.request import Slo
from moonserve.core.schedule import connectors, search
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
    meets_goals,
    roomy_decode,
)
from moonserve.core.schedule.groups import split
from moonserve.core.schedule.pipeline import Group, Work
from moonserve.core.schedule.policies import Policy, policy_of
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Decodes, InstanceView, Prefills, preferred
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


class Verdict(Frozen, frozen=True):
    """A decision, and which objectives it is predicted to miss."""

    decision: Decision
    candidates: Sequence[Candidate]
    """The chosen one, then the best of those it won against that were priced, KEPT at most."""
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


class _Field:
    """The candidates of both roles."""

    def __init__(
        self,
        prefills: Prefills,
        decodes: Decodes,
        estimate: Estimate,
        held: Held,
        external: bool,
        alone: bool,
    ) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.estimate = estimate
        self.held = held
        """How full their stores are."""
        self.external = external
        """Whether they are external engines; all instances of a model are, or none is."""
        self.alone = alone
        """Whether a decode instance is to do all of it by itself."""


class _Prefill:
    """The prefill instance, or the group, that was chosen."""

    def __init__(self, options: Options, scores: Sequence[float], row: int) -> None:
        self.options = options
        self.scores = scores
        self.row = row
        """Of the chosen instance; of a group, the first stage."""
        self.last = options.views[row]
        """Where all KV is when the prefill has ended."""
        self.ttft_us = options.ttft_us[row]
        self.group: Group | None = None
        self.why_alone: str | None = None

    @property
    def first_us(self) -> Micros:
        """Predicted time until its token is here, with the call's own time."""
        return self.ttft_us + self.last.cost.call_us


class _Decode:
    """The decode instance that was chosen."""

    def __init__(self, view: InstanceView, meets: bool, likely_us: Micros, most_us: Micros) -> None:
        self.view = view
        self.meets = meets
        """Whether every objective is met there by what is promised now."""
        self.likely_us = likely_us
        """Predicted TBT: the mean."""
        self.most_us = most_us
        """Predicted TBT after it has joined, at its expected final length. With a forecast: the
        highest value."""


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
        partners = roles.partners or field.prefills.all()
        _share(prefill, ask, preferred(partners, ask.avoid), partners, tuning)
    decode = _choose_decode(ask, field, prefill, policy, tuning, now_us)
    return _verdict(ask, field, prefill, decode, policy, state.advanced(), tuning)


def _candidates(ask: Ask, roles: Roles, policy: Policy, tuning: Tuning) -> _Field | None:
    """The instances that can take the request. Those that failed this request: only if no other is
    left."""
    prefills = roles.prefills.able(ask.length, ask.rank)
    decodes = roles.decodes.able(ask.length, ask.rank)
    if prefills is None or decodes is None:
        return None
    block_size = prefills.views[0].block_size
    estimate = Estimate(ask, roles, block_size, policy.fetch, tuning)
    external = connectors.is_external(decodes.views[0])
    lone: Sequence[InstanceView] = ()
    if external:
        lone = connectors.alone(
            ask, estimate, preferred(decodes.all(), ask.avoid), tuning.alone_tokens
        )
        found = Prefills(lone) if lone else connectors.able(ask, prefills, decodes)
        if found is None:
            return None
        prefills = found
    if ask.avoid:
        prefills = prefills.only(preferred(prefills.all(), ask.avoid))
    return _Field(prefills, decodes, estimate, roles.held, external, bool(lone))


def _choose_prefill(field: _Field, policy: Policy, state: PolicyState, now_us: Micros) -> _Prefill:
    """The candidate with the lowest score; see `_best` and `_sparing` for ties."""
    estimate = field.estimate
    prefills = field.prefills
    if policy.prunes:
        options = search.likely(estimate, prefills, now_us)
    else:
        options = estimate.options(prefills.all(), now_us)
    scores = policy.score(options, state)
    row = _best(options, scores, policy, estimate.cut(), field.held)
    if policy.times and prefills.bounded:
        others = _roomy(options, row, policy, prefills, field.held)
        if others:
            if len(options.views) < prefills.taking:
                best = options.views[row]
                views = sorted({*options.views, *others}, key=prefills.rows.__getitem__)
                options = estimate.options(views, now_us)
                scores = policy.score(options, state)
                row = views.index(best)
            row = _sparing(options, scores, policy, row, others, field.held)
    return _Prefill(options, scores, row)


def _best(options: Options, scores: Sequence[float], policy: Policy, cut: int, held: Held) -> int:
    """The row with the lowest score. Ties go to what costs later requests least.

    If scores are predicted times, a row ties with the lowest if it differs by no more than the
    prediction of its own prefill may err, so that an instance whose fit is a little lower does not
    draw all requests. Of many ties, those with a longer run of the prompt than `cut` and the first
    LOOKED others by InstanceView.order are compared. Of these:

    1. The fewest decodes: queues of prefill say nothing of decode, and of instances that do both
       the first would get all requests.
    2. The fewest blocks that the store must evict: else one store fills while others are empty.
    3. The longest prefix of its own: the fewest blocks are stored a second time.
    4. The instance that was not used for the longest time, then the first id.
    """
    best = min(scores)
    if policy.times:
        views = options.views
        transfer_us = options.transfer_us
        compute_us = options.compute_us
        ties = [
            row
            for row, score in enumerate(scores)
            if score - best <= views[row].cost.error * (transfer_us[row] + compute_us[row])
        ]
    else:
        ties = [row for row, score in enumerate(scores) if score == best]
    if len(ties) == 1:
        return ties[0]
    views = options.views
    local = options.local
    if len(ties) > search.LOOKED:
        others = sorted(
            [row for row in ties if local[row] <= cut], key=lambda row: (views[row].order, row)
        )
        ties = sorted([*[row for row in ties if local[row] > cut], *others[: search.LOOKED]])
    keys = [
        (options.decodes[row], _needs(options, row, policy, held), -local[row], views[row].used)
        for row in ties
    ]
    return ties[keys.index(min(keys))]


def _needs(options: Options, row: int, policy: Policy, held: Held) -> int:
    """How many blocks the store of this row must evict for the prompt."""
    view = options.views[row]
    if not view.store_blocks:
        return 0
    there = options.local if policy.copies else options.reused
    return evicted(view, options.ask.length // options.block_size - there[row], held)


def _roomy(
    options: Options, best: int, policy: Policy, prefills: Prefills, held: Held
) -> list[InstanceView]:
    """If the store of the `best` row must evict: those whose store may have room for the prompt, of
    the first LOOKED candidates by InstanceView.order."""
    if not _needs(options, best, policy, held):
        return []
    there = options.local if policy.copies else options.reused
    new = options.ask.length // options.block_size - there[best]  # others have no more of it
    views = [prefills.views[row] for row in prefills.first(search.LOOKED)]
    return [view for view in views if not evicted(view, new, held)]


def _sparing(
    options: Options,
    scores: Sequence[float],
    policy: Policy,
    best: int,
    others: Sequence[InstanceView],
    held: Held,
) -> int:
    """The row that is taken where the store of the `best` row must evict.

    One of the `others` whose store has room, which starts from no more blocks, may be later than
    the lowest score by SPARED of the time in which the evicted blocks would be computed again.
    Then rows are compared as ties are. others: see `_roomy`.
    """
    views = options.views
    local = options.local
    blocks = options.ask.length // options.block_size
    needs = _needs(options, best, policy, held)
    again_us = needs * options.compute_us[best] / max(1, blocks - options.reused[best])
    limit = min(scores) + SPARED * again_us
    there = options.local if policy.copies else options.reused
    rows = [
        row
        for row, view in enumerate(views)
        if scores[row] <= limit
        and there[row] <= there[best]
        and view in others
        and not _needs(options, row, policy, held)
    ]
    keys = [
        (options.decodes[row], needs if row == best else 0, -local[row], views[row].used, row)
        for row in [best, *rows]
    ]
    return min(keys)[-1]


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
    slo = ask.slo.slo
    context = ask.length + ask.expected_tokens
    goal_us = slo.tbt_us
    if policy.late and goal_us is not None:
        goal_us = round(goal_us * _tbt_share(ask.waited_us, slo, tuning))
    others: Decodes | None = None
    if field.external and (field.alone or connectors.hands_nothing_on(near)):
        view = near
        meets = meets_goals(near, near.tbt_us(context), goal_us)
    else:
        others = connectors.mates(near, field.decodes) if field.external else field.decodes
        if ask.avoid:
            others = others.only(preferred(others.all(), ask.avoid))
        view, meets = choose_decode(context, others, goal_us, near, leaves=policy.late)
    if ask.decode_load is None or _is_refused(ask, prefill):
        return _Decode(view, meets, view.tbt_us(ask.length), view.tbt_us(context))
    ends_us = now_us + prefill.first_us
    found = roomy_decode(view, others, context, goal_us, ask.decode_load, ends_us)
    return _Decode(found[0], meets, found[1], found[2])


def _is_refused(ask: Ask, prefill: _Prefill) -> bool:
    """Whether admission will refuse it for its TTFT: then no forecast of decode is needed."""
    behind = prefill.options.queue_us[prefill.row] > 0
    return behind and prefill.last.cost.known and _misses_ttft(ask, prefill)


def _misses_ttft(ask: Ask, prefill: _Prefill) -> bool:
    goal_us = ask.slo.slo.ttft_us
    return goal_us is not None and ask.waited_us + prefill.first_us > goal_us


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
        predicted_ttft_us=ask.waited_us + prefill.first_us,
        call_us=last.cost.call_us,
        predicted_tbt_us=decode.likely_us,
        pool_tokens=ask.match.pool * options.block_size,
        chosen=candidates.chosen,
        considered=field.prefills.taking,
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
        candidates if len(options.views) <= 4 * KEPT else tuple(candidates),
        ask.slo.slo,
        misses_ttft=_misses_ttft(ask, prefill),
        misses_tbt=not decode.meets,
        tbt_us=decode.most_us,
        breaks_us=strictest_us if breaks else None,
        state=state,
    )

"""Which group of instances prefills a long prompt, if any, and what is promised to its members.

Chunked pipeline parallelism costs the cluster more than one instance's prefill. So a group is for
prompts for which one instance alone would be late, and it is as small as possible.
core.schedule.decide and the Conductor call it; core.schedule.pipeline shares the work out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from moonserve.core.request import Slo
from moonserve.core.schedule.actions import Stage
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.pipeline import (
    Group,
    Work,
    chain,
    free_us,
    layers,
    pass_us,
    way,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId, Micros, RequestId, Tokens

_SMALL = 8
"""Instances of a group, up to which groups of every size are planned."""
Views: TypeAlias = Mapping[InstanceId, InstanceView]


def groups(
    first: InstanceView,
    others: Sequence[InstanceView],
    work: Work,
    now_us: Micros | None,
    within_us: Micros | None = None,
) -> Iterator[Group]:
    """A group of 2, of 3, and so on, in which `first` is the first stage; see `partners`.

    Of groups too small to be done `within_us`, and of large ones, only some are planned: planning
    takes long. now_us: None: as if all instances were idle.
    """
    members = _members(first, others, work, now_us)
    least_us = _least_us(members, work)
    most = len(members)
    for size in range(2, most + 1):
        hopeless = within_us is not None and least_us > size * within_us
        if (hopeless or size > _SMALL) and size & (size - 1) and size < most:
            continue
        group = _planned(members[:size], work, now_us)
        if group is not None:
            yield group


def _members(
    first: InstanceView, others: Sequence[InstanceView], work: Work, now_us: Micros | None
) -> list[InstanceView]:
    """The instances that may form a group, in order, each with at least one block of its own."""
    most = min(work.most, max(1, (work.length - work.start) // work.block_size))
    return [first, *partners(first, others, work, now_us)][:most]


def _planned(members: Sequence[InstanceView], work: Work, now_us: Micros | None) -> Group | None:
    """The best way in which these instances share the prompt."""
    return (layers if work.form == "layers" else chain)(members, work, now_us)


def _smallest(
    members: Sequence[InstanceView], work: Work, group: Group, within_us: Micros, now_us: Micros
) -> Group:
    """By halving: the smallest group in time among those that `groups` left out, or this one."""
    low = len(group.stages) // 2
    high = len(group.stages)
    while high > _SMALL and high - low > 1:
        size = (low + high) // 2
        found = _planned(members[:size], work, now_us)
        if found is not None and found.ttft_us <= within_us:
            group = found
            high = size
        else:
            low = size
    return group


def _least_us(members: Sequence[InstanceView], work: Work) -> Micros:
    """The least time that they spend together, however they share it."""
    return min(pass_us(view.cost, work.start, work.length) for view in members)


def partners(
    first: InstanceView, others: Sequence[InstanceView], work: Work, now_us: Micros | None
) -> list[InstanceView]:
    """The instances that may be a stage beside `first`: the soonest and nearest first.

    An instance in another rack ranks like one in this rack that is free later, by as much as the
    transfer of all the KV takes longer. Of equal ones, the one that was not used for longest is
    first.
    """
    if not first.info.layers:
        return []
    able = [
        view
        for view in others
        if view is not first
        and view.info.layers == first.info.layers
        and view.info.namespace == first.info.namespace
        and view.takes_prefill
        and view.kv_tokens >= work.length
    ]
    move_us = first.cost.load_us[1] * work.length / work.block_size * first.info.block_bytes

    def late_us(view: InstanceView) -> float:
        return free_us(view, now_us) + way(first, view, work.cross_rack) * move_us

    return sorted(able, key=lambda view: (late_us(view), view.info.rack, view.used))


def split(
    first: InstanceView,
    others: Sequence[InstanceView],
    work: Work,
    alone: tuple[Micros, Micros],
    within_us: Micros | None,
    now_us: Micros,
) -> tuple[Group | None, str | None]:
    """The smallest group that has the first token `within_us` from now, or why there is none.

    alone: the predicted TTFT of `first` by itself, and the engine's time in it. Only a prompt that
    is too long for one idle instance is shared: behind queues a group costs the waiting requests
    more than it saves. If no group is quick enough, the quickest group of idle instances does it
    that saves this request more time than it costs.
    """
    alone_us, spent_us = alone
    if within_us is None:
        return None, "there is no TTFT objective"
    if alone_us <= within_us:
        return None, "one instance alone meets the TTFT objective"
    if spent_us <= within_us:
        return None, "it would be late because of the queue before it, not because of its length"
    members = _members(first, others, work, now_us)
    if first.prefills:  # then it must be in time, and a crowd is refused that cannot be
        left_us = sum([max(0, within_us - free_us(view, now_us)) for view in members])
        if left_us < _least_us(members, work):
            return None, "the instances that could share it have too little time left"
    best: Group | None = None
    for group in groups(first, others, work, now_us, within_us):
        if group.ttft_us <= within_us:
            return _smallest(members, work, group, within_us, now_us), None
        best = group if best is None or group.ttft_us < best.ttft_us else best
    if best is None:
        return None, "no other instance can take a part of it"
    idle = [] if first.prefills else [view for view in others if not view.prefills]
    found = groups(first, idle, work, now_us, within_us)
    paying = [it for it in found if alone_us - it.ttft_us > it.spent_us - spent_us]
    if paying:
        return min(paying, key=lambda it: it.ttft_us), None
    late = f"the best group, of {len(best.stages)} instances, would be late too, after"
    return None, f"{late} {best.ttft_us / 1e6:.3g} s; it is not idle, or costs more than it saves"


def work_us(
    prefills: Sequence[InstanceView], length: Tokens, pool: int, slo: Slo, tuning: Tuning
) -> Micros:
    """What a prefill takes on idle instances: on one, or on a group if one is too slow.

    As long as costs are not known: what it takes at best.

    pool: leading blocks of the prompt that the pool holds.
    """
    first = prefills[0]
    size = prefills[0].info.namespace.block_size
    start = min(pool, (length - 1) // size) * size
    alone_us = first.cost.prefill_us(length, start, first.info.chunk_tokens)
    if not first.cost.known:
        return round(alone_us / first.cost.optimism)
    if tuning.cpp < 2 or slo.ttft_us is None or alone_us <= slo.ttft_us:
        return alone_us
    work = Work(start, length, size, 0, tuning.cpp, tuning.cpp_form, tuning.cross_rack)
    found = groups(first, prefills, work, None, slo.ttft_us)
    return min([group.ttft_us for group in found], default=alone_us)


def promise(
    views: Views, request: RequestId, shares: Sequence[Stage], now_us: Micros
) -> list[InstanceInfo]:
    """Promise each instance the part that it computes; returns the instances."""
    for share in shares:
        tokens = share.end - share.start
        view = views[share.instance]
        view.promise_prefill(request, share.work_us, tokens, now_us, share.start)
    return [views[share.instance].info for share in shares]


def release(
    views: Views, request: RequestId, instances: Iterable[InstanceId], now_us: Micros
) -> None:
    """End these promises, kept or not; those that ended before are no error."""
    for instance in instances:
        if instance in views:
            views[instance].end_prefill(request, now_us)

"""Chunked pipeline parallelism: how a given group of instances shares the prefill of one prompt.

There are two forms. `chain`, live and simulated: instance k computes the k-th part of the prompt,
layer by layer, from the KV of the parts before it, which is handed on layer by layer. So all work
at once, each a layer behind the one before. `layers`, the papers' form (arXiv 2407.00079, section
5.1), simulated only: instance k has the k-th share of the layers, and chunks of the prompt stream
through. Both are one recurrence of times: see `finish`. core.schedule.groups chooses the group and
calls these functions. They make a plan from views and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from moonserve.core.frozen import Frozen
from moonserve.core.schedule.actions import Stage
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import Micros, Tokens

Form: TypeAlias = Literal["chain", "layers"]

HIDDEN = 0.05
"""Bytes of a token's hidden state over bytes of its KV: 16,384 over 327,680 for LLaMA3-70B."""
MOST_CHUNKS = 64
_ROUNDS, _NEAR = 2, 1e-3


class Group(Frozen, frozen=True):
    """A plan: the part of each instance, and the time to the first token from the plan on."""

    stages: tuple[Stage, ...]
    ttft_us: Micros
    spent_us: Micros
    """The time that its instances spend together."""


class Work(Frozen, frozen=True):
    """A prompt to be split, of which [0, start) is cached, and how."""

    start: Tokens
    length: Tokens
    block_size: Tokens
    load_us: Micros
    """The time until the first instance has what it reuses."""
    most: int
    """The most instances of a group."""
    form: Form
    cross_rack: float
    """How many times longer a transfer between racks takes."""


class Step(NamedTuple):
    """One stage in time: what `finish` reads."""

    ready_us: float
    """When the instance is free."""
    work_us: float
    """Time of its pass, if it never has to wait."""
    link_us: float = 0.0
    """The time for one piece to come from the stage before."""
    base_us: float = 0.0
    """The time of a transfer beside its bytes."""


def finish(steps: Sequence[Step], pieces: int) -> list[tuple[float, float]]:
    """When each stage has its first piece done, and its last.

    Piece i of stage k begins when piece i - 1 there and piece i of the stage before, moved here,
    are done; links move one piece after the other. All pieces of a stage take equally long, so the
    first and the last are enough: in between, times are convex in i and decide nothing.
    """
    ends: list[tuple[float, float]] = []
    for step in steps:
        each_us = step.work_us / pieces
        came, all_came = step.ready_us, step.ready_us
        if ends:
            arrived, all_arrived = _moved(*ends[-1], step, pieces)
            came, all_came = max(came, arrived), max(came, all_arrived)
        first = came + each_us
        ends.append((first, max(came + step.work_us, all_came + each_us)))
    return ends


def _moved(first: float, last: float, step: Step, pieces: int) -> tuple[float, float]:
    """When the first piece, and the last, of the stage before are here."""
    arrived = first + step.base_us + step.link_us
    return arrived, max(arrived + (pieces - 1) * step.link_us, last + step.base_us + step.link_us)


def pass_us(cost: Cost, start: Tokens, end: Tokens) -> Micros:
    """The one pass that computes [start, end) of a prompt."""
    return cost.prefill_us(end, start, end - start)


def shared_us(cost: Cost, start: Tokens, length: Tokens, chunks: int, stages: int) -> Micros:
    """The form `layers`: the time of one stage, for its share of the layers of all chunks.

    Chunks are cut so that all take equally long: later ones, which attend to more, are shorter.
    """
    whole_us = pass_us(cost, start, length)
    total_us = 0
    at = start
    for left in range(chunks, 0, -1):
        end = length
        if left > 1:
            end = min(length - left + 1, max(at + 1, _reach(cost, at, whole_us / chunks)))
        took_us = pass_us(cost, at, end)
        total_us = total_us + took_us
        at = end
    return round(total_us / stages)


def free_us(view: InstanceView, now_us: Micros | None) -> Micros:
    """How long from now until it has done what it was promised; now_us: None: it is idle."""
    return 0 if now_us is None else view.queue_us(now_us)


def way(source: InstanceView, target: InstanceView, cross_rack: float) -> float:
    """How many times longer than within a rack a transfer takes."""
    return 1.0 if source.info.rack == target.info.rack else cross_rack


def _link(source: InstanceView, target: InstanceView, work: Work, tokens: float) -> float:
    """Time for the KV of `tokens` tokens from one instance to the other, without the base."""
    per_token_us = target.cost.load_us[1] * target.info.block_bytes / work.block_size
    return way(source, target, work.cross_rack) * per_token_us * tokens


# The form `chain`.


def chain(members: Sequence[InstanceView], work: Work, now_us: Micros | None) -> Group | None:
    """The parts with which all end soonest; None if a stage would be left without a block.

    For a given end, each stage takes as much as it can finish in time for the stages after it, each
    a layer behind. Halving finds the soonest end that covers the prompt.
    """
    layers = members[0].info.layers
    ready_us = [float(free_us(view, now_us)) for view in members]
    ready_us[0] += work.load_us
    count = len(members)
    total_us = pass_us(members[0].cost, work.start, work.length)
    best: list[Tokens] | None = None
    even = [work.start + (work.length - work.start) * at // count for at in range(count + 1)]
    for _ in range(_ROUNDS):
        steps = _steps(members, work, ready_us, best or even)
        mean_us = sum(step.work_us for step in steps) / count / layers
        ways_us = [step.base_us + step.link_us + mean_us for step in steps]
        behind_us = [sum(ways_us[at + 1 :]) for at in range(count)]
        low_us = min(ready_us)
        high_us = max(ready_us) + 2.0 * total_us
        while high_us - low_us > _NEAR * high_us:
            by_us = (low_us + high_us) / 2
            cuts = _cuts(members, work, ready_us, [by_us - us for us in behind_us])
            if cuts is None:
                low_us = by_us
            else:
                best = cuts
                high_us = by_us
        if best is None:
            return None
    assert best is not None
    ends_us = finish(_steps(members, work, ready_us, best), layers)
    return _group(members, best, ends_us, layers, now_us)


def _cuts(
    members: Sequence[InstanceView], work: Work, ready_us: Sequence[float], by_us: Sequence[float]
) -> list[Tokens] | None:
    """Starts and the end of parts such that stage k is done by `by_us[k]`; None: impossible."""
    layers = members[0].info.layers
    size = work.block_size
    cuts = [work.start]
    done = (0.0, 0.0)
    for at, view in enumerate(members):
        start = cuts[-1]
        left = len(members) - at - 1
        step = _step(members, work, ready_us, at, start, start)
        came = all_came = step.ready_us
        if at:
            arrived, all_arrived = _moved(*done, step, layers)
            came, all_came = max(came, arrived), max(came, all_arrived)
        most_us = min(by_us[at] - came, layers * (by_us[at] - all_came))
        end = min(_reach(view.cost, start, most_us), work.length)
        if left:  # its KV must also reach the next stage in time
            way_us = _link(view, members[at + 1], work, 1.0)
            end = min(end, int((by_us[at] - came) / way_us)) if way_us else end
            end = min(end // size, (work.length - 1) // size - left + 1) * size
        if end <= start:
            return None
        took_us = pass_us(view.cost, start, end)
        each_us = took_us / layers
        done = (came + each_us, max(came + took_us, all_came + each_us))
        cuts.append(end)
    return cuts if cuts[-1] == work.length else None


def _steps(
    members: Sequence[InstanceView], work: Work, ready_us: Sequence[float], cuts: Sequence[Tokens]
) -> list[Step]:
    return [_step(members, work, ready_us, at, *span) for at, span in enumerate(pairwise(cuts))]


def _step(
    members: Sequence[InstanceView],
    work: Work,
    ready_us: Sequence[float],
    at: int,
    start: Tokens,
    end: Tokens,
) -> Step:
    """Stage `at` when it computes [start, end); all KV before that comes from the stage before."""
    view = members[at]
    took_us = pass_us(view.cost, start, end)
    if not at:
        return Step(ready_us[0], took_us)
    link_us = _link(members[at - 1], view, work, start) / view.info.layers
    return Step(ready_us[at], took_us, link_us, view.cost.load_us[0])


def _reach(cost: Cost, start: Tokens, most_us: float) -> Tokens:
    """The end of the longest part from `start` on that one pass computes within `most_us`."""
    base, per_new, per_square, per_past = cost.pass_us[:4]
    room = most_us - base - per_past * start + (per_new + per_square * start) * start
    if room <= (per_new + per_square * start) * start:
        return start
    if not per_square:
        return int(room / per_new) if per_new else 1 << 40
    return int((sqrt(per_new * per_new + 4 * per_square * room) - per_new) / (2 * per_square))


# The form `layers`, of the papers.


def layers(members: Sequence[InstanceView], work: Work, now_us: Micros | None) -> Group:
    """The plan with the number of chunks, a power of two, with which all end soonest."""
    count = len(members)
    size = work.block_size
    cuts = [work.start, *[work.length] * count]
    best: Group | None = None
    chunks = 1
    while chunks <= min(MOST_CHUNKS, max(1, (work.length - work.start) // size)):
        steps = []
        for at, view in enumerate(members):
            ready_us = float(free_us(view, now_us))
            took_us = shared_us(view.cost, work.start, work.length, chunks, count)
            if not at:
                steps.append(Step(ready_us + work.load_us, took_us))
                continue
            before = members[at - 1]
            # Its share of what is reused comes from the first; then hidden states, chunk by chunk.
            if work.start:
                ready_us += view.cost.load_us[0]
                ready_us += _link(members[0], view, work, work.start / count)
            tokens = HIDDEN * (work.length - work.start) / chunks
            link_us = _link(before, view, work, tokens)
            steps.append(Step(ready_us, took_us, link_us, view.cost.load_us[0]))
        group = _group(members, cuts, finish(steps, chunks), chunks, now_us)
        if best is None or group.ttft_us < best.ttft_us:
            best = group
        chunks *= 2
    assert best is not None
    spans = [msgspec.structs.replace(stage, start=work.start) for stage in best.stages]
    return msgspec.structs.replace(best, stages=tuple(spans))


def _group(
    members: Sequence[InstanceView],
    cuts: Sequence[Tokens],
    ends_us: Sequence[tuple[float, float]],
    pieces: int,
    now_us: Micros | None,
) -> Group:
    works_us = [
        round(end_us) - free_us(view, now_us)
        for view, (_, end_us) in zip(members, ends_us, strict=True)
    ]
    stages = tuple(
        Stage(view.info.id, start, end, work_us, pieces)
        for view, (start, end), work_us in zip(members, pairwise(cuts), works_us, strict=True)
    )
    return Group(stages, round(ends_us[-1][1]), sum(works_us))

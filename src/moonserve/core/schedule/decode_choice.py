"""Which instance decodes: the lowest predicted time between tokens that breaks no objective.

Functions from views to a choice, for core.schedule.decide and for the Conductor; they change
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from moonserve.core.schedule.view import InstanceView, tbts_us
from moonserve.core.units import Micros, Tokens

_DECODES = attrgetter("decodes")
_TRIED = 4
"""Decode instances, those with the fewest promises, whose load over time is looked at."""
_NEAR = 1.02
"""Predicted TBTs this near are a tie, which the shorter path wins."""


class DecodeLoad(Protocol):
    """How full decode will be for one request; see core.schedule.decode_forecast."""

    def tbt_us(self, view: InstanceView, ends_us: Micros) -> tuple[Micros, Micros]:
        """Predicted TBTs on that instance once the request joins it at `ends_us`: the mean, and
        the most."""


def choose_decode(
    context: Tokens,
    views: Sequence[InstanceView],
    goal_us: Micros | None = None,
    near: InstanceView | None = None,
    leaves: bool = False,
) -> tuple[InstanceView, bool]:
    """The instance for a request of this context, and whether all its members then meet their TBT.

    near: the prefill instance. If it decodes too, the KV is there already and it is chosen; if the
    request `leaves`, only with every objective met. Else the lowest predicted TBT after joining
    wins: among those with a slot and KV room, if there are any, and with every objective met, if
    that can be. Ties go to the instance that has the KV, to the prefill's rack, to the fewest
    members, to the first.
    """
    home = near if near is not None and near in views else None
    if home is not None and (home.has_slot(context) or not any(v.has_slot(context) for v in views)):
        meets_here = meets_goals(home, home.tbt_us(context), goal_us)
        if meets_here or not leaves:
            return home, meets_here
        views = [home, *views]
    free = [view for view in views if view.room_tokens >= context] or views
    tbts = tbts_us(free, context)
    tbt_us, best = _lowest(tbts, free)
    meets = meets_goals(best, tbt_us, goal_us)
    rack = near.info.rack if near is not None else ""
    if not meets or (rack and best.info.rack != rack):  # then all must be looked at
        rows = list(zip(tbts, free, strict=True))
        met = [(us, view) for us, view in rows if meets_goals(view, us, goal_us)]
        meets = bool(met)
        rows = met or rows
        tbt_us, best = _lowest([us for us, _ in rows], [view for _, view in rows])
        same = [view for us, view in rows if view.info.rack == rack and us <= tbt_us * _NEAR]
        if rack and best.info.rack != rack and same:
            best = same[0]
    return best, meets


def roomy_decode(
    first: InstanceView,
    views: Sequence[InstanceView],
    context: Tokens,
    goal_us: Micros | None,
    load: DecodeLoad,
    ends_us: Micros,
) -> tuple[InstanceView, Micros, Micros]:
    """`first`, or the next that meets every objective at `ends_us`; and the TBTs found there.

    If no request has an objective, nothing is forecast. If all instances miss, it is `first`.
    """
    if goal_us is None and first.strictest_us() is None:
        tbt_us = first.tbt_us(context)
        return first, tbt_us, tbt_us
    found = load.tbt_us(first, ends_us)
    if meets_goals(first, found[1], goal_us):
        return first, *found
    free = [v for v in views if v.room_tokens >= context and v is not first]
    order = sorted(zip(tbts_us(free, context), range(len(free)), strict=True))
    for _, at in order[: _TRIED - 1]:
        other = load.tbt_us(free[at], ends_us)
        if meets_goals(free[at], other[1], goal_us):
            return free[at], *other
    return first, *found


def meets_goals(view: InstanceView, tbt_us: Micros, goal_us: Micros | None) -> bool:
    """Whether that time between tokens is within the goal and the goals of all decodes there."""
    strictest_us = view.strictest_us()
    return (goal_us is None or tbt_us <= goal_us) and (
        strictest_us is None or tbt_us <= strictest_us
    )


def _lowest(tbts: Sequence[Micros], views: Sequence[InstanceView]) -> tuple[Micros, InstanceView]:
    """The lowest predicted TBT. Ties: the fewest members, then the first."""
    lowest = min(tbts)
    return lowest, min([v for v, us in zip(views, tbts, strict=True) if us == lowest], key=_DECODES)

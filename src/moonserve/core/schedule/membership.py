"""Which instances are members of the cluster: joins, heartbeats, and instances that fell silent.

Only the Conductor calls it, and aborts the calls to instances that are lost. It reads no clock: the
time comes with ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec

from moonserve.core.liveness import Liveness
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Beat, Draining, InstanceInfo, Left
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, Micros

RESTARTED = "it restarted"
"""Why an instance is lost if a new start of it joins."""
_MOST_CHANGES = 256


class MemberChange(msgspec.Struct, frozen=True):
    """An instance came or went."""

    instance: InstanceId
    what: Literal["join", "epoch", "leave", "loss", "drain", "resume"]
    """epoch: a new start of it came in place of the earlier one. leave: in order. drain: it gets
    no new work. resume: it gets work again."""
    why: str = ""
    """Of a loss."""


class Membership:
    """Adds instances to the view; facts of an earlier epoch of an instance are ignored."""

    def __init__(
        self, view: ClusterView, tuning: Tuning, cost_of: Callable[[InstanceInfo], Cost]
    ) -> None:
        self._view = view
        self._cost_of = cost_of
        self._liveness = Liveness(tuning.dead_after_us, tuning.pause_us)
        self._strangers: dict[InstanceId, None] = {}
        """Instances whose costs are not known yet: they borrow those of their like."""
        self.changes: deque[MemberChange] = deque(maxlen=_MOST_CHANGES)
        """The latest ones that nobody has read."""

    def joins(self, info: InstanceInfo, now_us: Micros) -> bool:
        """Whether this is a new start of an instance; if not, it counts as a heartbeat."""
        old = self._view.instances.get(info.id)
        if old is None or old.info.epoch < info.epoch:
            return True
        if old.info.epoch == info.epoch:
            old.heard_us = now_us
        return False

    def add(self, info: InstanceInfo, now_us: Micros) -> None:
        """Add the instance. An earlier start of it was removed before, because of RESTARTED."""
        if self.changes and self.changes[-1] == MemberChange(info.id, "loss", RESTARTED):
            self.changes[-1] = MemberChange(info.id, "epoch")
        else:
            self.changes.append(MemberChange(info.id, "join"))
        view = InstanceView(info, now_us, self._cost_of(info))
        if not view.cost.known:
            self._strangers[info.id] = None
            costs = [it.cost for it in self._view.instances.values() if _are_alike(it.info, info)]
            if costs:
                view.cost.borrow(max(costs, key=lambda cost: cost.samples))
        self._view.add(view)

    def remove(self, instance: InstanceId, why: str | None) -> None:
        """Remove an instance; unknown ones are no error. why: it is lost; None: it leaves."""
        if instance in self._view.instances:
            what: Literal["leave", "loss"] = "leave" if why is None else "loss"
            self.changes.append(MemberChange(instance, what, why or ""))
        self._view.remove(instance)

    def drain(self, fact: Draining) -> bool:
        """Take in an operator's order. Returns whether an instance gets other work than before."""
        changed = self._view.drain(fact.instance, fact.epoch, fact.drains)
        if changed:
            self.changes.append(MemberChange(fact.instance, "drain" if fact.drains else "resume"))
        return changed

    def take(self, beat: Beat, now_us: Micros) -> None:
        """Take in a heartbeat."""
        if self.of_now(beat):
            view = self._view.instances[beat.instance]
            self._view.beat(view, beat.load, now_us)
            if self._strangers and beat.load.passes:
                self._introduce(view)

    def _introduce(self, view: InstanceView) -> None:
        """Lend what this instance has measured to those like it that are not known yet."""
        if view.cost.known:
            self._strangers.pop(view.info.id, None)
        for name in list(self._strangers):
            other = self._view.instances.get(name)
            if other is None:
                del self._strangers[name]
            elif other is not view and _are_alike(other.info, view.info):
                other.cost.borrow(view.cost)
                self._view.cost_changed(other.cost)

    def of_now(self, fact: Beat | Left) -> bool:
        """Whether the fact is of the current start of its instance."""
        view = self._view.instances.get(fact.instance)
        return view is not None and view.info.epoch == fact.epoch

    def silent(self, now_us: Micros) -> list[InstanceId]:
        """At a tick: instances without a heartbeat for too long, unless this process slept."""
        views = self._view.instances.items()
        return self._liveness.silent(now_us, ((id, view.heard_us) for id, view in views))


def _are_alike(one: InstanceInfo, other: InstanceInfo) -> bool:
    """Whether passes of one say how long passes of the other take.

    Prefill says nothing of decode. Hardware is not reported: instances of one model are taken for
    equal until they have measured themselves.
    """
    roles = {one.role, other.role}
    return (
        one.model == other.model
        and one.namespace == other.namespace
        and one.connector == other.connector
        and roles != {"prefill", "decode"}
    )

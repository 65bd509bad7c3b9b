"""Which instances are members of the cluster: joins, heartbeats, and instances that fell silent.

Only the Conductor calls it, and aborts the calls to instances that are lost. It reads no clock: the
time comes with ticks.
"""

from __future__ import annotations

from collections.abc import Callable

from moonserve.core.liveness import Liveness
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Beat, InstanceInfo, Left, PeerPromised
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, Micros


class Membership:
    """Adds instances to the view; facts of an earlier epoch of an instance are ignored."""

    def __init__(
        self, view: ClusterView, tuning: Tuning, cost_of: Callable[[InstanceInfo], Cost]
    ) -> None:
        self._view = view
        self._cost_of = cost_of
        self._liveness = Liveness(tuning.dead_after_us, tuning.pause_us)

    def joins(self, info: InstanceInfo, now_us: Micros) -> bool:
        """Whether this is a new start of an instance; if not, it counts as a heartbeat."""
        old = self._view.instances.get(info.id)
        if old is None or old.info.epoch < info.epoch:
            return True
        if old.info.epoch == info.epoch:
            old.heard_us = now_us
        return False

    def add(self, info: InstanceInfo, now_us: Micros) -> None:
        """Add the instance, in place of an earlier start."""
        self._view.add(InstanceView(info, now_us, self._cost_of(info)))

    def take(self, beat: Beat | PeerPromised, now_us: Micros) -> None:
        """Take in a heartbeat, or what another gateway has promised."""
        if isinstance(beat, PeerPromised):
            self._view.take_promises(beat.gateway, beat.promises, now_us)
        elif self.of_now(beat):
            view = self._view.instances[beat.instance]
            self._view.beat(view, beat.load, now_us)

    def of_now(self, fact: Beat | Left) -> bool:
        """Whether the fact is of the current start of its instance."""
        view = self._view.instances.get(fact.instance)
        return view is not None and view.info.epoch == fact.epoch

    def silent(self, now_us: Micros) -> list[InstanceId]:
        """At a tick: instances without a heartbeat for too long, unless this process slept."""
        views = self._view.instances.items()
        return self._liveness.silent(now_us, ((id, view.heard_us) for id, view in views))

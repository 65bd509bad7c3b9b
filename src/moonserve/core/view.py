"""What the Conductor believes about each instance, and what it has promised there.

Beliefs come from joins and heartbeats; promises are the Conductor's own ledger, exact at decision
time, where reports lag. Only the Conductor changes a view; placement reads it.
"""

from __future__ import annotations

import msgspec

from moonserve.core.cost import Cost
from moonserve.core.facts import InstanceInfo, InstanceLoad
from moonserve.core.units import InstanceId, Micros, RequestId, Tokens


class InstanceView:
    """One live instance: who it is, what it said last, what was promised to it."""

    def __init__(self, info: InstanceInfo, now_us: Micros) -> None:
        self.info = info
        self.cost = Cost()
        self.load = InstanceLoad(free_blocks=info.kv_blocks)
        self.heard_us = now_us
        self._queue: dict[RequestId, Micros] = {}
        self._head_since_us = now_us
        self.decoding: dict[RequestId, Tokens] = {}
        """Requests this instance decodes or will decode, with their context lengths."""

    def heard(self, load: InstanceLoad, now_us: Micros) -> None:
        """Take in a heartbeat: load, and measured samples for the cost fit."""
        self.heard_us = now_us
        self.load = load
        self.cost.observe(load.passes, load.transfers)

    def promise_prefill(self, request: RequestId, work_us: Micros, now_us: Micros) -> None:
        """Reserve `work_us` of this instance's prefill time, behind what it was promised before."""
        assert request not in self._queue
        if not self._queue:
            self._head_since_us = now_us
        self._queue[request] = work_us

    def end_prefill(self, request: RequestId, now_us: Micros) -> None:
        """The promise is over, kept or not; unknown requests are no error."""
        was_head = next(iter(self._queue), None) == request
        self._queue.pop(request, None)
        if was_head:
            self._head_since_us = now_us

    def queue_us(self, now_us: Micros) -> Micros:
        """Prefill work promised and not yet done: T_queue of Algorithm 1.

        The head has been running since it became the head, so that much of it is spent.
        """
        if not self._queue:
            return 0
        head = next(iter(self._queue.values()))
        return sum(self._queue.values()) - min(head, max(0, now_us - self._head_since_us))

    @property
    def takes_prefill(self) -> bool:
        """Whether it may be promised one more prefill."""
        return self.prefills < self.info.max_requests

    @property
    def takes_decode(self) -> bool:
        """Whether it may be promised one more decode."""
        return len(self.decoding) < self.info.max_requests

    @property
    def prefills(self) -> int:
        """How many prefills are promised here."""
        return len(self._queue)

    @property
    def promised_us(self) -> Micros:
        """Prefill time promised here, spent or not."""
        return sum(self._queue.values())

    def tbt_us(self, joining: Tokens) -> Micros:
        """Predicted time between tokens once a request of context `joining` has joined."""
        context = sum(self.decoding.values()) + joining
        return self.cost.decode_step_us(len(self.decoding) + 1, context)


class ClusterView:
    """All live instances, in the order of their ids."""

    def __init__(self) -> None:
        self.instances: dict[InstanceId, InstanceView] = {}

    def add(self, view: InstanceView) -> None:
        """Add or replace an instance, keeping id order so that ties fall the same way always."""
        self.instances[view.info.id] = view
        self.instances = dict(sorted(self.instances.items()))

    def remove(self, instance: InstanceId) -> None:
        """Forget an instance; unknown ones are no error."""
        self.instances.pop(instance, None)

    def prefills(self, model: str) -> list[InstanceView]:
        """Instances that may prefill for `model`, in id order."""
        return [v for v in self.instances.values() if serves(v.info, model, "prefill")]

    def decodes(self, model: str) -> list[InstanceView]:
        """Instances that may decode for `model`, in id order."""
        return [v for v in self.instances.values() if serves(v.info, model, "decode")]


def serves(info: InstanceInfo, model: str, role: str) -> bool:
    """Whether an instance takes this role for this model."""
    return info.model == model and info.role in (role, "both")


class Promised(msgspec.Struct, frozen=True):
    """The ledger in numbers; all zero when nothing is under way."""

    requests: int
    prefills: int
    prefill_us: Micros
    decodes: int

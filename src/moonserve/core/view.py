"""What the Conductor believes about each instance, and what it has promised there.

Beliefs come from joins and heartbeats; promises are the Conductor's own ledger, exact at decision
time, where reports lag. Only the Conductor changes a view; placement reads it. Every read is O(1):
a decision looks at every instance.
"""

from __future__ import annotations

import msgspec

from moonserve.core.cost import Cost
from moonserve.core.facts import InstanceInfo, InstanceLoad
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId, Tokens


class InstanceView:
    """One live instance: who it is, what it said last, what was promised to it."""

    def __init__(self, info: InstanceInfo, now_us: Micros, cost: Cost | None = None) -> None:
        self.info = info
        self.cost = cost or Cost()
        self.load = InstanceLoad(free_blocks=info.kv_blocks)
        self.heard_us = now_us
        self._queue: dict[RequestId, tuple[Micros, Tokens, Tokens]] = {}
        self._head_since_us = now_us
        self.promised_us: Micros = 0
        """Prefill time promised here, spent or not."""
        self.promised_tokens: Tokens = 0
        """Prompt tokens that those prefills compute."""
        self.prompt_tokens: Tokens = 0
        """All their prompt tokens, cached ones included."""
        self._decoding: dict[RequestId, Tokens] = {}
        self._tbt_goals: dict[RequestId, Micros] = {}
        self.context: Tokens = 0
        """Context lengths of all requests that decode here or will, summed."""
        self.kv_tokens = info.kv_blocks * info.namespace.block_size
        """The most context that fits here."""

    def heard(self, load: InstanceLoad, now_us: Micros) -> None:
        """Take in a heartbeat: load, and measured samples for the cost fit."""
        self.heard_us = now_us
        self.load = load
        self.cost.observe(load.passes, load.transfers)

    def promise_prefill(
        self,
        request: RequestId,
        work_us: Micros,
        tokens: Tokens,
        now_us: Micros,
        cached: Tokens = 0,
    ) -> None:
        """Reserve `work_us` of this instance's prefill time, behind what it was promised before.

        tokens: those to compute; cached: those of the prompt before them.
        """
        assert request not in self._queue
        if not self._queue:
            self._head_since_us = now_us
        self._queue[request] = (work_us, tokens, tokens + cached)
        self.promised_us += work_us
        self.promised_tokens += tokens
        self.prompt_tokens += tokens + cached

    def end_prefill(self, request: RequestId, now_us: Micros) -> None:
        """The promise is over, kept or not; unknown requests are no error."""
        was_head = next(iter(self._queue), None) == request
        work_us, tokens, prompt = self._queue.pop(request, (0, 0, 0))
        self.promised_us -= work_us
        self.promised_tokens -= tokens
        self.prompt_tokens -= prompt
        if was_head:
            self._head_since_us = now_us

    def queue_us(self, now_us: Micros) -> Micros:
        """Prefill work promised and not yet done: T_queue of Algorithm 1.

        The head has been running since it became the head, so that much of it is spent.
        """
        if not self._queue:
            return 0
        head_us = next(iter(self._queue.values()))[0]
        return self.promised_us - min(head_us, max(0, now_us - self._head_since_us))

    def promise_decode(
        self, request: RequestId, context: Tokens, tbt_goal_us: Micros | None = None
    ) -> None:
        """A request of this context will decode here; promised again, it is counted once.

        tbt_goal_us: its own objective for the time between tokens.
        """
        self.context += context - self._decoding.get(request, 0)
        self._decoding[request] = context
        if tbt_goal_us is not None:
            self._tbt_goals[request] = tbt_goal_us

    def end_decode(self, request: RequestId) -> None:
        """The promise is over, kept or not; unknown requests are no error."""
        self.context -= self._decoding.pop(request, 0)
        self._tbt_goals.pop(request, None)

    @property
    def takes_prefill(self) -> bool:
        """Whether it may be promised one more prefill."""
        return len(self._queue) < self.info.max_requests

    @property
    def takes_decode(self) -> bool:
        """Whether it may be promised one more decode."""
        return len(self._decoding) < self.info.max_requests

    @property
    def prefills(self) -> int:
        """How many prefills are promised here."""
        return len(self._queue)

    @property
    def decodes(self) -> int:
        """How many decodes are promised here, those still in prefill included."""
        return len(self._decoding)

    def has_slot(self, context: Tokens) -> bool:
        """Whether one more decode of this context finds a place in the batch, and its KV room."""
        return len(self._decoding) < self.info.max_seqs and self.context + context <= self.kv_tokens

    def tbt_us(self, joining: Tokens) -> Micros:
        """Predicted time between tokens once a request of context `joining` has joined.

        All members share a pass, so it is the same for every one of them.
        """
        return self.cost.decode_step_us(len(self._decoding) + 1, self.context + joining)

    def strictest_us(self) -> Micros | None:
        """The tightest TBT objective of those who decode here; None when nobody has one."""
        return min(self._tbt_goals.values(), default=None)


class ClusterView:
    """All live instances, in the order of their ids."""

    def __init__(self) -> None:
        self.instances: dict[InstanceId, InstanceView] = {}
        self._by_role: dict[tuple[str, str], list[InstanceView]] = {}
        self.racks: dict[SegmentId, str] = {}
        """Where each segment lies, as far as its instance said."""

    def add(self, view: InstanceView) -> None:
        """Add or replace an instance, keeping id order so that ties fall the same way always."""
        self.instances[view.info.id] = view
        self.instances = dict(sorted(self.instances.items()))
        self._changed()

    def remove(self, instance: InstanceId) -> None:
        """Forget an instance; unknown ones are no error."""
        self.instances.pop(instance, None)
        self._changed()

    def prefills(self, model: str) -> list[InstanceView]:
        """Instances that may prefill for `model`, in id order; not to be changed."""
        return self._role(model, "prefill")

    def decodes(self, model: str) -> list[InstanceView]:
        """Instances that may decode for `model`, in id order; not to be changed."""
        return self._role(model, "decode")

    def _changed(self) -> None:
        self._by_role.clear()
        infos = [view.info for view in self.instances.values()]
        self.racks = {i.segment: i.rack for i in infos if i.segment is not None and i.rack}

    def _role(self, model: str, role: str) -> list[InstanceView]:
        found = self._by_role.get((model, role))
        if found is None:
            found = [v for v in self.instances.values() if serves(v.info, model, role)]
            if found:  # names of models that nobody serves come from clients: not kept
                self._by_role[model, role] = found
        return found


def serves(info: InstanceInfo, model: str, role: str) -> bool:
    """Whether an instance takes this role for this model."""
    return info.model == model and info.role in (role, "both")


class Promised(msgspec.Struct, frozen=True):
    """The ledger in numbers; all zero when nothing is under way."""

    requests: int
    prefills: int
    prefill_us: Micros
    decodes: int

"""The Conductor: which prefill node, which decode node, from where comes the prefix.

One machine: `step(now, facts) -> actions`. It joins the view of the cluster, the prefix index,
placement and every request's life, and keeps the ledger of what was promised. Driven by
live/conductor and by the simulator; never waits, never calls, never knows the time by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from moonserve.core.facts import (
    Arrived,
    Beat,
    BlockRemoved,
    BlockStored,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    InstanceInfo,
    Joined,
    Left,
    PrefillEnded,
    Tick,
)
from moonserve.core.handoff import (
    MAX_ATTEMPTS,
    End,
    Handoff,
    LifeFact,
    Place,
    StartDecode,
    Wait,
)
from moonserve.core.placement import Decision, choose_decode, place, preferred
from moonserve.core.prefix import PrefixIndex
from moonserve.core.units import MICROS_PER_SECOND, InstanceId, Micros, RequestId
from moonserve.core.view import ClusterView, InstanceView, Promised


class Prefill(msgspec.Struct, frozen=True):
    """Call `to` to prefill what is known of the request, reusing decision.reused_tokens."""

    request: RequestId
    number: int
    to: InstanceInfo
    decision: Decision


class Decode(msgspec.Struct, frozen=True):
    """Call `to` to decode on from the KV that prefill put in the store."""

    request: RequestId
    number: int
    to: InstanceInfo


class Abort(msgspec.Struct, frozen=True):
    """Break off call `number`: its instance is gone. The outcome is reported as CallFailed."""

    request: RequestId
    number: int
    why: str


class Refuse(msgspec.Struct, frozen=True):
    """Nobody can take the request; nothing was spent on it.

    `retry_after_us` is None where nobody is alive; else all are full, and may not be by then.
    """

    request: RequestId
    why: str
    retry_after_us: Micros | None = None


class GiveUp(msgspec.Struct, frozen=True):
    """The request failed and no retry is left."""

    request: RequestId
    why: str


class Release(msgspec.Struct, frozen=True):
    """The request's life is over, however it ended: drop its leases on the store.

    One lease per prefill call, by the call's number.
    """

    request: RequestId
    numbers: tuple[int, ...]


Action: TypeAlias = Prefill | Decode | Abort | Refuse | GiveUp | Release


class Policy(msgspec.Struct, frozen=True):
    """Settings of the Conductor."""

    kvcache_balancing_threshold: float = 1.0
    """Fetch when the pool's prefix exceeds this many times the instance's own (Algorithm 1)."""
    dead_after_us: Micros = 5_000_000
    """An instance not heard of for this long is taken for dead."""
    pause_us: Micros = 2_000_000
    """A tick that comes later than this says that we slept, not that everybody else died."""
    patience_us: Micros = 30_000_000
    """How long a request that lost its instances waits for one to join: a restart's time."""


class Conductor:
    """See the module. All facts of one instant go into one `step`."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.view = ClusterView()
        self.index = PrefixIndex()
        self._lives: dict[RequestId, Handoff] = {}
        self._parked: dict[RequestId, Micros] = {}
        """Lives that wait for an instance to join, and since when."""
        self._ticked_us: Micros | None = None
        self._actions: list[Action] = []

    def step(self, now_us: Micros, facts: Iterable[Fact]) -> list[Action]:
        """Take the facts of one instant, in rank order, and say what is to be done."""
        for fact in sorted(facts, key=lambda f: (f.rank, f.subject)):
            match fact:
                case BlockStored(key, segment):
                    self.index.stored(key, segment)
                case BlockRemoved(key, segment):
                    self.index.removed(key, segment)
                case Joined(info):
                    self._joined(info, now_us)
                case Beat(instance, epoch, load):
                    view = self.view.instances.get(instance)
                    if view is not None and view.info.epoch == epoch:
                        view.heard(load, now_us)
                case Left(instance, epoch):
                    view = self.view.instances.get(instance)
                    if view is not None and view.info.epoch == epoch:
                        self.view.remove(instance)  # it still finishes what it has
                case Tick():
                    self._reap(now_us)
                    self._unpark(now_us)
                case Arrived(request, keys):
                    assert request.id not in self._lives, "request ids are unique"
                    life = Handoff(request, keys)
                    self._lives[request.id] = life
                    self._place(life, now_us)
                case PrefillEnded() | DecodeEnded() | CallFailed() | ClientGone():
                    self._life(fact, now_us)
        actions, self._actions = self._actions, []
        return actions

    def promised(self) -> Promised:
        """The ledger: zero in every field when no request is under way."""
        views = self.view.instances.values()
        return Promised(
            requests=len(self._lives),
            prefills=sum(view.prefills for view in views),
            prefill_us=sum(view.promised_us for view in views),
            decodes=sum(len(view.decoding) for view in views),
        )

    def _joined(self, info: InstanceInfo, now_us: Micros) -> None:
        old = self.view.instances.get(info.id)
        if old is not None and old.info.epoch >= info.epoch:
            if old.info.epoch == info.epoch:
                old.heard_us = now_us
            return
        if old is not None:
            self._lost(info.id, "it restarted")
        self.view.add(InstanceView(info, now_us))
        self._unpark(now_us)

    def _reap(self, now_us: Micros) -> None:
        last_us, self._ticked_us = self._ticked_us, now_us
        if last_us is None or now_us - last_us > self.policy.pause_us:
            return
        dead_us = now_us - self.policy.dead_after_us
        for instance in [i for i, v in self.view.instances.items() if v.heard_us < dead_us]:
            self._lost(instance, "it was not heard of any more")

    def _lost(self, instance: InstanceId, why: str) -> None:
        self.view.remove(instance)
        for life in self._lives.values():
            if life.instance == instance:
                why_all = f"instance {instance} is gone: {why}"
                self._actions.append(Abort(life.request.id, life.number, why_all))

    def _life(self, fact: LifeFact, now_us: Micros) -> None:
        life = self._lives.get(fact.request)
        if life is None:
            return
        absent = _unreachable(life, fact)
        match life.step(fact):
            case Wait():
                pass
            case Place():
                self._unreserve(life, now_us)
                life.unplaced()
                self._forget(absent)
                self._place(life, now_us)
            case StartDecode():
                self._decode(life, now_us)
            case End(failure):
                self._end(life, failure, now_us)
                self._forget(absent)

    def _forget(self, absent: InstanceId | None) -> None:
        """Nobody listens there: place nothing on it until it joins again, a heartbeat from now."""
        if absent is not None:
            self._lost(absent, "it refuses connections")

    def _place(self, life: Handoff, now_us: Micros) -> None:
        request = life.request
        model = request.model
        decision = place(
            life.length,
            self.index.match(life.keys),
            self.view.prefills(model),
            self.view.decodes(model),
            self.policy.kvcache_balancing_threshold,
            now_us,
            avoid=life.failed,
        )
        if decision is None:
            if life.attempts:
                self._parked.setdefault(request.id, now_us)
            else:
                self._actions.append(self._refusal(life, now_us))
                self._end(life, None, now_us)
            return
        self._parked.pop(request.id, None)
        number = life.placed(decision)
        prefill = self.view.instances[decision.prefill]
        chosen = next(c for c in decision.candidates if c.instance == decision.prefill)
        prefill.promise_prefill(request.id, chosen.transfer_us + chosen.compute_us, now_us)
        self.view.instances[decision.decode].decoding[request.id] = life.length
        self._actions.append(Prefill(request.id, number, prefill.info, decision))

    def _refusal(self, life: Handoff, now_us: Micros) -> Refuse:
        model = life.request.model
        prefills, decodes = self.view.prefills(model), self.view.decodes(model)
        if not prefills or not decodes:
            role = "decode" if prefills else "prefill"
            return Refuse(life.request.id, f"no {role} instance for model {model} is alive")
        full = "decode" if any(view.takes_prefill for view in prefills) else "prefill"
        wait_us = max(MICROS_PER_SECOND, min(view.queue_us(now_us) for view in prefills))
        return Refuse(life.request.id, f"every {full} instance of model {model} is full", wait_us)

    def _unpark(self, now_us: Micros) -> None:
        """Try to place those who wait; those who waited too long have failed."""
        for request, since_us in list(self._parked.items()):
            life = self._lives[request]
            self._place(life, now_us)
            if request in self._parked and now_us - since_us > self.policy.patience_us:
                why = f"no instance for model {life.request.model} came back in time"
                self._end(life, why, now_us)

    def _decode(self, life: Handoff, now_us: Micros) -> None:
        request, decision = life.request, life.decision
        assert decision is not None
        self._end_prefill(life, now_us)
        view = self.view.instances.get(decision.decode)
        if view is None:
            alive = self.view.decodes(request.model)
            if not alive and life.attempts >= MAX_ATTEMPTS:
                why = f"no decode instance for model {request.model} is alive"
                self._end(life, why, now_us)
                return
            if not alive:
                life.unplaced()
                self._place(life, now_us)
                return
            view = choose_decode(life.length, preferred(alive, life.failed))
        view.decoding[request.id] = life.length  # again, if the instance restarted meanwhile
        number = life.decoding(view.info.id)
        self._actions.append(Decode(request.id, number, view.info))

    def _end(self, life: Handoff, failure: str | None, now_us: Micros) -> None:
        life.end()
        self._unreserve(life, now_us)
        del self._lives[life.request.id]
        self._parked.pop(life.request.id, None)
        if failure is not None:
            self._actions.append(GiveUp(life.request.id, failure))
        self._actions.append(Release(life.request.id, tuple(life.leases)))

    def _end_prefill(self, life: Handoff, now_us: Micros) -> None:
        if life.decision is not None:
            view = self.view.instances.get(life.decision.prefill)
            if view is not None:
                view.end_prefill(life.request.id, now_us)

    def _unreserve(self, life: Handoff, now_us: Micros) -> None:
        self._end_prefill(life, now_us)
        if life.decision is not None:
            view = self.view.instances.get(life.decision.decode)
            if view is not None:
                view.decoding.pop(life.request.id, None)


def _unreachable(life: Handoff, fact: LifeFact) -> InstanceId | None:
    """The instance that this fact, about the call now out, says nobody listens at."""
    if isinstance(fact, CallFailed) and fact.unreachable and fact.number == life.number:
        return life.instance
    return None

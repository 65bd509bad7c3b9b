"""The Conductor: which prefill node, which decode node, from where comes the prefix.

One machine: `step(now, facts) -> actions`. It joins the view of the cluster, the prefix index,
placement and every request's life, and keeps the ledger of what was promised. Driven by
live/control/loop and by the simulator; never waits, never calls, never knows the time by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from moonserve.core.kv.facts import OfBlocks
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.pending import PendingPrefixes
from moonserve.core.schedule import admission, connectors, groups
from moonserve.core.schedule.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.schedule.admission_state import Outlook
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import (
    ORDER,
    Arrived,
    Beat,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    InstanceInfo,
    Joined,
    Leading,
    Left,
    PeerPromised,
    PrefillEnded,
    SpreadUpTo,
    StageEnded,
    Tick,
)
from moonserve.core.schedule.handoff import End, Handoff, LifeFact, Place, StartDecode, Wait
from moonserve.core.schedule.hot import Hot
from moonserve.core.schedule.membership import Presence
from moonserve.core.schedule.placement import Ask, Decision, choose_decode, preferred
from moonserve.core.schedule.policies import Memory, Tuning, Verdict, decide, policy_of, work_us
from moonserve.core.schedule.prediction_errors import PredictionErrors
from moonserve.core.schedule.view import ClusterView, InstanceView, Promised
from moonserve.core.schedule.waiting import Waiter, WaitingRoom
from moonserve.core.units import InstanceId, Micros, RequestId, Tokens

if TYPE_CHECKING:
    from random import Random  # noqa: TID251 - for its type only


class Conductor:
    """See the module. All facts of one instant go into one `step`.

    cost_of: costs of an instance that joins; rng: for policies that draw; length_of: see Oracle.
    """

    def __init__(
        self,
        tuning: Tuning | None = None,
        rng: Random | None = None,
        cost_of: Callable[[InstanceInfo], Cost] = lambda info: Cost(),
        length_of: Callable[[RequestId], Tokens] | None = None,
    ) -> None:
        self.tuning = tuning or Tuning()
        self._policy = policy_of(self.tuning.policy)
        self._memory = Memory(rng)
        self.outlook = Outlook(self.tuning, length_of)
        self.view = ClusterView()
        self._presence = Presence(self.view, self.tuning, cost_of)
        self.index = PrefixIndex()
        self._coming = PendingPrefixes()
        self.hot = Hot(self.tuning, self.view, self.index, self._coming)
        self._lives: dict[RequestId, Handoff] = {}
        self._rooms: dict[str, WaitingRoom] = {}
        """Lives that wait for an instance to be free, by model served; with late binding."""
        self._parked: dict[RequestId, Micros] = {}
        """Lives that wait for an instance to join, and since when."""
        self._held: dict[RequestId, Handoff] = {}
        """Lives whose prefill has ended and that wait for room in decode, by then."""
        self._actions: list[Action] = []

    def step(self, now_us: Micros, facts: Iterable[Fact]) -> list[Action]:
        """Take the facts of one instant, in rank order, and say what is to be done."""
        left = list[RequestId]()
        for fact in (facts := sorted(facts, key=ORDER)):
            match fact:  # the most frequent first
                case ClientGone(name) if name not in self._lives:
                    left.append(name)  # perhaps before it was placed: arrivals come later
                case PrefillEnded() | DecodeEnded() | CallFailed() | ClientGone():
                    self._life(fact, now_us)
                case Arrived(request) if request.id in left:
                    left.remove(request.id)
                    self._actions.append(Release(request.id, ()))
                case Arrived(request, keys):
                    assert request.id not in self._lives, "request ids are unique"
                    self.outlook.asked(request, now_us)
                    life = Handoff(request, keys, request.since_us(now_us))
                    self._lives[request.id] = life
                    self._place(life, now_us)
                case OfBlocks() | SpreadUpTo() | Leading():
                    self.hot.heard(fact)
                case Joined(info):
                    self._joined(info, now_us)
                case Beat() | PeerPromised():
                    self._presence.heard(fact, now_us)
                case Left(instance, lost=why) if self._presence.of_now(fact):
                    self._lost(instance, why)
                case Tick():
                    self.hot.expire(now_us)
                    for instance in self._presence.silent(now_us):
                        self._lost(instance, "it was not heard of any more")
                    self._unpark(now_us)
                case StageEnded(request, instance=instance) if request in self._lives:
                    if self._lives[request].staged(fact):
                        groups.release(self.view.instances, request, [instance], now_us)
        held = list(self._held.values())
        for life in held if held and self.outlook.stirs(facts, held, now_us) else ():
            self._decode(life, now_us)
        for model in list(self._rooms):
            self._bind(model, now_us)
        actions, self._actions = self._actions, []
        return actions

    def wake_us(self, now_us: Micros) -> Micros | None:
        """When to step again though nothing happens; None: no need. Later than now."""
        if not (self._held or self._rooms):
            return None
        times = [self.outlook.patient_us(h.request, h.arrived_us) for h in self._held.values()]
        ahead_us, refuses = self.tuning.bind_ahead_us, admission.refuses_some(self.tuning)
        for model, room in self._rooms.items():
            free_us = [now_us + view.queue_us(now_us) for view in self.view.prefills(model)]
            times += room.wakes_us(now_us, free_us, ahead_us, refuses)
        return min((time for time in times if time > now_us), default=None)

    def promised(self) -> Promised:
        """The ledger: zero in every field when no request is under way."""
        return self.view.promised(len(self._lives))

    @property
    def errors(self) -> PredictionErrors:
        """How far off the predictions were."""
        return self.outlook.errors

    @property
    def waiting(self) -> int:
        """Requests that wait here to be bound."""
        return sum(len(room) for room in self._rooms.values())

    # Instances.

    def _joined(self, info: InstanceInfo, now_us: Micros) -> None:
        if not self._presence.joins(info, now_us):
            return
        if info.id in self.view.instances:
            self._lost(info.id, "it restarted")
        self._presence.add(info, now_us)
        self._unpark(now_us)

    def _lost(self, instance: InstanceId, why: str) -> None:
        self.view.remove(instance)
        for life in self._lives.values() if why else ():  # else it still finishes what it has
            if instance in life.at:
                life.at = [instance]  # of a group, one that is lost ends it
                why_all = f"instance {instance} is gone: {why}"
                self._actions.append(Abort(life.request.id, life.number, why_all))

    def _forget(self, absent: InstanceId | None) -> None:
        """Nobody listens there: place nothing on it until it joins again, a heartbeat from now."""
        if absent is not None:
            self._lost(absent, "it refuses connections")

    # Lives.

    def _life(self, fact: LifeFact, now_us: Micros) -> None:
        if (life := self._lives.get(fact.request)) is None:
            return
        absent = life.absent(fact)
        match life.step(fact):
            case End(failure):
                self.outlook.ended(fact, life.request, self._decoder(life), now_us)
                self._end(life, failure, now_us)
                self._forget(absent)
            case StartDecode() if life.decision is not None and life.decision.joint:
                self._go_on(life, life.decision, now_us)
            case StartDecode() if self._held:
                self._held[life.request.id] = life  # behind them, in this step
            case StartDecode():
                self._decode(life, now_us)
            case Place():
                self._unreserve(life, now_us)
                life.unplaced()
                self._forget(absent)
                self._place(life, now_us)
            case Wait():
                pass

    def _place(self, life: Handoff, now_us: Micros) -> None:
        """Bind the request to its instances, now or when one is about to be free."""
        model = life.request.model
        prefills, decodes = self.view.prefills(model), self.view.decodes(model)
        if self._policy.late and admission.fits(life.length, prefills, decodes):
            self._wait(life, prefills, now_us)
            return
        verdict = self._decide(life, prefills, decodes, now_us) if prefills and decodes else None
        if verdict is None and (life.attempts or life.request.id in self._parked):
            self._parked.setdefault(life.request.id, now_us)
        elif verdict is None:
            self._refuse(life, admission.nobody(life.request, self.view, now_us), now_us)
        else:
            refusal = admission.unwanted(life.request, verdict, self.tuning, self.view)
            if refusal is not None and not life.attempts:
                self._refuse(life, refusal, now_us)
            else:
                self._bound(life, verdict.decision, now_us)

    def _decide(
        self,
        life: Handoff,
        prefills: list[InstanceView],
        decodes: list[InstanceView],
        now_us: Micros,
        others: list[InstanceView] | None = None,
    ) -> Verdict | None:
        ask = Ask(
            length=life.length,
            match=self.index.match(life.keys),
            coming=self._coming.match(life.keys),
            racks=self.view.racks,
            doubts=self.view.doubts,
            waited_us=now_us - life.arrived_us,
            expected_tokens=self.outlook.expected_tokens,
            whole=life.request.whole,
        )
        request, tuning = life.request, self.tuning
        held, memory = self.outlook.held_to(request, prefills, now_us), self._memory
        look = self.outlook.look(request, life.length, now_us, len(decodes))
        return decide(
            ask, prefills, decodes, held, tuning, memory, now_us, life.failed, look, others
        )

    def _bound(self, life: Handoff, decision: Decision, now_us: Micros) -> None:
        """Reserve at decision time, released on every end path; send the prefill call out."""
        request = life.request
        self._parked.pop(request.id, None)
        number, shares = life.placed(decision), life.shares
        infos = groups.promise(self.view.instances, request.id, shares, now_us)
        for share in shares if self._policy.looks_back else ():
            self._memory.assigned(share.instance, now_us, share.work_us)
        first, kept = infos[0], decision.reused_tokens <= decision.candidates[0].local_tokens
        if first.segment is not None and (kept or decision.copies):
            keys = life.keys[: shares[0].end // first.namespace.block_size]
            self._coming.promised(request.id, first.segment, keys)
        decode = self.view.instances[decision.decode]
        lag_us, tbt_us = decision.predicted_ttft_us - decision.waited_us, decision.predicted_tbt_us
        self.outlook.promise(request, life.length, decode, now_us, lag_us, tbt_us)
        group = tuple(infos) if decision.stages else ()
        self._actions.append(Prefill(request.id, number, infos[-1], decision, decode.info, group))
        self._actions += self.hot.placed(request, life.keys, decision, now_us)

    def _unpark(self, now_us: Micros) -> None:
        """Try to place those who wait; those who waited too long have failed."""
        for request, since_us in list(self._parked.items()):
            life = self._lives[request]
            self._place(life, now_us)
            if request in self._parked and now_us - since_us > self.tuning.patience_us:
                self._end(life, admission.nobody(life.request, self.view, now_us).why, now_us)

    def _go_on(self, life: Handoff, decision: Decision, now_us: Micros) -> None:
        """The call that has prefilled decodes on; no other goes out."""
        self._end_prefill(life, now_us)
        view = self.view.instances.get(decision.decode)
        if view is not None and life.request.id in view.stays.promised:  # else it is another start
            view.begin_decode(life.request.id, now_us)

    def _decode(self, life: Handoff, now_us: Micros) -> None:
        request, decision, outlook = life.request, life.decision, self.outlook
        context = outlook.context(life.length)
        assert decision is not None
        self._end_prefill(life, now_us)
        view, way = self.view.instances.get(decision.decode), decision.connector
        if view is None:
            alive = connectors.speaking(way, self.view.decodes(request.model))
            if not alive and life.exhausted:
                self._end(life, f"no decode instance for model {request.model} is alive", now_us)
                return
            if not alive:
                life.unplaced()
                self._place(life, now_us)
                return
            goal_us = outlook.slo(request).tbt_us
            view, _ = choose_decode(context, preferred(alive, life.failed), goal_us)
        if self._held.pop(request.id, None) is None:
            outlook.errors.tbt.add(decision.predicted_tbt_us, view.tbt_now_us(context))
        if life.attempts == 1:  # else its client may have tokens
            others = connectors.speaking(way, self.view.decodes(request.model))
            view, refusal = outlook.arrives(request, view, others, context, decision, now_us)
            if refusal is not None:
                if now_us < outlook.patient_us(request, life.arrived_us):
                    self._held[request.id] = life
                else:
                    self._refuse(life, refusal, now_us)
                return
        if view.info.id != decision.decode:
            self._unreserve(life, now_us)
        # Again: the instance may be another one, or have restarted.
        outlook.promise(request, life.length, view, now_us, 0, view.tbt_now_us(context))
        view.begin_decode(request.id, now_us)
        number = life.decoding(view.info.id)
        self._actions.append(Decode(request.id, number, view.info))

    def _end(self, life: Handoff, failure: str | None, now_us: Micros) -> None:
        life.end()
        self._unreserve(life, now_us)
        request = life.request
        del self._lives[request.id]
        self._parked.pop(request.id, None)
        if request.model in self._rooms:
            self._rooms[request.model].remove(request.id)
        if failure is not None:
            self._actions.append(GiveUp(request.id, failure))
        self._actions.append(Release(request.id, tuple(life.leases)))

    def _end_prefill(self, life: Handoff, now_us: Micros) -> None:
        if not life.shares:
            return
        who, life.shares = [share.instance for share in life.shares], ()
        groups.release(self.view.instances, life.request.id, who, now_us)
        self._coming.over(life.request.id)

    def _unreserve(self, life: Handoff, now_us: Micros) -> None:
        self._end_prefill(life, now_us)
        self._held.pop(life.request.id, None)
        if (view := self._decoder(life)) is not None:
            view.end_decode(life.request.id, now_us)

    def _decoder(self, life: Handoff) -> InstanceView | None:
        return None if life.decision is None else self.view.instances.get(life.decision.decode)

    # Late binding.

    def _wait(self, life: Handoff, prefills: Sequence[InstanceView], now_us: Micros) -> None:
        """Let the request into the waiting room; `_bind` follows in the same step."""
        self._parked.pop(life.request.id, None)
        room = self._rooms.setdefault(life.request.model, WaitingRoom())
        if len(room) >= self.tuning.max_waiting and not life.attempts:
            last = self._lives[room.gives_way(life.request)]
            self._refuse(last, admission.too_many(last.request, room, len(prefills)), now_us)
            if last is life:
                return
        slo, pool = self.outlook.slo(life.request), self.index.match(life.keys).pool
        takes_us = work_us(prefills, life.length, pool, slo, self.tuning)
        came_us = now_us if life.attempts else life.arrived_us
        room.add(Waiter.of(life.request, slo, came_us, takes_us, life.attempts > 0))

    def _bind(self, model: str, now_us: Micros) -> None:
        """Give waiting requests to instances that are, or are about to be, free."""
        room = self._rooms[model]
        prefills, decodes = self.view.prefills(model), self.view.decodes(model)
        for waiter in room.hopeless(now_us):
            life = self._lives[waiter.request]
            if not life.attempts and admission.refuses_ttft(self.tuning, waiter.priority):
                refusal = admission.too_late(waiter, room, len(prefills), now_us)
                self._refuse(life, refusal, now_us)
        if not prefills or not decodes:
            for waiter in room.everybody():
                self._parked[waiter.request] = now_us
            del self._rooms[model]
            return
        held, ahead_us = set[RequestId](), self.tuning.bind_ahead_us
        room.crowded = set()
        while len(room):
            if not any(v.is_free(now_us, ahead_us) for v in prefills):
                return
            free_us = [now_us + view.queue_us(now_us) for view in prefills]
            first = room.next(now_us, free_us, held | room.crowded)
            if first is None:
                return
            life = self._lives[first.request]
            if not admission.fits(life.length, prefills, decodes):
                room.remove(first.request)  # whom it waited for is gone
                self._place(life, now_us)
                continue
            fitting = [v for v in prefills if v.kv_tokens >= life.length]
            free = [v for v in preferred(fitting, life.failed) if v.is_free(now_us, ahead_us)]
            if not free:
                held.add(first.request)  # those that can take it are busy: others may pass
                continue
            verdict = self._decide(life, free, decodes, now_us, fitting)
            if verdict is None:
                return
            slo, is_late = self.outlook.slo(life.request), now_us > first.begin_us
            if admission.yields(life.request, verdict, slo, decodes, is_late):
                room.crowd(first, is_late)  # nothing is gained by a prefill now
                continue
            request, tuning = life.request, self.tuning
            unwanted = admission.unwanted_in_decode(request, verdict, slo, tuning, self.view)
            if unwanted is not None and not life.attempts:
                self._refuse(life, unwanted, now_us)
                continue
            room.went(first)
            self._bound(life, verdict.decision, now_us)

    def _refuse(self, life: Handoff, refusal: Refuse, now_us: Micros) -> None:
        self._actions.append(self.outlook.with_drain(life.request, refusal, self.view, now_us))
        self._end(life, None, now_us)

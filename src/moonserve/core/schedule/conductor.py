"""The Conductor: which instance prefills a request, which decodes it, where its prefix comes from.

One machine: `step(now, facts) -> actions`. Facts change the view of the cluster, the prefix index
and the lives of requests. A life that needs instances gets a decision (core.schedule.decide); what
it promises is reserved in the views at once; actions tell the driver what to call. Every promise is
released on every end of a life: the ledger is zero when no request is under way.

Driven by live/control/loop and by the simulator. It never waits, never calls, and never reads a
clock. Only the Conductor changes a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from moonserve.core.kv.facts import BlocksStored, OfBlocks
from moonserve.core.kv.index import PendingPrefixes, PrefixIndex
from moonserve.core.request import Request, Slo
from moonserve.core.schedule import admission, connectors, groups
from moonserve.core.schedule.actions import (
    Abort,
    Action,
    Decision,
    Decode,
    GiveUp,
    Prefill,
    Refuse,
    Release,
)
from moonserve.core.schedule.admission import DecodeEntry
from moonserve.core.schedule.adoption import Adopted, Deposed, StepFact
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.decide import Verdict, decide
from moonserve.core.schedule.decode_forecast import DecodeForecast, PredictionErrors
from moonserve.core.schedule.estimate import Ask, Roles, choose_decode
from moonserve.core.schedule.facts import (
    ORDER,
    Arrived,
    Beat,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Draining,
    InstanceInfo,
    Joined,
    Leading,
    Left,
    PrefillEnded,
    Selected,
    SpreadUpTo,
    StageEnded,
    Tick,
)
from moonserve.core.schedule.handoff import (
    End,
    Handoff,
    LifeFact,
    Pause,
    Phase,
    Place,
    StartDecode,
    Wait,
)
from moonserve.core.schedule.hot import Hot
from moonserve.core.schedule.membership import RESTARTED, MemberChange, Membership
from moonserve.core.schedule.objectives import Objectives, Tenants
from moonserve.core.schedule.policies import policy_of
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.retry import RetryCalendar
from moonserve.core.schedule.retry_after import RetryAfter
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import (
    ClusterView,
    FreeTimes,
    InstanceView,
    Prefills,
    Promised,
    allowed,
    preferred,
)
from moonserve.core.schedule.waiting import Waiter, WaitingRoom
from moonserve.core.shares import Shares
from moonserve.core.units import (
    MICROS_PER_SECOND,
    BlockKey,
    InstanceId,
    Micros,
    RequestId,
    SegmentId,
    Tokens,
)

if TYPE_CHECKING:
    from random import Random  # noqa: TID251 - for its type only

WORTH = 0.1
"""Late binding: a request waits for a prefix that saves it this share of its prefill."""
MARGIN_US: Micros = MICROS_PER_SECOND
"""Late binding: by so much a request that waits for a prefix must be in time."""
PAUSE_US: Micros = MICROS_PER_SECOND
"""Between two calls of a request that has tokens and whose calls have failed too often."""


class _Unknown(msgspec.Struct):
    """Instances of one adopted life that have not joined here yet."""

    instances: list[InstanceId]
    since_us: Micros
    """Since when they are waited for."""
    called_us: Micros
    """When the life's call went out."""


class Conductor:
    """See the module. All facts of one instant go into one `step`.

    cost_of: costs of an instance that joins; rng: for policies that draw; length_of: output lengths
    for the oracle; clients_return: whether refused clients send their requests again.
    """

    def __init__(
        self,
        tuning: Tuning | None = None,
        rng: Random | None = None,
        cost_of: Callable[[InstanceInfo], Cost] = lambda info: Cost(),
        length_of: Callable[[RequestId], Tokens] | None = None,
        clients_return: bool = True,
    ) -> None:
        self.tuning = tuning or Tuning()
        self._policy = policy_of(self.tuning.policy)
        self._state = PolicyState(rng)
        self.errors = PredictionErrors()
        """How far off the predictions were."""
        # What is known of the cluster.
        self.view = ClusterView()
        self.index = PrefixIndex(self.tuning.max_indexed_blocks)
        self._pending = PendingPrefixes()
        self._members = Membership(self.view, self.tuning, cost_of)
        self.hot = Hot(self.tuning, self.view, self.index, self._pending)
        # What is known of clients and of outputs.
        self._tenants = Tenants()
        self.retries = RetryCalendar(clients_return)
        self._objectives = Objectives(self.tuning, self._tenants, self.retries)
        self._forecast = DecodeForecast(
            self.tuning, self._objectives, self.retries, self.errors, length_of
        )
        self._entry = DecodeEntry(self.tuning, self._objectives, self._forecast)
        self._retry_after = RetryAfter(self.tuning, self._objectives, self._forecast, self.retries)
        # Requests.
        self._lives: dict[RequestId, Handoff] = {}
        self._under_way = Shares()
        """Who has how many lives."""
        self._rooms: dict[str, WaitingRoom] = {}
        """Lives that wait for an instance to be free, by model served; with late binding."""
        self._running = PendingPrefixes()
        """What the prefills of bound lives compute, by instance; with late binding."""
        self._parked: dict[RequestId, Micros] = {}
        """Lives that wait for an instance to join, and since when."""
        self._paused: dict[RequestId, Micros] = {}
        """Lives whose calls failed too often, and when they are placed again."""
        self._ticked_us: Micros | None = None
        self._held: dict[RequestId, Handoff] = {}
        """Lives whose prefill has ended and that wait for room in decode."""
        self._unknown: dict[RequestId, _Unknown] = {}
        """Adopted lives with instances that have not joined here yet."""
        self._actions: list[Action] = []

    # Facts.

    def step(self, now_us: Micros, facts: Iterable[StepFact]) -> list[Action]:
        """Take the facts of one instant, in rank order, and return what is to be done."""
        facts = sorted(facts, key=ORDER)
        gone: list[RequestId] = []
        """Clients that left and whose request may still be among this step's facts: ClientGone
        sorts before Arrived."""
        for fact in facts:
            match fact:  # the most frequent first: a class that does not match takes time
                case DecodeEnded() | PrefillEnded() | CallFailed():
                    self._go_on(fact, now_us)
                case Arrived(request) if request.id in gone:
                    gone.remove(request.id)
                    self._actions.append(Release(request.id, ()))
                case Arrived(request, keys):
                    self._arrive(request, keys, now_us)
                case ClientGone(name) if name not in self._lives:
                    gone.append(name)
                case ClientGone():
                    self._go_on(fact, now_us)
                case OfBlocks() | SpreadUpTo() | Leading():
                    self.hot.take(fact)
                    if self._rooms and isinstance(fact, BlocksStored):
                        self._reuse_more(fact.keys)
                case Joined(info):
                    self._join(info, now_us)
                case Beat():
                    self._members.take(fact, now_us)
                case Left(instance, lost=why) if self._members.of_now(fact):
                    self._lose(instance, why)
                case StageEnded(request) if request in self._lives:
                    self._end_stage(self._lives[request], fact, now_us)
                case Adopted():
                    self._adopt(fact, now_us)
                case Draining():
                    if self._members.drain(fact):
                        self._unpark(now_us)
                case Selected(prefill, decode):
                    self.view.use(prefill, decode)
                case Tick():
                    self._tick(now_us)
                case Deposed():
                    for life in list(self._lives.values()):
                        self._drop(life, now_us)
        self._try_held(facts, now_us)
        self._end_pauses(now_us)
        for model in list(self._rooms):
            self._bind(model, now_us)
        actions = self._actions
        self._actions = []
        return actions

    def wake_us(self, now_us: Micros) -> Micros | None:
        """When to step again though nothing happens; None: no need. Later than now."""
        if not (self._held or self._rooms or self._paused):
            return None
        times = [self._entry.patient_us(life) for life in self._held.values()]
        times += self._paused.values()
        ahead_us = self.tuning.bind_ahead_us
        refuses = admission.refuses_some(self.tuning)
        for model, room in self._rooms.items():
            views = self.view.prefills(model) if ahead_us else ()
            free_us = [now_us + view.queue_us(now_us) for view in views]
            times += room.wakes_us(now_us, free_us, ahead_us, refuses)
        return min((time for time in times if time > now_us), default=None)

    def _tick(self, now_us: Micros) -> None:
        slept_us = 0 if self._ticked_us is None else now_us - self._ticked_us
        if slept_us > self.tuning.pause_us:
            self._allow(slept_us)
        self._ticked_us = now_us
        self.hot.expire(now_us)
        for instance in self._members.silent(now_us):
            self._lose(instance, "it sent no heartbeat for too long")
        self._give_up_unknown(now_us)
        self._unpark(now_us)

    def _allow(self, slept_us: Micros) -> None:
        """This process slept for so long: for lives that wait, this time has not passed."""
        for request in self._parked:
            self._parked[request] += slept_us
        for unknown in self._unknown.values():
            unknown.since_us += slept_us
        for life in self._lives.values():
            if life.stalled_us is not None:
                life.stalled_us += slept_us

    # What others read.

    def slo(self, request: Request) -> Slo:
        """A request's own objectives, or the cluster's."""
        return self._objectives.own(request)

    def promised(self) -> Promised:
        """The ledger: zero in every field when no request is under way."""
        return self.view.promised(len(self._lives))

    @property
    def waiting(self) -> int:
        """Requests that wait for an instance to be free."""
        return sum(len(room) for room in self._rooms.values())

    def preview(
        self, request: Request, keys: Sequence[BlockKey], now_us: Micros
    ) -> Decision | Refuse:
        """What the request would get if it arrived now; nothing changes.

        With late binding: as if it were first in the waiting room now. A refusal has no Retry-After
        slot booked.
        """
        life = Handoff(request, keys, now_us)
        verdict = self._decide(life, self._roles(request), now_us)
        if verdict is None:
            return admission.nobody(request, life.length, self.view, now_us)
        refusal = admission.unwanted(request, verdict, self.tuning, self.view)
        return refusal or verdict.decision

    def member_changes(self) -> list[MemberChange]:
        """The instances that came or went since the last call, oldest first; at most 256."""
        changes = list(self._members.changes)
        self._members.changes.clear()
        return changes

    # Instances.

    def _join(self, info: InstanceInfo, now_us: Micros) -> None:
        if not self._members.joins(info, now_us):
            return
        if info.id in self.view.instances:
            self._lose(info.id, RESTARTED)
        self._members.add(info, now_us)
        self._promise_at(info.id, now_us)
        self._unpark(now_us)

    def _lose(self, instance: InstanceId, why: str | None) -> None:
        """Remove an instance and abort its calls. If `why` is None, it leaves in order: its calls
        go on."""
        self._members.remove(instance, why)
        if why is None:
            return
        for life in self._lives.values():
            if instance in life.at:
                life.at = [instance]  # one lost member ends the whole group call
                why_all = f"instance {instance} is gone: {why}"
                self._actions.append(Abort(life.request.id, life.number, why_all))

    def _forget(self, absent: InstanceId | None, fact: LifeFact) -> None:
        """Remove an instance that refuses connections, as this fact reports. It joins again with
        its next heartbeat."""
        if absent is None or not isinstance(fact, CallFailed):
            return
        if not fact.died:
            self._lose(absent, "it refuses connections")
        elif absent in self.view.instances and self.view.instances[absent].info.epoch == fact.died:
            for life in self._lives.values():
                life.doomed |= absent in life.at
            self._lose(absent, "it died")

    # Lives.

    def _arrive(self, request: Request, keys: Sequence[BlockKey], now_us: Micros) -> None:
        assert request.id not in self._lives, "request ids are unique"
        life = Handoff(request, keys, request.since_us(now_us))
        self._tenants.asked(life.party.name, request.length, now_us)
        self.retries.arrive(request, keys, now_us)
        self._lives[request.id] = life
        self._under_way.take(life.party)
        self._place(life, now_us)

    def _go_on(self, fact: LifeFact, now_us: Micros) -> None:
        """Do what follows for a life from a fact about it."""
        life = self._lives.get(fact.request)
        if life is None:
            return
        absent = life.absent(fact)
        beside_us = life.call_took_us(fact, now_us)
        if beside_us is not None and life.at[-1] in self.view.instances:
            self.view.instances[life.at[-1]].cost.took(beside_us)
        match life.step(fact, now_us, self.tuning.patience_us):
            case End(failure):
                self._forecast.learn(fact, life.request, self._decoder(life), now_us)
                self._end(life, failure, now_us)
                self._forget(absent, fact)
            case StartDecode() if life.decision is not None and life.decision.joint:
                self._decode_on(life, life.decision, now_us)
            case StartDecode() if self._held:
                self._held[life.request.id] = life  # behind them, in this step
            case StartDecode():
                self._decode(life, now_us)
            case Place():
                self._unplace(life, now_us)
                self._forget(absent, fact)
                self._place(life, now_us)
            case Pause():
                self._unplace(life, now_us)
                self._forget(absent, fact)
                self._paused[life.request.id] = now_us + PAUSE_US
            case Wait():
                pass

    def _unplace(self, life: Handoff, now_us: Micros) -> None:
        """No instance is chosen for the life any more, and nothing is promised."""
        self._unreserve(life, now_us)
        life.unplaced()

    def _end(self, life: Handoff, failure: str | None, now_us: Micros) -> None:
        """The life is over, with a failure or without: release all that was promised."""
        request = life.request
        self._drop(life, now_us)
        if failure is not None:
            self._actions.append(GiveUp(request.id, failure))
        self._actions.append(Release(request.id, tuple(life.leases)))

    def _drop(self, life: Handoff, now_us: Micros) -> None:
        """Nothing here knows the life any more."""
        request = life.request
        life.end()
        self._unreserve(life, now_us)
        del self._lives[request.id]
        self._under_way.give(life.party)
        self._parked.pop(request.id, None)
        self._paused.pop(request.id, None)
        if request.model in self._rooms:
            self._rooms[request.model].remove(request.id)

    def _refuse(self, life: Handoff, refusal: Refuse, now_us: Micros) -> None:
        """Refuse the request, with a time at which its client should return."""
        booked = self._retry_after.book(life, refusal, self.view, now_us)
        self._actions.append(booked)
        self._end(life, None, now_us)

    # Lives that another Conductor began.

    def _adopt(self, fact: Adopted, now_us: Micros) -> None:
        """Go on with a request where another Conductor left it: promise again what that one did.

        Its instances may not have joined here yet. What it needs there is promised when they join.
        """
        before = self._lives.get(fact.request.id)
        if before is not None:
            self._drop(before, now_us)
        request = fact.request
        life = Handoff.adopted(fact, request.since_us(now_us))
        self._lives[request.id] = life
        self._under_way.take(life.party)
        self.index.touch(life.keys)
        names = dict.fromkeys([*(share.instance for share in life.shares), fact.decision.decode])
        unknown = [name for name in names if name not in self.view.instances]
        if unknown:
            self._unknown[request.id] = _Unknown(unknown, now_us, fact.called_us)
        for name in names:
            if name in self.view.instances:
                self._promise_again(life, name, fact.called_us, now_us)

    def _promise_again(
        self, life: Handoff, instance: InstanceId, called_us: Micros, now_us: Micros
    ) -> None:
        """Promise what an adopted life needs of this instance; its call went out at `called_us`."""
        decision = life.decision
        assert decision is not None
        request = life.request.id
        began_us = min(called_us, now_us)
        mine = [share for share in life.shares if share.instance == instance]
        infos = groups.promise(self.view.instances, request, mine, began_us)
        if infos and mine[0] is life.shares[0]:
            self._promise_prefix(life, decision, infos[0])
        if instance != decision.decode:
            return
        view = self.view.instances[instance]
        due_us = began_us + decision.predicted_ttft_us - decision.waited_us
        lag_us = max(0, due_us - now_us) if life.shares else 0
        self._promise_decode(life, view, now_us, lag_us, decision.predicted_tbt_us)
        if life.phase is Phase.DECODE and request not in self._held:
            view.resume_decode(request, began_us, now_us)

    def _promise_at(self, instance: InstanceId, now_us: Micros) -> None:
        """An instance has joined for which adopted lives wait."""
        for request, unknown in list(self._unknown.items()):
            if instance in unknown.instances:
                unknown.instances.remove(instance)
                if not unknown.instances:
                    del self._unknown[request]
                self._promise_again(self._lives[request], instance, unknown.called_us, now_us)

    def _give_up_unknown(self, now_us: Micros) -> None:
        """Instances of adopted lives that have not joined for too long are lost, as others are."""
        for request, unknown in list(self._unknown.items()):
            if now_us - unknown.since_us <= self.tuning.dead_after_us:
                continue
            del self._unknown[request]
            life = self._lives[request]
            lost = next((name for name in unknown.instances if name in life.at), None)
            if lost is not None and request not in self._held:
                life.at = [lost]
                why = f"instance {lost} is gone: it has not joined this Conductor"
                self._actions.append(Abort(request, life.number, why))

    # Placement: decide, reserve, act.

    def _place(self, life: Handoff, now_us: Micros) -> None:
        """Bind the request to its instances, now or when one is about to be free."""
        request = life.request
        prefills = allowed(self.view.prefills(request.model), request.among)
        decodes = allowed(self.view.decodes(request.model), request.among)
        if self._policy.late and admission.fits(life.length, prefills, decodes):
            self._wait(life, prefills, now_us)
            return
        verdict = self._decide_and_note(life, self._roles(request), now_us)
        if verdict is None and (life.leases or request.id in self._parked):
            self._parked.setdefault(request.id, now_us)
        elif verdict is None:
            self._refuse(life, admission.nobody(request, life.length, self.view, now_us), now_us)
        else:
            refusal = admission.unwanted(request, verdict, self.tuning, self.view)
            if refusal is not None and not life.leases:
                self._refuse(life, refusal, now_us)
            else:
                self._bound(life, verdict, now_us)

    def _decide_and_note(self, life: Handoff, roles: Roles, now_us: Micros) -> Verdict | None:
        """A decision that counts: the policy's state moves on."""
        verdict = self._decide(life, roles, now_us)
        if verdict is not None:
            self._state = verdict.state
        return verdict

    def _decide(self, life: Handoff, roles: Roles, now_us: Micros) -> Verdict | None:
        """The best placement on these instances by now; nothing changes."""
        request = life.request
        prefills = roles.prefills.members
        if not prefills or not roles.decodes.members:
            return None
        ask = Ask(
            length=life.length,
            match=self.index.match(life.keys),
            pending=self._pending.match(life.keys),
            waited_us=now_us - life.arrived_us,
            expected_tokens=self._forecast.expected_tokens,
            whole=request.whole,
            rank=self._under_way.rank(life.party),
            slo=self._objectives.effective(request, prefills, now_us),
            avoid=life.failed,
            decode_load=self._forecast.load_for(request, life.length, now_us, len(roles.decodes)),
        )
        return decide(ask, roles, self._state, self.tuning, now_us)

    def _roles(
        self,
        request: Request,
        prefills: Prefills | None = None,
        partners: Sequence[InstanceView] | None = None,
    ) -> Roles:
        """All instances for a request, or only these of prefill."""
        view = self.view
        found = view.prefill_role(request.model) if prefills is None else prefills
        decodes = view.decode_role(request.model)
        if request.among:
            found.sync()
            decodes.sync()
            found = found.only(allowed(found.members, request.among), kept=True)
            decodes = decodes.only(allowed(decodes.members, request.among), kept=True)
        return Roles(found, decodes, partners, view.racks, view.doubts, self.index.blocks)

    def _bound(self, life: Handoff, verdict: Verdict, now_us: Micros) -> None:
        """Reserve what was decided, for every end of the life to release; send the call out."""
        request = life.request
        decision = verdict.decision
        self._parked.pop(request.id, None)
        number = life.placed(decision, now_us)
        infos = groups.promise(self.view.instances, request.id, life.shares, now_us)
        if self._policy.looks_back:
            for share in life.shares:
                self._state = self._state.assigned(share.instance, now_us, share.work_us)
        self.index.touch(life.keys)
        self._promise_prefix(life, decision, infos[0])
        if self._policy.late and not decision.stages:
            self._running.promised(request.id, SegmentId(decision.prefill), life.keys)
        decode = self.view.instances[decision.decode]
        lag_us = decision.predicted_ttft_us - decision.waited_us
        self._promise_decode(life, decode, now_us, lag_us, decision.predicted_tbt_us)
        group = tuple(infos) if decision.stages else ()
        self._actions.append(
            Prefill(request.id, number, infos[-1], decision, decode.info, group, verdict.candidates)
        )
        self._actions += self.hot.placed(request, life.keys, decision, now_us)

    def _promise_prefix(self, life: Handoff, decision: Decision, first: InstanceInfo) -> None:
        """Promise the prompt's blocks on the first instance, which will keep what it computes.

        Nothing is promised if it loads a part from others and does not keep it: its own blocks
        would begin after a gap.
        """
        kept = decision.reused_tokens <= decision.chosen.local_tokens or decision.copies
        if first.segment is not None and kept:
            keys = life.keys[: life.shares[0].end // first.namespace.block_size]
            self._pending.promised(life.request.id, first.segment, keys)

    def _promise_decode(
        self, life: Handoff, view: InstanceView, now_us: Micros, lag_us: Micros, tbt_us: Micros
    ) -> None:
        """Count the decode there, which begins `lag_us` from now with a predicted TBT of `tbt_us`.

        If this request already misses its TBT goal, other requests need not protect it.
        """
        request = life.request
        goal_us = self._objectives.own(request).tbt_us
        if goal_us is not None and tbt_us > goal_us:
            goal_us = None
        if request.id not in view.residencies.promised:
            self.retries.admit(request, life.prompt_keys)
            self._tenants.given(life.party.name, life.length)
        residency = self._forecast.promise(request, life.length, now_us + lag_us)
        residency.lag_us = lag_us
        view.promise_decode(request.id, self._forecast.context(life.length), goal_us, residency)

    def _end_prefill(self, life: Handoff, now_us: Micros) -> None:
        """What was promised for the prefill is over."""
        if not life.shares:
            return
        instances = [share.instance for share in life.shares]
        life.shares = ()
        groups.release(self.view.instances, life.request.id, instances, now_us)
        self._pending.over(life.request.id)
        self._running.over(life.request.id)

    def _end_stage(self, life: Handoff, fact: StageEnded, now_us: Micros) -> None:
        """An instance of a group is free for other requests."""
        if life.staged(fact):
            groups.release(self.view.instances, fact.request, [fact.instance], now_us)

    def _unreserve(self, life: Handoff, now_us: Micros) -> None:
        """Nothing is promised for this life any more."""
        self._end_prefill(life, now_us)
        self._held.pop(life.request.id, None)
        self._unknown.pop(life.request.id, None)
        view = self._decoder(life)
        if view is not None:
            view.end_decode(life.request.id, now_us)

    def _decoder(self, life: Handoff) -> InstanceView | None:
        """The instance that was chosen for decode, if it is there."""
        return None if life.decision is None else self.view.instances.get(life.decision.decode)

    def _unpark(self, now_us: Micros) -> None:
        """Try again to place lives without instances; those that waited too long have failed.

        If all instances are full, a life that has tokens waits on: others will end.
        """
        for request, since_us in list(self._parked.items()):
            life = self._lives[request]
            self._place(life, now_us)
            if request in self._parked and now_us - since_us > self.tuning.patience_us:
                lack = admission.nobody(life.request, life.length, self.view, now_us)
                if not life.begun or lack.reason != "instances_full":
                    self._end(life, lack.why, now_us)

    def _end_pauses(self, now_us: Micros) -> None:
        """Place the lives again whose pause is over."""
        for request in [name for name, until_us in self._paused.items() if until_us <= now_us]:
            del self._paused[request]
            self._place(self._lives[request], now_us)

    # Decode.

    def _try_held(self, facts: Sequence[StepFact], now_us: Micros) -> None:
        """Let lives that wait for room begin to decode, where these facts may have made some."""
        held = list(self._held.values())
        if held and self._entry.is_stirred(facts, held, now_us):
            for life in held:
                self._decode(life, now_us)

    def _decode_on(self, life: Handoff, decision: Decision, now_us: Micros) -> None:
        """The prefill of a joint call has ended. One call does both: only the promises change."""
        self._end_prefill(life, now_us)
        view = self.view.instances.get(decision.decode)
        # No promise there means that the instance has restarted.
        if view is not None and life.request.id in view.residencies.promised:
            view.begin_decode(life.request.id, now_us)

    def _decode(self, life: Handoff, now_us: Micros) -> None:
        """The prefill has ended: let the request decode, hold it, move it or refuse it."""
        request = life.request
        decision = life.decision
        assert decision is not None
        context = self._forecast.context(life.length)
        self._end_prefill(life, now_us)
        decodes = allowed(self.view.decodes(request.model), request.among)
        able = connectors.speaking(decision.connector, decodes)
        view = self.view.instances.get(decision.decode)
        if view is None:
            if not able and request.id in self._unknown:
                self._held[request.id] = life  # until an instance has joined here
                return
            if not able:
                self._decode_nowhere(life, now_us)
                return
            goal_us = self._objectives.own(request).tbt_us
            view, _ = choose_decode(context, preferred(able, life.failed), goal_us)
        if self._held.pop(request.id, None) is None:
            self.errors.tbt.add(decision.predicted_tbt_us, view.tbt_now_us(context))
        # Later attempts are never refused: the client may already have tokens.
        if len(life.leases) == 1:
            view, refusal = self._entry.choose(life, view, able, decision, now_us)
            if refusal is not None and now_us < self._entry.patient_us(life):
                self._held[request.id] = life
                return
            if refusal is not None:
                self._refuse(life, refusal, now_us)
                return
        if view.info.id != decision.decode:
            self._unreserve(life, now_us)
        # Promise once more: the view may be another instance, or a restarted one without our
        # promise.
        self._promise_decode(life, view, now_us, 0, view.tbt_now_us(context))
        view.begin_decode(request.id, now_us)
        number = life.decoding(view.info.id)
        self._actions.append(Decode(request.id, number, view.info))

    def _decode_nowhere(self, life: Handoff, now_us: Micros) -> None:
        """No instance that could decode it is there: prefill again, or give up."""
        match life.lacks_decode(now_us, self.tuning.patience_us):
            case End():
                model = life.request.model
                self._end(life, f"no decode instance for model {model} is alive", now_us)
            case _:
                self._unplace(life, now_us)
                self._place(life, now_us)

    # Late binding.

    def _wait(self, life: Handoff, prefills: Sequence[InstanceView], now_us: Micros) -> None:
        """Let the request into the waiting room; `_bind` follows in the same step."""
        request = life.request
        self._parked.pop(request.id, None)
        room = self._rooms.setdefault(request.model, WaitingRoom())
        if len(room) >= self.tuning.max_waiting and not life.leases:
            last = self._lives[room.gives_way(request)]
            self._refuse(last, admission.too_many(last.request, room, len(prefills)), now_us)
            if last is life:
                return
        slo = self._objectives.own(request)
        takes_us, lacks, has = self._takes(life, prefills)
        came_us = now_us if life.leases else life.arrived_us
        room.add(Waiter.of(request, slo, came_us, takes_us, bool(life.leases), lacks, has))

    def _takes(
        self, life: Handoff, prefills: Sequence[InstanceView]
    ) -> tuple[Micros, BlockKey | None, int]:
        """The prefill time of a life that waits, the first block of it that nobody has, and how
        many come before that one."""
        there = self.index.match(life.keys).pool
        lacks = life.keys[there] if there < len(life.keys) else None
        slo = self._objectives.own(life.request)
        return groups.work_us(prefills, life.length, there, slo, self.tuning), lacks, there

    def _look_again(self, room: WaitingRoom, waiters: Iterable[Waiter]) -> bool:
        """Look up what these lives take by now; whether one takes another time than was known."""
        changed = False
        for waiter in waiters:
            life = self._lives[waiter.request]
            prefills = self.view.prefills(life.request.model)
            if prefills:
                changed |= room.takes(waiter.request, *self._takes(life, prefills))
        return changed

    def _reuse_more(self, keys: Sequence[BlockKey]) -> None:
        """Blocks were stored: waiting lives that lacked them take less time now."""
        for room in self._rooms.values():
            self._look_again(room, room.lacking(keys))

    def _prefix_us(
        self, waiter: Waiter, prefills: Sequence[InstanceView], now_us: Micros
    ) -> Micros | None:
        """When a life would be done if it waited for a prefix that an instance computes just now.

        None: that saves it less than WORTH of its prefill, or it would not surely be in time.
        """
        life = self._lives[waiter.request]
        slo = self._objectives.own(life.request)
        ends_us = waiter.begin_us + waiter.work_us
        for name, blocks in self._running.match(life.keys).items():
            view = self.view.instances.get(InstanceId(name))
            if view is None:
                continue
            rest_us = groups.work_us(prefills, life.length, blocks, slo, self.tuning)
            takes_us = view.queue_us(now_us) + rest_us
            saves = waiter.work_us - rest_us > WORTH * waiter.work_us
            if saves and now_us + takes_us + MARGIN_US < ends_us:
                return takes_us
        return None

    def _bind(self, model: str, now_us: Micros) -> None:
        """Give waiting requests to instances that are, or are about to be, free."""
        room = self._rooms[model]
        prefills = self.view.prefills(model)
        decodes = self.view.decodes(model)
        self._refuse_hopeless(room, len(prefills), now_us)
        if not prefills or not decodes:
            for waiter in room.everybody(now_us):
                self._parked[waiter.request] = now_us
            del self._rooms[model]
            return
        ahead_us = self.tuning.bind_ahead_us
        held: set[RequestId] = set()
        """Requests that only busy instances can take, or that wait for a prefix: others may pass
        them."""
        waits: set[RequestId] = set()
        """Those of them that wait for a prefix, and for which others were there to go."""
        known: set[RequestId] = set()
        """Requests that were looked up again."""
        now: set[RequestId] = set()
        """Requests that do not wait for a prefix: nobody could go in their place."""
        least: int | None = None
        """The lowest priority that may pass those that wait for a prefix."""
        room.try_again()
        role = self.view.prefill_role(model)
        while len(room):
            free = role.free(now_us, ahead_us)
            if not free:
                return
            first = room.next(now_us, FreeTimes(prefills, now_us), held)
            if first is None or (least is not None and first.priority < least):
                return
            if first.request not in known:  # since then blocks may have been evicted
                known.add(first.request)
                if self._look_again(room, [first]):
                    continue
            earlier = room.earlier_alike(first, held)
            if earlier is not None and earlier.request not in known:
                known.add(earlier.request)
                self._look_again(room, [earlier])
                continue
            first = earlier or first
            life = self._lives[first.request]
            among = life.request.among
            if not admission.fits(life.length, allowed(prefills, among), allowed(decodes, among)):
                room.remove(first.request)  # the instance that it waited for is gone
                self._place(life, now_us)
                continue
            fitting: Sequence[InstanceView] = prefills
            if life.length > role.least_kv or life.failed or among:
                mine = allowed(prefills, among)
                fitting = [view for view in mine if view.kv_tokens >= life.length]
                wanted = dict.fromkeys(preferred(fitting, life.failed))
                free = [view for view in free if view in wanted]
            if not free:
                held.add(first.request)
                continue
            comes_us = None if first.request in now else self._prefix_us(first, prefills, now_us)
            if comes_us is not None:
                other = room.next(now_us, FreeTimes(prefills, now_us), held | {first.request})
                if other is None and comes_us < first.work_us:
                    held.add(first.request)
                elif other is not None and other.priority == first.priority:
                    held.add(first.request)
                    waits.add(first.request)
                    least = first.priority
                else:  # all wait for it
                    goes = (room.earlier_alike(first, held - waits) or first).request
                    held.discard(goes)
                    now.add(goes)
                continue
            roles = self._roles(life.request, role.only(free, kept=True), fitting)
            verdict = self._decide_and_note(life, roles, now_us)
            if verdict is None and among:  # others may decode elsewhere
                held.add(first.request)
                continue
            if verdict is None:
                return
            self._bind_first(room, first, life, verdict, now_us)

    def _bind_first(
        self, room: WaitingRoom, first: Waiter, life: Handoff, verdict: Verdict, now_us: Micros
    ) -> None:
        """Bind the request whose turn it is, refuse it, or let it wait for room in decode."""
        request = life.request
        slo = self._objectives.own(request)
        is_late = now_us > first.begin_us
        decodes = self.view.decodes(request.model)
        if admission.yields(request, verdict, slo, decodes, is_late):
            room.crowd(first, is_late)  # decode has no room, so do not prefill yet
            return
        refusal = admission.unwanted_in_decode(request, verdict, slo, self.tuning, self.view)
        if refusal is not None and not life.leases:
            self._refuse(life, refusal, now_us)
            return
        room.went(first)
        self._bound(life, verdict, now_us)

    def _refuse_hopeless(self, room: WaitingRoom, servers: int, now_us: Micros) -> None:
        """Refuse waiting requests that can no longer meet their TTFT, where that refuses."""
        if not admission.refuses_some(self.tuning):
            return
        doomed = self._doomed(room, now_us)
        self._look_again(room, doomed)
        for waiter in self._doomed(room, now_us) if doomed else ():
            life = self._lives[waiter.request]
            self._refuse(life, admission.too_late(waiter, room, servers, now_us), now_us)

    def _doomed(self, room: WaitingRoom, now_us: Micros) -> list[Waiter]:
        """Waiting requests that can no longer meet their TTFT by what is known, and are refused for
        it."""
        return [
            waiter
            for waiter in room.hopeless(now_us)
            if admission.refuses_ttft(self.tuning, waiter.priority)
            and not self._lives[waiter.request].leases
        ]

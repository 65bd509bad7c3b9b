"""Laws of the Conductor under any policy and any history of requests, instances and failures."""

from collections.abc import Iterable
from itertools import pairwise
from random import Random

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.schedule.adoption import Deposed, FactOfRequest, StepFact, Tracked
from moonserve.core.schedule.conductor import PAUSE_US, Conductor
from moonserve.core.schedule.cost import LAPTOP_PASS, Cost
from moonserve.core.schedule.facts import (
    Arrived,
    Beat,
    CallFailed,
    ClientGone,
    Connector,
    DecodeEnded,
    Draining,
    Fact,
    InstanceInfo,
    InstanceLoad,
    Joined,
    Left,
    PrefillEnded,
    Role,
    StageEnded,
    Tick,
)
from moonserve.core.schedule.handoff import MAX_ATTEMPTS
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, info

NAMES = ["d0", "d1", "p0", "p1", "p2"]
CHEAP_PASS = (1_000, *LAPTOP_PASS[1:])
"""With it, groups pay though prompts are short."""
OBJECTIVES = st.just(Slo()) | st.builds(
    Slo,
    ttft_us=st.sampled_from([None, 1_000, 20_000, 100_000, 10_000_000]),
    tbt_us=st.sampled_from([None, 1_000, 45_100, 60_000]),
)
"""None, those that nobody can meet, those that only an idle instance can, and lax ones."""


class ConductorMachine(RuleBasedStateMachine):
    """A driver that executes actions, and a world that fails at random."""

    resumes = True

    def __init__(self) -> None:
        super().__init__()
        self.tuning = Tuning()
        self.rng = Random(1)
        self.conductor = Conductor()
        self.now_us = 0
        self.epochs: dict[str, int] = {}
        self.count = 0
        self.calls: dict[RequestId, Prefill | Decode] = {}
        self.open: dict[RequestId, tuple[Request, Micros]] = {}
        """With the time of arrival."""
        self.attempts: dict[RequestId, int] = {}
        self.failures: dict[RequestId, int] = {}
        """Failed calls that an instance received, of requests without a token."""
        self.known: dict[RequestId, int] = {}
        """Length of the prompt and the tokens so far."""
        self.token_us: dict[RequestId, Micros] = {}
        """When decode last gave a token, or the request came."""
        self.paired_us: Micros = 0
        """When an instance of each role was last there."""
        self.leases: dict[RequestId, list[int]] = {}
        self.stages: dict[RequestId, list[InstanceId]] = {}
        """Members of each group that are not done, but for the last."""
        self.idle: set[RequestId] = set()
        """Those with no call out: they wait for an instance to be free, or to join."""
        self.tracked: dict[RequestId, Tracked] = {}
        """What the driver keeps of each, for another Conductor."""
        self.numbers: dict[RequestId, int] = {}
        """Of the last call."""

    @initialize(
        policy=st.sampled_from([*POLICIES, *["late_binding"] * len(POLICIES)]),
        slo=OBJECTIVES,
        admission=st.sampled_from(["none", "ttft", "early", "predictive"]),
        bind_ahead_us=st.sampled_from([0, 20_000]),
        max_waiting=st.sampled_from([2, 100]),
        cpp=st.sampled_from([1, 3]),
        crowd=st.lists(st.integers(-1, 1), max_size=4),
    )
    def begin(self, policy: str, slo: Slo, crowd: list[int], **more: object) -> None:
        """Choose a tuning, late binding half of the time; a crowd comes to one pair, or a group."""
        if more["cpp"] != 1:  # without an objective there are no groups
            slo = Slo(slo.ttft_us or 60_000, slo.tbt_us)
        self.tuning = Tuning(policy=policy, slo=slo, **more)  # type: ignore[arg-type]
        cost = LAPTOP_PASS if self.tuning.cpp == 1 else CHEAP_PASS
        self.conductor = Conductor(self.tuning, Random(1), lambda info: Cost(cost, (200, 0.0005)))
        self.step(Tick())
        if crowd:
            for name in ["p0", "d0", "p1", "p2"][: 2 if self.tuning.cpp == 1 else 4]:
                self.join(name)
        for priority in crowd:
            self.arrive(20 if self.tuning.cpp == 1 else 100, Slo(), priority)

    def step(self, *facts: Fact) -> None:
        """Hand facts over and execute the actions."""
        self.track(facts)
        self.take(*facts)

    def track(self, facts: Iterable[Fact]) -> None:
        """Keep what the driver reports."""
        for fact in facts:
            if isinstance(fact, Arrived):
                self.tracked[fact.request.id] = Tracked(fact.request, fact.keys)
            elif isinstance(fact, FactOfRequest) and fact.request in self.tracked:
                self.tracked[fact.request].told(fact)

    def take(self, *facts: StepFact) -> None:
        """As `step`, without keeping the facts."""
        self.now_us += 1
        actions = self.conductor.step(self.now_us, facts)
        self.check_order(actions)
        if self.able():
            self.paired_us = self.now_us
        for action in actions:
            self.do(action)

    def able(self) -> bool:
        """Whether instances are there that can serve a request."""
        views = self.conductor.view.instances.values()
        return len({view.info.role for view in views if not view.drained}) == 2

    def check_order(self, actions: list[Action]) -> None:
        """No request is bound while one of higher priority goes on waiting.

        As long as few have come, all are young, and nobody has an objective: late binding also
        weighs who can still be in time, and owes a share to those that it put off. A retry may wait
        for an instance that has not failed it.
        """
        bound = {action.request for action in actions if isinstance(action, Prefill)}
        over = {action.request for action in actions if isinstance(action, Release)}
        left = self.idle - bound - over
        if not POLICIES[self.tuning.policy].late or len(left) != self.conductor.waiting:
            return
        slos = [self.open[r][0].slo.over(self.tuning.slo) for r in [*left, *bound]]
        young = all(self.now_us - self.open[r][1] < 20_000_000 for r in left)
        if young and self.count <= 12 and all(slo == Slo() for slo in slos):
            fresh = [r for r in left if not self.attempts[r]]
            last = max((self.open[r][0].priority for r in fresh), default=-9)
            assert all(self.open[r][0].priority >= last for r in bound)

    def do(self, action: Action) -> None:
        """Every action is for an open request; each is released exactly once, last of all."""
        assert action.request in self.open, action
        if isinstance(action, Prefill | Decode):
            assert action.number > self.numbers.get(action.request, 0), "numbers never go back"
            self.numbers[action.request] = action.number
            self.tracked[action.request].acted(action, self.now_us)
        match action:
            case Prefill():
                self.idle.discard(action.request)
                self.leases[action.request].append(action.number)
                self.attempts[action.request] += 1
                self.check_prefill(action)
                self.check_stages(action)
                self.calls[action.request] = action
            case Decode():
                assert action.to.role == "decode"
                self.idle.discard(action.request)
                self.calls[action.request] = action
            case Abort():
                call = self.calls.pop(action.request, None)
                assert call is not None or self.tracked[action.request].facts, "it had ended"
                if call is not None:
                    assert call.number == action.number
                    self.fail(call)
            case Refuse():
                assert self.attempts[action.request] == 0, "work was spent on it"
                assert action.request not in self.calls
            case GiveUp():
                self.calls.pop(action.request, None)
                self.check_end(action.request)
            case Release():
                self.calls.pop(action.request, None)
                self.idle.discard(action.request)
                assert action.numbers == tuple(self.leases.pop(action.request))
                del self.open[action.request]
                del self.tracked[action.request]

    def check_end(self, request: RequestId) -> None:
        """A stream that has begun is given up only if decode gave no token for 30 s, or if no pair
        of instances was there for 30 s."""
        if self.known[request] > len(self.open[request][0].prompt):
            since_us = min(self.token_us[request], self.paired_us)
            assert self.now_us - since_us > self.tuning.patience_us

    def check_prefill(self, action: Prefill) -> None:
        """One of role prefill, another decodes."""
        assert action.to.role == "prefill"
        assert not action.decision.joint
        named = [*(it.instance for it in action.decision.shares), action.decode.id]
        assert not any(self.conductor.view.instances[name].drained for name in named)

    def check_stages(self, action: Prefill) -> None:
        """A group shares out what is not reused, in whole blocks, among unlike instances."""
        stages, decision = action.decision.stages, action.decision
        assert [info.id for info in action.group] == [stage.instance for stage in stages]
        if not stages:
            return
        assert 2 <= len(stages) == len({stage.instance for stage in stages}) <= self.tuning.cpp
        assert stages[-1].instance == action.to.id == decision.prefill
        assert all(one.end == next.start for one, next in pairwise(stages))
        assert (stages[0].start, stages[-1].end) == (
            decision.reused_tokens,
            decision.prompt_tokens,
        )
        assert all(s.start < s.end and s.start % BLOCK == 0 for s in stages)
        alone_us = decision.waited_us + decision.chosen.ttft_us
        assert decision.predicted_ttft_us < alone_us
        self.stages[action.request] = [stage.instance for stage in stages[:-1]]

    def fail(self, call: Prefill | Decode, unreachable: bool = False) -> None:
        """Report a failed call; a decode call may have given tokens before. Of a group, the first
        member may have failed. So may one that nobody listens at."""
        request = call.request
        member = next(iter(self.stages.pop(request, [])), None)
        gave = self.resumes and isinstance(call, Decode) and not unreachable
        if gave and self.rng.random() < 0.5:
            self.known[request] += self.rng.randrange(1, 5)
            self.token_us[request] = self.now_us
        length = self.known[request]
        self.failures[request] += not unreachable
        keys = tuple(chain_keys(NAMESPACE.root(), range(length), BLOCK))
        self.idle.add(request)  # unless the next actions say otherwise
        self.step(
            CallFailed(request, call.number, "failed", True, length, keys, unreachable, member)
        )

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """An instance comes up with a new epoch."""
        self.epochs[name] = self.epochs.get(name, 0) + 1
        self.step(Joined(self.described(name)))

    def described(self, name: str) -> InstanceInfo:
        """The description with which it joins."""
        role: Role = "prefill" if name[0] == "p" else "decode"
        return info(name, role, self.epochs[name])

    @rule(name=st.sampled_from(NAMES), stale=st.booleans())
    def leave(self, name: str, stale: bool) -> None:
        """An instance leaves, or a late goodbye of an older epoch arrives."""
        self.step(Left(info(name, "both").id, self.epochs.get(name, 0) - stale))

    @rule(name=st.sampled_from(NAMES), stale=st.booleans(), drains=st.booleans())
    def drain(self, name: str, stale: bool, drains: bool) -> None:
        """An operator drains an instance, or takes that back; of an older start it is too late."""
        self.step(Draining(InstanceId(name), self.epochs.get(name, 0) - stale, drains))

    @rule(name=st.sampled_from(NAMES))
    def beat(self, name: str) -> None:
        """A heartbeat."""
        self.step(Beat(info(name, "both").id, self.epochs.get(name, 0), InstanceLoad()))

    @rule(seconds=st.sampled_from([1, 6, 31]))
    def silence(self, seconds: int) -> None:
        """No instance sends a heartbeat for a while."""
        for _ in range(seconds):
            self.now_us += 1_000_000
            self.step(Tick())

    @rule()
    def sleep(self) -> None:
        """This process stops for longer than a request's patience."""
        self.now_us += 40_000_000
        self.paired_us += 40_000_000
        for request in self.token_us:
            self.token_us[request] += 40_000_000
        self.step(Tick())

    @rule()
    def wake(self) -> None:
        """The driver's timer fires when the Conductor asked for it."""
        wake_us = self.conductor.wake_us(self.now_us)
        assert wake_us is None or wake_us > self.now_us
        if wake_us is not None:
            self.now_us = wake_us - 1
            self.step()

    @rule(
        length=st.integers(1, 40) | st.just(100),
        slo=OBJECTIVES,
        priority=st.integers(-1, 1),
        whole=st.booleans(),
        leaves=st.booleans(),
    )
    def arrive(
        self, length: int, slo: Slo, priority: int, whole: bool = False, leaves: bool = False
    ) -> None:
        """A request comes; one for a single call is like any other before workers of ours. Its
        client may leave at the same instant."""
        self.count += 1
        name = RequestId(f"r{self.count}")
        prompt = tuple(range(length))
        request = Request(name, "m", len(prompt), prompt, slo=slo, priority=priority, whole=whole)
        self.open[name] = (request, self.now_us + 1)
        self.attempts[name] = 0
        self.leases[name] = []
        self.idle.add(name)  # unless the next actions say otherwise
        self.failures[name] = 0
        self.known[name] = length
        self.token_us[name] = self.now_us
        keys = tuple(chain_keys(NAMESPACE.root(), prompt, BLOCK))
        self.step(Arrived(request, keys), *[ClientGone(name)] * leaves)
        assert not leaves or name not in self.open, "nobody is there to be served"

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def leave_while_waiting(self, data: st.DataObject) -> None:
        """The client of a request without a call leaves."""
        self.step(ClientGone(data.draw(st.sampled_from(sorted(self.idle)))))

    @rule(name=st.sampled_from(NAMES), length=st.integers(1, 40))
    def store(self, name: str, length: int) -> None:
        """Blocks become known."""
        keys = chain_keys(NAMESPACE.root(), tuple(range(length)), BLOCK)
        self.step(BlocksStored(SegmentId(name), tuple(keys), None, "dram", 1))

    @precondition(lambda self: self.calls)
    @rule(
        data=st.data(),
        how=st.sampled_from(["done", "final", "fail", "unreachable", "gone", "stale"]),
    )
    def outcome(self, data: st.DataObject, how: str) -> None:
        """A call ends somehow, or its client leaves."""
        request = data.draw(st.sampled_from(sorted(self.calls)))
        call = self.calls[request]
        if how == "stale":
            self.step(PrefillEnded(request, call.number - 1, final=True))
        elif how == "gone":
            self.step(ClientGone(request))
        elif how in ("fail", "unreachable"):
            del self.calls[request]
            self.fail(call, how == "unreachable")
        elif isinstance(call, Prefill) and call.decision.joint and how == "done":
            if not self.tracked[request].facts:
                self.step(PrefillEnded(request, call.number, final=False))
            assert self.calls.pop(request) is call, "a call that does all of it goes on"
            self.step(DecodeEnded(request, call.number, tokens=7))
        elif isinstance(call, Prefill):
            del self.calls[request]
            self.idle.add(request)  # unless a decode instance is there
            self.known[request] += self.resumes
            self.step(PrefillEnded(request, call.number, final=how == "final"))
        else:
            del self.calls[request]
            self.step(DecodeEnded(request, call.number, tokens=7))

    @rule(name=st.sampled_from(NAMES))
    def join_again(self, name: str) -> None:
        """An instance joins once more with the epoch that it has, as at a Conductor that has not
        known it."""
        if name in self.epochs:
            self.step(Joined(self.described(name)))

    @rule(data=st.data(), lost=st.booleans(), twice=st.booleans())
    def another_leads(self, data: st.DataObject, lost: bool, twice: bool) -> None:
        """The Conductor is gone; another one, which knows some of the instances, adopts all lives.

        lost: a call ends just then, and what the Conductor makes of it does not reach the driver.
        """
        if lost and self.calls:
            request = data.draw(st.sampled_from(sorted(self.calls)))
            self.lose_answer(self.calls[request])
        knows = data.draw(st.sets(st.sampled_from(NAMES)))
        known = [view.info for view in self.conductor.view.instances.values()]
        self.depose()
        cost = LAPTOP_PASS if self.tuning.cpp == 1 else CHEAP_PASS
        self.conductor = Conductor(self.tuning, Random(1), lambda info: Cost(cost, (200, 0.0005)))
        facts: list[StepFact] = [Joined(info) for info in known if info.id in knows]
        for request, tracked in self.tracked.items():
            self.failures[request] = 0
            if tracked.is_placed:
                facts += [tracked.adopted()] * (1 + twice)
                facts += tracked.facts
            else:
                facts.append(Arrived(tracked.request, tracked.keys))
        self.take(*facts, Tick())

    def depose(self) -> None:
        """The Conductor before may live on: it forgets all requests, and releases nothing."""
        actions = self.conductor.step(self.now_us, [Deposed()])
        assert not any(isinstance(action, Release) for action in actions)
        assert self.conductor.promised() == Promised(0, 0, 0, 0)
        self.conductor.view.check()

    def lose_answer(self, call: Prefill | Decode) -> None:
        """A call ends, and the Conductor takes that in, but its actions are lost with it."""
        request = call.request
        if isinstance(call, Prefill) and not call.decision.joint:
            del self.calls[request]
            self.idle.add(request)
            self.known[request] += self.resumes
            fact: Fact = PrefillEnded(request, call.number, final=False)
        elif isinstance(call, Prefill) and not self.tracked[request].facts:
            fact = PrefillEnded(request, call.number, final=False)
        else:
            del self.calls[request]
            self.idle.add(request)
            fact = DecodeEnded(request, call.number, tokens=7)
        self.track([fact])
        self.conductor.step(self.now_us, [fact])

    @precondition(lambda self: self.stages)
    @rule(data=st.data(), stale=st.booleans())
    def stage(self, data: st.DataObject, stale: bool) -> None:
        """One of a group has done its part, or is reported to; others can have its place."""
        request = data.draw(st.sampled_from(sorted(self.stages)))
        left = self.stages[request]
        if request in self.calls and isinstance(self.calls[request], Prefill) and left:
            before = self.conductor.promised().prefills
            number = self.calls[request].number
            self.step(StageEnded(request, number - stale, left[-1]))
            fewer = left[-1] in self.conductor.view.instances and not stale
            if self.tuning.policy != "late_binding":
                assert self.conductor.promised().prefills >= before - fewer
            if not stale:
                left.pop()

    @invariant()
    def ledger_balances(self) -> None:
        """Promises never exceed the open requests; each has a call out or waits."""
        self.conductor.view.check()
        promised = self.conductor.promised()
        assert promised.requests == len(self.open) == len(self.calls) + len(self.idle)
        assert not self.idle & self.calls.keys()
        assert self.conductor.waiting <= len(self.idle)
        prefills = [c for c in self.calls.values() if isinstance(c, Prefill)]
        assert promised.prefills <= sum(max(1, len(c.group)) for c in prefills)
        assert promised.decodes <= len(self.open)
        for name, (request, _) in self.open.items():
            assert self.failures[name] < MAX_ATTEMPTS or self.known[name] > request.length

    @invariant()
    def late_binding_keeps_its_promises(self) -> None:
        """Nobody but a late policy lets a request wait that was never placed; none waits in vain.

        Who can no longer meet its TTFT is refused, where that refuses.
        """
        fresh = [name for name in self.idle if not self.attempts[name]]
        late = POLICIES[self.tuning.policy].late
        assert late or not fresh
        if late and self.tuning.admission != "none" and len(self.idle) == self.conductor.waiting:
            for name in fresh:
                request, arrived_us = self.open[name]
                ttft_us = request.slo.over(self.tuning.slo).ttft_us
                assert ttft_us is None or self.now_us <= arrived_us + ttft_us

    @invariant()
    def an_idle_cluster_keeps_nobody_waiting(self) -> None:
        """With no call out and instances that can serve, no request waits, unless it pauses, or an
        instance that was to decode it has not joined the present Conductor yet."""
        if self.able() and not self.calls:
            assert len(self.idle - self.conductor._unknown.keys()) == self.paused()

    def paused(self) -> int:
        """How many requests pause; all of them have tokens, and the Conductor wakes for each."""
        paused = self.conductor._paused
        for name, until_us in paused.items():
            assert self.failures[name] >= MAX_ATTEMPTS
            assert until_us <= self.now_us + PAUSE_US
        wake_us = self.conductor.wake_us(self.now_us)
        assert not paused or (wake_us is not None and wake_us <= min(paused.values()))
        return len(paused)

    def teardown(self) -> None:
        """When every client has left, the ledger is zero."""
        self.step(*[ClientGone(request) for request in sorted(self.open)])
        assert self.conductor.promised() == Promised(0, 0, 0, 0)
        assert not self.open
        assert not self.conductor._held
        assert not self.conductor._unknown


class ForeignMachine(ConductorMachine):
    """The same before engines of others: pairs by connector, and some that do all of it. Their
    calls are made again only before the client has a byte."""

    resumes = False

    def described(self, name: str) -> InstanceInfo:
        """The description with which it joins."""
        connector: Connector = "nixl" if name in ("p0", "p1", "d0") else "mooncake"
        own = {"segment": SegmentId(name), "fetches": False, "layers": 0, "connector": connector}
        if name == "p2":
            own |= {"role": "both", "connector": "none"}
        return msgspec.structs.replace(super().described(name), **own)

    def check_prefill(self, action: Prefill) -> None:
        """Both halves are one engine's, in one call, or two that share a connector."""
        decision = action.decision
        assert decision.joint == (action.to.id == decision.decode)
        assert action.to.connector == action.decode.connector == decision.connector
        assert decision.joint or action.to.connector == "nixl"
        assert decision.joint or not self.open[action.request][0].whole
        assert decision.holder is None
        assert not decision.stages

    def able(self) -> bool:
        """Whether both halves of a pair are there, or an engine that does both."""
        view = self.conductor.view.instances
        return "p2" in view or ("d0" in view and ("p0" in view or "p1" in view))


TestConductor = ConductorMachine.TestCase
TestConductor.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestForeign = ForeignMachine.TestCase
TestForeign.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

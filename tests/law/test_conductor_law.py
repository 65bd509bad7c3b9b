"""Laws of the Conductor under any history of requests, instances and failures."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonserve.core.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse, Release
from moonserve.core.conductor import Conductor
from moonserve.core.facts import (
    Arrived,
    Beat,
    BlocksStored,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    InstanceLoad,
    Joined,
    Left,
    PrefillEnded,
    Tick,
)
from moonserve.core.handoff import MAX_ATTEMPTS
from moonserve.core.prefix import chain_keys
from moonserve.core.request import Request
from moonserve.core.units import RequestId, SegmentId
from moonserve.core.view import Promised
from tests.support.cluster import BLOCK, NAMESPACE, info

NAMES = ["d0", "d1", "p0", "p1"]


class ConductorMachine(RuleBasedStateMachine):
    """A shell that does as told, and a world that fails at random."""

    def __init__(self) -> None:
        super().__init__()
        self.conductor = Conductor()
        self.now_us = 0
        self.epochs: dict[str, int] = {}
        self.count = 0
        self.calls: dict[RequestId, Prefill | Decode] = {}
        self.open: set[RequestId] = set()
        self.attempts: dict[RequestId, int] = {}
        self.leases: dict[RequestId, list[int]] = {}
        self.parked: set[RequestId] = set()

    def step(self, *facts: Fact) -> None:
        """Hand facts over and do as told."""
        self.now_us += 1
        for action in self.conductor.step(self.now_us, facts):
            self.do(action)

    def do(self, action: Action) -> None:
        """Every action is for an open request; each is released exactly once, last of all."""
        assert action.request in self.open, action
        match action:
            case Prefill():
                self.parked.discard(action.request)
                self.leases[action.request].append(action.number)
                self.attempts[action.request] += 1
                assert action.to.role == "prefill"
                self.calls[action.request] = action
            case Decode():
                assert action.to.role == "decode"
                self.parked.discard(action.request)
                self.calls[action.request] = action
            case Abort():
                call = self.calls.pop(action.request)
                assert call.number == action.number
                self.fail(call)
            case Refuse() | GiveUp():
                self.calls.pop(action.request, None)
            case Release():
                self.calls.pop(action.request, None)
                self.parked.discard(action.request)
                assert action.numbers == tuple(self.leases.pop(action.request))
                self.open.remove(action.request)

    def fail(self, call: Prefill | Decode, unreachable: bool = False) -> None:
        """Report a failed call, with one more token known."""
        tokens = tuple(range(30))
        keys = tuple(chain_keys(NAMESPACE.root(), tokens, BLOCK))
        self.parked.add(call.request)  # unless the next actions say otherwise
        failed = CallFailed(call.request, call.number, "failed", True, 30, keys, unreachable)
        self.step(failed)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        """An instance comes up with a new epoch."""
        self.epochs[name] = self.epochs.get(name, 0) + 1
        role = "prefill" if name[0] == "p" else "decode"
        self.step(Joined(info(name, role, self.epochs[name])))  # type: ignore[arg-type]

    @rule(name=st.sampled_from(NAMES), stale=st.booleans())
    def leave(self, name: str, stale: bool) -> None:
        """An instance leaves, or a late goodbye of an older epoch arrives."""
        self.step(Left(info(name, "both").id, self.epochs.get(name, 0) - stale))

    @rule(name=st.sampled_from(NAMES))
    def beat(self, name: str) -> None:
        """A heartbeat."""
        self.step(Beat(info(name, "both").id, self.epochs.get(name, 0), InstanceLoad()))

    @rule(seconds=st.sampled_from([1, 6, 31]))
    def silence(self, seconds: int) -> None:
        """Everybody falls silent for a while."""
        self.now_us += seconds * 1_000_000
        self.step(Tick())
        self.step(Tick())

    @rule(length=st.integers(1, 40))
    def arrive(self, length: int) -> None:
        """A request comes."""
        self.count += 1
        request = RequestId(f"r{self.count}")
        self.open.add(request)
        self.attempts[request] = 0
        self.leases[request] = []
        prompt = tuple(range(length))
        keys = tuple(chain_keys(NAMESPACE.root(), prompt, BLOCK))
        self.step(Arrived(Request(request, "m", prompt), keys))

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
        elif isinstance(call, Prefill):
            del self.calls[request]
            self.parked.add(request)  # unless a decode instance is there
            self.step(PrefillEnded(request, call.number, final=how == "final"))
        else:
            del self.calls[request]
            self.step(DecodeEnded(request, call.number))

    @invariant()
    def ledger_balances(self) -> None:
        """Promises never exceed the open requests; each has a call out or waits for an instance."""
        promised = self.conductor.promised()
        assert promised.requests == len(self.open) == len(self.calls) + len(self.parked)
        assert not self.parked & self.calls.keys()
        assert promised.prefills <= sum(isinstance(c, Prefill) for c in self.calls.values())
        assert promised.decodes <= len(self.open)
        assert all(n <= MAX_ATTEMPTS for n in self.attempts.values())

    def teardown(self) -> None:
        """When every client has left, the ledger is zero."""
        self.step(*[ClientGone(request) for request in sorted(self.open)])
        assert self.conductor.promised() == Promised(0, 0, 0, 0)
        assert not self.open


TestConductor = ConductorMachine.TestCase
TestConductor.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

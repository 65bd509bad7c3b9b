"""Order and KvEventStream with an engine whose batches are lost, doubled, late or out of order."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.core.kv.events import ClearedEvent, KvBatch, KvEvent, RemovedEvent, StoredEvent
from moonserve.core.kv.index import PrefixIndex
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.kv.order import Order, Reset, Step
from moonserve.core.kv.stream import KvEventStream
from moonserve.core.units import BlockKey, SegmentId
from tests.support.kvevents import feed

SIZE, ME = 4, SegmentId("p0")
SPACE = Namespace("m", "r", "l", SIZE)
CHAINS = [[*range(24)], [*range(12), *range(50, 62)], [*range(100, 112)]]
"""Two that share three blocks, and one alone."""
KEYS = [chain_keys(SPACE.root(), tokens, SIZE) for tokens in CHAINS]
KEPT = 6


class Engine:
    """A naive engine: copies by our key, batches kept for a replay, a name per key and run."""

    def __init__(self) -> None:
        self.copies: Counter[BlockKey] = Counter()
        self.kept: list[tuple[int, KvBatch]] = []
        self.next = 0

    def step(self, ts: float, *events: KvEvent) -> tuple[int, KvBatch]:
        told = (self.next, KvBatch(ts, events))
        self.kept = [*self.kept, told][-KEPT:]
        self.next += 1
        return told


class OrderAgainstEngine(RuleBasedStateMachine):
    @initialize(replays=st.booleans(), held=st.sampled_from([2, 100]))
    def begin(self, replays: bool, held: int) -> None:
        self.replays = replays
        self.order = Order(replays, max_held=held)
        self.stream = KvEventStream(ME, 1, SPACE)
        self.index = PrefixIndex()
        self.engine = Engine()
        self.run = 0
        self.ts = 0.0
        self.wire: list[tuple[int, KvBatch]] = []
        """Published and not arrived."""
        self.given: list[tuple[int, KvBatch]] = []
        self.do(self.order.connected())

    def name(self, key: BlockKey) -> int:
        """The engine's own; another in each run, as before vLLM 0.30."""
        return int.from_bytes(key[:8], "big") ^ self.run

    def do(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Reset):
                feed(self.index, self.stream.cleared())
                assert self.index.entries == 0
            else:
                feed(self.index, self.stream.facts(step))

    def publish(self, event: KvEvent, copies: int) -> None:
        self.ts += 1.0
        self.wire += [self.engine.step(self.ts, event)] * copies

    copies = st.sampled_from([1, 1, 1, 1, 0, 2])

    @rule(chain=st.sampled_from([0, 1, 2]), start=st.integers(0, 2), n=st.integers(1, 6), c=copies)
    def store(self, chain: int, start: int, n: int, c: int) -> None:
        keys = KEYS[chain]
        while start and not self.engine.copies[keys[start - 1]]:
            start -= 1
        stop = min(start + n, len(keys))
        self.engine.copies.update(keys[start:stop])
        names = [*map(self.name, keys)]
        parent = names[start - 1] if start else None
        tokens = CHAINS[chain][start * SIZE : stop * SIZE]
        self.publish(StoredEvent([*names[start:stop]], parent, tokens, SIZE), c)

    @rule(at=st.integers(0, 99), c=copies)
    def remove(self, at: int, c: int) -> None:
        held = sorted(self.engine.copies)
        if held:
            key = held[at % len(held)]
            self.engine.copies -= Counter([key])
            self.publish(RemovedEvent([self.name(key)]), c)

    @rule(c=copies)
    def clear(self, c: int) -> None:
        self.engine.copies.clear()
        self.publish(ClearedEvent(), c)

    @rule(at=st.sampled_from([0, 0, 0, 1, 2]))
    def arrive(self, at: int) -> None:
        if self.wire:
            told = self.wire.pop(at % len(self.wire))
            self.do(self.order.arrived(*told))

    @rule(lost=st.sampled_from([0, 0, 2, 3]), answered=st.sampled_from([True, True, False]))
    def replay(self, lost: int, answered: bool) -> None:
        self.serve(lost, answered)

    def serve(self, lost: int = 0, answered: bool = True) -> None:
        """lost: which message of the answer, from 1; never the first, which finds a queue empty."""
        since = self.order.want
        if since is None:
            return
        answer = [it for it in self.engine.kept if it[0] >= since]
        for number, told in enumerate(answer):
            if number != lost - 1:
                self.do(self.order.replayed(*told))
        self.do(self.order.replay_ended(answered))

    @rule()
    def restart(self) -> None:
        """The connection is lost with the process, and comes up to the new one."""
        self.engine = Engine()
        self.run += 1
        self.do(self.order.connected())

    @rule()
    def settle(self) -> None:
        """All arrives, and one batch more of this run; the connection is made anew, and replays are
        served until none is wanted."""
        self.publish(RemovedEvent([]), 1)
        for _ in range(len(self.wire)):
            self.arrive(0)
        self.do(self.order.connected())
        for _ in range(8):
            self.serve()
        assert self.order.want is None, "replays come to an end"
        told = {key for keys in KEYS for key in keys if self.index.tiers(key, ME)}
        assert told <= set(self.engine.copies), "no claim that is not true"
        assert self.index.entries == len(told)
        if self.replays and self.order.complete:
            assert told == set(self.engine.copies), "all is known, from the first batch on"
        if self.replays and self.engine.next <= KEPT:
            assert told == set(self.engine.copies), "what is kept is learned again"

    @invariant()
    def bounded(self) -> None:
        # A late batch of an earlier run may give a block of this run a second name.
        assert self.index.entries <= self.stream.blocks


OrderAgainstEngine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_what_is_believed_of_an_engine = OrderAgainstEngine.TestCase

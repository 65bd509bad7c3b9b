"""Clients that return at their Retry-After, in a crowd several times as large as fits.

A closed loop in made-up time around the real Conductor: one prefill instance that takes one prompt
at a time, two decode instances whose members share passes. A second is a million ticks.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from typing import Any

import pytest

from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.actions import Decode, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Arrived, DecodeEnded, Joined, PrefillEnded
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import BlockKey, RequestId
from tests.support.cluster import info

SECOND = 1_000_000
STEP, SEQ = 40_000, 4_000


def key_of(prompt: Any) -> BlockKey:
    """Of its last full block."""
    return BlockKey(repr(prompt).encode())


class World:
    """Clients, each with one request at a time, that obey Retry-After or do not."""

    def __init__(
        self,
        clients: int,
        obey: bool = True,
        prefill_us: int = 60_000,
        seed: int = 1,
        **more: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.prefill_us = prefill_us
        self.closed = False
        """Nobody asks any more."""
        slo = Slo(2 * SECOND, STEP + 30 * SEQ)
        cost = Cost((prefill_us, 0, 0, 0, STEP, SEQ, 0), learns=False)
        tuning = Tuning(**{"slo": slo, "join_passes": 0.0, **more})
        self.core = Conductor(tuning, cost_of=lambda _: cost)
        names = {"p0": "prefill", "d0": "decode", "d1": "decode"}
        joins = [Joined(info(n, r, max_seqs=64)) for n, r in names.items()]  # type: ignore[arg-type]
        self.core.step(0, joins)
        self.obey = obey
        self.events: list[tuple[int, int, str, Any]] = []
        self.count = 0
        self.decoding: dict[str, dict[RequestId, list[int]]] = {"d0": {}, "d1": {}}
        """By instance and request: tokens made, tokens to make, how many the pass makes."""
        self.passing = set[str]()
        self.free_us = 0
        self.client_of: dict[RequestId, int] = {}
        self.lengths: dict[RequestId, int] = {}
        self.prompts = {client: self.prompt() for client in range(clients)}
        self.refused: Counter[int] = Counter()
        self.tries: Counter[int] = Counter()
        self.let_in: Counter[bool] = Counter()
        """Of tries after a refusal."""
        self.served = 0
        self.waits: list[int] = []
        for client in range(clients):
            self.at(self.rng.randrange(SECOND), "ask", client)

    def prompt(self) -> tuple[int, ...]:
        """A new one."""
        return tuple(self.rng.randrange(50_000) for _ in range(8))

    def at(self, when_us: int, what: str, who: Any) -> None:
        """Something happens then."""
        self.count += 1
        heapq.heappush(self.events, (when_us, self.count, what, who))

    def run(self, until_us: int) -> None:
        """Let it all happen until then."""
        while self.events and self.events[0][0] <= until_us:
            now_us, _, what, who = heapq.heappop(self.events)
            getattr(self, what)(now_us, who)

    def ask(self, now_us: int, client: int) -> None:
        """A client asks, for the first time or again."""
        if self.closed:
            return
        request = RequestId(f"r{self.count}")
        self.count += 1
        self.client_of[request] = client
        self.lengths[request] = self.rng.randint(20, 80)
        stopping = Stopping(max_tokens=self.lengths[request])
        it = Request(
            request, "m", len(self.prompts[client]), self.prompts[client], stopping=stopping
        )
        self.step(now_us, [Arrived(it, (key_of(it.prompt),))])

    def prefilled(self, now_us: int, who: tuple[RequestId, int]) -> None:
        """A prefill call has ended."""
        self.step(now_us, [PrefillEnded(*who, final=False)])

    def passed(self, now_us: int, name: str) -> None:
        """A pass of a decode instance has ended: a token for each that was there at its start."""
        here, facts = self.decoding[name], []
        for request, made in list(here.items()):
            made[0] += made[2]
            made[2] = 1  # who joined meanwhile is in the next
            if made[0] >= made[1]:
                del here[request]
                facts.append(DecodeEnded(request, 2, made[1]))
                self.served += 1
                client = self.client_of.pop(request)
                self.prompts[client] = self.prompt()
                self.at(now_us + 1, "ask", client)
        self.passing.discard(name)
        self.begin_pass(now_us, name)
        self.step(now_us, facts)

    def begin_pass(self, now_us: int, name: str) -> None:
        """If there is anybody, and none is under way."""
        if self.decoding[name] and name not in self.passing:
            self.passing.add(name)
            self.at(now_us + STEP + SEQ * len(self.decoding[name]), "passed", name)

    def step(self, now_us: int, facts: list[Any]) -> None:
        """Hand facts to the Conductor and execute its actions."""
        for action in self.core.step(now_us, facts):
            match action:
                case Prefill(request, number):
                    client = self.client_of[request]
                    if self.refused[client]:
                        self.let_in[True] += 1
                    self.tries[self.refused.pop(client, 0)] += 1
                    self.free_us = max(self.free_us, now_us) + self.prefill_us
                    self.at(self.free_us, "prefilled", (request, number))
                case Decode(request, to=to):
                    made = [0, self.lengths[request], int(to.id not in self.passing)]
                    self.decoding[to.id][request] = made
                    self.begin_pass(now_us, to.id)
                case Refuse(request, retry_after_us=wait_us):
                    assert wait_us is not None
                    client = self.client_of.pop(request)
                    if self.refused[client]:
                        self.let_in[False] += 1
                    self.refused[client] += 1
                    self.waits.append(wait_us)
                    if self.obey:
                        self.at(now_us + math.ceil(wait_us / SECOND) * SECOND, "ask", client)
                    else:
                        self.refused.pop(client)
                        self.prompts[client] = self.prompt()
                        self.at(now_us + self.rng.randrange(10 * SECOND), "ask", client)
                case _:
                    pass


def run(clients: int, **more: Any) -> World:
    """Two minutes, the first of which fills the cluster and the calendar and is not counted."""
    world = World(clients, **more)
    world.run(60 * SECOND)
    world.let_in.clear()
    world.tries.clear()
    world.waits.clear()
    world.served = 0
    world.run(120 * SECOND)
    return world


@pytest.mark.parametrize("clients", [90, 300])
def test_who_comes_when_told_is_mostly_let_in_at_the_next_try(clients: int) -> None:
    """Not one of a crowd that comes together, nor behind newcomers: they wait their turn too."""
    it = run(clients)
    assert it.let_in[True] > 0.9 * it.let_in.total()
    assert it.tries[0] < 0.25 * it.tries.total()
    assert max(it.waits) <= 60 * SECOND


def test_so_it_is_where_prefill_is_what_lacks() -> None:
    """Room is kept in the prefill queue as well as in decode."""
    it = run(90, prefill_us=200_000)
    assert it.let_in[True] > 0.9 * it.let_in.total()


def test_so_it_is_where_prefills_and_passes_are_waited_for() -> None:
    """Outputs do not end like clockwork: a due client may wait a little for room in decode."""
    it = run(120, join_passes=1.0, slo=Slo(3 * SECOND, STEP + 30 * SEQ))
    assert it.let_in[True] > 0.9 * it.let_in.total()


def test_so_it_is_in_one_instant_after_a_crowd_that_did_not_come() -> None:
    """The share that comes is learned of each crowd anew."""
    it = World(90, obey=False, prefill_us=200_000)
    it.run(30 * SECOND)
    assert it.core.retries.share < 0.5
    it.closed = True
    it.run(60 * SECOND)
    it.closed, it.obey = False, True
    it.tries.clear()
    for client in range(1_000, 1_200):
        it.prompts[client] = it.prompt()
        it.at(61 * SECOND, "ask", client)
    it.run(90 * SECOND)
    assert it.let_in[True] > 0.9 * it.let_in.total() > 60


def test_no_place_stays_empty_for_those_who_come_or_do_not() -> None:
    """As many are served as if no room were kept, whether clients obey or not."""

    def served(**more: Any) -> int:
        return sum(run(90, seed=seed, **more).served for seed in range(4))

    plain = served(admission="early")
    assert min(served(obey=True), served(obey=False)) > 0.95 * plain


def test_nothing_is_left_when_the_crowd_has_gone() -> None:
    """The ledger is zero, and clients that are not expected any more are forgotten."""
    it = run(300)
    it.closed = True
    it.run(400 * SECOND)
    it.core.step(400 * SECOND, [Arrived(Request(RequestId("last"), "m", len((1,)), (1,)), ())])
    assert it.core.promised().requests == 1
    assert len(it.core.retries) == 0

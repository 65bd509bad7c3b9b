"""Made-up loads of other shapes than the public traces, to tune rules on some and judge on others.

The table of policies uses them. The same arguments give the same trace on every machine. Each shape
is a crowd of clients: a client opens a session, sends its turns one after the other, and waits
between them. More `clients` means more sessions a second and the same pauses. Clients do not wait
for answers: their pauses are times between two requests. A trace begins in the middle: its first
sessions have begun before. Lengths are in tokens, log-normal around medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from random import Random
from typing import TypeAlias

import msgspec

from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens
from moonserve.sim.plan import prefill_bound
from moonserve.sim.setup import Setup
from moonserve.sim.trace import BLOCK_SIZE, Row, Trace

MOST_TOKENS: Tokens = 120_000
"""The longest prompt; a session that would exceed it ends."""
WARM = 3.0
"""A trace begins after so many times the mean length of its longest kind of session."""


class Kind(msgspec.Struct, frozen=True):
    """One kind of client."""

    sessions_per_s: float
    turns: float
    """Mean turns of a session, at least 1."""
    systems: int
    """Prefixes that sessions share; the k-th is chosen in proportion to 1 / k ** 1.1."""
    system_tokens: Tokens
    """Their median length."""
    turn_tokens: Tokens
    """Median of what a turn adds."""
    output_tokens: Tokens
    """Median of an answer, which the next turn begins with."""
    pause_s: float
    """Mean time between two turns."""
    sigma: float = 1.0
    """Standard deviation of the lengths' logarithms."""
    tail: float = 0.0
    """Not 0: what a turn adds has a Pareto tail with this exponent in place of the log-normal."""
    first_tokens: Tokens = 0
    """Median of a document of its own that a session's first turn adds."""
    tenant: str = ""


Rate: TypeAlias = Callable[[float], float]
"""By how much sessions come faster or slower at a time in seconds; 2 at most."""


def _steady(at_s: float) -> float:
    return 1.0


def _bursts(at_s: float) -> float:
    """Of every two minutes, 20 s with many sessions, then few."""
    return 2.0 if at_s % 120 < 20 else 0.8


def _waves(at_s: float) -> float:
    """A day in four minutes."""
    return 1 + 0.8 * math.sin(2 * math.pi * at_s / 240)


_CHAT = Kind(0.3, 4.0, 12, 1_500, 1_200, 350, 25.0)
_AGENT = Kind(0.06, 14.0, 6, 9_000, 1_400, 120, 4.0, sigma=0.9)
_RAG = Kind(0.9, 1.1, 4, 600, 9_000, 250, 30.0, sigma=0.7)
_BATCH = Kind(0.05, 1.0, 1, 300, 45_000, 500, 1.0, sigma=0.5)
_DOCS = Kind(0.12, 5.0, 3, 500, 200, 200, 15.0, first_tokens=25_000)
_TAIL = Kind(1.0, 1.5, 8, 800, 1_500, 200, 20.0, tail=1.15)
_SHORT = Kind(1.0, 2.0, 4, 400, 300, 150, 10.0)


def _named(kind: Kind, tenant: str, times: float) -> Kind:
    rate = times * kind.sessions_per_s
    return msgspec.structs.replace(kind, tenant=tenant, sessions_per_s=rate)


SHAPES: Mapping[str, tuple[tuple[Kind, ...], Rate]] = {
    # those that rules may be tuned on
    "agents": ((_AGENT,), _steady),
    "rag": ((_RAG, _named(_SHORT, "", 0.1)), _steady),
    "bursts": ((_CHAT,), _bursts),
    # those that only judge
    "mixed": ((_named(_CHAT, "", 0.5), _named(_AGENT, "", 0.5), _BATCH), _steady),
    "tail": ((_TAIL,), _steady),
    "waves": ((_named(_CHAT, "", 0.6), _named(_AGENT, "", 0.6)), _waves),
    "documents": ((_DOCS, _named(_SHORT, "", 0.2)), _steady),
    "tenants": (
        (
            _named(_CHAT, "chat", 0.5),
            _named(_RAG, "rag", 0.4),
            _named(_AGENT, "agents", 0.4),
            _named(_BATCH, "batch", 0.5),
        ),
        _bursts,
    ),
}
TUNED = ("agents", "rag", "bursts")
"""The shapes on which rules may be tuned."""


def shape(
    name: str, seed: int, requests: int, clients: float = 1.0, block_size: Tokens = BLOCK_SIZE
) -> Trace:
    """So many requests of a shape, of `clients` times as many clients as SHAPES says."""
    kinds, rate = SHAPES[name]
    rows = _rows([_named(kind, kind.tenant, clients) for kind in kinds], rate, seed, block_size)
    warm_us = round(WARM * max(kind.turns * kind.pause_s for kind in kinds) * MICROS_PER_SECOND)
    taken = list(islice((row for row in rows if row.at_us >= warm_us), requests))
    first_us = taken[0].at_us
    moved = [msgspec.structs.replace(row, at_us=row.at_us - first_us) for row in taken]
    return Trace(f"{name}-{seed}", block_size, moved)


def at_load(name: str, seed: int, requests: int, load: float, setup: Setup) -> Trace:
    """A shape with as many clients as load the prefill instances of `setup`, ideally cached, so
    many times."""
    clients = 1.0
    for _ in range(4):  # more clients share more, so look again
        clients *= prefill_bound(shape(name, seed, requests, clients), setup)
    return shape(name, seed, requests, load * clients)


def _rows(kinds: Sequence[Kind], rate: Rate, seed: int, size: Tokens) -> Iterator[Row]:
    """The requests of all clients, by time."""
    rng = Random(seed)
    fresh = count()
    crowds = [_Crowd(kind, rng, fresh, size) for kind in kinds]
    order = count()
    events: list[tuple[float, int, _Crowd, _Session | None]] = []
    for crowd in crowds:
        heappush(events, (0.0, next(order), crowd, None))
    while True:
        at_s, _, crowd, session = heappop(events)
        if session is None:  # twice as many come as in the mean, and `rate` lets some of them in
            next_s = at_s + rng.expovariate(2 * crowd.kind.sessions_per_s)
            heappush(events, (next_s, next(order), crowd, None))
            if 2 * rng.random() >= rate(at_s):
                continue
            session = crowd.opened()
        row = crowd.turn(session, round(at_s * MICROS_PER_SECOND))
        if row is None:
            continue
        yield row
        if rng.random() >= 1 / crowd.kind.turns:
            pause_s = rng.expovariate(1 / crowd.kind.pause_s)
            heappush(events, (at_s + pause_s, next(order), crowd, session))


class _Session:
    """A session so far: its length, and the ids of its full blocks."""

    def __init__(self, tokens: Tokens, blocks: tuple[int, ...], first: Tokens) -> None:
        self.tokens = tokens
        self.blocks = list(blocks)
        self.first = first
        """The document that its first turn adds."""


class _Crowd:
    """The clients of one kind."""

    def __init__(self, kind: Kind, rng: Random, fresh: Iterator[int], size: Tokens) -> None:
        self.kind = kind
        self._rng = rng
        self._fresh = fresh
        self._size = size
        self._systems = [self._system() for _ in range(kind.systems)]
        self._weights = list(accumulate(1 / k**1.1 for k in range(1, kind.systems + 1)))

    def _system(self) -> tuple[Tokens, tuple[int, ...]]:
        tokens = self._length(self.kind.system_tokens, 0.5)
        return tokens, tuple(islice(self._fresh, tokens // self._size))

    def _length(self, median: Tokens, sigma: float) -> Tokens:
        drawn = median * math.exp(self._rng.gauss(0.0, sigma))
        return min(max(1, round(drawn)), MOST_TOKENS)

    def opened(self) -> _Session:
        """A new session under one of the shared prefixes."""
        kind = self.kind
        tokens, blocks = self._rng.choices(self._systems, cum_weights=self._weights)[0]
        first = self._length(kind.first_tokens, kind.sigma) if kind.first_tokens else 0
        return _Session(tokens, blocks, first)

    def turn(self, session: _Session, at_us: Micros) -> Row | None:
        """The session's next request; None: it would be too long."""
        kind = self.kind
        added = self._length(kind.turn_tokens, kind.sigma)
        if kind.tail:
            added = round(kind.turn_tokens * self._rng.paretovariate(kind.tail) / 2)
        session.tokens += max(1, added) + session.first
        session.first = 0
        if session.tokens > MOST_TOKENS:
            return None
        full, rest = divmod(session.tokens, self._size)
        session.blocks += islice(self._fresh, full - len(session.blocks))
        tail = islice(self._fresh, 1 if rest else 0)
        output = min(self._length(kind.output_tokens, 0.8), 2_000)
        row = Row(at_us, session.tokens, output, (*session.blocks, *tail), tenant=kind.tenant)
        session.tokens += output
        return row

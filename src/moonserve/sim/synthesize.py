"""Made-up traces with the shape of chat: sessions that grow turn by turn under shared prompts.

`moonserve trace synthesize` and tests that want a known kind of load use it. The same seed and
arguments give the same trace on every machine. It does not imitate any one trace.
"""

from __future__ import annotations

import math
from itertools import accumulate, count, islice
from random import Random

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.units import MICROS_PER_SECOND, Tokens
from moonserve.sim.trace import BLOCK_SIZE, MOST_TOKENS, Row, Trace


class Shape(msgspec.Struct, frozen=True):
    """What requests look like. Lengths in tokens, log-normal around their medians."""

    turns: float = 3.0
    """Mean requests of a session, >= 1."""
    open_sessions: int = 256
    """How many of the latest sessions may still continue: more of them, later reuse."""
    system_prompts: int = 16
    """All sessions share them; the k-th is chosen in proportion to 1 / k ** zipf."""
    zipf: float = 1.0
    system_tokens: Tokens = 1024
    """Median length of a system prompt."""
    hot_share: float = 0.0
    """This share of the sessions begins with one more prompt, the same for all of them."""
    hot_tokens: Tokens = 8_192
    """The length of that prompt."""
    user_tokens: Tokens = 800
    """Median length of what a turn adds."""
    output_tokens: Tokens = 300
    """Median length of an answer, which the next turn's input includes."""
    sigma: float = 1.0
    """Standard deviation of the lengths' logarithms."""
    most_tokens: Tokens = 131_072
    """The longest input; a session that would exceed it begins anew."""


CHAT = Shape()
_MOST = 1_000_000


class _Session:
    """A conversation so far: its length, and the ids of its full blocks."""

    def __init__(self, system: tuple[Tokens, tuple[int, ...]]) -> None:
        self.tokens, blocks = system
        self.blocks = list(blocks)


def synthesize(
    seed: int, requests: int, rps: float, shape: Shape = CHAT, block_size: Tokens = BLOCK_SIZE
) -> Trace:
    """Poisson arrivals at `rps`; each continues a recent session, or begins one.

    It continues with probability 1 - 1 / turns, any open session with equal chance, so a session
    has `turns` requests in the mean. Sessions share the full blocks of their system prompt, and
    turns share those of all turns before; a partial last block is never shared.
    """
    _check(requests, rps, shape, block_size)
    rng = Random(seed)
    fresh = count()

    def length(median: Tokens) -> Tokens:
        drawn = median * math.exp(rng.gauss(0.0, shape.sigma))
        return min(max(1, round(drawn)), shape.most_tokens // 2)

    systems: list[tuple[Tokens, tuple[int, ...]]] = []
    for _ in range(shape.system_prompts):
        tokens = length(shape.system_tokens)
        systems.append((tokens, tuple(islice(fresh, tokens // block_size))))
    weights = list(accumulate(1 / k**shape.zipf for k in range(1, len(systems) + 1)))
    tokens = min(shape.hot_tokens, shape.most_tokens // 2)
    hot = tokens, tuple(islice(fresh, tokens // block_size if shape.hot_share else 0))
    sessions: list[_Session] = []
    rows: list[Row] = []
    at_s = 0.0
    for _ in range(requests):
        user = length(shape.user_tokens)
        goes_on = bool(sessions) and rng.random() >= 1 / shape.turns
        chosen = rng.choice(sessions) if goes_on else None
        if chosen is None or chosen.tokens + user > shape.most_tokens:
            is_hot = shape.hot_share > 0 and rng.random() < shape.hot_share
            system = hot if is_hot else rng.choices(systems, cum_weights=weights)[0]
            chosen = _Session(system)
            sessions.append(chosen)
            del sessions[: -shape.open_sessions]
        chosen.tokens += user
        full, rest = divmod(chosen.tokens, block_size)
        chosen.blocks += islice(fresh, full - len(chosen.blocks))
        tail = islice(fresh, 1 if rest else 0)
        output = length(shape.output_tokens)
        at_us = round(at_s * MICROS_PER_SECOND)
        rows.append(Row(at_us, chosen.tokens, output, (*chosen.blocks, *tail)))
        chosen.tokens += output
        at_s += rng.expovariate(rps)
    return Trace(f"synthetic-{seed}", block_size, rows)


def _check(requests: int, rps: float, shape: Shape, block_size: Tokens) -> None:
    """Check the arguments. Raises ConfigError for the first one that is out of its range."""
    ranges: dict[str, tuple[float, float, float]] = {
        "requests": (requests, 1, math.inf),
        "block_size": (block_size, 1, MOST_TOKENS),
        "turns": (shape.turns, 1, _MOST),
        "open_sessions": (shape.open_sessions, 1, _MOST),
        "system_prompts": (shape.system_prompts, 1, _MOST),
        "system_tokens": (shape.system_tokens, 1, MOST_TOKENS),
        "hot_share": (shape.hot_share, 0, 1),
        "hot_tokens": (shape.hot_tokens, 1, MOST_TOKENS),
        "user_tokens": (shape.user_tokens, 1, MOST_TOKENS),
        "output_tokens": (shape.output_tokens, 1, MOST_TOKENS),
        "zipf": (shape.zipf, 0, 10),
        "sigma": (shape.sigma, 0, 10),
        "most_tokens": (shape.most_tokens, 2, MOST_TOKENS),
        "rps": (rps, 1e-6, 1e6),
    }
    for field, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise ConfigError(f"{value} must be between {least} and {most}", field)

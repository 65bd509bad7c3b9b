"""What a trace holds: its lengths, and how much of it a cache can give back.

`moonserve trace stats` and the paper's hit-rate figures use it. It makes one pass over the requests
in order of arrival, without timing: each request finds the blocks of all requests before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonserve.core.units import Tokens
from moonserve.sim.cache import Cache
from moonserve.sim.trace import Trace

QUANTILES = (50, 90, 99, 100)


class Hits(msgspec.Struct, frozen=True):
    """What one cache of `capacity` blocks (None: unbounded) gives back over a whole trace."""

    policy: str
    capacity: int | None
    block_hits: int
    token_hits: Tokens


class Stats(msgspec.Struct, frozen=True):
    """A trace in numbers; quantiles by percent, 100 being the largest."""

    name: str
    block_size: Tokens
    requests: int
    span_ms: int
    input_tokens: Tokens
    output_tokens: Tokens
    block_touches: int
    unique_blocks: int
    infinite_hits: int
    infinite_hit_tokens: Tokens
    input_quantiles: dict[int, Tokens]
    output_quantiles: dict[int, Tokens]


def stats(trace: Trace) -> Stats:
    """Count everything that needs no choice of capacity or policy."""
    rows = trace.rows
    infinite = hits(trace, None)
    inputs = sorted(row.input_tokens for row in rows)
    outputs = sorted(row.output_tokens for row in rows)
    return Stats(
        name=trace.name,
        block_size=trace.block_size,
        requests=len(rows),
        span_ms=round((rows[-1].at_us - rows[0].at_us) / 1000),
        input_tokens=sum(inputs),
        output_tokens=sum(outputs),
        block_touches=sum(len(row.blocks) for row in rows),
        unique_blocks=len({block for row in rows for block in row.blocks}),
        infinite_hits=infinite.block_hits,
        infinite_hit_tokens=infinite.token_hits,
        input_quantiles=_quantiles(inputs),
        output_quantiles=_quantiles(outputs),
    )


def hits(trace: Trace, capacity: int | None, policy: str = "lru") -> Hits:
    """Serve a trace from one cache that all requests share.

    A request hits the longest leading run of its blocks that the cache holds. Then all its blocks
    are used or enter, the deepest first, and the surplus is evicted. In tokens, a hit on the
    partial last block counts the tokens that the request has of it.
    """
    cache: Cache[int] = Cache(capacity, policy)
    block_hits = token_hits = 0
    for row in trace.rows:
        run = cache.run(row.blocks)
        block_hits += run
        token_hits += min(run * trace.block_size, row.input_tokens)
        cache.insert(row.blocks)
    return Hits(policy, capacity, block_hits, token_hits)


def _quantiles(ordered: Sequence[int]) -> dict[int, int]:
    """Nearest rank: the smallest value that at least p percent of the values do not exceed."""
    return {p: ordered[-(-len(ordered) * p // 100) - 1] for p in QUANTILES}

"""What a simulated instance is asked to do; sim.cluster and sim.cpp make calls, sim.node does
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.units import BlockKey, Micros, RequestId, Tokens


class StagePart(msgspec.Struct, eq=False):
    """Makes a prefill call a stage of a group: it has a pass of its own, beside the batch."""

    pieces: int
    """The number of pieces in which its KV goes to the next stage, and arrives from the previous
    one."""
    work_us: Micros | None
    """The time of its pass, if that is not what its tokens cost."""
    whole: bool
    """Whether the last piece that it waits for has arrived."""


class Call(msgspec.Struct, eq=False):
    """One prefill or decode call on a node."""

    request: RequestId
    number: int
    known: Tokens
    """Tokens known when the call came; the KV of all but one may be loaded."""
    prompt: Tokens
    """Prompt tokens; known - prompt tokens were generated before."""
    most: Tokens
    """The call ends after this many output tokens."""
    load: Callable[[Callable[[Tokens], None]], None]
    """Loads the KV, then calls its argument with the number of tokens that the KV covers."""
    keys: Sequence[BlockKey] = ()
    """The keys of its full blocks, if requests of its engine share blocks."""
    part: StagePart | None = None
    cached: Tokens = 0
    began_us: Micros | None = None
    busy_us: Micros = 0
    """Time of the passes that it took part in, each shared among its calls; 0 on decode."""
    computed_us: Micros = 0
    """Time of the passes that prefilled it, each counted whole."""
    spans: list[list[int]] = []
    """[first, after last] numbers of the node's passes that gave it a token."""

"""What a simulated instance is asked to do; sim.cluster and sim.cpp make calls, sim.node does
them."""

from __future__ import annotations

from collections.abc import Callable

from moonserve.core.units import Micros, RequestId, Tokens


class Part:
    """Makes a prefill call a stage of a group: it has a pass of its own, beside the batch."""

    def __init__(self, pieces: int, work_us: Micros | None, whole: bool) -> None:
        self.pieces = pieces
        """The number of pieces in which its KV goes to the next stage, and arrives from the
        previous one."""
        self.work_us = work_us
        """The time of its pass, if that is not what its tokens cost."""
        self.whole = whole
        """Whether the last piece that it waits for has arrived."""


class Call:
    """One prefill or decode call on a node."""

    def __init__(
        self,
        request: RequestId,
        number: int,
        known: Tokens,
        prompt: Tokens,
        most: Tokens,
        load: Callable[[Callable[[Tokens], None]], None],
        part: Part | None = None,
    ) -> None:
        self.request = request
        self.number = number
        self.known = known
        """Tokens known when the call came; the KV of all but one may be loaded."""
        self.prompt = prompt
        """Prompt tokens; known - prompt tokens were generated before."""
        self.most = most
        """The call ends after this many output tokens."""
        self.load = load
        """Loads the KV, then calls its argument with the number of tokens that the KV covers."""
        self.part = part
        self.cached: Tokens = 0
        self.began_us: Micros | None = None
        self.busy_us: Micros = 0
        """Time of the passes that it took part in, each shared among its calls; 0 on decode."""
        self.spans: list[list[int]] = []
        """[first, after last] numbers of the node's passes that gave it a token."""

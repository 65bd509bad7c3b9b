"""What a simulated instance is asked to do; made by sim.cluster and sim.cpp, done by sim.node."""

from __future__ import annotations

from collections.abc import Callable

from moonserve.core.units import Micros, RequestId, Tokens


class Part:
    """What makes a prefill call a stage of a group: a pass of its own, beside the batch."""

    def __init__(self, pieces: int, work_us: Micros | None, whole: bool) -> None:
        self.pieces = pieces
        """In which it is handed on, and in which what it waits for comes."""
        self.work_us = work_us
        """Time of its pass, where that is not what its tokens cost."""
        self.whole = whole
        """Whether the last piece that it waits for is here."""


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
        """Tokens known when it came; the KV of all but one may be loaded."""
        self.prompt = prompt
        """Tokens that were given, so that known - prompt were generated before."""
        self.most = most
        """Output tokens after which it ends."""
        self.load = load
        """Brings the KV; tells when it is here, and how many tokens it covers."""
        self.part = part
        self.cached: Tokens = 0
        self.began_us: Micros | None = None
        self.busy_us: Micros = 0
        """Time of the passes it took part in, each shared among what ran in it; 0 on decode."""
        self.spans: list[list[int]] = []
        """[first, after last] numbers of the node's passes that gave it a token."""

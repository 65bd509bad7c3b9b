"""PendingPrefixes: what instances will hold after the prefills promised to them; a radix tree.

The Conductor adds a chain when it places a request, and removes it when the prefill is over. Unlike
PrefixIndex it has whole chains only, and so never touches a chain block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.kv.index import parting
from moonserve.core.units import BlockKey, RequestId, SegmentId


class _PromisedRun:
    """Blocks that the same promised chains share, up to number `stop` of each chain."""

    __slots__ = ("after", "counts", "keys", "stop")

    def __init__(
        self,
        keys: Sequence[BlockKey],
        stop: int,
        counts: dict[SegmentId, int],
        after: dict[BlockKey, _PromisedRun],
    ) -> None:
        self.keys = keys
        """One of these chains, from its head."""
        self.stop = stop
        self.counts = counts
        """Holder -> how many of the chains it was promised."""
        self.after = after
        """The runs that follow, by their first key."""


class PendingPrefixes:
    """Holders and the chains promised to them; keys are chained hashes, as in PrefixIndex."""

    def __init__(self) -> None:
        self._heads: dict[BlockKey, _PromisedRun] = {}
        self._of: dict[RequestId, tuple[SegmentId, Sequence[BlockKey]]] = {}

    def promised(self, request: RequestId, holder: SegmentId, keys: Sequence[BlockKey]) -> None:
        """`holder` will have this chain through the prefill of this request."""
        self._of[request] = (holder, keys)
        self.add(holder, keys)

    def over(self, request: RequestId) -> None:
        """The request's prefill is over, or was never promised."""
        if request in self._of:
            self.remove(*self._of.pop(request))

    def add(self, holder: SegmentId, keys: Sequence[BlockKey]) -> None:
        """`holder` will have this chain."""
        at, after = 0, self._heads
        while at < len(keys):
            run = after.get(keys[at])
            if run is None:
                run = after[keys[at]] = _PromisedRun(keys, len(keys), {}, {})
            stop = at + parting(run.keys, at, keys, at, run.stop - at)
            if stop < run.stop:
                rest = _PromisedRun(run.keys, run.stop, run.counts.copy(), run.after)
                run.stop = stop
                run.after = {run.keys[stop]: rest}
            run.counts[holder] = run.counts.get(holder, 0) + 1
            at, after = stop, run.after

    def remove(self, holder: SegmentId, keys: Sequence[BlockKey]) -> None:
        """Take back an earlier `add`, whether the promise was kept or not."""
        at, after = 0, self._heads
        way: list[_PromisedRun] = []
        while at < len(keys):
            run = after[keys[at]]
            run.counts[holder] -= 1
            if not run.counts[holder]:
                del run.counts[holder]
            if not run.counts:
                del after[keys[at]]  # no run after it has a promise either
                break
            way.append(run)
            at, after = run.stop, run.after
        for run in reversed(way):
            if len(run.after) == 1:
                [rest] = run.after.values()
                if rest.counts == run.counts:  # all chains go on there
                    run.keys = rest.keys
                    run.stop = rest.stop
                    run.after = rest.after

    def match(self, keys: Sequence[BlockKey]) -> dict[SegmentId, int]:
        """How many leading blocks of this chain each holder will have; others are absent."""
        found: dict[SegmentId, int] = {}
        at, after = 0, self._heads
        while at < len(keys):
            run = after.get(keys[at])
            if run is None:
                break
            stop = at + parting(run.keys, at, keys, at, run.stop - at)
            found.update(dict.fromkeys(run.counts, stop))
            if stop < run.stop:
                break
            at, after = stop, run.after
        return found

"""What the KV events of external engines tell the Conductor.

EngineMonitor makes a ConductorIndexer for each engine rank that it follows, and reports all its
facts through a FactReporter. Nothing here opens a socket: live.kvevents.follower does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from moonserve.core.kv.events import KvBatch
from moonserve.core.kv.facts import BlockEvent, BlocksRemoved, BlocksStored
from moonserve.core.kv.reported import Reported
from moonserve.core.kv.stream import KvEventStream, StreamStats
from moonserve.core.schedule.facts import Fact, InstanceInfo
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId, Micros, SegmentId, Tokens

POOL = SegmentId("shared-store")
"""The holder of what engines put into a store that they share."""


class MonitoredCluster(Protocol):
    """The Conductor, as far as engines' monitors need it."""

    def now_us(self) -> Micros:
        """The Conductor's clock."""

    def views(self) -> Mapping[InstanceId, InstanceView]:
        """The instances that have joined."""

    def tell(self, *facts: Fact) -> None:
        """Report facts for the Conductor's next step."""


class FactReporter:
    """The Conductor as monitors report to it: each block of a shared store is reported once.

    Nobody reports what that store evicts. If it has too many blocks, those that were reported
    longest ago are taken out.
    """

    def __init__(self, cluster: MonitoredCluster) -> None:
        self._cluster = cluster
        self._pool = Reported(POOL)

    def now_us(self) -> Micros:
        """See MonitoredCluster."""
        return self._cluster.now_us()

    def views(self) -> Mapping[InstanceId, InstanceView]:
        """See MonitoredCluster."""
        return self._cluster.views()

    def tell(self, *facts: Fact) -> None:
        """See MonitoredCluster."""
        reported: list[Fact] = []
        for fact in facts:
            if isinstance(fact, BlocksStored) and fact.segment == POOL:
                reported += self._pool.stored(self.now_us(), fact.keys, fact.parent)
            elif isinstance(fact, BlocksRemoved) and fact.segment == POOL:
                reported += self._pool.removed(self.now_us(), fact.keys)
            else:
                reported.append(fact)
        if reported:
            self._cluster.tell(*reported)


class BlockSink(Protocol):
    """What receives the facts of a ConductorIndexer: an EngineMonitor."""

    def blocks(self, *facts: BlockEvent) -> None:
        """The engine's blocks have changed."""

    def restarted(self) -> None:
        """The engine's events began anew: it is a new process."""


class ConductorIndexer:
    """A BlockIndexer: an engine rank's events as facts about one instance, in one epoch of it."""

    def __init__(self, info: InstanceInfo, shares_store: bool, sink: BlockSink) -> None:
        """`shares_store`: whether events of a shared store are facts about POOL."""
        assert info.segment is not None, "external engines hold their own KV"
        self.info = info
        self.sink = sink
        pool = POOL if shares_store else None
        self._stream = KvEventStream(info.segment, info.epoch, info.namespace, pool)

    @property
    def stats(self) -> StreamStats:
        """See BlockIndexer."""
        return self._stream.stats

    @property
    def mismatch(self) -> Tokens | None:
        """See BlockIndexer."""
        return self._stream.mismatch

    def batch(self, batch: KvBatch) -> None:
        """See BlockIndexer."""
        facts = self._stream.batch(batch)
        if facts:
            self.sink.blocks(*facts)

    def reset(self, restarted: bool) -> None:
        """See BlockIndexer."""
        self.sink.blocks(*self._stream.reset())
        if restarted:
            self.sink.restarted()

"""Follows the KV events of one engine rank for its monitor: batches in, facts for the index out."""

from __future__ import annotations

from moonserve.core.kv.events import KvBatch
from moonserve.core.kv.stream import EventStream
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.live.external.feeds import POOL, Feed, FeedCounts, FeedSink
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.kvevents.subscriber import EventFeed


class _Followed:
    """A Feed, and the Sink of an EventFeed."""

    def __init__(self, info: InstanceInfo, spec: InstanceSpec, rank: int, to: FeedSink) -> None:
        assert info.segment is not None, "engines hold their own KV"
        pool = POOL if spec.shared_store else None
        self._stream = EventStream(info.segment, info.epoch, info.namespace, pool)
        self._to = to
        replay = spec.replay_of(rank) or None
        self.feed = EventFeed(spec.events_of(rank), replay, spec.topic, self)

    def batch(self, batch: KvBatch) -> None:
        """See Sink."""
        facts = self._stream.batch(batch)
        if facts:
            self._to.blocks(*facts)

    def reset(self, why: str, restarted: bool) -> None:
        """See Sink."""
        self._to.blocks(*self._stream.reset())
        if restarted:
            self._to.restarted()

    def counts(self) -> FeedCounts:
        """See Feed."""
        order, stats, size = self.feed.order, self._stream.stats, self._stream.mismatch
        fault = ""
        if size is not None:
            fault = f"their blocks have {size} tokens, unlike its cache's; say events: off"
        return FeedCounts(
            connected=self.feed.connected,
            trusted=order.complete or not order.stats.batches,
            batches=order.stats.batches,
            gaps=order.stats.gaps,
            resets=order.stats.untrusted,
            orphans=stats.orphans,
            malformed=self.feed.malformed,
            fault=fault,
        )

    async def close(self) -> None:
        """See Feed."""
        await self.feed.close()


async def open_feed(info: InstanceInfo, spec: InstanceSpec, rank: int, to: FeedSink) -> Feed:
    """A FeedOpener. Raises ConfigError: no such kind of address."""
    followed = _Followed(info, spec, rank, to)
    await followed.feed.start()
    return followed

"""Followers: the KV events of engine ranks, each followed into one index.

The Conductor's index (live.external.monitor) and the Indexer API (live.external.indexer_api) use
the same Followers, so an address that both follow is received and decoded once. Each index has a
feed of its own, with its own order and its own keys: see
docs/adr/0019-two-indexes-one-follower.md.

What never happens here: ZMQ is not imported before the first engine is followed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from moonserve.core.kv.events import KvBatch
from moonserve.core.kv.stream import StreamStats
from moonserve.core.units import Tokens
from moonserve.live.kvevents.wire import EventAddress

if TYPE_CHECKING:
    from moonserve.live.kvevents.subscriber import EventFeed, Subscriptions

log = logging.getLogger(__name__)


class BlockIndexer(Protocol):
    """Puts the blocks of one engine rank into an index. Called on the event loop; never blocks."""

    @property
    def stats(self) -> StreamStats:
        """Counts of the events so far."""

    @property
    def mismatch(self) -> Tokens | None:
        """The engine's block size if it is not the index's, else None."""

    def batch(self, batch: KvBatch) -> None:
        """Take the next batch."""

    def reset(self, restarted: bool) -> None:
        """Forget all blocks: `restarted`: the engine is a new process; otherwise batches were
        lost."""


class FeedCounts(msgspec.Struct, frozen=True):
    """The state of one feed, and its counts so far."""

    connected: bool = False
    trusted: bool = False
    """Whether the events add up to what the engine holds, as far as can be known."""
    batches: int = 0
    gaps: int = 0
    """Times that batches were missing."""
    resets: int = 0
    """Times that all known blocks were forgotten because batches were lost."""
    restarts: int = 0
    """Times that all known blocks were forgotten because the engine restarted."""
    orphans: int = 0
    """Blocks left out because the engine never reported the blocks before them."""
    malformed: int = 0
    fault: str = ""
    """Why no event can be used, such as another block size; empty: they can be used."""


class Feed(Protocol):
    """The KV events of one engine rank, being followed."""

    def counts(self) -> FeedCounts:
        """The state now."""

    async def close(self) -> None:
        """Stop; the index receives nothing afterwards."""


Follow: TypeAlias = Callable[[EventAddress, BlockIndexer], Awaitable[Feed]]
"""Follow an engine rank into an index. Raises ConfigError: an address is invalid."""


class Followers:
    """Follows engine ranks; all of one event loop, so that they can share subscriptions."""

    def __init__(self, curve: str = "") -> None:
        """curve: the folder with keys for encrypted events; empty: there is none."""
        self._curve = curve
        self._subscriptions: Subscriptions | None = None

    @property
    def subscribed(self) -> int:
        """How many addresses are subscribed to, whatever the number of their feeds."""
        return 0 if self._subscriptions is None else self._subscriptions.count

    async def follow(self, address: EventAddress, indexer: BlockIndexer) -> Feed:
        """See Follow."""
        from moonserve.live.kvevents.subscriber import EventFeed, Subscriptions

        if self._subscriptions is None:
            self._subscriptions = Subscriptions(curve=self._curve)
        following = _Following(indexer)
        following.feed = EventFeed(address, following, self._subscriptions)
        await following.feed.start()
        return following


class _Following:
    """A Feed, and the Sink of its EventFeed: gives what it receives to an indexer."""

    feed: EventFeed

    def __init__(self, indexer: BlockIndexer) -> None:
        self._indexer = indexer
        self._warned = False

    def batch(self, batch: KvBatch) -> None:
        """See subscriber.Sink."""
        self._indexer.batch(batch)
        size = self._indexer.mismatch
        if size is not None and not self._warned:
            self._warned = True
            log.warning(
                "%s: KV events are not used: their blocks have %d tokens, the index's do not",
                self.feed.address.endpoint,
                size,
            )

    def reset(self, why: str, restarted: bool) -> None:
        """See subscriber.Sink."""
        self._indexer.reset(restarted)

    def counts(self) -> FeedCounts:
        """See Feed."""
        order = self.feed.order
        size = self._indexer.mismatch
        return FeedCounts(
            connected=self.feed.connected,
            trusted=order.complete or not order.stats.batches,
            batches=order.stats.batches,
            gaps=order.stats.gaps,
            resets=order.stats.untrusted,
            restarts=order.stats.restarts,
            orphans=self._indexer.stats.orphans,
            malformed=self.feed.malformed,
            fault="" if size is None else f"their blocks have {size} tokens",
        )

    async def close(self) -> None:
        """See Feed."""
        await self.feed.close()

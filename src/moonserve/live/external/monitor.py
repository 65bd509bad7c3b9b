"""EngineMonitor: asks one external engine, joins it to the Conductor, watches it, gives it up.

Fleet runs one task per engine. The outcome of clients' calls does not matter here: an engine is up
while it answers GET /health, and keeps the facts of its handshake until its process changes. The
monitor makes a ConductorIndexer for each engine rank whose KV events it follows, and reports all
facts. live.kvevents.follower opens the sockets of events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.events import KvBatch
from moonserve.core.kv.facts import TIERS, BlockEvent, BlocksCleared
from moonserve.core.kv.inferred import Reported
from moonserve.core.kv.keys import Namespace
from moonserve.core.kv.stream import KvEventStream
from moonserve.core.schedule.facts import (
    Beat,
    InstanceInfo,
    InstanceLoad,
    Joined,
    Left,
    PassSample,
)
from moonserve.core.schedule.observed import CallWatch
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId, SegmentId, seconds_to_us
from moonserve.live.external.handshake import EngineFacts, handshake, models
from moonserve.live.external.member import Member, Mismatch, Page, RankPage
from moonserve.live.kvevents.follower import Feed, Follow
from moonserve.live.kvevents.wire import EventAddress
from moonserve.live.ports import ClusterFeed
from moonserve.live.text.tools import TextTools

log = logging.getLogger(__name__)

State: TypeAlias = Literal["asking", "up", "lost", "refused"]
_MAX_SEQS = 256
_CHUNK_TOKENS = 8_192
_LEAST_GAPS = 16
"""Gaps between tokens that must lie between two polls, for a meaningful mean."""
POOL = SegmentId("shared-store")
"""The holder of what engines put into a store that they share."""


class ConductorIndexer(KvEventStream):
    """A BlockIndexer: an engine rank's events as facts about one instance, in one epoch of it."""

    def __init__(self, info: InstanceInfo, shares_store: bool, sink: EngineMonitor) -> None:
        """`shares_store`: whether events of a shared store are facts about POOL."""
        assert info.segment is not None, "external engines hold their own KV"
        pool = POOL if shares_store else None
        super().__init__(info.segment, info.epoch, info.namespace, pool)
        self.info = info
        self.sink = sink

    def batch(self, batch: KvBatch) -> None:
        """See BlockIndexer."""
        facts = self.facts(batch)
        if facts:  # mostly none
            self.sink.blocks(*facts)

    def reset(self, restarted: bool) -> None:
        """See BlockIndexer."""
        self.sink.blocks(*self.cleared())
        if restarted:
            self.sink.restarted()


class Times(msgspec.Struct, frozen=True):
    """How often a monitor polls its engine, and when it gives the engine up."""

    poll_s: float = 1.0
    """Between two polls of an engine's health and load."""
    answer_s: float = 5.0
    """Deadline of an answer. An engine under load may answer slowly."""
    failures: int = 3
    """Polls in a row without an answer after which the engine is lost."""
    retry_s: float = 5.0
    """Between two handshakes with an engine that was refused."""

    @property
    def longest_s(self) -> float:
        """The longest time from an engine's last answer until it is given up."""
        asked = 2  # GET /health, then GET /v1/models with our key
        return self.failures * (self.poll_s + asked * self.answer_s) + 1.0


class EngineMonitor:
    """The state of one engine. `run` never returns: cancel it, then `close`."""

    def __init__(
        self,
        member: Member,
        conductor: ClusterFeed,
        pool: Reported,
        tools: TextTools | None,
        times: Times,
        check: Callable[[Member, EngineFacts], EngineFacts],
        follow: Follow | None,
    ) -> None:
        """pool: the blocks of POOL, of which all monitors report. tools: of the engine's
        tokenizer; None: it has none here. check: raises Mismatch if the engine does not fit the
        others of its model. follow: None: do not follow events."""
        self.member = member
        self.tools = tools
        self.state: State = "asking"
        self.why = ""
        """Why the engine is not up."""
        self.facts: EngineFacts | None = None
        """From the last handshake that succeeded."""
        self.watches: dict[InstanceId, CallWatch] = {}
        self.feeds: dict[InstanceId, Feed] = {}
        self.epoch = 0
        self._conductor = conductor
        self._pool = pool
        self._times = times
        self._check = check
        self._follow = follow
        self._said: dict[InstanceId, RankPage] = {}
        """Load of each instance at the last poll."""
        self._new_process = False
        """Whether the engine's process is another one than at the handshake."""

    async def run(self) -> None:
        """Handshake, join and watch; again from the start when the engine is lost or restarted."""
        while True:
            try:
                found = await handshake(self.member, self.tools)
                found = self._check(self.member, found)
                await self._join(found)
                await self._watch(found)
            except Mismatch as error:
                await self._leave("refused", str(error))
                await asyncio.sleep(self._times.retry_s)
            except MoonserveError as error:
                state: State = "asking" if self.facts is None else "lost"
                await self._leave(state, str(error))
                await asyncio.sleep(self._times.poll_s)
            except Exception as error:
                # A bug, perhaps because of this engine's answer, must not keep it out for ever.
                log.exception("%s: bug while monitoring it", self.member.spec.name)
                await self._leave("lost", f"bug in the gateway: {error!r}")
                await asyncio.sleep(self._times.retry_s)

    async def close(self) -> None:
        """Send the engine nothing more and forget its blocks. It still finishes what it has."""
        await self._close_feeds()
        self._forget(self.epoch + 1, None)

    # For the KV events that it follows.

    def blocks(self, *events: BlockEvent) -> None:
        """The engine's blocks have changed. Each block of a shared store is reported once."""
        now_us = self._conductor.now_us()
        self._conductor.tell(*[it for event in events for it in self._pool.take(now_us, event)])

    def restarted(self) -> None:
        """The engine's events began anew: it is a new process."""
        self._new_process = True

    # Joining.

    async def _join(self, found: EngineFacts) -> None:
        last, started_s = self.facts, found.started_s
        same = (
            last is not None
            and not self._new_process
            and not self.member.changed
            and started_s is not None
            and last.started_s == started_s
            and bool(self.member.infos)
        )
        how = "up again" if last is not None else "up"
        if not same:
            if last is not None and self.member.infos:
                how = "restarted"
            began_ms = int(1_000 * (started_s or time.time()))
            self.epoch = max(self.epoch + 1, began_ms)
            self._new_process = True
            self.member.changed = False
            await self._close_feeds()
        for text in found.warnings if last is None or last.warnings != found.warnings else ():
            log.warning("%s: %s", self.member.spec.name, text)
        level = logging.WARNING if how == "restarted" else logging.INFO
        said = (self.member.spec.name, how, self.epoch, self.member.url, found.model)
        log.log(level, "%s: %s (epoch %d) at %s, model %s", *said)
        self.facts = found
        self.member.version = found.version
        self.state = "up"
        self.why = ""
        infos = {it.id: it for it in map(self._info, range(self.member.spec.dp_size))}
        self.member.infos = infos
        # One step takes both: no decision sees the new process with the blocks of an earlier one.
        cleared = [] if same else [it for info in infos for it in self._cleared(info, self.epoch)]
        self._conductor.tell(*map(Joined, infos.values()), *cleared)
        if not same:
            await self._begin(found)
            self._new_process = False  # only now: if _begin fails, it must run again

    async def _begin(self, found: EngineFacts) -> None:
        """Forget the calls of an earlier process, and follow the events of the new one."""
        chunk = self.member.spec.chunk_tokens or _CHUNK_TOKENS
        self._said.clear()
        self.watches = {instance: CallWatch(chunk) for instance in self.member.infos}
        for rank, info in enumerate(self.member.infos.values()):
            if found.events and self._follow is not None:
                spec = self.member.spec
                address = EventAddress(
                    spec.events_of(rank), spec.replay_of(rank), spec.topic, spec.events_curve
                )
                indexer = ConductorIndexer(info, spec.shared_store, self)
                self.feeds[info.id] = await self._follow(address, indexer)

    def _info(self, rank: int) -> InstanceInfo:
        spec, found = self.member.spec, self.facts
        assert found is not None
        instance = spec.ids()[rank]
        return InstanceInfo(
            id=instance,
            epoch=self.epoch,
            role=spec.role,
            url=self.member.url,
            model=found.model,
            namespace=Namespace(found.model, "", "", found.block_size),
            kv_blocks=found.kv_tokens // found.block_size,
            block_bytes=0,
            max_seqs=spec.max_seqs or _MAX_SEQS,
            chunk_tokens=spec.chunk_tokens or _CHUNK_TOKENS,
            max_len=found.max_len,
            segment=SegmentId(instance),
            rack=spec.rack,
            connector=spec.connector,
            bootstrap=self.member.bootstrap,
            dp_rank=rank if spec.dp_size > 1 else None,
            fetches=spec.shared_store,
        )

    # Watching.

    async def _watch(self, found: EngineFacts) -> None:
        """Return when the engine is lost, or may be another process."""
        failures = 0
        while True:
            await asyncio.sleep(self._times.poll_s)
            health, page = await asyncio.gather(self._healthy(), self._page())
            failures = 0 if health is None else failures + 1
            if health is not None and failures >= self._times.failures:
                await self._leave("lost", health)
                return
            if health is not None:
                continue
            started_s = page.started_s
            if self._new_process or self.member.changed:
                return
            if started_s is not None and started_s != found.started_s:
                return
            if any(instance not in self._conductor.views() for instance in self.member.infos):
                return  # the Conductor gave it up
            self._beat(page)

    async def _healthy(self) -> str | None:
        """None if the engine is healthy, else why it is not."""
        try:
            timeout_s = self._times.answer_s
            reply = await self.member.ask("/health", timeout_s=timeout_s)
            if reply.status == 200:  # needs no key, but calls do
                await models(self.member, timeout_s)
        except MoonserveError as error:
            return str(error)
        return None if reply.status == 200 else f"GET /health answered {reply.status}"

    async def _page(self) -> Page:
        """The engine's metrics; an empty page if it gives none."""
        try:
            return await self.member.page(self._times.answer_s)
        except MoonserveError:
            return Page()

    def _beat(self, page: Page) -> None:
        for rank, info in enumerate(self.member.infos.values()):
            now_us = self._conductor.now_us()
            view = self._conductor.views()[info.id]
            said = page.rank(rank)
            watch = self.watches[info.id]
            watch.others(
                now_us, view.external.waiting, view.external.running, view.external.context
            )
            passes, hits = watch.take(now_us)
            seen = said or RankPage()
            load = InstanceLoad(
                running=seen.running,
                waiting=max(0, seen.waiting - seen.deferred),
                free_blocks=round((1.0 - seen.usage) * info.kv_blocks),
                passes=(*passes, *self._steps(info, seen, view)),
                hits=hits,
                everybody=said is not None,
                kv_tokens=round(seen.usage * view.kv_tokens),
            )
            self._conductor.tell(Beat(info.id, info.epoch, load))

    def _steps(self, info: InstanceInfo, said: RankPage, view: InstanceView) -> list[PassSample]:
        """The engine's decode passes since the last poll, from its own times between tokens.

        Only for decode instances that run as many requests as at the last poll. The engine's times
        include requests whose replies do not stream.
        """
        before = self._said.get(info.id)
        self._said[info.id] = said
        if info.role != "decode" or before is None or before.running != said.running:
            return []
        gaps = said.gaps - before.gaps
        if not said.running or gaps < _LEAST_GAPS:
            return []
        context = round(said.usage * view.kv_tokens)
        step_us = seconds_to_us((said.gaps_s - before.gaps_s) / gaps)
        return [PassSample(0, 0, 0, said.running, context, step_us)]

    # Leaving.

    async def _leave(self, state: State, why: str) -> None:
        """The engine is not used from now on; its running calls are cut off."""
        if (state, why) != (self.state, self.why):
            level = logging.INFO if state == "asking" and self.why else logging.WARNING
            log.log(level, "%s: %s: %s", self.member.spec.name, state, why)
        self.state = state
        self.why = why
        for info in self.member.infos.values():
            self._conductor.tell(Left(info.id, info.epoch, why))
        if state == "refused":
            await self._close_feeds()
            self._forget(self.epoch + 1, why)

    def _forget(self, epoch: int, why: str | None) -> None:
        """why: why its calls are aborted; None: it still finishes them."""
        for info in self.member.infos.values():
            self._conductor.tell(Left(info.id, info.epoch, why), *self._cleared(info.id, epoch))
        self.epoch = epoch
        self.member.infos = {}

    def _cleared(self, instance: InstanceId, epoch: int) -> list[BlockEvent]:
        segment = SegmentId(instance)
        return [BlocksCleared(segment, tier, epoch) for tier in TIERS]

    async def _close_feeds(self) -> None:
        while self.feeds:  # if this is cancelled, `close` closes the rest
            await next(reversed(self.feeds.values())).close()
            self.feeds.popitem()

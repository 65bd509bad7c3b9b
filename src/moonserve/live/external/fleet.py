"""The foreign engines of one gateway: which are described, and by whom; a monitor for each.

Descriptions come from the cluster file, over HTTP or from a registry, each source with its own
names; the relay asks here whom it calls, and tells what its calls came to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from moonserve.core.errors import BadRequest, ConfigError, NobodyAlive
from moonserve.core.kv.facts import BlocksRemoved
from moonserve.core.schedule import observed
from moonserve.core.schedule.observed import Part, Watch
from moonserve.core.units import BlockKey, InstanceId, Micros, Tokens
from moonserve.live.external.events import POOL, FactReporter
from moonserve.live.external.handshake import EngineFacts, beside
from moonserve.live.external.member import Member
from moonserve.live.external.monitor import EngineMonitor, Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.kvevents.follower import FeedCounts, Follow
from moonserve.live.ports import ClusterFeed
from moonserve.live.text.tools import TextTools

log = logging.getLogger(__name__)

_MOST = 1_024
_NAMED = 3
"""So many engines are named of whom the same is said."""
_SILENT = 8
"""Calls after which it is said that an engine does not tell what was cached."""


_TELLS = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}


class Taken(BadRequest):
    """Another source has described an engine of this name, or any has one at this URL."""

    status = 409


class Unknown(BadRequest):
    """No engine of this name was described by this source."""

    status = 404


class _Kept(msgspec.Struct):
    source: str
    monitor: EngineMonitor
    task: asyncio.Task[None]


class WatchedCall(observed.Call):
    """See observed.Observer: one call that is out, on the gateway's clock."""

    __slots__ = ("_now_us", "_watch")

    def __init__(
        self,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool,
        watch: Watch,
        now_us: Callable[[], Micros],
    ) -> None:
        super().__init__(part, prompt, predicted, streams)
        self._watch, self._now_us = watch, now_us
        watch.began(now_us(), self)

    def answered(self, cached: Tokens | None) -> None:
        """See observed.Call."""
        self._watch.answered(self._now_us(), self, cached)

    def ended(self, cached: Tokens | None = None) -> None:
        """See observed.Call."""
        self._watch.ended(self._now_us(), self, cached)


class Fleet:
    """See the module. To be made and used on the event loop; `close` it."""

    def __init__(
        self,
        conductor: ClusterFeed,
        http: HttpClient,
        load_text: Callable[[str], TextTools],
        environ: Mapping[str, str],
        *,
        follow: Follow | None = None,
        times: Times | None = None,
    ) -> None:
        """`load_text`: a model's text side by its reference, called in a thread, ConfigError where
        there is none; `environ`: where API keys are; `follow` None: events are not followed."""
        self.times = times or Times()
        self._conductor, self._http = conductor, http
        self._reporter = FactReporter(conductor)
        self._load_text = load_text
        self._environ = environ
        self._follow = follow
        self._texts: dict[str, TextTools] = {}
        self._kept: dict[str, _Kept] = {}
        self._by_id: dict[InstanceId, EngineMonitor] = {}
        self._changing = asyncio.Lock()

    # Which there are.

    async def described(self, source: str, specs: Sequence[InstanceSpec]) -> None:
        """These, and no others, are what `source` describes now. Raises as `add` does, with those
        before it added."""
        names = [spec.name for spec in specs]
        for name, kept in list(self._kept.items()):
            if kept.source == source and name not in names:
                await self.remove(source, name)
        for spec in specs:
            try:
                await self.add(source, spec)
            except ConfigError as error:
                raise spec.fault(error) from None

    async def add(self, source: str, spec: InstanceSpec) -> bool:
        """One more engine, or a new description of one; whether that changed anything.

        Raises ConfigError where the description is wrong, Taken where another source has the name,
        or another engine the URL.
        """
        async with self._changing:
            return await self._add(source, spec.checked())

    async def check(self, source: str, spec: InstanceSpec) -> None:
        """Raise what `add` would, and change nothing."""
        async with self._changing:
            await self._needs(source, spec.checked())

    async def _needs(self, source: str, spec: InstanceSpec) -> tuple[str, TextTools | None]:
        """The key and the tokenizer of an engine that may be added. Raises as `add` does."""
        old = self._kept.get(spec.name)
        if old is not None and old.source != source:
            raise Taken(f"{spec.name} is described by {old.source}; choose another name", "name")
        if old is None and len(self._kept) >= _MOST:
            raise ConfigError(f"{_MOST} engines are the most that one gateway keeps", "instances")
        key = self._environ.get(spec.api_key_env, "") if spec.api_key_env else ""
        if spec.api_key_env and not key:
            raise ConfigError(f"{spec.api_key_env} is not set in the environment", "api_key_env")
        for name, kept in self._kept.items():
            if name != spec.name and kept.monitor.member.spec.place() == spec.place():
                what = f"{spec.url} is {name}, described by {kept.source}"
                raise Taken(f"{what}: remove one of {name} and {spec.name}", "url")
        return key, await self._text(spec.tokenizer) if spec.tokenizer else None

    async def _add(self, source: str, spec: InstanceSpec) -> bool:
        old = self._kept.get(spec.name)
        key, tools = await self._needs(source, spec)
        if old is not None and old.monitor.member.spec == spec:
            return False
        if old is not None:
            await self._remove(old)
        monitor = EngineMonitor(
            Member(spec, self._http, key),
            self._reporter,
            tools,
            self.times,
            self._check,
            self._follow,
        )
        task = asyncio.create_task(monitor.run(), name=f"monitor of {spec.name}")
        task.add_done_callback(_ended)
        self._kept[spec.name] = _Kept(source, monitor, task)
        self._by_id.update(dict.fromkeys(spec.ids(), monitor))
        return True

    async def remove(self, source: str, name: str) -> None:
        """Nothing new goes there; what it has it still finishes. Raises Unknown, Taken."""
        async with self._changing:
            kept = self.removable(source, name)
            if kept is None:
                raise Unknown(f"no engine is named {name}", "name")
            await self._remove(kept)
            log.warning("%s: removed by %s; it gets nothing more", name, source)

    def removable(self, source: str, name: str) -> _Kept | None:
        """What `source` describes under that name; None: nobody does. Raises Taken."""
        kept = self._kept.get(name)
        if kept is not None and kept.source != source:
            raise Taken(f"{name} is described by {kept.source}; remove it there", "name")
        return kept

    async def _remove(self, kept: _Kept) -> None:
        spec = kept.monitor.member.spec
        del self._kept[spec.name]
        for instance in spec.ids():
            self._by_id.pop(instance, None)
        await _stop(kept)

    async def close(self) -> None:
        """Let go of all."""
        kept, self._kept = self._kept, {}
        self._by_id.clear()
        for one in kept.values():
            await _stop(one)

    async def _text(self, ref: str) -> TextTools:
        if ref not in self._texts:
            try:
                self._texts[ref] = await asyncio.to_thread(self._load_text, ref)
            except ConfigError as error:
                raise ConfigError(str(error).removeprefix("model: "), "tokenizer") from None
        return self._texts[ref]

    def _check(self, member: Member, found: EngineFacts) -> EngineFacts:
        """An engine must go with the others of its model that are up; adds what is doubtful of it.
        Raises Mismatch."""
        others = [(it.member, it.facts) for it in self._of(found.model) if it.state == "up"]
        return beside(member, found, [(it, of) for it, of in others if of and it is not member])

    # For the relay.

    def member(self, instance: InstanceId) -> Member:
        """The engine of an instance that has joined. Raises NobodyAlive where it is gone."""
        monitor = self._by_id.get(instance)
        if monitor is None:
            raise NobodyAlive(f"instance {instance} is gone")
        return monitor.member

    def follows_events(self, model: str) -> bool:
        """Whether instances of the model tell KV events: keys are then those of its tokens."""
        for kept in self._kept.values():  # asked for every request
            monitor = kept.monitor
            if monitor.feeds and monitor.facts is not None and monitor.facts.model == model:
                return True
        return False

    def follows_events_of(self, instance: InstanceId) -> bool:
        """Whether this instance does."""
        monitor = self._by_id.get(instance)
        return monitor is not None and instance in monitor.feeds

    def text(self, model: str) -> TextTools | None:
        """The model's tokenizer and template as its engines have them; None: not known here."""
        return next((it.tools for it in self._of(model) if it.tools is not None), None)

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """See observed.Observer."""
        self._reporter.tell(BlocksRemoved(POOL, tuple(keys), "dram", 0))

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> WatchedCall:
        """See observed.Observer."""
        monitor = self._by_id.get(instance)
        watch = None if monitor is None else monitor.watches.get(instance)
        now_us = self._conductor.now_us
        return WatchedCall(part, prompt, predicted, streams, watch or Watch(1), now_us)

    def _of(self, model: str) -> list[EngineMonitor]:
        monitors = [kept.monitor for kept in self._kept.values()]
        return [it for it in monitors if it.facts is not None and it.facts.model == model]

    # For people and programs.

    def monitors(self) -> list[tuple[str, EngineMonitor]]:
        """(source, monitor) of every engine, in order of name."""
        return [(kept.source, kept.monitor) for _, kept in sorted(self._kept.items())]

    def alarms(self) -> list[str]:
        """What somebody should look at, in words."""
        found: list[str] = []
        if not self._kept:
            found.append("no engines are known")
        warned: dict[str, list[str]] = {}
        for _, monitor in self.monitors():
            name = monitor.member.spec.name
            if monitor.state != "up":
                found.append(f"{name}: {monitor.state}: {monitor.why or 'not asked yet'}")
            elif monitor.facts is not None:
                for text in monitor.facts.warnings:
                    warned.setdefault(text, []).append(name)
            for instance, watch in monitor.watches.items():
                if watch.unsaid >= _SILENT and not watch.said:
                    found.append(
                        f"{instance}: replies do not say what was cached, so nothing confirms what "
                        f"it is taken to hold: start it with {_TELLS[monitor.member.spec.engine]}"
                    )
            for instance, feed in monitor.feeds.items():
                found += [f"{instance}: {text}" for text in _of_feed(feed.counts())]
        for view in self._conductor.views().values():
            if not view.trust.trusted:
                share = f"{100 * view.trust.share:.0f}%"
                found.append(
                    f"{view.info.id}: finds less cached than is claimed: {share} of it counts"
                )
        found += [f"{_several(names)}: {text}" for text, names in warned.items()]
        found += self._halves()
        if self._index_empty():
            found.append("the index is empty though engines tell events and have served requests")
        return found

    def _halves(self) -> list[str]:
        """Engines that serve nobody, since their other half is not described."""
        specs = [(kept.monitor.member.spec, kept.monitor.facts) for kept in self._kept.values()]
        known: dict[tuple[str, str], set[str]] = {}
        """What those of a role and a connector serve; "": it did not say yet."""
        for it, of in specs:
            key = it.role, it.connector
            known.setdefault(key, set()).add(of.model if of else it.model)
        said = []
        for spec, of in specs:
            other = {"prefill": "decode", "decode": "prefill"}.get(spec.role)
            model = of.model if of else spec.model
            served = known.get((other or "", spec.connector), set())
            if other is not None and not (served & {model, ""} if model else served):
                what = f"no {other} engine of its model has connector {spec.connector}"
                said.append(f"{spec.name}: {what}: it serves nobody")
        return said

    def _index_empty(self) -> bool:
        views = self._conductor.views()
        feeds = [it for _, monitor in self.monitors() for it in monitor.feeds if it in views]
        return bool(feeds) and self._conductor.placed > 0 and not self._conductor.index_blocks()


def _several(names: list[str]) -> str:
    """Engines of whom the same is said."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _of_feed(counts: FeedCounts) -> list[str]:
    if counts.fault:
        remedy = "but its cache's have another size; set events: off"
        return [f"its events are not used: {counts.fault}, {remedy}"]
    if not counts.connected:
        return ["its events do not come: what it holds is not known"]
    return [] if counts.trusted else ["events were lost: what it holds is not wholly known"]


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)


async def _stop(kept: _Kept) -> None:
    kept.task.cancel()
    await asyncio.gather(kept.task, return_exceptions=True)
    await kept.monitor.close()

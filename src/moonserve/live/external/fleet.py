"""Fleet: the external engines of one gateway, and an EngineMonitor for each.

Descriptions come from the cluster file, over HTTP, or from a registry; each source has names of its
own. The driver looks up here which engine it calls, and reports the outcome of its calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from moonserve.core.errors import BadRequest, ConfigError, NobodyAlive
from moonserve.core.kv.inferred import Reported
from moonserve.core.schedule import observed
from moonserve.core.schedule.observed import CallWatch, Part
from moonserve.core.units import BlockKey, InstanceId, Micros, Tokens
from moonserve.live.external.handshake import EngineFacts, beside
from moonserve.live.external.member import Member
from moonserve.live.external.monitor import POOL, EngineMonitor, Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.kvevents.follower import FeedCounts, Follow
from moonserve.live.ports import ClusterFeed
from moonserve.live.text.tools import TextTools

log = logging.getLogger(__name__)

_MAX_ENGINES = 1_024
_NAMED = 3
"""Engines that an alarm names if it is the same for several."""
_SILENT = 8
"""Calls without a count of cached tokens after which there is an alarm."""
_REPORT_FLAG = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}


class Taken(BadRequest):
    """Another source has an engine of this name, or any source has one at this URL."""

    status = 409


class Unknown(BadRequest):
    """This source has no engine of this name."""

    status = 404


_LEAST_OFF_US: Micros = 2_000
"""By so much a time may always be off."""


class _Kept(msgspec.Struct):
    source: str
    monitor: EngineMonitor
    task: asyncio.Task[None]


class WatchedCall(observed.ObservedCall):
    """An OutgoingCall, reported to its instance's Watch with the gateway's clock."""

    __slots__ = ("_began_us", "_now_us", "_watch")

    def __init__(
        self,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool,
        watch: CallWatch,
        now_us: Callable[[], Micros],
    ) -> None:
        super().__init__(part, prompt, predicted, streams)
        self._watch = watch
        self._now_us = now_us
        self._began_us = now_us()
        watch.began(self._began_us, self)

    def answered(self, cached: Tokens | None) -> None:
        """See OutgoingCall."""
        self._watch.answered(self._now_us(), self, cached)

    def answered_after(self, after_us: Micros, cached: Tokens | None) -> None:
        """As `answered`, of a call of another process, which has measured this time since it
        began. If its reports came with other delays, nothing is learned of the time."""
        seen_us = self._now_us() - self._began_us
        self.doubtful = abs(seen_us - after_us) > max(_LEAST_OFF_US, after_us // 10)
        self.answered(cached)

    def ended(self, cached: Tokens | None = None) -> None:
        """See OutgoingCall."""
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
        """`load_text`: reads a model's tokenizer by its reference, is called in a thread, and
        raises ConfigError if there is none; `environ`: has the API keys; `follow`: None: KV events
        are not followed."""
        self.times = times or Times()
        self._conductor = conductor
        self._http = http
        self._pool = Reported(POOL)
        self._load_text = load_text
        self._environ = environ
        self._follow = follow
        self._texts: dict[str, TextTools] = {}
        self._kept: dict[str, _Kept] = {}
        self._by_id: dict[InstanceId, EngineMonitor] = {}
        self._changing = asyncio.Lock()

    # Descriptions.

    async def described(self, source: str, specs: Sequence[InstanceSpec]) -> None:
        """Let these be all engines that `source` describes. Raises as `add`; the engines before
        the wrong one are added."""
        names = [spec.name for spec in specs]
        for name, kept in list(self._kept.items()):
            if kept.source == source and name not in names:
                await self.remove(source, name)
        for spec in specs:
            with spec.named():
                await self.add(source, spec)

    async def add(self, source: str, spec: InstanceSpec) -> bool:
        """Add an engine, or replace its description. Returns whether anything changed.

        Raises ConfigError if the description is wrong, Taken if another source has the name or
        another engine the URL.
        """
        async with self._changing:
            return await self._add(source, spec.checked())

    async def check(self, source: str, spec: InstanceSpec) -> None:
        """Raise what `add` would raise, but change nothing."""
        async with self._changing:
            await self._needs(source, spec.checked())

    async def _needs(self, source: str, spec: InstanceSpec) -> tuple[str, TextTools | None]:
        """The API key and the tokenizer of an engine that may be added. Raises as `add`."""
        old = self._kept.get(spec.name)
        if old is not None and old.source != source:
            raise Taken(f"{spec.name} is described by {old.source}; choose another name", "name")
        if old is None and len(self._kept) >= _MAX_ENGINES:
            what = f"a gateway has {_MAX_ENGINES} engines at most"
            raise ConfigError(f"{what}; remove one first", "instances")
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
            self._conductor,
            self._pool,
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
        """Send an engine nothing more; it finishes what it has. Raises Unknown, Taken."""
        async with self._changing:
            kept = self.removable(source, name)
            if kept is None:
                raise Unknown(f"no engine is named {name}", "name")
            await self._remove(kept)
            log.warning("%s: removed by %s; no request is sent there any more", name, source)

    def removable(self, source: str, name: str) -> _Kept | None:
        """The engine of that name; None: there is none. Raises Taken: it is of another source."""
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
        """Stop all monitors."""
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
        """Compare an engine with those of its model that are up: see handshake.beside."""
        others = [(it.member, it.facts) for it in self._of(found.model) if it.state == "up"]
        return beside(member, found, [(it, of) for it, of in others if of and it is not member])

    # For the driver.

    def member(self, instance: InstanceId) -> Member:
        """The engine of an instance that has joined. Raises NobodyAlive if it is gone."""
        monitor = self._by_id.get(instance)
        if monitor is None:
            raise NobodyAlive(f"instance {instance} is gone")
        return monitor.member

    def follows_events(self, model: str) -> bool:
        """Whether KV events of the model are followed: then block keys are made of its tokens."""
        for kept in self._kept.values():  # a loop, since it runs for every request
            monitor = kept.monitor
            if monitor.feeds and monitor.facts is not None and monitor.facts.model == model:
                return True
        return False

    def follows_events_of(self, instance: InstanceId) -> bool:
        """Whether KV events of this instance are followed."""
        monitor = self._by_id.get(instance)
        return monitor is not None and instance in monitor.feeds

    def text(self, model: str) -> TextTools | None:
        """The tokenizer and template of the model's engines; None: they are not known here."""
        return next((it.tools for it in self._of(model) if it.tools is not None), None)

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """See Observer."""
        self._conductor.tell(*self._pool.removed(self._conductor.now_us(), keys))

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> WatchedCall:
        """See Observer."""
        monitor = self._by_id.get(instance)
        watch = None if monitor is None else monitor.watches.get(instance)
        now_us = self._conductor.now_us
        return WatchedCall(part, prompt, predicted, streams, watch or CallWatch(1), now_us)

    def _of(self, model: str) -> list[EngineMonitor]:
        monitors = [kept.monitor for kept in self._kept.values()]
        return [it for it in monitors if it.facts is not None and it.facts.model == model]

    # For operators.

    def monitors(self) -> list[tuple[str, EngineMonitor]]:
        """(source, monitor) of every engine, in order of name."""
        return [(kept.source, kept.monitor) for _, kept in sorted(self._kept.items())]

    def alarms(self) -> list[str]:
        """What an operator should look at, as sentences."""
        found: list[str] = []
        if not self._kept:
            found.append("no engines are known")
        warned: dict[str, list[str]] = {}
        for _, monitor in self.monitors():
            name = monitor.member.spec.name
            if monitor.state != "up":
                why = monitor.why or "not asked yet"
                found.append(f"{name}: {monitor.state}: {why}{_may_lack(monitor)}")
            elif monitor.facts is not None:
                for text in monitor.facts.warnings:
                    warned.setdefault(text, []).append(name)
            for instance, watch in monitor.watches.items():
                if watch.unsaid >= _SILENT and not watch.said:
                    found.append(
                        f"{instance}: replies do not report cached tokens, so the gateway cannot"
                        " check what the instance should hold: start the engine with"
                        f" {_REPORT_FLAG[monitor.member.spec.engine]}"
                    )
            for instance, feed in monitor.feeds.items():
                found += [f"{instance}: {text}" for text in _of_feed(feed.counts())]
        for view in self._conductor.views().values():
            if not view.trust.trusted:
                share = f"{100 * view.trust.share:.0f}%"
                found.append(
                    f"{view.info.id}: finds less cached than its events claim: {share} of it counts"
                )
        found += [f"{_several(names)}: {text}" for text, names in warned.items()]
        found += self._halves()
        if self._index_empty():
            found.append(
                "the prefix index is empty, although engines with KV events have served requests"
            )
        return found

    def _halves(self) -> list[str]:
        """Alarms of prefill engines without a decode engine, and the other way round."""
        specs = [(kept.monitor.member.spec, kept.monitor.facts) for kept in self._kept.values()]
        known: dict[tuple[str, str], set[str]] = {}
        """The models that engines of a role and a connector serve; "": not known yet."""
        for it, of in specs:
            key = it.role, it.connector
            known.setdefault(key, set()).add(of.model if of else it.model)
        alarms = []
        for spec, of in specs:
            other = {"prefill": "decode", "decode": "prefill"}.get(spec.role)
            model = of.model if of else spec.model
            served = known.get((other or "", spec.connector), set())
            if other is not None and not (served & {model, ""} if model else served):
                what = f"no {other} engine of its model has connector {spec.connector}"
                alarms.append(f"{spec.name}: {what}: it serves no request")
        return alarms

    def _index_empty(self) -> bool:
        views = self._conductor.views()
        feeds = [it for _, monitor in self.monitors() for it in monitor.feeds if it in views]
        return bool(feeds) and self._conductor.placed > 0 and not self._conductor.index_blocks()


def _may_lack(monitor: EngineMonitor) -> str:
    """What an engine that never came up may lack, as a further clause; mostly nothing."""
    spec = monitor.member.spec
    by_mooncake = spec.connector == "mooncake" or (spec.engine == "vllm" and spec.shared_store)
    if monitor.state == "asking" and monitor.why and by_mooncake:
        return (
            "; if its log says `Engine core initialization failed`, its host may lack"
            " libibverbs.so.1 (on Debian and Ubuntu: apt install libibverbs1)"
        )
    return ""


def _several(names: list[str]) -> str:
    """The engines that share an alarm."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _of_feed(counts: FeedCounts) -> list[str]:
    if counts.fault:
        remedy = "but the engine reports another block size; set events: off"
        return [f"its KV events are not used: {counts.fault}, {remedy}"]
    if not counts.connected:
        return ["no connection for its KV events: what it holds is not known"]
    return [] if counts.trusted else ["KV events were lost: what it holds is not fully known"]


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)


async def _stop(kept: _Kept) -> None:
    kept.task.cancel()
    await asyncio.gather(kept.task, return_exceptions=True)
    await kept.monitor.close()

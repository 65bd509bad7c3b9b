"""External engines as a front knows them: Fleet in the Conductor's process reports them.

Implements drive's Engines and external's Observer. A front reports its calls to engines back. It
makes tokens with tokenizers that it loads itself; until one is loaded, it asks the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from moonserve.core.errors import ConfigError, NobodyAlive
from moonserve.core.kv.facts import BlocksRemoved
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.observed import Part
from moonserve.core.units import BlockKey, InstanceId, Tokens
from moonserve.live.external.member import Member
from moonserve.live.external.monitor import POOL
from moonserve.live.fronts import wire
from moonserve.live.fronts.remote import RemoteConductor
from moonserve.live.http.client import HttpClient
from moonserve.live.text.tools import TextTools

log = logging.getLogger(__name__)


class RemoteFleet:
    """See the module. RemoteConductor calls `update`."""

    def __init__(
        self,
        conductor: RemoteConductor,
        http: HttpClient,
        load_text: Callable[[str], TextTools],
        environ: Mapping[str, str],
    ) -> None:
        """
        load_text: loads a model's text side by its reference; called in a thread. environ: has the
        API keys.
        """
        self._conductor, self._http = conductor, http
        self._load_text, self._environ = load_text, environ
        self._engines: dict[str, tuple[wire.EngineState, Member]] = {}
        self._by_id: dict[InstanceId, Member] = {}
        self._tells: set[InstanceId] = set()
        self._texts: dict[str, TextTools | None] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._calls: dict[int, Noted] = {}
        """Calls that have not ended."""

    def member(self, instance: InstanceId) -> Member:
        """See drive.engines.Engines."""
        found = self._by_id.get(instance)
        if found is None:
            raise NobodyAlive(f"{instance} has left")
        return found

    def follows_events(self, model: str) -> bool:
        """See drive.engines.Engines."""
        return any(
            info.model == model and self.follows_events_of(info.id) for info in self._infos()
        )

    def follows_events_of(self, instance: InstanceId) -> bool:
        """See drive.engines.Engines."""
        return instance in self._tells

    def text(self, model: str) -> TextTools | None:
        """See drive.engines.Engines."""
        for engine, _ in self._engines.values():
            if any(info.model == model for info in engine.infos):
                found = self._texts.get(engine.spec.tokenizer)
                if found is not None:
                    return found
        return None

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """See ports.Observer."""
        self._conductor.tell(BlocksRemoved(POOL, tuple(keys), "dram", 0))

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> Noted:
        """See ports.Observer."""
        number = next(self._numbers)
        began = wire.CallBegan(number, instance, part, prompt, predicted, streams)
        call = self._calls[number] = Noted(began, self._conductor, self._calls)
        self._conductor.notify(began)
        return call

    def report_again(self) -> None:
        """Report all calls under way to a Conductor that has not heard of them."""
        for call in self._calls.values():
            self._conductor.notify(*call.said)

    def update(self, engines: list[wire.EngineState]) -> None:
        """Take over all engines that there are now. A restarted engine is a new member."""
        before, self._engines = self._engines, {}
        for engine in engines:
            old = before.get(engine.spec.name)
            member = old[1] if old is not None and _same(old[0], engine) else self._made(engine)
            member.infos = {info.id: info for info in engine.infos}
            member.version = engine.version
            self._engines[engine.spec.name] = engine, member
            self._read(engine.spec.tokenizer)
        members = [member for _, member in self._engines.values()]
        self._by_id = {instance: it for it in members for instance in it.infos}
        self._tells = {instance for engine in engines for instance in engine.tells}

    def _made(self, engine: wire.EngineState) -> Member:
        key = self._environ.get(engine.spec.api_key_env, "") if engine.spec.api_key_env else ""
        return Member(engine.spec, self._http, key)

    def _infos(self) -> list[InstanceInfo]:
        return [info for engine, _ in self._engines.values() for info in engine.infos]

    def _read(self, ref: str) -> None:
        if ref and ref not in self._texts:
            self._texts[ref] = None
            task = asyncio.create_task(self._load(ref), name=f"tokenizer {ref}")
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _load(self, ref: str) -> None:
        try:
            self._texts[ref] = await asyncio.to_thread(self._load_text, ref)
        except ConfigError as error:
            log.warning("tokenizer %s: %s", ref, error)


class Noted:
    """One call to an engine; reports to the Conductor's process. See ports.OutgoingCall."""

    __slots__ = ("_began_us", "_calls", "_conductor", "_number", "count", "said")

    def __init__(
        self, began: wire.CallBegan, conductor: RemoteConductor, calls: dict[int, Noted]
    ) -> None:
        """calls: those under way, from which it removes itself."""
        self.count: Tokens = 0
        self.said: list[wire.CallBegan | wire.CallAnswered] = [began]
        """What the Conductor has been told of it."""
        self._began_us = conductor.now_us()
        self._number = began.number
        self._conductor = conductor
        self._calls = calls

    def answered(self, cached: Tokens | None) -> None:
        """See ports.OutgoingCall."""
        after_us = self._conductor.now_us() - self._began_us
        answered = wire.CallAnswered(self._number, self.count, cached, after_us)
        self.said.append(answered)
        self._conductor.notify(answered)

    def ended(self, cached: Tokens | None = None) -> None:
        """See ports.OutgoingCall."""
        self._calls.pop(self._number, None)
        self._conductor.notify(wire.CallEnded(self._number, self.count, cached))


def _same(old: wire.EngineState, new: wire.EngineState) -> bool:
    """Whether both are the same start of the same engine."""
    starts = [{info.id: info.epoch for info in engine.infos} for engine in (old, new)]
    return old.spec == new.spec and starts[0] == starts[1]

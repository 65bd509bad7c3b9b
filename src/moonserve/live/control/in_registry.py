"""A Conductor in a registry: it is found there, finds workers there, and leads or stands by.

Control mounts it. At the start it looks for another Conductor under the same prefix. It stands by
beside one that takes fronts too, and refuses to start beside any other. Fronts and workers find it
by its entry, and fronts by the duty that it holds.
Before it reports that it is ready, its index is filled: by the store's master, by the engines'
events, or by a copy from another Conductor. Nothing here decides where a request goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from moonserve.core.errors import BadRequest, ConfigError, MoonserveError, RegistryError
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.schedule.facts import InstanceInfo, Leading
from moonserve.live.control.index_copy import INDEX_PATH, first_of, packed
from moonserve.live.control.join import Internal
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.standby import Standby, leader_in
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import Handler
from moonserve.live.ports import Candidacy, Registry
from moonserve.live.registry.entries import (
    CONDUCTORS,
    DUTY,
    INSTANCES,
    ConductorEntry,
    decoded,
    follow_master,
)
from moonserve.live.store.reports import POOL
from moonserve.live.tasks import keep_doing

log = logging.getLogger(__name__)

PATH = "/api/conductor"
_BOOT_S = 10.0
"""Longest wait for the index at the start."""
_PROBE_S = 2.0
_GONE_S = 15.0
"""Longest wait for the entry of a Conductor that died to end."""
_AGAIN_S = 0.5
_PATIENCE_S = 2.0
"""How long a standby leaves the duty to its holder, whose entry etcd may have lost."""


class InRegistry:
    """See the module. Made before the server listens; then `start`, and `close` at the end."""

    def __init__(
        self,
        registry: Registry,
        conductor: ConductorLoop,
        internal: Internal,
        http: HttpClient,
        token: str,
        known: Callable[[], Awaitable[object]] | None = None,
        has_workers: bool = True,
        move: Callable[[str], None] | None = None,
        takes_fronts: bool = False,
        has_own_fronts: bool = False,
    ) -> None:
        """known: returns once the holders of the KV have filled the index; None: take it over from
        another Conductor. has_workers: False with external engines. move: called with the URL of
        the store's master whenever that changes. takes_fronts: whether it decides for fronts.
        has_own_fronts: they are those of one gateway, which forward what others ask of it; so no
        other Conductor can replace it, and it can replace none.
        """
        self.registry = registry
        self._conductor = conductor
        self._internal = internal
        self._http = http
        self._token = token
        self._known = known
        self._has_workers = has_workers
        self._move = move
        self.leadership = Leadership(self._confirm)
        self._takes_fronts = takes_fronts
        self._replaceable = takes_fronts and not has_own_fronts
        self._standby = Standby(registry, http, token, self._deposed, self._led_by)
        self._candidacy: Candidacy | None = None
        self.not_ready = "it gathers what others hold"
        """Why this Conductor is not ready yet; empty: it is."""
        self.gathered = asyncio.Event()
        """Set when it is."""
        self.index = "not known yet"
        """Where the index comes from, in words."""
        self._me = ConductorEntry("", 0, "", "")
        self._tasks: list[asyncio.Task[None]] = []

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("GET", INDEX_PATH): self._index,
            ("GET", PATH): self._show,
            **self._standby.routes(),
        }

    async def start(self, me: ConductorEntry) -> None:
        """Register this Conductor, so that others find it.

        Raises ConfigError: another one is there; RegistryError.
        """
        self._me = me = msgspec.structs.replace(me, takes_fronts=self._replaceable)
        await self._check_others()
        self._conductor.tell(Leading(False))
        await self.registry.register(CONDUCTORS + me.name, msgspec.json.encode(me))
        works: list[Callable[[], Coroutine[Any, Any, None]]] = [self._gather]
        if self._has_workers:
            works.append(self._follow_workers)
        if self._move is not None:
            works.append(partial(follow_master, self.registry, self._move))
        patience_s = _PATIENCE_S if self._takes_fronts else 0.0
        candidacy = await self.registry.elect(DUTY, me.name, self._lead, patience_s)
        self._candidacy = candidacy
        if self._takes_fronts:
            works.append(partial(self._standby.run, me.name, candidacy))
        self._tasks += [keep_doing("a task of the registry", work) for work in works]
        if not self.leadership.term:  # another one started at the same time
            await self._check_others()

    async def close(self) -> None:
        """Leave the registry at once, so that others need not wait for a timeout."""
        for task in self._tasks:
            task.cancel()
        await self.registry.close()

    # The duty.

    def _lead(self, term: int) -> None:
        if term:
            log.info("this Conductor leads, in term %d", term)
            self._conductor.tell(Leading(True))
            self.leadership.set_term(term)
            if self._takes_fronts:
                tell = partial(self._standby.tell_others, self._me.name, term, self._term)
                self._tasks.append(keep_doing("telling others who leads", tell))
        else:
            log.warning("this Conductor does not lead any more")
            self._conductor.tell(Leading(False))
            self.leadership.set_term(0)

    def _term(self) -> int:
        return self.leadership.term

    def _deposed(self, term: int) -> None:
        """Another Conductor leads in this term, as it says."""
        if self._candidacy is not None and 0 < self.leadership.term < term:
            self._candidacy.give_way(term)

    def _led_by(self, url: str) -> None:
        self.leadership.leader = url

    async def _confirm(self) -> bool:
        """Read who leads. While the registry is away, this one does: its orders are refused if that
        is not so."""
        try:
            leader, _ = await leader_in(self.registry)
        except RegistryError:
            return bool(self.leadership.term)
        self._deposed(leader.term)
        return bool(self.leadership.term)

    # Other Conductors.

    async def _others(self) -> list[ConductorEntry]:
        found = decoded(await self.registry.read(CONDUCTORS), CONDUCTORS, ConductorEntry)
        return [entry for name, entry in found.items() if name != self._me.name]

    async def _check_others(self) -> None:
        """Wait until the entries of Conductors that died have ended, unless this one may stand by.

        Raises ConfigError if one lives beside which this one cannot stand.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _GONE_S
        while others := await self._others():
            for entry in others:
                await self._refuse_beside(entry)
            if all(entry.takes_fronts for entry in others) and self._replaceable:
                return
            if loop.time() > end_s:
                where = ", ".join(entry.url for entry in others)
                raise ConfigError(
                    f"has a Conductor at {where} that does not answer, but renews its entry; see"
                    " to that process, or give this cluster a prefix of its own",
                    "registry",
                )
            log.info("waiting for the entry of a Conductor to end: %s", others[0].url)
            await asyncio.sleep(_AGAIN_S)

    async def _refuse_beside(self, other: ConductorEntry) -> None:
        """Raise ConfigError if this Conductor lives; the message says what to do."""
        own_prefix = "give this cluster a prefix of its own, such as etcd://host:port/second"
        try:
            reply = await self._http.request(
                "GET", other.url + PATH, headers=bearer(self._token), timeout_s=_PROBE_S
            )
        except MoonserveError:
            return
        if reply.status == 401:
            raise ConfigError(
                f"is not that of the Conductor at {other.url}, which is in the same registry: set"
                f" MOONSERVE_TOKEN to that one, or {own_prefix}",
                "token",
            )
        if other.model != self._me.model:
            raise ConfigError(
                f"has a Conductor at {other.url} for {other.model or 'external engines'} already,"
                f" not for {self._me.model or 'external engines'}: {own_prefix}",
                "registry",
            )
        if reply.status == 200 and not (other.takes_fronts and self._replaceable):
            raise ConfigError(
                f"has a Conductor at {other.url} already, and a cluster has one: run one `moonserve"
                " conductor`, and gateways with --conductor and the address of the registry; or"
                f" {own_prefix}",
                "registry",
            )

    # The index.

    async def _gather(self) -> None:
        try:
            async with asyncio.timeout(_BOOT_S):
                if self._known is not None:
                    await self._known()
                    self.index = "as told by " + (
                        "the store's master" if self._has_workers else "the engines"
                    )
                else:
                    self.index = await self._take_over()
        except TimeoutError:
            self.index = f"incomplete: not told within {_BOOT_S:g} s"
        except RegistryError as error:
            self.index = f"incomplete: {error}"
        if self.index.startswith("incomplete"):
            log.warning("serving with what is known: the index is %s", self.index)
        self.not_ready = ""
        self.gathered.set()

    async def _take_over(self) -> str:
        urls = [entry.url for entry in await self._others()]
        return await first_of(self._http, urls, self._token, self._take)

    def _take(self, event: BlocksStored) -> None:
        self._internal.seen([event])

    async def _index(self, request: HttpRequest) -> StreamingResponse:
        told = packed(self._conductor.inventory, [POOL])
        return StreamingResponse(told, content_type="application/octet-stream")

    # Workers.

    async def _follow_workers(self) -> None:
        """Let workers join when they are in the registry, before they have found this Conductor."""
        known: Mapping[str, bytes] = {}
        async for entries in self.registry.watch(INSTANCES):
            new = {key: value for key, value in entries.items() if known.get(key) != value}
            known = entries
            for info in decoded(new, INSTANCES, InstanceInfo).values():
                try:
                    self._internal.admit(info)
                except BadRequest as error:
                    log.warning("worker %s is not used: %s", info.id, error)

    # What operators see.

    def metrics(self) -> Iterator[Metric]:
        """Whether this Conductor leads, and whether its index is whole."""
        for name, text, value in (
            ("conductor_leads", "Whether this Conductor leads.", bool(self.leadership.term)),
            (
                "index_complete",
                "Whether the index was complete at the start.",
                not self.not_ready and not self.index.startswith("incomplete"),
            ),
        ):
            yield GaugeMetricFamily(f"moonserve_{name}", text, value=float(value))

    async def _show(self, request: HttpRequest) -> Response:
        term = self.leadership.term
        return json_response(
            {
                "me": self._me,
                "leads": bool(term),
                "term": term,
                "leader": self._me.url if term else self.leadership.leader,
                "instances": len(self._conductor.views()),
                "index": self.index,
            }
        )

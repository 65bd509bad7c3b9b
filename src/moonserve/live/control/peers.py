"""Several gateways over one cluster: this gateway's exchange with the others.

Each gateway has its own Conductor. It finds workers and other gateways in the registry. Gateways
send each other what they have promised, and each adds it to its view of the cluster. One gateway
leads: it has the duties that only one may have. Control mounts it.

Before a new gateway reports that it is ready, it takes over the index of another one: the blocks
that it gets from no other source. Those are the blocks in Mooncake's pool, which gateways only know
from the reports of workers. The store's master and the KV events of engines report all other
blocks. Nothing here decides where a request goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from moonserve.core.errors import UNREADABLE, BadRequest, MoonserveError, RegistryError
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.index import Held
from moonserve.core.liveness import Liveness
from moonserve.core.schedule.facts import InstanceInfo, Leading, PeerPromised, Promises
from moonserve.core.units import SegmentId, seconds_to_us
from moonserve.live.control.join import Internal
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import Handler
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import (
    GATEWAYS,
    INSTANCES,
    GatewayEntry,
    decoded,
    follow_master,
)
from moonserve.live.store.reports import POOL
from moonserve.live.tasks import keep_doing

log = logging.getLogger(__name__)

_LOOK_S = 0.02
"""Promises are sent at most this long after they changed,"""
_AGAIN_S = 0.25
"""and again after this pause while there are any, since work gets done; otherwise after"""
_IDLE_S = 1.0
_CALL_S = 2.0
_SILENT_S = 3.0
"""The promises of a gateway that is silent for so long are dropped."""
_BOOT_S = 10.0
"""Longest wait for the index at the start."""
INDEX_PATH = "/internal/index"
_PAGE = 1_024
"""Keys in one event."""
_MOST_EVENTS_BYTES = 1 << 20
_ANSWER_S = 5.0
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BlocksStored).decode


async def packed(
    inventory: Callable[[SegmentId], list[Held]], holders: list[SegmentId]
) -> AsyncIterator[bytes]:
    """All blocks of these holders as events, each after its length; the length 0 ends them.

    inventory: returns the blocks of one holder.
    """
    for holder in holders:
        for keys, parent, tier, epoch in inventory(holder):
            for at in range(0, len(keys), _PAGE):
                part = keys[at : at + _PAGE]
                before = keys[at - 1] if at else parent
                body = _encode(BlocksStored(holder, part, before, tier, epoch))  # type: ignore[arg-type]
                yield _LENGTH.pack(len(body)) + body
            await asyncio.sleep(0)
    yield _LENGTH.pack(0)


async def ask(http: HttpClient, url: str, token: str, take: Callable[[BlocksStored], None]) -> int:
    """Pass all events of a peer to `take`; return how many blocks. Raises MoonserveError."""
    buffer, count = bytearray(), 0
    async with http.stream(
        "GET",
        url + INDEX_PATH,
        headers=bearer(token),
        timeout_s=_ANSWER_S,
        idle_timeout_s=_ANSWER_S,
    ) as reply:
        if reply.status != 200:
            raise RegistryError(f"{url}{INDEX_PATH} answers {reply.status}")
        async for chunk in reply:
            buffer += chunk
            while len(buffer) >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer)
                if size == 0:
                    return count
                if size > _MOST_EVENTS_BYTES:
                    raise RegistryError(
                        f"{url}{INDEX_PATH} sends an event of {size} bytes, which is too large"
                    )
                end = _LENGTH.size + size
                if len(buffer) < end:
                    break
                event = _read(bytes(buffer[_LENGTH.size : end]), url)
                del buffer[:end]
                take(event)
                count += len(event.keys)
    raise RegistryError(f"{url}{INDEX_PATH} ended early, after {count} blocks")


def _read(body: bytes, url: str) -> BlocksStored:
    try:
        return _decode(body)
    except UNREADABLE as error:
        raise RegistryError(f"{url}{INDEX_PATH} sends no valid event: {error}") from None


async def first_of(
    http: HttpClient, urls: list[str], token: str, take: Callable[[BlocksStored], None]
) -> str:
    """Ask peers in turn until one has sent all its blocks; return the result in words."""
    why = "there is no other gateway"
    for url in urls:
        try:
            count = await ask(http, url, token, take)
        except MoonserveError as error:
            why = str(error)
        else:
            return f"{count} blocks from {url}"
    return f"incomplete: {why}" if urls else why


class PeerPromises(msgspec.Struct, frozen=True):
    """What one gateway has promised, as it sends it to others."""

    gateway: str
    epoch: int
    promises: tuple[Promises, ...]


class Several:
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
        duty: str = "conductor",
    ) -> None:
        """known: returns once the holders of the KV have filled the index; None: take it over from
        another gateway. has_workers: False with external engines. move: called with the URL of the
        store's master whenever that changes. duty: the one that a single gateway at a time has.
        """
        self.registry = registry
        self._conductor = conductor
        self._internal = internal
        self._http = http
        self._token = token
        self._known = known
        self._has_workers = has_workers
        self._move = move
        self._duty = duty
        self.leads = False
        self.not_ready = "it gathers what others hold"
        """Why this gateway is not ready yet; empty: it is."""
        self.gathered = asyncio.Event()
        """Set when it is."""
        self.index = "not known yet"
        """Where the index comes from, in words."""
        self._me = GatewayEntry("", 0, "")
        self._peers: dict[GatewayEntry, asyncio.Task[None]] = {}
        self._promised: tuple[Promises, ...] = ()
        self._news = asyncio.Event()
        """Set, and replaced by a new one, when the promises of this gateway have changed."""
        self._heard: dict[str, tuple[int, float]] = {}
        """Gateways that have sent promises: their epoch, and when."""
        self._tasks: list[asyncio.Task[None]] = []

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/internal/promises"): self._promises,
            ("GET", INDEX_PATH): self._index,
            ("GET", "/api/gateways"): self._gateways,
        }

    async def start(self, me: GatewayEntry) -> None:
        """Register this gateway, so that others find it. Raises RegistryError."""
        self._me = me
        self._conductor.tell(Leading(False))
        await self.registry.register(GATEWAYS + me.name, msgspec.json.encode(me))
        works: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._follow_gateways,
            self._look,
            self._expire,
            self._gather,
        ]
        if self._has_workers:
            works.append(self._follow_workers)
        if self._move is not None:
            works.append(partial(follow_master, self.registry, self._move))
        self._tasks = [keep_doing("a task of the registry", work) for work in works]
        await self.registry.elect(self._duty, me.name, self._lead)

    async def close(self) -> None:
        """Leave the registry at once, so that others need not wait for a timeout."""
        for task in (*self._tasks, *self._peers.values()):
            task.cancel()
        await self.registry.close()

    def _lead(self, leads: bool) -> None:
        self.leads = leads
        log.info("this gateway %s", "leads" if leads else "does not lead any more")
        self._conductor.tell(Leading(leads))

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
        found = decoded(await self.registry.read(GATEWAYS), GATEWAYS, GatewayEntry)
        urls = [entry.url for name, entry in found.items() if name != self._me.name]
        return await first_of(self._http, urls, self._token, self._take)

    def _take(self, event: BlocksStored) -> None:
        self._internal.seen([event])

    async def _index(self, request: HttpRequest) -> StreamingResponse:
        told = packed(self._conductor.inventory, [POOL])
        return StreamingResponse(told, content_type="application/octet-stream")

    # Workers.

    async def _follow_workers(self) -> None:
        """Let workers join when they are in the registry, before they have found this gateway."""
        known: Mapping[str, bytes] = {}
        async for entries in self.registry.watch(INSTANCES):
            new = {key: value for key, value in entries.items() if known.get(key) != value}
            known = entries
            for info in decoded(new, INSTANCES, InstanceInfo).values():
                try:
                    self._internal.admit(info)
                except BadRequest as error:
                    log.warning("worker %s is not used: %s", info.id, error)

    # Gateways.

    async def _follow_gateways(self) -> None:
        async for entries in self.registry.watch(GATEWAYS):
            found = set(decoded(entries, GATEWAYS, GatewayEntry).values()) - {self._me}
            for entry in self._peers.keys() - found:
                self._peers.pop(entry).cancel()
                if all(other.name != entry.name for other in found):
                    self._forget(entry.name)
            for entry in sorted(found - self._peers.keys(), key=lambda it: it.name):
                what = f"telling gateway {entry.name}"
                self._peers[entry] = keep_doing(what, partial(self._tell, entry))

    async def _look(self) -> None:
        """Watch the promises of this gateway, once for all peers."""
        while True:
            now = self._conductor.promises() if self._peers else ()
            is_new = _changed(self._promised, now)
            self._promised = now
            if is_new:
                news = self._news
                self._news = asyncio.Event()
                news.set()
            await asyncio.sleep(_LOOK_S)

    async def _tell(self, peer: GatewayEntry) -> None:
        """Keep one other gateway informed of the promises of this gateway."""
        failing = False
        while True:
            news, now = self._news, self._promised
            try:
                await self._send(peer, now)
                failing = False
            except MoonserveError as error:
                if not failing:
                    log.warning("gateway %s: %s; still trying", peer.name, error)
                failing = True
                await asyncio.sleep(_AGAIN_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if now else _IDLE_S):
                    await news.wait()

    async def _send(self, peer: GatewayEntry, promises: tuple[Promises, ...]) -> None:
        headers = {"content-type": "application/msgpack"} | bearer(self._token)
        body = _encode(PeerPromises(self._me.name, self._me.epoch, promises))
        url = f"{peer.url}/internal/promises"
        reply = await self._http.request("POST", url, headers=headers, body=body, timeout_s=_CALL_S)
        if reply.status != 200:
            raise BadRequest(f"it answers {reply.status} to promises")

    async def _promises(self, request: HttpRequest) -> Response:
        try:
            told = msgspec.msgpack.decode(await request.body(), type=PeerPromises)
        except UNREADABLE as error:
            raise BadRequest(f"body is no promises: {error}", "body") from None
        epoch, _ = self._heard.get(told.gateway, (0, 0.0))
        if told.epoch >= epoch and told.gateway != self._me.name:
            self._heard[told.gateway] = told.epoch, asyncio.get_running_loop().time()
            self._conductor.tell(PeerPromised(told.gateway, told.promises))
        return json_response({})

    async def _expire(self) -> None:
        silent_us = seconds_to_us(_SILENT_S)
        liveness = Liveness(silent_us, pause_us=silent_us // 2)
        while True:
            await asyncio.sleep(_SILENT_S / 4)
            heard = ((name, seconds_to_us(at_s)) for name, (_, at_s) in self._heard.items())
            for name in liveness.silent(seconds_to_us(asyncio.get_running_loop().time()), heard):
                self._forget(name)

    def _forget(self, gateway: str) -> None:
        if self._heard.pop(gateway, None) is not None:
            self._conductor.tell(PeerPromised(gateway, ()))

    def metrics(self) -> Iterator[Metric]:
        """What is measured of several gateways."""
        for name, text, value in (
            ("gateway_peers", "Other gateways in the registry.", len(self._peers)),
            ("gateway_leads", "Whether this gateway leads.", self.leads),
            (
                "index_complete",
                "Whether the index was complete at the start.",
                not self.not_ready and not self.index.startswith("incomplete"),
            ),
        ):
            yield GaugeMetricFamily(f"moonserve_{name}", text, value=float(value))

    async def _gateways(self, request: HttpRequest) -> Response:
        peers = sorted(self._peers, key=lambda it: it.name)
        return json_response(
            {
                "me": self._me,
                "leads": self.leads,
                "index": self.index,
                "peers": [
                    {"name": it.name, "url": it.url, "heard": it.name in self._heard}
                    for it in peers
                ],
            }
        )


def _changed(told: tuple[Promises, ...], now: tuple[Promises, ...]) -> bool:
    """Whether anything was promised or ended; progress in time is no change."""
    if len(told) != len(now):
        return True
    return any(
        (a.instance, a.epoch, a.prefills, a.decodes, a.context, a.running)
        != (b.instance, b.epoch, b.prefills, b.decodes, b.context, b.running)
        for a, b in zip(told, now, strict=True)
    )

"""Draining instances: an operator's POST /api/instances/NAME/drain or /resume.

A drained instance gets no new work. What it has goes on, and the blocks in its segment of the store
move to other members. When nothing is left it is idle, and may be stopped without loss. With a
registry the order is kept there, so that the next Conductor knows of it. An order holds for one
start of an instance: a restarted one serves again. Control has one `Drains`; nothing here decides
where a request goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.schedule.admission import first_names, resume_command
from moonserve.core.schedule.facts import Draining
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import Routes
from moonserve.live.ports import Registry
from moonserve.live.registry.entries import DRAINS, DrainEntry, decoded
from moonserve.live.store.pool import Pool
from moonserve.live.tasks import keep_doing

log = logging.getLogger(__name__)

PREFIX = "/api/instances/"
State: TypeAlias = Literal["serving", "draining", "idle"]


class NoInstance(BadRequest):
    """No instance of this name has joined."""

    status = 404


class DrainStatus(msgspec.Struct, frozen=True):
    """How far the draining of one instance has come."""

    instance: str
    state: State
    """idle: it has no work and no blocks of the store any more."""
    requests: int
    """Promised to it, or running there by its own report, whichever is more."""
    blocks: int
    """Objects of the store in its segment."""
    warning: str = ""
    """What a drain takes from the cluster, and why its blocks stay; empty: neither."""


class Drains:
    """See the module. To be made and used on the event loop."""

    def __init__(self, conductor: ConductorLoop, pool: Pool, registry: Registry | None) -> None:
        """registry: where the orders are kept; None: in this process only."""
        self._conductor = conductor
        self._pool = pool
        self._registry = registry
        self._known: dict[InstanceId, int] = {}
        """The orders of the registry, by instance with its epoch."""
        self._following: asyncio.Task[None] | None = None

    def prefixes(self) -> Routes:
        """Path prefixes."""
        return {("POST", PREFIX): self._order, ("GET", PREFIX): self._show}

    def alarms(self) -> list[str]:
        """What no instance of a model does any more, since all that can are drained."""
        views = self._conductor.views().values()
        found = []
        for model in sorted({view.info.model for view in views}):
            for part in ("prefill", "decode"):
                able = [
                    it for it in views if it.info.model == model and it.info.role in (part, "both")
                ]
                if able and all(view.drained for view in able):
                    names = sorted(str(view.info.id) for view in able)
                    found.append(
                        f"all instances that {part} for model {model} are drained:"
                        f" {first_names(names)}; new requests wait up to"
                        " --wait-ready, and then get a 503, until"
                        f" {resume_command(names, 'one of them')}, or until another one joins"
                    )
        return found

    def start(self) -> None:
        """Begin to follow the orders in the registry, if there is one."""
        if self._registry is not None:
            self._following = keep_doing("following which instances are drained", self._follow)

    def stop(self) -> None:
        """Follow no more."""
        if self._following is not None:
            self._following.cancel()

    async def _follow(self) -> None:
        assert self._registry is not None
        async for entries in self._registry.watch(DRAINS):
            self._apply(entries)

    def _apply(self, entries: Mapping[str, bytes]) -> None:
        found = decoded(entries, DRAINS, DrainEntry)
        wanted = {InstanceId(name): entry.epoch for name, entry in found.items()}
        for name, epoch in self._known.items():
            if wanted.get(name) != epoch:
                self._conductor.tell(Draining(name, epoch, drains=False))
        for name, epoch in wanted.items():
            self._conductor.tell(Draining(name, epoch))
        self._known = wanted

    async def _order(self, request: HttpRequest) -> Response:
        name, _, verb = request.path.removeprefix(PREFIX).rpartition("/")
        if verb not in ("drain", "resume"):
            raise BadRequest(f"{request.path} ends neither with /drain nor with /resume", "path")
        drains = verb == "drain"
        view = self._view(name)
        info = view.info
        self._conductor.tell(Draining(info.id, info.epoch, drains))
        self._conductor.settle()
        if self._registry is not None:
            await self._keep(info.id, info.epoch, drains)
        if info.segment is not None:
            await self._pool.drain(info.segment, drains)
        return json_response(await self._status(view))

    async def _keep(self, instance: InstanceId, epoch: int, drains: bool) -> None:
        """Write the order into the registry. Raises RegistryError: it is of effect here only."""
        assert self._registry is not None
        if drains:
            entry = msgspec.json.encode(DrainEntry(epoch))
            await self._registry.put(DRAINS + instance, entry)
        else:
            await self._registry.remove(DRAINS + instance)

    async def _show(self, request: HttpRequest) -> Response:
        return json_response(await self._status(self._view(request.path.removeprefix(PREFIX))))

    def _view(self, name: str) -> InstanceView:
        views = self._conductor.views()
        view = views.get(InstanceId(name))
        if view is None:
            joined = ", ".join(views) or "none"
            raise NoInstance(
                f"no instance named {name!r} has joined, or it was lost; joined: {joined};"
                " `moonserve instances` shows the others with the reason",
                "name",
            )
        return view

    async def _status(self, view: InstanceView) -> DrainStatus:
        info = view.info
        promised = view.prefills + view.decodes
        requests = max(promised, view.load.running + view.load.waiting)
        segments = await self._segments() if info.segment is not None else ()
        own = next((it for it in segments if it["id"] == info.segment), None)
        blocks = 0 if own is None else int(own["objects"])
        state: State = "serving"
        if view.drained:
            state = "draining" if requests or blocks else "idle"
        faults = (self._missed(view), stuck(own, segments)) if view.drained else ()
        warning = "; ".join(fault for fault in faults if fault)
        return DrainStatus(info.id, state, requests, blocks, warning)

    def _missed(self, view: InstanceView) -> str:
        """What no other instance of the model can do that gets new work; empty: nothing."""
        info = view.info
        parts = ("prefill", "decode") if info.role == "both" else (info.role,)
        views = self._conductor.views().values()
        left = {it.info.role for it in views if it.info.model == info.model and not it.drained}
        missed = [] if "both" in left else [part for part in parts if part not in left]
        if not missed:
            return ""
        return (
            f"no other instance can {' or '.join(missed)} for model {info.model}: new requests wait"
            " for one, up to --wait-ready, and then get a 503"
        )

    async def _segments(self) -> Sequence[Mapping[str, Any]]:
        """The ledgers of all segments; none if the pool does not say."""
        found: Sequence[Mapping[str, Any]] = (await self._pool.lookup({})).get("segments", ())
        return found


def stuck(own: Mapping[str, Any] | None, segments: Sequence[Mapping[str, Any]]) -> str:
    """Why the blocks of a drained segment cannot move; empty: they can, or there are none.

    own: its ledger, see SegmentStats. segments: all ledgers.
    """
    if own is None or not own["objects"]:
        return ""
    block_bytes = own["used_bytes"] / own["objects"]
    for it in segments:
        room = it["capacity_bytes"] - it["used_bytes"] + it["evictable_bytes"]
        takes = it["id"] != own["id"] and not it["draining"] and it["tier"] == "dram"
        if takes and room >= block_bytes:
            return ""
    return (
        "its blocks cannot move, since no other segment of the store has room: start one with"
        " `moonserve segment`, or stop the instance without waiting, and the prefixes that are"
        " only there are computed again"
    )

"""HTTP handlers of the gateway for workers: join, beat, leave, and blocks in Mooncake's pool.

Bodies are msgpack (live.rpc.joins). They become facts for the
Conductor. Nothing is decided here, except whether an instance may join.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest
from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.inferred import Reported
from moonserve.core.schedule.facts import Beat, InstanceInfo, Joined, Left
from moonserve.invalid import without_password
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import Handler
from moonserve.live.openai.headers import TERM
from moonserve.live.rpc.joins import CONTENT_TYPE, BeatBody, BlocksBody, LeaveBody
from moonserve.live.store.reports import POOL

T = TypeVar("T")


class UnknownInstance(BadRequest):
    """A beat of an instance that has not joined with this epoch: it must join again."""

    status = 404


class Incompatible(BadRequest):
    """An instance that another one stands against: a newer start of it, or one of its model with
    which it could not exchange KV. It may join when the other has left."""

    status = 409


class Internal:
    """Handlers of /internal; the gateway's process adds them to its routes."""

    def __init__(
        self,
        conductor: ConductorLoop,
        models: Collection[str],
        term: Callable[[], int] = lambda: 0,
    ) -> None:
        """models: those that workers may serve. term: of this Conductor, for workers; 0: it does
        not lead."""
        self._term = term
        self._conductor = conductor
        self._models = models
        self._reported = Reported(POOL)

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/internal/join"): self._handler(InstanceInfo, self.admit),
            ("POST", "/internal/beat"): self._handler(BeatBody, self._beat),
            ("POST", "/internal/leave"): self._handler(LeaveBody, self._leave),
            ("POST", "/internal/blocks"): self._handler(BlocksBody, self._blocks),
        }

    def _handler(self, shape: type[T], take: Callable[[T], None]) -> Handler:
        """A handler that decodes a body of this shape and passes it to `take`."""

        async def handle(request: HttpRequest) -> Response:
            try:
                body = msgspec.msgpack.decode(await request.body(), type=shape)
            except UNREADABLE as error:
                raise BadRequest(f"body is no msgpack {shape.__name__}: {error}", "body") from None
            take(body)
            term = {TERM: str(self._term())}
            return Response(200, msgspec.msgpack.encode({}), term, CONTENT_TYPE)

        return handle

    def admit(self, info: InstanceInfo) -> None:
        """Let an instance join. Raises BadRequest, Incompatible."""
        if info.namespace.block_size < 1 or info.chunk_tokens < 1 or info.max_seqs < 1:
            raise BadRequest("block_size, chunk_tokens and max_seqs must be 1 or more", "namespace")
        if info.model not in self._models:
            served = ", ".join(self._models)
            raise BadRequest(
                f"this Conductor serves {served or 'external engines'}, not {info.model}; start the"
                " worker with the same --model, or let it join another Conductor (with a registry:"
                " under a prefix of its own, such as etcd://host:port/second)",
                "model",
            )
        if not _has_host(info.url) or "@" in info.url:
            shown = without_password(info.url)
            raise BadRequest(f"{shown!r} is no URL such as http://host:port", "url")
        for view in self._conductor.views().values():
            other = view.info
            if other.id != info.id and other.model == info.model:
                _check_compatible(info, other)
            if other.id == info.id and other.epoch > info.epoch:
                raise Incompatible(
                    f"another process named {info.id} (newer epoch) has joined;"
                    " choose a different --name",
                    "id",
                )
        self._conductor.tell(Joined(info))

    def _beat(self, beat: BeatBody) -> None:
        view = self._conductor.views().get(beat.id)
        if view is None or view.info.epoch != beat.epoch:
            raise UnknownInstance(f"instance {beat.id} has not joined; join again", "id")
        self._conductor.tell(Beat(beat.id, beat.epoch, beat.load))

    def _leave(self, leave: LeaveBody) -> None:
        self._conductor.tell(Left(leave.id, leave.epoch))

    def _blocks(self, blocks: BlocksBody) -> None:
        self.seen(blocks.events)

    def seen(self, events: Sequence[BlocksStored | BlocksRemoved]) -> None:
        """A worker has seen these changes of Mooncake's pool. Raises BadRequest."""
        now_us = self._conductor.now_us()
        for event in events:
            if event.segment != POOL:
                raise BadRequest(
                    f"the store's master reports the blocks of {event.segment}, not workers",
                    "segment",
                )
            self._conductor.tell(*self._reported.take(now_us, event))


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _check_compatible(info: InstanceInfo, other: InstanceInfo) -> None:
    for field in msgspec.structs.fields(info.namespace):
        mine = getattr(info.namespace, field.name)
        theirs = getattr(other.namespace, field.name)
        if mine != theirs:
            raise Incompatible(
                f"{field.name} is {mine!r} here but {theirs!r} on instance {other.id}: "
                f"instances of model {info.model} cannot exchange KV; start all with the same",
                f"namespace.{field.name}",
            )

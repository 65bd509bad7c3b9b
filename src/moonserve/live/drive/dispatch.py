"""The cluster behind the gateway: does what the Conductor decides for each request.

One inbox per request carries both the Conductor's actions and the replies of the call that is out,
so that a request's task waits in one place. Implements ports.Serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Mapping
from typing import Any, TypeAlias

import msgspec

from moonserve.core.errors import (
    BadRequest,
    EngineFailed,
    MoonserveError,
    NobodyAlive,
    Overloaded,
)
from moonserve.core.kv.keys import KeyChain, Namespace
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.units import (
    MICROS_PER_SECOND,
    BlockKey,
    InstanceId,
    LeaseId,
    Micros,
    Tokens,
    lease_of,
)
from moonserve.live.drive.connectors import embedded
from moonserve.live.drive.gather_group import MemberFailed, together
from moonserve.live.drive.wire import (
    Decoded,
    InstanceRefused,
    Prefilled,
    WireClient,
    completion_body,
)
from moonserve.live.http.connection import UpstreamError
from moonserve.live.ports import Conducting, ModelCard, Output

log = logging.getLogger(__name__)


class _Failed(msgspec.Struct, frozen=True):
    """A call ended without its result."""

    why: str
    retry: bool
    unreachable: bool = False
    member: InstanceId | None = None


class _Reply(msgspec.Struct, frozen=True):
    """What the call of this number gave."""

    number: int
    what: Prefilled | Decoded | _Failed


_Item: TypeAlias = Action | _Reply


class Cluster:
    """Serves requests on the instances that have joined."""

    def __init__(
        self, conductor: Conducting, wire: WireClient, configured: Mapping[str, Tokens]
    ) -> None:
        """`configured`: models served here by name and context length, joined yet or not."""
        self._conductor = conductor
        self._wire = wire
        self._configured = dict(configured)

    def models(self) -> list[ModelCard]:
        """One card per model name, in order of name."""
        sizes = dict(self._configured)
        roles: dict[str, list[str]] = {name: [] for name in sizes}
        for info in self._conductor.instances():
            sizes[info.model] = min(info.max_len, sizes.get(info.model, info.max_len))
            roles.setdefault(info.model, []).append(info.role)
        return [ModelCard(name, sizes[name], _both(roles[name])) for name in sorted(sizes)]

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        """See ports.Serving."""
        life = _Life(request, self._namespace(request.model), self._conductor, self._wire)
        try:
            async with contextlib.aclosing(life.run()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            await life.close()

    def _namespace(self, model: str) -> Namespace:
        for info in self._conductor.instances():
            if info.model == model:
                return info.namespace
        raise NobodyAlive(f"no instance of model {model} is alive")


def _both(roles: Collection[str]) -> bool:
    """Whether these instances together prefill and decode."""
    return "both" in roles or ("prefill" in roles and "decode" in roles)


def owed(refusal: Refuse) -> MoonserveError:
    """What the client of a refused request is told."""
    why, reason, wait_us = refusal.why, refusal.reason, refusal.retry_after_us
    if reason == "duplicate_request_id":
        return BadRequest(why, "x-request-id", reason)
    if reason == "nobody_alive":
        return NobodyAlive(why)
    if reason == "kv_memory":  # no waiting helps
        return BadRequest(why, "prompt", "context_length_exceeded")
    return Overloaded(why, reason, None if wait_us is None else wait_us / MICROS_PER_SECOND)


class _Life:
    """One request's task: its inbox, the call that is out, the tokens known so far."""

    def __init__(
        self, request: Request, namespace: Namespace, conductor: Conducting, wire: WireClient
    ) -> None:
        self._request = request
        self._block_size = namespace.block_size
        self._chain = KeyChain(namespace.salted(request.cache_salt), namespace.block_size)
        self._conductor = conductor
        self._wire = wire
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()  # bounded by max_tokens replies
        assert request.prompt, "our own workers need the token ids"
        self._known = list(request.prompt)
        self._replayed = 0
        """Tokens of the running decode that prefill gave already."""
        self._cached: Tokens | None = None
        self._first_us: Micros = 0
        self._last_us: Micros = 0
        """When the first and the last token came."""
        self._params: dict[str, Any] = {}
        self._number = 0
        """Of the call that is out; 0 when none is."""
        self._call: asyncio.Task[None] | None = None
        self._placed: Prefill | None = None
        """The prefill call that is out."""
        self._ahead: asyncio.Task[None] | None = None
        """Has the decode instance pull KV while prefill computes."""
        self._first: Output | None = None
        """What prefill gave; kept until decode takes the request, which may yet be refused."""
        self._outcome = "cancelled"
        self._opened = False

    async def run(self) -> AsyncGenerator[Output, None]:
        """Pieces of output until the end; raises what the client is owed."""
        request = self._request
        if self._conductor.known(request.id):
            message = f"a request with id {request.id} is under way; ids must differ"
            raise BadRequest(message, "x-request-id", "duplicate_request_id")
        self._conductor.open(request, self._keys(), self._inbox)
        self._opened = True
        while True:
            item = await self._inbox.get()
            if self._first is not None and not isinstance(item, Refuse):
                first, self._first = self._first, None
                yield first
            match item:
                case Prefill():
                    self._prefill(item)
                case Decode():
                    self._decode(item)
                case Abort(number=number, why=why) if number == self._number:
                    self._stop_call()
                    self._tell_failed(_Failed(why, retry=True))
                case Refuse():
                    self._outcome = "refused"
                    raise owed(item)
                case GiveUp(why=why):
                    self._outcome = "failed"
                    raise EngineFailed(why)
                case _Reply(number, what) if number == self._number:
                    output = self._take(what)
                    if isinstance(what, Prefilled) and output and not output.finish_reason:
                        self._first = output
                    elif output is not None:
                        # Noted first: who has the last piece may close us without coming back.
                        self._outcome = output.finish_reason or self._outcome
                        yield output
                        if output.finish_reason is not None:
                            return
                case _:
                    pass  # an older call's reply, or an abort that came too late

    async def close(self) -> None:
        """Stop whatever is still out; the Conductor frees what it reserved."""
        self._stop_call()
        self._stop_ahead()
        if self._opened:
            self._opened = False
            self._conductor.tell(ClientGone(self._request.id))
            self._conductor.close(self._request.id, self._outcome, self._tbt_us())

    def _tbt_us(self) -> Micros | None:
        """The mean gap between tokens, over those that came."""
        gaps = self._generated() - 1
        return (self._last_us - self._first_us) // gaps if gaps > 0 else None

    def _take(self, what: Prefilled | Decoded | _Failed) -> Output | None:
        """Account for a reply; the output to pass on, if any."""
        match what:
            case _Failed():
                self._tell_failed(what)
                return None
            case Prefilled():
                return self._prefilled(what)
            case Decoded(token_ids, finish):
                self._stop_ahead()
                skip = min(self._replayed, len(token_ids))
                self._replayed -= skip
                fresh = token_ids[skip:]
                if fresh:
                    self._known.extend(fresh)
                    self._last_us = self._conductor.now_us()
                if finish is not None:
                    tokens = self._generated()
                    self._conductor.tell(DecodeEnded(self._request.id, self._number, tokens))
                if not fresh and finish is None:
                    return None
                return Output(fresh, finish)

    def _prefilled(self, what: Prefilled) -> Output | None:
        if not what.token_ids:
            self._tell_failed(_Failed("prefill gave no token", retry=True))
            return None
        self._known.extend(what.token_ids)
        self._last_us = self._conductor.now_us()
        self._params = what.kv_transfer_params
        self._replayed = len(what.token_ids)
        stopped = what.finish_reason == "stop"
        finish = "stop" if stopped else ("length" if self._left() <= 0 else None)
        self._conductor.tell(PrefillEnded(self._request.id, self._number, final=finish is not None))
        self._keep_fetched()
        cached = None
        if self._cached is None:
            cached = self._cached = what.cached_tokens
            self._first_us = self._last_us
            self._conductor.first_token(self._request.id, cached)
        return Output(what.token_ids, finish, cached)

    def _keep_fetched(self) -> None:
        """What prefill loaded from others is copied to its own segment, if the policy says so.

        Now, since the copy would have made the load longer.
        """
        placed, self._placed = self._placed, None
        if placed is None or not placed.decision.copies:
            return
        decision, loader = placed.decision, (*placed.group, placed.to)[0]
        fetched = decision.reused_tokens > decision.chosen.local_tokens
        if fetched and loader.segment is not None:
            keys = self._keys()[: decision.reused_tokens // self._block_size]
            self._conductor.keep(keys, loader.segment, decision.holder)

    def _generated(self) -> Tokens:
        return len(self._known) - self._request.length

    def _left(self) -> Tokens:
        """Tokens still to be generated."""
        return self._request.stopping.max_tokens - self._generated()

    def _keys(self) -> tuple[BlockKey, ...]:
        return self._chain.of(self._known)

    def _prefill(self, action: Prefill) -> None:
        self._placed = action
        lease = lease_of(self._request.id, action.number)

        async def call() -> None:
            if action.group:
                reply = await self._in_parts(action, lease)
            else:
                params = embedded.prefill_params(lease, action.decision)
                body = completion_body(self._request, self._known, 1, False, params)
                reply = await self._wire.prefill(action.to, self._request, body)
            self._inbox.put_nowait(_Reply(action.number, reply))

        self._start(action.number, call())
        self._pull_ahead(action, lease)

    async def _in_parts(self, action: Prefill, lease: LeaseId) -> Prefilled:
        """The reply of the last of a group; the first knows what was reused."""
        calls = {}
        for stage, to, params in embedded.group_params(lease, action.decision, action.group):
            body = completion_body(self._request, self._known[: stage.end], 1, False, params)
            calls[to.id] = self._wire.prefill(to, self._request, body)

        def ended(member: InstanceId) -> None:
            if member != action.to.id:
                self._conductor.tell(StageEnded(self._request.id, action.number, member))

        replies = await together(calls, ended)
        return msgspec.structs.replace(replies[-1], cached_tokens=replies[0].cached_tokens)

    def _pull_ahead(self, action: Prefill, lease: LeaseId) -> None:
        """A hint to the decode instance, for what prefill publishes in more than one piece."""
        self._stop_ahead()
        to, prefills = action.decode, action.group or (action.to,)
        one_piece = not action.group and len(self._known) <= action.to.chunk_tokens
        if one_piece or to.id in [it.id for it in prefills]:
            return
        call = self._wire.prefetch(to, self._request, lease, self._keys())
        self._ahead = asyncio.create_task(call, name=f"prefetch of {lease}")
        self._ahead.add_done_callback(self._ahead_ended)

    def _ahead_ended(self, task: asyncio.Task[None]) -> None:
        """Whatever became of it, decode loads what it has not got."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            known = isinstance(error, MoonserveError)
            level = logging.DEBUG if known else logging.ERROR
            log.log(level, "%s: no prefetch", self._request.id, exc_info=None if known else error)

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _decode(self, action: Decode) -> None:
        """Decode's prompt is what prefill saw; its reply begins with the token prefill gave."""
        prompt = self._known[: len(self._known) - self._replayed]
        params = embedded.decode_params(self._params)
        left = self._left() + self._replayed
        body = completion_body(self._request, prompt, left, True, params)

        async def call() -> None:
            finished = False
            async for piece in self._wire.decode(action.to, self._request, body):
                self._inbox.put_nowait(_Reply(action.number, piece))
                finished = piece.finish_reason is not None
            if not finished:
                message = f"instance {action.to.id} ended its stream without a finish_reason"
                raise InstanceRefused(message, retry=True)

        self._start(action.number, call())

    def _start(self, number: int, call: Coroutine[Any, Any, None]) -> None:
        self._stop_call()
        self._number = number
        self._call = asyncio.create_task(call, name=f"call {number} of {self._request.id}")
        self._call.add_done_callback(lambda task: self._call_ended(number, task))

    def _call_ended(self, number: int, task: asyncio.Task[None]) -> None:
        """However a call failed, the request's task hears of it."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        why, member = str(error), None
        if isinstance(error, MemberFailed):
            member, error = error.member, error.error
        failed = _Failed(why, retry=True, member=member)
        if isinstance(error, UpstreamError):
            failed = _Failed(why, True, unreachable=not error.sent, member=member)
        elif isinstance(error, InstanceRefused):
            alone = member is None  # else the next try is without what this one refused
            failed = _Failed(why, error.retry or not alone, member=member)
        elif not isinstance(error, MoonserveError):
            log.error("%s: call %d failed", self._request.id, number, exc_info=error)
            failed = _Failed("internal error", retry=True, member=member)
        self._inbox.put_nowait(_Reply(number, failed))

    def _stop_call(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _tell_failed(self, failed: _Failed) -> None:
        number, self._number = self._number, 0  # nothing is out: a reply still queued is stale
        self._stop_ahead()
        self._conductor.tell(
            CallFailed(
                request=self._request.id,
                number=number,
                why=failed.why,
                retry=failed.retry,
                length=len(self._known),
                keys=self._keys(),
                unreachable=failed.unreachable,
                member=failed.member,
            )
        )

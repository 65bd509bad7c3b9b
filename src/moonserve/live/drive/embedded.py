"""Requests on our own workers: their calls, whose pieces are token ids.

`EmbeddedServing` implements ports.Serving for `live/api`. `TokenCalls` makes the calls of one
request for `request.RequestDriver`. KV goes through the store: see connectors/embedded. No text is
made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.keys import KeyChain, Namespace
from moonserve.core.request import Request, TokenLogprobs
from moonserve.core.schedule.actions import Decode, Prefill
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes
from moonserve.core.units import BlockKey, InstanceId, LeaseId, Tokens, lease_of
from moonserve.live.drive.connectors import embedded
from moonserve.live.drive.engines import NONE_JOINED, nobody_of
from moonserve.live.drive.gather_group import gather_group
from moonserve.live.drive.lost import CallLost
from moonserve.live.drive.request import Life, RequestDriver
from moonserve.live.drive.wire import Decoded, Prefilled, WireClient, completion_body
from moonserve.live.ports import Conducting, ModelCard, Output

log = logging.getLogger(__name__)

_DRAIN_S = 0.5


class EmbeddedServing:
    """Serves requests on the workers that have joined."""

    def __init__(
        self, conductor: Conducting, wire: WireClient, configured: Mapping[str, Tokens]
    ) -> None:
        """configured: the models of this gateway by name and context length, whether or not workers
        have joined for them."""
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

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See ports.Serving."""
        namespace = self._namespace(request.model)
        calls = TokenCalls(request, namespace, self._conductor, self._wire)
        _, keys = calls.known()
        driver = RequestDriver(request, keys, self._conductor, calls)
        try:
            while (output := await driver.next()) is not None:
                yield output
        finally:
            await driver.aclose()

    def _namespace(self, model: str) -> Namespace:
        for info in self._conductor.instances():
            if info.model == model:
                return info.namespace
        raise nobody_of(model, self._conductor, NONE_JOINED)


def _both(roles: Collection[str]) -> bool:
    """Whether these roles together can prefill and decode."""
    return "both" in roles or ("prefill" in roles and "decode" in roles)


def _sure(given: Sequence[TokenLogprobs | None]) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of tokens that the client gets. Raises CallLost if one is missing."""
    sure = tuple(it for it in given if it is not None)
    if len(sure) < len(given):
        raise CallLost("a token came without its log probability", retry=True)
    return sure


class _TokenReply:
    """How far the tokens of one request have come."""

    def __init__(self) -> None:
        self.tokens: Tokens = 0
        self.cached: Tokens | None = None
        self.finish: str | None = None
        self.prefill: PrefillTimes | None = None
        self.decode: DecodeTimes | None = None

    @property
    def done(self) -> bool:
        """Whether the last token has come."""
        return self.finish is not None


class TokenCalls:
    """Makes the calls of one request. A lost call goes on elsewhere from the tokens that are
    known."""

    again_s = 0.0

    def __init__(
        self, request: Request, namespace: Namespace, conductor: Conducting, wire: WireClient
    ) -> None:
        assert request.prompt, "our own workers need the token ids"
        self.reply = _TokenReply()
        self._request = request
        self._conductor = conductor
        self._wire = wire
        self._known = list(request.prompt)
        self._block_size = namespace.block_size
        self._chain = KeyChain(namespace.salted(request.cache_salt), namespace.block_size)
        self._params: dict[str, Any] = {}
        """The parameters that prefill returned for its decode."""
        self._repeated = 0
        """Tokens that the running decode will repeat, because prefill returned them already."""
        self._decoding: AsyncGenerator[Decoded, None] | None = None
        self._decoder: InstanceId | None = None
        self._ahead: asyncio.Task[None] | None = None
        """The call that has the decode instance pull KV while prefill computes."""

    def broke_off(self) -> str:
        """See Calls. It goes on from all tokens that are known."""
        return ""

    def known(self) -> tuple[Tokens, tuple[BlockKey, ...]]:
        """See Calls. Includes every token that was generated so far."""
        return len(self._known), self._chain.of(self._known)

    async def died(self, instance: InstanceInfo) -> bool:
        """See Calls."""
        return await self._wire.died(instance)

    async def prefill(self, action: Prefill, life: Life) -> Output:
        """See Calls. Returns the next token."""
        lease = lease_of(self._request.id, action.number)
        self._pull_ahead(action, lease)
        if action.group:
            given = await self._in_parts(action, lease, life)
        else:
            params = embedded.prefill_params(lease, action.decision)
            body = completion_body(self._request, self._known, 1, False, params)
            given = await self._wire.prefill(action.to, self._request, body)
        if not given.token_ids:
            raise CallLost("prefill gave no token")
        return self._prefilled(given, action, life)

    async def decode(self, action: Decode, life: Life) -> Output | None:
        """See Calls. Decode gets the prompt that prefill had, so its reply begins with the token
        that prefill returned."""
        prompt = self._known[: len(self._known) - self._repeated]
        params = embedded.decode_params(self._params)
        body = completion_body(self._request, prompt, self._left() + self._repeated, True, params)
        self.reply.decode = None
        self._decoder = action.to.id
        self._decoding = self._wire.decode(action.to, self._request, body)
        return await self._next()

    async def pour(self, sink: Callable[[Output], bool]) -> bool:
        """See Calls. Its last piece ends a reply, not the end of the call."""
        while sink(await self._next()):
            pass
        return False

    async def _next(self) -> Output:
        """The next piece that has a token which the client lacks, or the end."""
        assert self._decoding is not None, "a decode is out"
        async for piece in self._decoding:
            self._stop_ahead()
            output = self._decoded(piece)
            if output is not None:
                return output
        raise CallLost(f"instance {self._decoder} ended its stream without a finish_reason")

    def ended(self) -> None:
        """See Calls. There is nothing to do."""

    async def stop(self) -> None:
        """See Calls."""
        self._stop_ahead()
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            await decoding.aclose()

    async def drain(self) -> None:
        """See Calls."""
        if self._decoding is not None:
            with contextlib.suppress(MoonserveError, TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    async for _ in self._decoding:
                        pass

    def _prefilled(self, given: Prefilled, action: Prefill, life: Life) -> Output:
        """Account for the token that prefill returned."""
        cached = given.cached_tokens if self.reply.cached is None else None
        logprobs = _sure(given.logprobs)
        self._add(given.token_ids)
        self._params = given.kv_transfer_params
        self.reply.prefill = given.times
        self._repeated = len(given.token_ids)
        if given.finish_reason == "stop":
            self.reply.finish = "stop"
        elif self._left() <= 0:
            self.reply.finish = "length"
        life.prefill_ended(final=self.reply.done)
        self._keep_fetched(action)
        if cached is not None:
            self.reply.cached = cached
            life.first_token(cached)
        return Output(given.token_ids, self.reply.finish, cached, logprobs)

    def _decoded(self, piece: Decoded) -> Output | None:
        """Account for a piece of decode's reply. None: it has no token that the client lacks."""
        skip = min(self._repeated, len(piece.token_ids))
        logprobs = _sure(piece.logprobs[skip:]) if piece.logprobs else ()
        self._repeated -= skip
        if piece.times is not None:
            self.reply.decode = piece.times
        fresh = piece.token_ids[skip:]
        self._add(fresh)
        self.reply.finish = piece.finish_reason
        if not fresh and not self.reply.done:
            return None
        if not logprobs:
            return Output(fresh, piece.finish_reason)
        return Output(fresh, piece.finish_reason, None, logprobs)

    def _add(self, tokens: tuple[int, ...]) -> None:
        self._known.extend(tokens)
        self.reply.tokens += len(tokens)

    def _left(self) -> Tokens:
        """Tokens still to be generated."""
        return self._request.stopping.max_tokens - self.reply.tokens

    async def _in_parts(self, action: Prefill, lease: LeaseId, life: Life) -> Prefilled:
        """Call all members of a group. The last member's reply has the token; the first one's tells
        what was reused."""
        calls: dict[InstanceId, Coroutine[Any, Any, Prefilled]] = {}
        for stage, to, params in embedded.group_params(lease, action.decision, action.group):
            body = completion_body(self._request, self._known[: stage.end], 1, False, params)
            calls[to.id] = self._wire.prefill(to, self._request, body)

        def ended(member: InstanceId) -> None:
            if member != action.to.id:
                life.stage_ended(member)

        replies = await gather_group(calls, ended)
        return msgspec.structs.replace(replies[-1], cached_tokens=replies[0].cached_tokens)

    def _keep_fetched(self, action: Prefill) -> None:
        """Copy the blocks that prefill loaded from others to its own segment, if the policy asks
        for it.

        The copy begins after prefill has ended, because it would have made the load slower.
        """
        decision = action.decision
        if not decision.copies:
            return
        loader = (*action.group, action.to)[0]
        fetched = decision.reused_tokens > decision.chosen.local_tokens
        if fetched and loader.segment is not None:
            _, keys = self.known()
            reused = keys[: decision.reused_tokens // self._block_size]
            self._conductor.keep(reused, loader.segment, decision.holder)

    def _pull_ahead(self, action: Prefill, lease: LeaseId) -> None:
        """Tell the decode instance which KV to pull while prefill still computes. Only useful if
        prefill publishes it in more than one piece."""
        self._stop_ahead()
        to = action.decode
        prefills = action.group or (action.to,)
        one_piece = not action.group and len(self._known) <= action.to.chunk_tokens
        if one_piece or to.id in [it.id for it in prefills]:
            return
        _, keys = self.known()
        call = self._wire.prefetch(to, self._request, lease, keys)
        self._ahead = asyncio.create_task(call, name=f"prefetch of {lease}")
        self._ahead.add_done_callback(self._ahead_ended)

    def _ahead_ended(self, task: asyncio.Task[None]) -> None:
        """Ignore the failure of a prefetch: decode itself loads the blocks that are missing."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            known = isinstance(error, MoonserveError)
            level = logging.DEBUG if known else logging.ERROR
            log.log(level, "%s: no prefetch", self._request.id, exc_info=None if known else error)

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

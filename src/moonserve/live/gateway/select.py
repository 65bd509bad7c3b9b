"""Placement for other gateways: /api/select, /api/reserve, /api/release. Nothing is proxied.

Mounted by the gateway process. A reservation is a request of the Conductor's like any other, whose
calls somebody else makes and tells of; so there is one ledger. Who never comes back is released at
the reservation's deadline. docs/indexer.md has the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from moonserve.core.actions import Action, Decode, GiveUp, Prefill, Refuse
from moonserve.core.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    ModelNotFound,
    MoonserveError,
    NobodyAlive,
    Overloaded,
)
from moonserve.core.facts import CallFailed, ClientGone, DecodeEnded, InstanceInfo, PrefillEnded
from moonserve.core.looking import look
from moonserve.core.placement import Decision
from moonserve.core.prefix import Namespace, chain_keys
from moonserve.core.request import Counted, Request, Slo, Stopping
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Micros, RequestId, Tokens
from moonserve.live.conductor import ConductorLoop, lease_of
from moonserve.live.gateway.headers import MAX_PRIORITY
from moonserve.live.gateway.openai import CompletionRequest, context_exceeded
from moonserve.live.gateway.prompts import Prompts
from moonserve.live.gateway.text import TextTools
from moonserve.live.http.auth import check_token
from moonserve.live.http.message import HttpRequest, Response, decode_json, json_response
from moonserve.live.http.server import Handler
from moonserve.live.instances import embedded

MAX_RESERVATIONS = 16_384
_KEY_BYTES = 32

_Id: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(?!\.\.?$)[A-Za-z0-9._:@-]{1,128}$")]
_Tenant: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:@/-]{0,64}$")]
_Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0.001, le=1e9)]


class Conflict(BadRequest):
    """It contradicts what is there already."""

    status = 409


class Ask(msgspec.Struct, kw_only=True):
    """What is to be placed: its prompt as text, as token ids, or as block keys and a length."""

    model: str
    prompt: str | None = None
    token_ids: list[int] | None = None
    block_keys: list[str] | None = None
    """In hex; see core.prefix."""
    prompt_tokens: Tokens | None = None
    """With block_keys."""
    max_tokens: Annotated[Tokens, msgspec.Meta(ge=1)] = 16
    """The most it will generate, or what is expected, where that is known."""
    ttft_slo_ms: _Ms | None = None
    tbt_slo_ms: _Ms | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    tenant: _Tenant = ""
    id: _Id | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=0.001, le=3_600)] = 120.0
    """How long a reservation lasts; from the end of prefill on, as long again."""


class Release(msgspec.Struct, kw_only=True):
    """What became of a reserved request."""

    id: str
    outcome: Literal["prefill_ended", "decode_ended", "failed", "cancelled"]
    tokens: Annotated[Tokens, msgspec.Meta(ge=0)] = 0
    """decode_ended: length of the whole output."""
    cached_tokens: Annotated[Tokens, msgspec.Meta(ge=0)] = 0
    """prefill_ended: how much of the prompt was not computed."""
    why: str = "the caller says so"
    """failed."""
    retry: bool = False
    """failed: it is to be placed again, elsewhere."""
    unreachable: bool = False
    """failed: nobody listens at the address that the call went to."""


class _Held:
    """One reservation."""

    def __init__(self, request: Request, keys: tuple[BlockKey, ...], ttl_s: float) -> None:
        self.request = request
        self.keys = keys
        self.ttl_s = ttl_s
        self.inbox: asyncio.Queue[Action] = asyncio.Queue()  # a few actions per call
        self.number = 0
        """Of the call that the caller makes."""
        self.reply: dict[str, Any] = {}
        """What the caller was told last."""
        self.decodes = False
        """Whether prefill has ended."""
        self.timer: asyncio.TimerHandle | None = None
        self.lock = asyncio.Lock()


class Selection:
    """Handlers of /api/select, /api/reserve and /api/release.

    tools: text tools of a model served here, KeyError of others.
    """

    def __init__(
        self, conductor: ConductorLoop, tools: Callable[[str], TextTools], token: str
    ) -> None:
        self._conductor = conductor
        self._tools = tools
        self._token = token
        self._prompts = Prompts(16 << 10, 16 << 20)
        self._held: dict[RequestId, _Held] = {}

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/api/select"): self._guarded(self._select),
            ("POST", "/api/reserve"): self._guarded(self._reserve),
            ("POST", "/api/release"): self._guarded(self._release),
        }

    @property
    def reservations(self) -> int:
        """How many there are."""
        return len(self._held)

    def stop(self) -> None:
        """No deadline passes any more."""
        for held in self._held.values():
            if held.timer is not None:
                held.timer.cancel()

    def _guarded(self, handler: Callable[[HttpRequest], Awaitable[Response]]) -> Handler:
        async def checked(http: HttpRequest) -> Response:
            check_token(http, self._token)
            return await handler(http)

        return checked

    async def _select(self, http: HttpRequest) -> Response:
        ask = decode_json(await http.body(), Ask)
        request, keys = await self._request(ask, http.id)
        core, now_us = self._conductor.core, self._conductor.now_us()
        found = look(core, request, keys, now_us)
        if isinstance(found, Refuse):
            raise _error(found)
        infos = [core.view.instances[name].info for name in (found.prefill, found.decode)]
        group = [core.view.instances[stage.instance].info for stage in found.stages]
        placed = Prefill(request.id, 0, infos[0], found, infos[1], tuple(group))
        return json_response(_placement(placed))

    async def _reserve(self, http: HttpRequest) -> Response:
        ask = decode_json(await http.body(), Ask)
        if len(self._held) >= MAX_RESERVATIONS:
            raise Overloaded(f"{len(self._held)} reservations are open", "reservations", 1.0)
        request, keys = await self._request(ask, ask.id or http.id)
        if self._conductor.known(request.id):
            raise Conflict(f"a request with id {request.id} is under way", "id")
        http.cancel_on_disconnect()
        held = self._held[request.id] = _Held(request, keys, ask.ttl_s)
        self._conductor.open(request, keys, held.inbox)
        return json_response(await self._next(held))

    async def _release(self, http: HttpRequest) -> Response:
        told = decode_json(await http.body(), Release)
        held = self._held.get(RequestId(told.id))
        if held is None:
            return json_response({"id": told.id, "released": False})
        async with held.lock:
            return json_response(await self._released(held, told))

    async def _released(self, held: _Held, told: Release) -> dict[str, Any]:
        request, number = held.request.id, held.number
        over = {"id": request, "released": True}
        if request not in self._held:  # meanwhile
            return over | {"released": False}
        match told.outcome:
            case "prefill_ended":
                if held.decodes:
                    return held.reply  # told again
                self._conductor.first_token(request, told.cached_tokens)
                self._conductor.tell(PrefillEnded(request, number, final=False))
                return await self._next(held)
            case "failed" if told.retry:
                length = len(held.request.prompt)
                self._conductor.tell(
                    CallFailed(
                        request, number, told.why, True, length, held.keys, told.unreachable
                    )
                )
                return await self._next(held)
            case "decode_ended":
                if not held.decodes:  # of one call, prefill and decode: both end now
                    self._conductor.tell(PrefillEnded(request, number, final=False))
                    number += 1
                self._conductor.tell(DecodeEnded(request, number, told.tokens))
            case "failed":
                why, unreachable = told.why, told.unreachable
                self._conductor.tell(
                    CallFailed(request, number, why, False, 0, held.keys, unreachable)
                )
            case "cancelled":
                pass
        self._over(held, told.outcome)
        return over

    async def _next(self, held: _Held) -> dict[str, Any]:
        """What the caller is to do now; where that is nothing, the reservation is over."""
        outcome = "failed"
        try:
            async with asyncio.timeout(held.ttl_s):
                action = await self._action(held)
            if isinstance(action, Refuse):
                outcome = "refused"
                raise _error(action)
            if isinstance(action, GiveUp):
                raise EngineFailed(action.why)
        except TimeoutError:
            self._over(held, outcome)
            raise DeadlineExceeded(f"no instance was free within {held.ttl_s:g} s") from None
        except asyncio.CancelledError:
            self._over(held, "cancelled")
            raise
        except MoonserveError:
            self._over(held, outcome)
            raise
        held.number = action.number
        held.decodes = isinstance(action, Decode)
        if isinstance(action, Decode):
            held.reply = {"id": held.request.id, "decode": _instance(action.to)}
        else:
            held.reply = _placement(action)
        held.reply["deadline_s"] = held.ttl_s
        self._renew(held)
        return held.reply

    async def _action(self, held: _Held) -> Prefill | Decode | Refuse | GiveUp:
        """The next one that is an answer; whose instance is lost the caller finds out itself."""
        while True:
            action = await held.inbox.get()
            if isinstance(action, Prefill | Decode | Refuse | GiveUp):
                return action

    def _renew(self, held: _Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        loop = asyncio.get_running_loop()
        held.timer = loop.call_later(held.ttl_s, self._over, held, "expired")

    def _over(self, held: _Held, outcome: str) -> None:
        """The Conductor frees what it reserved, however this ended."""
        if held.timer is not None:
            held.timer.cancel()
        if self._held.pop(held.request.id, None) is not None:
            self._conductor.tell(ClientGone(held.request.id))
            self._conductor.close(held.request.id, outcome)

    async def _request(self, ask: Ask, name: str) -> tuple[Request, tuple[BlockKey, ...]]:
        """The request as the Conductor sees it, with its key chain. Raises BadRequest."""
        views = self._conductor.core.view.instances.values()
        infos = [view.info for view in views if view.info.model == ask.model]
        if not infos:
            raise NobodyAlive(f"no instance of model {ask.model} is alive")
        namespace, max_len = infos[0].namespace, min(info.max_len for info in infos)
        prompt, keys = await self._prompt(ask, namespace, max_len)
        if len(prompt) + ask.max_tokens > max_len:
            what = f"{len(prompt)} tokens and {ask.max_tokens} to generate"
            raise context_exceeded("max_tokens", what, max_len)
        request = Request(
            id=RequestId(name),
            model=ask.model,
            prompt=prompt,
            stopping=Stopping(max_tokens=ask.max_tokens),
            slo=Slo(_us(ask.ttft_slo_ms), _us(ask.tbt_slo_ms)),
            priority=ask.priority,
            tenant=ask.tenant,
        )
        return request, keys

    async def _prompt(
        self, ask: Ask, namespace: Namespace, max_len: Tokens
    ) -> tuple[tuple[int, ...] | Counted, tuple[BlockKey, ...]]:
        given = [ask.prompt, ask.token_ids, ask.block_keys]
        if sum(each is not None for each in given) != 1:
            raise BadRequest("give one of prompt, token_ids and block_keys", "prompt")
        if ask.block_keys is not None:
            keys, size = [_key(text) for text in ask.block_keys], namespace.block_size
            length = ask.prompt_tokens or 0
            if length < 1 or len(keys) != length // size:
                what = f"there must be one for each {size} of prompt_tokens, so {length // size}"
                raise BadRequest(f"block_keys: {len(keys)} are given; {what}", "block_keys")
            return Counted(length), tuple(keys)
        tokens = ask.token_ids
        if tokens is None:
            fields = CompletionRequest(model=ask.model, prompt=ask.prompt or "")
            tokens = await self._prompts.tokens(fields, self._text(ask.model), max_len)
        if not 1 <= len(tokens) <= max_len:
            what = f"{len(tokens)} are not 1 to the model's context of {max_len} tokens"
            raise BadRequest(f"token_ids: {what}", "token_ids")
        try:
            keys = chain_keys(namespace.root(), tokens, namespace.block_size)
        except OverflowError:
            raise BadRequest("token_ids: each must be from 0 to 2^32 - 1", "token_ids") from None
        return tuple(tokens), tuple(keys)

    def _text(self, model: str) -> TextTools:
        try:
            return self._tools(model)
        except KeyError:
            what = f"{model} has no tokenizer here; send token_ids"
            raise ModelNotFound(f"prompt: {what}", "prompt") from None


def _error(refusal: Refuse) -> MoonserveError:
    """A refusal as every client of this gateway gets it."""
    wait_us = refusal.retry_after_us
    if wait_us is None:
        return NobodyAlive(refusal.why)
    if refusal.reason == "kv_memory":  # no waiting helps
        return BadRequest(refusal.why, "prompt", "context_length_exceeded")
    return Overloaded(refusal.why, refusal.reason, wait_us / MICROS_PER_SECOND)


def _placement(action: Prefill) -> dict[str, Any]:
    decision, lease = action.decision, lease_of(action.request, action.number)
    told = {
        "id": action.request,
        "prefill": _instance(action.to),
        "decode": _instance(action.decode),
        **_predicted(decision),
    }
    if not action.number:  # only a look: there is no call
        return told
    if action.to.connector == "embedded":
        told["prefill"]["kv_transfer_params"] = embedded.prefill_params(lease, decision)
    if action.group:
        told["stages"] = [
            _instance(to) | {"start": stage.start, "end": stage.end, "kv_transfer_params": params}
            for stage, to, params in embedded.group_params(lease, decision, action.group)
        ]
    return told


def _predicted(decision: Decision) -> dict[str, Any]:
    return {
        "policy": decision.policy,
        "prompt_tokens": decision.prompt_tokens,
        "reused_tokens": decision.reused_tokens,
        "pool_tokens": decision.pool_tokens,
        "holder": decision.holder,
        "waited_ms": decision.waited_us / 1_000,
        "predicted_ttft_ms": decision.predicted_ttft_us / 1_000,
        "predicted_tbt_ms": decision.predicted_tbt_us / 1_000,
    }


def _instance(info: InstanceInfo) -> dict[str, Any]:
    return {
        "instance": info.id,
        "url": info.url,
        "connector": info.connector,
        "bootstrap": info.bootstrap,
        "dp_rank": info.dp_rank,
        "max_prefill_chunk": info.chunk_tokens,
    }


def _us(ms: float | None) -> Micros | None:
    return None if ms is None else round(ms * 1_000)


def _key(text: str) -> BlockKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise BadRequest(f"block_keys: {text[:80]!r} is no 32 bytes in hex", "block_keys")
    return BlockKey(key)

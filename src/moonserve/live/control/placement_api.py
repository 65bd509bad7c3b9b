"""Placement for other gateways: /api/select, /api/reserve, /api/release. Nothing is proxied.

The gateway process mounts it. For the Conductor, a reservation is a request like any other, so one
ledger counts both; but another gateway makes its calls, and reports their outcome. A reservation
that is never released ends at its deadline. PlacementRequests makes Requests of the bodies, with
block keys in the namespace of the instances. docs/reference/indexer-api.md has the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from moonserve.core.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
)
from moonserve.core.kv.keys import Namespace, chain_keys
from moonserve.core.request import Request, Slo, Stopping
from moonserve.core.schedule.actions import Action, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceInfo,
    PrefillEnded,
    Selected,
)
from moonserve.core.shares import Party
from moonserve.core.units import BlockKey, LeaseId, Micros, RequestId, Tokens, lease_of
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.drive.connectors import embedded, mooncake, nixl
from moonserve.live.drive.engines import NONE_JOINED, nobody_of
from moonserve.live.drive.request import error_for, gave_up
from moonserve.live.http.message import HttpRequest, Response, decode_json, json_response
from moonserve.live.http.server import Handler
from moonserve.live.openai.headers import Ms, Priority, Tenant
from moonserve.live.openai.prompts import Prompts
from moonserve.live.openai.request import CompletionRequest, context_exceeded
from moonserve.live.ports import Conducting
from moonserve.live.text.tools import TextTools
from moonserve.page import pointer

_KEY_BYTES = 32

_Id: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(?!\.\.?$)[A-Za-z0-9._:@-]{1,128}$",
        description="1 to 128 letters, digits, or . _ : @ - (and not . or ..)",
    ),
]


class PlacementBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to place; its prompt as text, as token ids, or as block keys and a length."""

    model: str
    prompt: str | None = None
    token_ids: list[int] | None = None
    block_keys: list[str] | None = None
    """In hex, as core.kv.keys makes them."""
    prompt_tokens: Tokens | None = None
    """The prompt's length; only with block_keys."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)] | None = None
    """The salt that the request will have at its engine. block_keys include it already."""
    max_tokens: Annotated[Tokens, msgspec.Meta(ge=1)] = 16
    """The most tokens that it will generate, or the expected number if that is known."""
    ttft_slo_ms: Ms | None = None
    tbt_slo_ms: Ms | None = None
    priority: Priority = 0
    tenant: Tenant = ""
    id: _Id | None = None
    ttl_s: Annotated[float, msgspec.Meta(ge=0.001, le=3_600)] = 120.0
    """How long a reservation lasts, in seconds; as long again from the end of prefill."""


class PlacementRequests:
    """Makes Requests. tools: a model's text tools; None: it has no tokenizer here. model: the one
    that this gateway serves, also while no instance of it is alive; "": those of its engines."""

    def __init__(
        self, conductor: Conducting, tools: Callable[[str], TextTools | None], model: str
    ) -> None:
        self._conductor = conductor
        self._tools = tools
        self._model = model
        self._prompts = Prompts(16 << 10, 16 << 20)

    async def request(self, ask: PlacementBody, name: str) -> tuple[Request, tuple[BlockKey, ...]]:
        """The request as the Conductor sees it, with its key chain. Raises BadRequest."""
        infos = self._infos(ask.model)
        namespace, max_len = infos[0].namespace, min(info.max_len for info in infos)
        length, keys = await self._prompt(ask, namespace, max_len)
        left = max_len - length
        if left < 1:
            raise context_exceeded("prompt", f"{length} tokens and 1 to generate", max_len)
        request = Request(
            id=RequestId(name),
            model=ask.model,
            length=length,
            stopping=Stopping(max_tokens=min(ask.max_tokens, left)),
            slo=Slo(_us(ask.ttft_slo_ms), _us(ask.tbt_slo_ms)),
            priority=ask.priority,
            tenant=ask.tenant,
        )
        return request, keys

    def _infos(self, model: str) -> list[InstanceInfo]:
        """The instances of a model. Raises ModelNotFound; NobodyAlive, if it may come later."""
        alive = self._conductor.instances()
        infos = [info for info in alive if info.model == model]
        joined = [*alive, *self._conductor.drained()]
        known = sorted({info.model for info in joined} | ({self._model} if self._model else set()))
        if not infos and known and model not in known:
            what = f"{model!r} is not served here; known: {', '.join(known)}"
            raise ModelNotFound(f"model: {what}", "model", "model_not_found")
        if not infos:
            raise nobody_of(model, self._conductor, NONE_JOINED)
        return infos

    async def _prompt(
        self, ask: PlacementBody, namespace: Namespace, max_len: Tokens
    ) -> tuple[Tokens, tuple[BlockKey, ...]]:
        """Its length, and the keys of its full blocks."""
        given = [ask.prompt, ask.token_ids, ask.block_keys]
        if sum(each is not None for each in given) != 1:
            raise BadRequest("give one of prompt, token_ids and block_keys", "prompt")
        if ask.block_keys is not None:
            keys = [_key(text) for text in ask.block_keys]
            size = namespace.block_size
            length = ask.prompt_tokens or 0
            if length < 1 or len(keys) != length // size:
                what = f"there must be one for each {size} of prompt_tokens, so {length // size}"
                raise BadRequest(f"block_keys: {len(keys)} are given; {what}", "block_keys")
            return length, tuple(keys)
        tokens = ask.token_ids
        if tokens is None:
            fields = CompletionRequest(model=ask.model, prompt=ask.prompt or "")
            tools = self._text(ask.model)
            tokens = await self._prompts.tokens(fields, tools, max_len, Party(ask.tenant))
        if not 1 <= len(tokens) <= max_len:
            what = (
                f"{len(tokens)} tokens are given; there must be 1 to {max_len}, the model's context"
            )
            raise BadRequest(f"token_ids: {what}", "token_ids")
        try:
            keys = chain_keys(namespace.salted(ask.cache_salt or ""), tokens, namespace.block_size)
        except OverflowError:
            raise BadRequest("token_ids: each must be from 0 to 2^32 - 1", "token_ids") from None
        return len(tokens), tuple(keys)

    def _text(self, model: str) -> TextTools:
        tools = self._tools(model)
        if tools is None:
            what = f"{model} has no tokenizer here; send token_ids instead"
            raise ModelNotFound(f"prompt: {what}", "prompt")
        return tools


def _us(ms: float | None) -> Micros | None:
    return None if ms is None else round(ms * 1_000)


def _key(text: str) -> BlockKey:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise BadRequest(f"block_keys: {text[:80]!r} is not 32 bytes in hex", "block_keys")
    return BlockKey(key)


MAX_RESERVATIONS = 16_384
_SHOWN = ("url", "connector", "bootstrap", "dp_rank", "chunk_tokens")
"""Fields of an InstanceInfo that callers get as they are."""


class ReleaseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The outcome of a reserved request, or of one of its calls."""

    id: str
    outcome: Literal["prefill_ended", "decode_ended", "failed", "cancelled"]
    tokens: Annotated[Tokens, msgspec.Meta(ge=0)] = 0
    """decode_ended: length of the whole output."""
    cached_tokens: Annotated[Tokens, msgspec.Meta(ge=0)] = 0
    """prefill_ended: how much of the prompt was not computed."""
    why: str = "the caller says so"
    """failed: the reason."""
    retry: bool = False
    """failed: whether the request is to be placed again, elsewhere."""
    unreachable: bool = False
    """failed: the call's address refused the connection."""


class _Reservation(msgspec.Struct, eq=False):
    """A request that another gateway has reserved and not yet released."""

    request: Request
    keys: tuple[BlockKey, ...]
    ttl_s: float
    number: int = 0
    """Number of the call that the caller makes now."""
    reply: dict[str, Any] = {}
    """The last reply to the caller."""
    decodes: bool = False
    """Whether prefill has ended."""
    joint: bool = False
    """Whether one call does prefill and decode."""
    timer: asyncio.TimerHandle | None = None
    inbox: asyncio.Queue[Action] = msgspec.field(default_factory=asyncio.Queue)
    """A few actions per call."""
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class PlacementApi:
    """Handlers of /api/select, /api/reserve and /api/release.

    tools, model: see PlacementRequests.
    """

    def __init__(
        self,
        conductor: ConductorLoop,
        tools: Callable[[str], TextTools | None],
        model: str = "",
    ) -> None:
        self._conductor = conductor
        self._requests = PlacementRequests(conductor, tools, model)
        self._held: dict[RequestId, _Reservation] = {}

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/api/select"): self._select,
            ("POST", "/api/reserve"): self._reserve,
            ("POST", "/api/release"): self._release,
        }

    @property
    def reservations(self) -> int:
        """How many reservations there are."""
        return len(self._held)

    def stop(self) -> None:
        """Let no deadline pass any more."""
        for held in self._held.values():
            if held.timer is not None:
                held.timer.cancel()

    async def _select(self, http: HttpRequest) -> Response:
        ask = decode_json(await http.body(), PlacementBody)
        request, keys = await self._requests.request(ask, http.id)
        found = self._conductor.dry_run(request, keys)
        if isinstance(found, Refuse):
            raise error_for(found)
        self._conductor.tell(Selected(found.prefill, found.decode))
        views = self._conductor.views()
        infos = [views[name].info for name in (found.prefill, found.decode)]
        group = [views[stage.instance].info for stage in found.stages]
        placed = Prefill(request.id, 0, infos[0], found, infos[1], tuple(group))
        return json_response(_placement(placed))

    async def _reserve(self, http: HttpRequest) -> Response:
        ask = decode_json(await http.body(), PlacementBody)
        if len(self._held) >= MAX_RESERVATIONS:
            raise Overloaded(
                f"{len(self._held)} reservations are open, which is the limit", "reservations", 1.0
            )
        request, keys = await self._requests.request(ask, ask.id or http.id)
        if self._conductor.known(request.id):
            raise Conflict(f"a request with id {request.id} is under way", "id")
        http.cancel_on_disconnect()
        held = self._held[request.id] = _Reservation(request, keys, ask.ttl_s)
        self._conductor.open(request, keys, held.inbox)
        return json_response(await self._next(held))

    async def _release(self, http: HttpRequest) -> Response:
        outcome = decode_json(await http.body(), ReleaseBody)
        held = self._held.get(RequestId(outcome.id))
        if held is None:
            return json_response({"id": outcome.id, "released": False})
        async with held.lock:
            return json_response(await self._released(held, outcome))

    async def _released(self, held: _Reservation, body: ReleaseBody) -> dict[str, Any]:
        request, number = held.request.id, held.number
        over = {"id": request, "released": True}
        if request not in self._held:  # it ended while this call waited for the lock
            return over | {"released": False}
        match body.outcome:
            case "prefill_ended":
                if held.decodes:
                    return held.reply  # a repeated call
                self._conductor.first_token(request, body.cached_tokens)
                self._conductor.tell(PrefillEnded(request, number, final=False))
                if held.joint:
                    return self._go_on(held)
                return await self._next(held)
            case "decode_ended":
                if not held.decodes:  # prefill ends as well, which was not reported
                    self._conductor.tell(PrefillEnded(request, number, final=False))
                    number += not held.joint
                self._conductor.tell(DecodeEnded(request, number, body.tokens))
            case "failed":
                retry, length = body.retry, held.request.length if body.retry else 0
                self._conductor.tell(
                    CallFailed(
                        request, number, body.why, retry, length, held.keys, body.unreachable
                    )
                )
                if retry:
                    return await self._next(held)
            case "cancelled":
                pass
        self._over(held, body.outcome)
        return over

    async def _next(self, held: _Reservation) -> dict[str, Any]:
        """The caller's next step. If there is none, the reservation ends, and this raises."""
        try:
            async with asyncio.timeout(held.ttl_s):
                action = await self._action(held)
        except TimeoutError:
            self._over(held, "failed")
            raise DeadlineExceeded(f"no instance was free within {held.ttl_s:g} s") from None
        except asyncio.CancelledError:
            self._over(held, "cancelled")
            raise
        if isinstance(action, Refuse):
            self._over(held, "refused")
            raise error_for(action, pointer(action.request, self._conductor.has_page))
        if isinstance(action, GiveUp):
            self._over(held, "failed")
            raise gave_up(action)
        held.number = action.number
        held.decodes = isinstance(action, Decode)
        if isinstance(action, Decode):
            held.reply = {"id": held.request.id, "decode": _instance(action.to)}
        else:
            held.reply = _placement(action)
            held.joint = action.decision.joint
        return self._renewed(held)

    def _go_on(self, held: _Reservation) -> dict[str, Any]:
        """The prefill has ended, and the same call decodes."""
        held.decodes = True
        held.reply = {"id": held.request.id, "decode": held.reply["decode"]}
        return self._renewed(held)

    async def _action(self, held: _Reservation) -> Prefill | Decode | Refuse | GiveUp:
        """The next action that answers the caller. An Abort does not: its call fails anyway."""
        while True:
            action = await held.inbox.get()
            if isinstance(action, Prefill | Decode | Refuse | GiveUp):
                return action

    def _renewed(self, held: _Reservation) -> dict[str, Any]:
        """The reply. The reservation lasts `ttl_s` from now on."""
        if held.timer is not None:
            held.timer.cancel()
        loop = asyncio.get_running_loop()
        held.timer = loop.call_later(held.ttl_s, self._over, held, "expired")
        held.reply["deadline_s"] = held.ttl_s
        return held.reply

    def _over(self, held: _Reservation, outcome: str) -> None:
        """End the reservation: the Conductor frees what it has promised."""
        if held.timer is not None:
            held.timer.cancel()
        if self._held.pop(held.request.id, None) is not None:
            self._conductor.tell(ClientGone(held.request.id))
            self._conductor.close(held.request.id, outcome)


def _placement(action: Prefill) -> dict[str, Any]:
    decision, lease = action.decision, lease_of(action.request, action.number)
    placement: dict[str, Any] = {
        "id": action.request,
        "prefill": _instance(action.to),
        "decode": _instance(action.decode),
        "policy": decision.policy,
        "prompt_tokens": decision.prompt_tokens,
        "reused_tokens": decision.reused_tokens,
        "pool_tokens": decision.pool_tokens,
        "holder": decision.holder,
        "one_call": decision.joint,
        "waited_ms": decision.waited_us / 1_000,
        "predicted_ttft_ms": decision.predicted_ttft_us / 1_000,
        "predicted_tbt_ms": decision.predicted_tbt_us / 1_000,
    }
    if not action.number:  # a dry run: there is no call
        return placement
    if params := _params(action, lease):
        placement["prefill"]["kv_transfer_params"] = params
    if action.group:
        placement["stages"] = [
            _instance(to) | {"start": stage.start, "end": stage.end, "kv_transfer_params": params}
            for stage, to, params in embedded.group_params(lease, decision, action.group)
        ]
    return placement


def _params(action: Prefill, lease: LeaseId) -> dict[str, Any] | msgspec.Raw | None:
    """kv_transfer_params of the prefill call, for a decode elsewhere; None: there are none."""
    if action.to.connector == "embedded":
        return embedded.prefill_params(lease, action.decision)
    if action.to.connector == "nixl" and not action.decision.joint:
        return msgspec.Raw(nixl.PREFILL)
    if action.to.connector == "mooncake" and not action.decision.joint:
        return msgspec.Raw(mooncake.prefill_params(lease))
    return None


def _instance(info: InstanceInfo) -> dict[str, Any]:
    return {
        "instance": info.id,
        **{name: getattr(info, name) for name in _SHOWN},
    }

"""Placement for other gateways: /api/select, /api/reserve, /api/release. Nothing is proxied.

The gateway process mounts it. For the Conductor, a reservation is a request like any other, so one
ledger counts both; but another gateway makes its calls, and reports their outcome. A reservation
that is never released ends at its deadline. docs/reference/indexer-api.md has the API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from moonserve.core.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    MoonserveError,
    Overloaded,
)
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Action, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.decision import Decision
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceInfo,
    PrefillEnded,
)
from moonserve.core.units import BlockKey, LeaseId, RequestId, Tokens, lease_of
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.placement_asks import PlacementBody, PlacementRequests
from moonserve.live.drive.connectors import embedded, mooncake, nixl
from moonserve.live.drive.request import error_for
from moonserve.live.http.auth import guarded
from moonserve.live.http.message import HttpRequest, Response, decode_json, json_response
from moonserve.live.http.server import Handler
from moonserve.live.text.tools import TextTools

MAX_RESERVATIONS = 16_384


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


class _Reservation:
    """A request that another gateway has reserved and not yet released."""

    def __init__(self, request: Request, keys: tuple[BlockKey, ...], ttl_s: float) -> None:
        self.request = request
        self.keys = keys
        self.ttl_s = ttl_s
        self.inbox: asyncio.Queue[Action] = asyncio.Queue()  # a few actions per call
        self.number = 0
        """Number of the call that the caller makes now."""
        self.reply: dict[str, Any] = {}
        """The last reply to the caller."""
        self.decodes = False
        """Whether prefill has ended."""
        self.joint = False
        """Whether one call does prefill and decode."""
        self.timer: asyncio.TimerHandle | None = None
        self.lock = asyncio.Lock()


class PlacementApi:
    """Handlers of /api/select, /api/reserve and /api/release.

    tools: a model's text tools; None: it has no tokenizer here.
    """

    def __init__(
        self, conductor: ConductorLoop, tools: Callable[[str], TextTools | None], token: str
    ) -> None:
        self._conductor = conductor
        self._requests = PlacementRequests(conductor, tools)
        self._token = token
        self._held: dict[RequestId, _Reservation] = {}

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/api/select"): guarded(self._select, self._token),
            ("POST", "/api/reserve"): guarded(self._reserve, self._token),
            ("POST", "/api/release"): guarded(self._release, self._token),
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
            case "failed" if body.retry:
                length = held.request.length
                self._conductor.tell(
                    CallFailed(request, number, body.why, True, length, held.keys, body.unreachable)
                )
                return await self._next(held)
            case "decode_ended":
                if not held.decodes:  # prefill ends as well, which was not reported
                    self._conductor.tell(PrefillEnded(request, number, final=False))
                    number += not held.joint
                self._conductor.tell(DecodeEnded(request, number, body.tokens))
            case "failed":
                why, unreachable = body.why, body.unreachable
                self._conductor.tell(
                    CallFailed(request, number, why, False, 0, held.keys, unreachable)
                )
            case "cancelled":
                pass
        self._over(held, body.outcome)
        return over

    async def _next(self, held: _Reservation) -> dict[str, Any]:
        """The caller's next step. If there is none, the reservation ends, and this raises."""
        outcome = "failed"
        try:
            async with asyncio.timeout(held.ttl_s):
                action = await self._action(held)
            if isinstance(action, Refuse):
                outcome = "refused"
                raise error_for(action)
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
            held.reply, held.joint = _placement(action), action.decision.joint
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
    placement = {
        "id": action.request,
        "prefill": _instance(action.to),
        "decode": _instance(action.decode),
        **_predicted(decision),
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


def _predicted(decision: Decision) -> dict[str, Any]:
    return {
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


def _instance(info: InstanceInfo) -> dict[str, Any]:
    return {
        "instance": info.id,
        "url": info.url,
        "connector": info.connector,
        "bootstrap": info.bootstrap,
        "dp_rank": info.dp_rank,
        "chunk_tokens": info.chunk_tokens,
    }

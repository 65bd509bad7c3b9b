"""PickerFront: picks endpoints for a proxy's requests, as Front serves those of clients.

`process.gateway` mounts it in place of Front. `server` hands it each request as a stream of
messages. It reads prompts, asks the Conductor and keeps limits by the same code as a gateway
(EngineText, Limiter); the proxy sends the bodies to the engines. Every failure before a pick is an
answer to the client; nothing is sent to an engine from here, except for /tokenize.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    ProcessingRequest,
    ProcessingResponse,
)

from moonserve.core.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    MoonserveError,
    NobodyAlive,
    Overloaded,
)
from moonserve.core.schedule.actions import Prefill
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.shares import Party
from moonserve.core.units import Bytes, whole_number
from moonserve.live.access.guard import Guard
from moonserve.live.access.keys import ApiKey
from moonserve.live.access.meter import UNCOUNTED, CountedCall, Meter
from moonserve.live.access.refusals import Reason
from moonserve.live.access.terms import ClientTerms, terms_of
from moonserve.live.api.engine_text import EngineText
from moonserve.live.api.limiter import SMALL_BODY_BYTES, Limiter, network
from moonserve.live.health import Health
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    UnsupportedCoding,
    decode_json,
    request_id,
)
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.openai import headers as names
from moonserve.live.openai.external import FREE
from moonserve.live.openai.request import PATHS, BodyShape, Form
from moonserve.live.picker.calls import PickedCall
from moonserve.live.picker.connection import CallRefused
from moonserve.live.picker.endpoints import Endpoints, normal
from moonserve.live.picker.protocol import (
    PREFILLER,
    RANK,
    Answered,
    Headed,
    Pick,
    PickAsked,
    PickerStream,
    ProxiedHead,
    ReplyPiece,
    refused,
)

log = logging.getLogger(__name__)

OBJECTIVE = "x-gateway-inference-objective"
"""Header of the Inference Extension: the name of an objective, which has a priority."""
FAIRNESS = "x-gateway-inference-fairness-id"
"""Header of the Inference Extension: what shares capacity equally; our tenant."""
_FORMS: Mapping[str, Form] = {path: form for form, path in PATHS.items() if form not in FREE}
"""The paths whose requests are placed by their prompts."""
_HANDED: frozenset[Form] = frozenset({"chat", "completion"})
"""The forms whose KV a sidecar hands over; prefill and decode of others are of one engine."""
_MODELS = "/v1/models/"
_CREDENTIALS = ("authorization", "x-api-key")
"""Headers that may have a client's key, which is no engine's business."""
_OTHER = "other"
"""The route of requests without a prompt that is read, in metrics."""
_BODY_S = 60.0
"""The longest time until a request's body is whole."""
_FALLBACKS = 2
"""Endpoints that a pick names beside the first."""
_CLIENT_GONE = 499

Read = Callable[[], Awaitable[ProcessingRequest | None]]
"""The proxy's next message; None: there are no more."""
Write = Callable[[ProcessingResponse], Awaitable[None]]


class _NamedModel(msgspec.Struct):
    """What is read of a body without a prompt."""

    model: str = ""


class PickerFront:
    """See the module. Mount `routes()` in an App."""

    def __init__(
        self,
        backend: EngineText,
        health: Health,
        parts: Callable[[PickerFront], Sequence[ProcessPart]],
        *,
        most: Bytes,
        within_s: float,
        objectives: Mapping[str, int],
        salted: bool,
        guard: Guard | None = None,
        meter: Meter | None = None,
    ) -> None:
        """parts: makes what listens for the proxy. most: the largest body. within_s: how long a
        request may wait for an instance. objectives: priorities by name. salted: whether tenants
        share no KV. guard: asks clients for API keys, whose limits `meter` counts; None: the proxy
        decides who its clients are."""
        self.metrics = backend.metrics
        self._backend = backend
        self._health = health
        self._most = most
        self._within_s = within_s
        self._objectives = objectives
        self._salted = salted
        self._guard = guard
        if guard is not None:
            self.metrics.registry.register(guard.refusals)
        self._meter = meter
        self._limiter = Limiter(backend.limits, self.metrics)
        self._endpoints = Endpoints()
        self._turn = 0
        """Which instance gets the next request without a prompt."""
        self.parts = parts(self)

    # As a front of a process.

    def routes(self) -> Routes:
        """Readiness and metrics; the proxy has no route here."""
        return {("GET", "/ready"): self._ready, ("GET", "/metrics"): self._limiter.metrics_text}

    def prefixes(self) -> Routes:
        """None."""
        return {}

    def body_shapes(self) -> dict[str, BodyShape]:
        """None."""
        return {}

    def absent(self) -> dict[str, str]:
        """The paths of models."""
        what = "a picker serves no clients; send the request to the proxy before the engines"
        return dict.fromkeys(PATHS.values(), what)

    def drain(self) -> None:
        """From now on answer new requests, and readiness, with 503; everything else goes on."""
        self._limiter.draining = True
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Answer requests that wait for engines now; others go on."""
        self._backend.stop_waiting()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way. False: `timeout_s` is over."""
        return await self._limiter.idle(timeout_s)

    def readiness(self) -> Response:
        """The answer of /ready: 200 if requests can be placed."""
        alive = [card.name for card in self._backend.cards() if card.alive]
        return self._limiter.readiness(alive, self._health.not_ready(), self._backend.lack)

    async def _ready(self, request: HttpRequest) -> Response:
        return self.readiness()

    # One request.

    async def serve(self, read: Read, write: Write) -> None:
        """Serve one request of the proxy, until it ends or this is cancelled: then its client has
        gone, or its reply is whole."""
        served = _UnderWay(asyncio.get_running_loop().time())
        try:
            await self._serve(served, read, write)
        finally:
            served.close()
            self.metrics.requests[served.route, served.status or _CLIENT_GONE] += 1

    async def _serve(self, served: _UnderWay, read: Read, write: Write) -> None:
        stream = PickerStream(self._most)
        try:
            asked = await self._whole(served, stream, read, write)
            if asked is None:
                return
            pick = await self._pick(served, asked)
            for reply in stream.picked(pick):
                await write(reply)
        except MoonserveError as error:
            await self._refuse(served, error, write)
            return
        except CallRefused:  # the proxy's fault: the call ends with a status of gRPC
            served.status = BadRequest.status
            raise
        except Exception:
            log.exception("%s: a bug in picking an endpoint", served.route)
            await self._refuse(served, MoonserveError("internal error"), write)
            return
        if served.call is not None:
            served.call.sent()
        try:
            await self._follow(served, stream, read, write)
        except MoonserveError as error:
            log.warning("%s: the proxy's stream ends: %s", served.route, error)

    async def _follow(
        self, served: _UnderWay, stream: PickerStream, read: Read, write: Write
    ) -> None:
        """Watch the reply until it ends. Raises PickerMisconfigured."""
        while (message := await read()) is not None:
            replies, event = stream.take(message)
            served.follow(event)  # first: the proxy may end the stream while a reply is written
            for reply in replies:
                await write(reply)

    async def _refuse(self, served: _UnderWay, error: MoonserveError, write: Write) -> None:
        served.status = error.status
        if isinstance(error, Overloaded):
            self.metrics.rejected[error.reason] += 1
        await write(refused(error, served.path))

    async def _whole(
        self, served: _UnderWay, stream: PickerStream, read: Read, write: Write
    ) -> PickAsked | None:
        """The whole request; None: it ended before. Raises what the client gets."""
        try:
            async with asyncio.timeout(_BODY_S):
                while (message := await read()) is not None:
                    replies, event = stream.take(message)
                    if isinstance(event, Headed):
                        self._admit(served, event.head)
                        self._expect(served, event.head)
                    for reply in replies:
                        await write(reply)
                    if isinstance(event, PickAsked):
                        if not served.admitted:
                            self._admit(served, event.head)
                        return event
        except TimeoutError:
            raise DeadlineExceeded(f"the body has not come within {_BODY_S:g} s") from None
        return None

    def _admit(self, served: _UnderWay, head: ProxiedHead) -> None:
        """Find out who asks. Raises Unauthorized, Forbidden, BadRequest."""
        served.path = head.path
        if self._guard is not None:
            served.key = self._guard.key_of(head)
            self._check_path(head.path, served.key)
            self._guard.admit(head)
        try:
            served.terms = self._terms(head.headers, served.key)
        except Forbidden:
            self._count_refusal(served.key, "terms")
            raise
        served.admitted = True

    def _check_path(self, path: str, key: ApiKey | None) -> None:
        """Raise Forbidden if the key is for models only and the path is not: engines have paths
        that change them, also below /v1/. None: the client has the cluster's token."""
        if (
            key is None
            or path in PATHS.values()
            or f"{path}/".startswith(_MODELS)
            or key.may("admin")
        ):
            return
        self._count_refusal(key, "scope")
        raise Forbidden(
            f"key {key.name} has no scope admin, which {path[:80]} of an engine needs",
            "authorization",
        )

    def _expect(self, served: _UnderWay, head: ProxiedHead) -> None:
        """Refuse a body that would not be served, before it comes."""
        party = served.terms.party
        self._limiter.check(party)
        size = whole_number(head.headers.get("content-length", ""))
        if size is None or size > SMALL_BODY_BYTES:
            served.held.enter_context(self._limiter.body(head.headers, self._most, party))

    async def _pick(self, served: _UnderWay, asked: PickAsked) -> Pick:
        if why := self._health.undecided():
            raise NobodyAlive(why)
        head = asked.head
        form = _FORMS.get(head.path)
        if form is None or head.method != "POST":
            return await self._pick_any(asked)
        served.route = head.path
        if asked.body is None:
            raise BadRequest("request body: is missing", None, "invalid_json")
        coding = head.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise UnsupportedCoding(
                f"content-encoding: the body is compressed with {coding[:20]!r}; send it as it is,"
                " without this header",
                "content-encoding",
            )
        return await self._place(served, asked, asked.body, form)

    async def _place(self, served: _UnderWay, asked: PickAsked, body: bytes, form: Form) -> Pick:
        """Have the Conductor place a generation."""
        headers, terms = asked.head.headers, served.terms
        served.enter(self._limiter, terms.party)
        await self._count(served)
        if len(body) > SMALL_BODY_BYTES:
            longest = max((card.max_len for card in self._backend.cards()), default=0)
            await self._limiter.decoding_turn(terms.party, body, longest)
        given = request_id(headers.get("x-request-id"))
        read = await self._backend.prepare(
            headers, given, served.arrived_s, body, form, terms, self._limiter
        )
        served.held.pop_all().close()
        outgoing, caller = read.outgoing, self._backend.caller
        usable = await self._usable(outgoing.model, asked.subset)
        among = () if asked.subset is None else tuple(info.id for info in usable)
        whole = read.request.whole or form not in _HANDED
        request = msgspec.structs.replace(read.request, among=among, whole=whole)
        call = served.call = PickedCall(read, request, caller, served.arrived_s)
        served.counted.spent(call.tokens)
        placed = await call.place(self._within_s)
        chosen, added = await self._chosen(placed)
        added |= outgoing.trace
        served.by = {
            await self._endpoints.of(info): info for info in (chosen, *self._others(placed, usable))
        }
        served.by.pop("", None)
        if not served.by:
            raise NobodyAlive(f"instance {chosen.id} has no address that a proxy can use")
        changed = outgoing.raw is not body
        return Pick([*served.by], outgoing.raw, changed, added, self._removed())

    async def _chosen(self, placed: Prefill) -> tuple[InstanceInfo, dict[str, str]]:
        """The instance that the request goes to, and the headers that it needs."""
        chosen = placed.to if placed.decision.joint else placed.decode
        headers = dict(self._backend.caller.engines.member(chosen.id).headers)
        if chosen.dp_rank is not None:
            headers[RANK] = str(chosen.dp_rank)
        if not placed.decision.joint:
            headers[PREFILLER] = await self._endpoints.of(placed.to)
        return chosen, headers

    def _others(self, placed: Prefill, usable: Sequence[InstanceInfo]) -> list[InstanceInfo]:
        """Instances that can take the call in place of the chosen one, the best first."""
        chosen = placed.to if placed.decision.joint else placed.decode
        by_id = {
            info.id: info for info in usable if info.id != chosen.id and _stands_in(info, chosen)
        }
        scored = [it.instance for it in sorted(placed.candidates, key=lambda it: it.score)]
        later = sorted(by_id, key=lambda it: (it < chosen.id, it))
        order = dict.fromkeys([*scored, *later])
        headers = self._backend.caller.engines.member
        return [
            by_id[it]
            for it in order
            if it in by_id and headers(it).headers == headers(chosen.id).headers
        ][:_FALLBACKS]

    async def _usable(self, model: str, subset: Sequence[str] | None) -> Sequence[InstanceInfo]:
        """The instances of a model that the proxy lets a request use. Raises NobodyAlive if none
        of them can be called, and ModelNotFound."""
        infos = self._backend.instances(model)
        if subset is None:
            return infos
        found = await self._endpoints.among(infos, subset)
        if all(info.role == "prefill" for info in found):
            raise NobodyAlive(
                f"none of the {len(subset)} endpoints that the proxy allows serves {model}"
            )
        return found

    async def _pick_any(self, asked: PickAsked) -> Pick:
        """An instance for a request without a prompt that is read here: each in turn."""
        model = _model_of(asked.body) if asked.body else ""
        known = [card.name for card in self._backend.cards()]
        if not known:
            raise NobodyAlive(self._backend.lack)
        usable = await self._usable(model or known[0], asked.subset)
        able = [info for info in usable if info.role != "prefill"]
        if not able:
            raise NobodyAlive(self._backend.lack)
        self._turn += 1
        info = able[self._turn % len(able)]
        endpoint = await self._endpoints.of(info)
        if not endpoint:
            raise NobodyAlive(f"instance {info.id} has no address that a proxy can use")
        return Pick([endpoint], asked.body, False, self._headers_of(info), self._removed())

    def _headers_of(self, info: InstanceInfo) -> Mapping[str, str]:
        return self._backend.caller.engines.member(info.id).headers

    def _removed(self) -> Sequence[str]:
        """The headers that engines do not get from clients."""
        return () if self._guard is None else _CREDENTIALS

    def _terms(self, headers: Mapping[str, str], key: ApiKey | None) -> ClientTerms:
        """Tenant, objectives and priority, also by the headers of the Inference Extension. With a
        key the tenant is the key's."""
        given = dict(headers)
        priority = self._objectives.get(headers.get(OBJECTIVE, ""))
        if priority is not None:
            given.setdefault(names.PRIORITY, str(priority))
        if FAIRNESS in headers and key is None:
            given.setdefault(names.TENANT, headers[FAIRNESS])
        return terms_of(given, key, self._salted, _address(headers))

    async def _count(self, served: _UnderWay) -> None:
        """Count a request of a key with limits. Raises Overloaded: it is over one of them."""
        key = served.key
        if key is None or self._meter is None or not key.limits.counted:
            return
        try:
            served.counted = await self._meter.enter(key)
        except Overloaded:
            self._count_refusal(key, "key_limit")
            raise

    def _count_refusal(self, key: ApiKey | None, reason: Reason) -> None:
        if self._guard is not None and key is not None:
            self._guard.refusals.count(key.name, reason)


class _UnderWay:
    """What is known of one request of the proxy while it is served."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.admitted = False
        """Whether it is known who asks: the next three."""
        self.path = ""
        self.key: ApiKey | None = None
        self.terms = ClientTerms()
        self.counted: CountedCall = UNCOUNTED
        """By the limits of its key."""
        self.route = _OTHER
        self.status = 0
        """Of the reply; 0: there was none."""
        self.call: PickedCall | None = None
        self.by: dict[str, InstanceInfo] = {}
        """The picked endpoints in order, and their instances."""
        self.held = contextlib.ExitStack()
        """The place of its body."""
        self._leave: Callable[[], None] = lambda: None

    def enter(self, limiter: Limiter, party: Party) -> None:
        """Count it as under way until `close`. Raises NobodyAlive, Overloaded."""
        limiter.enter(party)
        self._leave = lambda: limiter.leave(not self.status, party)

    def follow(self, event: Headed | PickAsked | Answered | ReplyPiece | None) -> None:
        """Report what has become of the reply."""
        if isinstance(event, Answered):
            self.status = event.status
        if self.call is None:
            return
        match event:
            case Answered(status, served, shown, over):
                first = next(iter(self.by.values()))
                by = self.by.get(normal(served), first) if served else first
                self.call.answered(status, by, shown)
                if over:
                    self.call.passed(b"", True)
            case ReplyPiece(data, over):
                self.call.passed(data, over)

    def close(self) -> None:
        """It has ended, however it did."""
        self.held.close()
        if self.call is not None:
            self.counted.spent(self.call.tokens)
            self.call.close()
        self.counted.over()
        self._leave()


def _stands_in(info: InstanceInfo, chosen: InstanceInfo) -> bool:
    """Whether a proxy may send to this instance what was meant for the chosen one."""
    return (
        info.role == chosen.role
        and info.connector == chosen.connector
        and info.dp_rank == chosen.dp_rank
        and info.url != chosen.url
    )


def _address(headers: Mapping[str, str]) -> str:
    """The client's address as the proxy saw it: the last one in x-forwarded-for."""
    return network(headers.get("x-forwarded-for", "").rpartition(",")[2].strip())


def _model_of(body: bytes) -> str:
    try:
        return decode_json(body, _NamedModel).model
    except BadRequest:
        return ""  # the engine says what is wrong with it

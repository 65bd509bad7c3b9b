"""The API as every gateway serves it: its routes, the models, readiness, and the drain.

The gateway process mounts `Front` over the backend that it has. Nothing here knows what makes the
text of a generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import msgspec

from moonserve.core.errors import Forbidden, NobodyAlive, Overloaded
from moonserve.core.units import Tokens
from moonserve.live.access.cors import Cors
from moonserve.live.access.guard import Guard
from moonserve.live.access.keys import ApiKey
from moonserve.live.access.meter import UNCOUNTED, CountedCall, Meter
from moonserve.live.access.refusals import Reason
from moonserve.live.access.terms import ClientTerms, terms_of
from moonserve.live.api.exchange import Exchange
from moonserve.live.api.limiter import SMALL_BODY_BYTES, Limiter, Limits, network
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.health import Health
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import Handler, NotFound, ProcessPart
from moonserve.live.openai.request import PATHS, SERVED_BY, BodyShape, Form
from moonserve.live.ports import ModelCard

_MODELS = "/v1/models"
_ARRIVED = nullcontext()


class ModelEntry(msgspec.Struct):
    """One model in OpenAI's list."""

    id: str
    created: int
    max_model_len: Tokens
    object: str = "model"
    owned_by: str = "moonserve"


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[ModelEntry]
    object: str = "list"


class Backend(Protocol):
    """What serves the models: `own_text.OwnText` by our own workers, `engine_text.EngineText` by
    external engines."""

    lack: str
    """What is missing if no model is alive."""
    forms: Sequence[Form]
    """The kinds of requests that it serves."""
    limits: Limits
    metrics: RequestMetrics

    def stop_waiting(self) -> None:
        """Requests wait no more for instances that could serve them: this process ends."""

    def body_shape(self, form: Form) -> BodyShape:
        """The fields of a generation's body."""

    def cards(self) -> Sequence[ModelCard]:
        """One card per model."""

    def card(self, name: str) -> ModelCard:
        """The card of that model. Raises ModelNotFound, NobodyAlive."""

    async def exchange(
        self,
        http: HttpRequest,
        body: bytes,
        form: Form,
        terms: ClientTerms,
        limiter: Limiter,
        leave: Callable[[], None],
    ) -> Exchange:
        """Check and prepare one generation; nothing is sent to an instance yet.

        terms: by the headers; limiter: names the request; leave: to be called when the exchange is
        closed. Raises BadRequest, ModelNotFound, NobodyAlive, Overloaded.
        """


class Front:
    """The API over a backend. Mount `routes()` and `prefixes()` in an App."""

    def __init__(
        self,
        backend: Backend,
        health: Health | None = None,
        guard: Guard | None = None,
        meter: Meter | None = None,
        *,
        salted: bool = False,
        cors: Cors | None = None,
    ) -> None:
        """guard: finds the API key of a request, whose limits `meter` counts; None: there are no
        keys. salted: whether tenants share no KV. cors: answers preflights; None: nobody does."""
        self.metrics = backend.metrics
        self.parts: Sequence[ProcessPart] = ()
        """Further parts of the process that it needs: none."""
        self._backend = backend
        self._limiter = Limiter(backend.limits, self.metrics)
        self._created = int(time.time())
        self._health = health or Health()
        self._guard = guard
        if guard is not None:
            self.metrics.registry.register(guard.refusals)
        self._meter = meter
        self._salted = salted
        self._cors = cors

    def routes(self) -> dict[tuple[str, str], Handler]:
        """The handlers of exact paths."""
        counted = self._limiter.counted
        forms: dict[tuple[str, str], Handler] = {
            ("POST", PATHS[form]): counted(PATHS[form], partial(self._generate, form=form))
            for form in self._backend.forms
        }
        return {
            **forms,
            ("GET", _MODELS): counted(_MODELS, self._list_models),
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._limiter.metrics_text,
        }

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """The handlers of path prefixes, because a model's name may have slashes."""
        found: dict[tuple[str, str], Handler] = {
            ("GET", _MODELS + "/"): self._limiter.counted(_MODELS, self._one_model)
        }
        if self._cors is not None:
            found["OPTIONS", "/v1/"] = self._cors.preflight
        return found

    def body_shapes(self) -> dict[str, BodyShape]:
        """The fields of bodies, by path."""
        backend = self._backend
        return {PATHS[form]: backend.body_shape(form) for form in backend.forms}

    def absent(self) -> dict[str, str]:
        """The paths that only other backends serve, each with which ones."""
        return {
            path: "workers of moonserve do not serve it, but a gateway before external engines does"
            f" (moonserve gateway --url ENGINE); {SERVED_BY[form]}"
            for form, path in PATHS.items()
            if form not in self._backend.forms
        }

    def drain(self) -> None:
        """From now on answer new generations, and /ready, with 503; everything else goes on.

        To shut down, call `drain`, then `idle`, and only then stop the server. Until then the
        workers' heartbeats and store calls must reach this process.
        """
        self._limiter.draining = True
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Requests that wait for instances get their answer now; see Backend."""
        self._backend.stop_waiting()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no generation is under way, streams included. False: `timeout_s` is over."""
        return await self._limiter.idle(timeout_s)

    async def _generate(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        try:
            return await self._generated(http, form)
        except NobodyAlive as error:
            missing = self._health.incomplete()
            if not missing or self._limiter.draining:
                raise
            raise NobodyAlive(f"{error}; {missing}") from None

    async def _generated(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        if why := self._health.undecided():
            raise NobodyAlive(why)
        key = None if self._guard is None else self._guard.key_of(http)
        try:
            terms = terms_of(http.headers, key, self._salted, network(http.address))
        except Forbidden:
            self._refused(key, "terms")
            raise
        party = terms.party
        call: CountedCall = UNCOUNTED
        counted: Exchange | None = None

        def leave() -> None:
            nonlocal counted
            self._limiter.leave(http.gone, party)
            if counted is not None:
                call.spent(counted.tokens)
                counted = None  # it has `leave`: no request that has ended may be a cycle
            call.over()

        if http.unread():
            self._limiter.check(party)
            await http.soon()  # a small body that comes just behind its head is not on its way
        with (
            self._limiter.body(http.headers, http.max_body_bytes, party)
            if http.unread()
            else _ARRIVED
        ):
            body = await http.body()
            self._limiter.enter(party)
            try:
                http.cancel_on_disconnect()
                if key is not None and self._meter is not None and key.limits.counted:
                    call = await self._entered(self._meter, key)
                if len(body) > SMALL_BODY_BYTES:
                    longest = max((card.max_len for card in self._backend.cards()), default=0)
                    await self._limiter.decoding_turn(party, body, longest)
                exchange = await self._backend.exchange(
                    http, body, form, terms, self._limiter, leave
                )
                counted = exchange
                call.spent(exchange.tokens)
            except BaseException:
                leave()
                raise
        streams = False
        try:
            reply = await exchange.begin()
            streams = isinstance(reply, StreamingResponse)
            return reply
        finally:
            if not streams:  # a stream is closed by the HTTP server
                await exchange.aclose()

    async def _entered(self, meter: Meter, key: ApiKey) -> CountedCall:
        """Count a request of a key with limits. Raises Overloaded: it is over one of them."""
        try:
            return await meter.enter(key)
        except Overloaded:
            self._refused(key, "key_limit")
            raise

    def _refused(self, key: ApiKey | None, reason: Reason) -> None:
        if self._guard is not None and key is not None:
            self._guard.refusals.count(key.name, reason)

    async def _list_models(self, request: HttpRequest) -> Response:
        return json_response(ModelList([self._entry(card) for card in self._backend.cards()]))

    async def _one_model(self, request: HttpRequest) -> Response:
        name = request.path.removeprefix(_MODELS + "/")
        if not name:
            raise NotFound(f"there is no path {request.path}; did you mean {_MODELS}?")
        return json_response(self._entry(self._backend.card(name)))

    async def _ready(self, request: HttpRequest) -> Response:
        alive = [card.name for card in self._backend.cards() if card.alive]
        return self._limiter.readiness(alive, self._health.not_ready(), self._backend.lack)

    def _entry(self, card: ModelCard) -> ModelEntry:
        return ModelEntry(card.name, self._created, card.max_len)

"""The gateway's routes: from an HTTP request to ports.Serving and back.

`GatewayApp` depends on a Serving and on text tools per model, nothing else; the gateway process
adds its own routes beside these. Holds no state of a request beyond its end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from moonserve.core.errors import (
    ModelNotFound,
)
from moonserve.core.request import Request
from moonserve.core.units import RequestId, Tokens, seconds_to_us
from moonserve.live.gateway import headers, openai
from moonserve.live.gateway.door import Door
from moonserve.live.gateway.door import Limits as Limits
from moonserve.live.gateway.generation import (
    EventStream,
    Form,
    Generation,
    reply_head,
    whole_reply,
)
from moonserve.live.gateway.metrics import Metrics
from moonserve.live.gateway.prompts import Prompts, max_tokens
from moonserve.live.gateway.text import TextTools
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
    json_response,
)
from moonserve.live.http.server import Handler
from moonserve.live.ports import ModelCard, Serving

_MODELS = "/v1/models"


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


_Fields: TypeAlias = openai.ChatRequest | openai.CompletionRequest


class GatewayApp:
    """OpenAI's API, health and metrics over `serving`.

    `tools` gives the text tools of a model that `serving.models()` names. Mount `routes()` and
    `prefixes()` in an App.
    """

    def __init__(
        self, serving: Serving, tools: Callable[[str], TextTools], limits: Limits | None = None
    ) -> None:
        self.metrics = Metrics()
        self._serving = serving
        self._tools = tools
        self._limits = limits or Limits()
        self._prompts = Prompts(self._limits.offload_bytes, self._limits.max_tokenising_bytes)
        self._live: set[RequestId] = set()
        self._door = Door(self._limits, self.metrics)
        self._created = int(time.time())
        self.not_ready: Callable[[], str] = str
        """Why others should serve, if this gateway knows of anything; empty: no reason."""

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/v1/chat/completions"): self._door.counted(
                "/v1/chat/completions", self._chat
            ),
            ("POST", "/v1/completions"): self._door.counted("/v1/completions", self._completion),
            ("GET", _MODELS): self._door.counted(_MODELS, self._list_models),
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._door.metrics_text,
        }

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes; a model's name may have slashes."""
        return {("GET", _MODELS + "/"): self._door.counted(_MODELS, self._one_model)}

    def drain(self) -> None:
        """From now on new generations are answered 503, and so is /ready; all else goes on.

        Who shuts down calls this, then `idle`, and only then stops the server: as long as a
        generation runs, its instances must get through with their beats and store operations.
        """
        self._door.draining = True

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no generation is under way, streams included; False after `timeout_s`."""
        return await self._door.idle(timeout_s)

    async def _list_models(self, request: HttpRequest) -> Response:
        return json_response(ModelList([self._entry(card) for card in self._serving.models()]))

    async def _one_model(self, request: HttpRequest) -> Response:
        return json_response(self._entry(self._card(request.path.removeprefix(_MODELS + "/"))))

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: HttpRequest) -> Response:
        alive = [card.name for card in self._serving.models() if card.alive]
        lack = "no model has both a prefill and a decode instance"
        return self._door.readiness(alive, self.not_ready(), lack)

    async def _chat(self, http: HttpRequest) -> Response | StreamingResponse:
        return await self._generate(http, "chat")

    async def _completion(self, http: HttpRequest) -> Response | StreamingResponse:
        return await self._generate(http, "completion")

    async def _generate(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        tenant = headers.tenant(http.headers)
        self._door.enter(tenant)
        try:
            body = await http.body()
            http.cancel_on_disconnect()
            fields = self._parse(form, body)
            request = await self._request(http, fields, tenant)
            generation = Generation(
                request,
                self._serving.generate(request),
                self._tools(request.model).detokenizer(),
                self.metrics,
                http.arrived_s,
                lambda: self._leave(http, tenant, request.id),
            )
        except BaseException:
            self._leave(http, tenant, None)
            raise
        self._live.add(request.id)
        stream, ids = bool(fields.stream), bool(fields.return_token_ids)
        head = reply_head(request, form, stream, int(time.time()))
        handed_over = False
        try:
            if not stream:
                return Response(body=await whole_reply(generation, head, form, ids))
            # The first piece comes before the status line: what fails until then has its own.
            first = await generation.next_text()
            usage = openai.wants_usage(fields)
            events = EventStream(generation, first, head, form, usage, ids)
            handed_over = True
            return StreamingResponse(events)
        finally:
            if not handed_over:
                await generation.close()

    def _leave(self, http: HttpRequest, tenant: str, live: RequestId | None) -> None:
        self._door.leave(http, tenant)
        if live is not None:
            self._live.discard(live)

    def _parse(self, form: Form, body: bytes) -> _Fields:
        if form == "chat":
            return openai.parse_chat(body, self._limits.max_messages)
        return openai.parse_completion(body)

    async def _request(self, http: HttpRequest, fields: _Fields, tenant: str) -> Request:
        """The request as the cluster sees it; BadRequest or ModelNotFound where it cannot be."""
        slo, priority = headers.slo(http.headers), headers.priority(http.headers)
        card = self._card(fields.model)
        prompt = await self._prompts.tokens(fields, self._tools(card.name), card.max_len)
        stopping = openai.stopping(fields, max_tokens(fields, len(prompt), card.max_len))
        return Request(
            id=self._door.named(http, http.id in self._live),
            model=card.name,
            prompt=tuple(prompt),
            sampling=openai.sampling(fields, secrets.randbits(63)),
            stopping=stopping,
            slo=slo,
            priority=priority,
            arrived_us=seconds_to_us(http.arrived_s),
            tenant=tenant,
        )

    def _card(self, name: str) -> ModelCard:
        cards = self._serving.models()
        for card in cards:
            if card.name == name:
                return card
        known = ", ".join(card.name for card in cards) or "none yet"
        raise ModelNotFound(
            f"model: {name!r} is not served here; known: {known}", "model", "model_not_found"
        )

    def _entry(self, card: ModelCard) -> ModelEntry:
        return ModelEntry(card.name, self._created, card.max_len)

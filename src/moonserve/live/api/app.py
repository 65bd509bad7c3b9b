"""OpenAI's API over workers of ours: from an HTTP request to ports.Serving and back.

`GatewayApp` depends on a Serving and on text tools per model, nothing else; the gateway process
adds its own routes beside its. Holds no state of a request beyond its end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from moonserve.core.errors import (
    ModelNotFound,
)
from moonserve.core.request import Request
from moonserve.core.units import RequestId, seconds_to_us
from moonserve.live.api.front import Front
from moonserve.live.api.generation import EventStream, Generation, whole_reply
from moonserve.live.api.limiter import Limits as Limits
from moonserve.live.health import Health
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
)
from moonserve.live.openai import headers
from moonserve.live.openai import request as openai
from moonserve.live.openai.prompts import Prompts, max_tokens
from moonserve.live.openai.reply import ReplyWriter, reply_head
from moonserve.live.openai.request import Form
from moonserve.live.ports import ModelCard, Serving
from moonserve.live.text.tools import TextTools

_Fields: TypeAlias = openai.ChatRequest | openai.CompletionRequest


class GatewayApp(Front):
    """OpenAI's API, health and metrics over `serving`.

    `tools` gives the text tools of a model that `serving.models()` names.
    """

    lack = "no model has both a prefill and a decode instance"

    def __init__(
        self,
        serving: Serving,
        tools: Callable[[str], TextTools],
        limits: Limits | None = None,
        health: Health | None = None,
    ) -> None:
        self._limits = limits or Limits()
        super().__init__(self._limits, health or Health())
        self._serving = serving
        self._tools = tools
        self._prompts = Prompts(self._limits.offload_bytes, self._limits.max_tokenising_bytes)
        self._live: set[RequestId] = set()

    def cards(self) -> Sequence[ModelCard]:
        """See Front."""
        return self._serving.models()

    def card(self, name: str) -> ModelCard:
        """See Front."""
        cards = self._serving.models()
        for card in cards:
            if card.name == name:
                return card
        known = ", ".join(card.name for card in cards) or "none yet"
        raise ModelNotFound(
            f"model: {name!r} is not served here; known: {known}", "model", "model_not_found"
        )

    async def generate(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        """See Front."""
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
        head = reply_head(request.id, form, stream, int(time.time()), request.model)
        writer = ReplyWriter(head, form, openai.wants_usage(fields))
        handed_over = False
        try:
            if not stream:
                return Response(body=await whole_reply(generation, writer, ids))
            # The first piece comes before the status line: what fails until then has its own.
            first = await generation.next_text()
            events = EventStream(generation, first, writer, ids)
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
        card = self.card(fields.model)
        prompt = await self._prompts.tokens(fields, self._tools(card.name), card.max_len)
        stopping = openai.stopping(fields, max_tokens(fields, len(prompt), card.max_len))
        return Request(
            id=self._door.named(http, http.id in self._live),
            model=card.name,
            length=len(prompt),
            prompt=tuple(prompt),
            sampling=openai.sampling(fields, secrets.randbits(63)),
            stopping=stopping,
            slo=slo,
            priority=priority,
            arrived_us=seconds_to_us(http.arrived_s),
            cache_salt=fields.cache_salt or "",
            tenant=tenant,
        )

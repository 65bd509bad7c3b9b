"""The API's backend for our own workers: the gateway makes the text, and workers know token ids
only.

`OwnText` is a `front.Backend`. It parses a client's request, tokenizes its prompt, and turns the
tokens of ports.Serving into text. No state of a request is kept after its end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from moonserve.core.errors import ModelNotFound
from moonserve.core.request import Request
from moonserve.core.units import RequestId, seconds_to_us
from moonserve.live.access.terms import ClientTerms
from moonserve.live.api.exchange import Exchange
from moonserve.live.api.generation import Generation, TextExchange
from moonserve.live.api.limiter import Limiter, Limits
from moonserve.live.api.ready_wait import ReadyWait
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.message import HttpRequest
from moonserve.live.openai import request as openai
from moonserve.live.openai.prompts import Prompts, max_tokens
from moonserve.live.openai.reply import ReplyWriter, reply_head
from moonserve.live.openai.request import BodyShape, Form
from moonserve.live.openai.trace_context import SamplingRule, begin_trace
from moonserve.live.ports import ModelCard, Serving
from moonserve.live.text.tools import TextTools

_Fields: TypeAlias = openai.ChatRequest | openai.CompletionRequest


class OwnText:
    """See the module. tools: returns the text tools of a model that `serving.models()` names."""

    lack = "no model has both a prefill and a decode instance"
    forms: Sequence[Form] = ("chat", "completion")

    def __init__(
        self,
        serving: Serving,
        tools: Callable[[str], TextTools],
        limits: Limits | None = None,
        sampling: Callable[[], SamplingRule | None] = lambda: None,
    ) -> None:
        """sampling: which requests have spans; None: none has."""
        self.limits = limits or Limits()
        self.metrics = RequestMetrics()
        self._serving = serving
        self._tools = tools
        self._sampling = sampling
        self._prompts = Prompts(self.limits.offload_bytes, self.limits.max_tokenising_bytes)
        self._live: set[RequestId] = set()
        self._ready = ReadyWait(self.card, self.limits.wait_ready_us)

    def stop_waiting(self) -> None:
        """See Backend."""
        self._ready.stop()

    def body_shape(self, form: Form) -> BodyShape:
        """See Backend."""
        return openai.body_shape(form)

    def cards(self) -> Sequence[ModelCard]:
        """See Backend."""
        return self._serving.models()

    def card(self, name: str) -> ModelCard:
        """See Backend."""
        cards = self._serving.models()
        for card in cards:
            if card.name == name:
                return card
        known = ", ".join(card.name for card in cards) or "none yet"
        raise ModelNotFound(
            f"model: {name!r} is not served here; known: {known}", "model", "model_not_found"
        )

    async def exchange(
        self,
        http: HttpRequest,
        body: bytes,
        form: Form,
        terms: ClientTerms,
        limiter: Limiter,
        leave: Callable[[], None],
    ) -> Exchange:
        """See Backend."""
        fields = self._parse(form, body)
        request = await self._request(http, fields, terms, limiter)
        generation = Generation(
            request,
            self._serving.generate(request),
            self._tools(request.model).detokenizer(),
            self.metrics,
            http.arrived_s,
        )
        self._live.add(request.id)

        def ended() -> None:
            self._live.discard(request.id)
            leave()

        stream = bool(fields.stream)
        ids = bool(fields.return_token_ids)
        head = reply_head(request.id, form, stream, int(time.time()), request.model)
        writer = ReplyWriter(head, form, openai.wants_usage(fields))
        return TextExchange(generation, writer, stream, ids, ended)

    def _parse(self, form: Form, body: bytes) -> _Fields:
        if form == "chat":
            return openai.parse_chat(body, self.limits.max_messages)
        longest = max((card.max_len for card in self._serving.models()), default=0)
        return openai.parse_completion(body, longest)

    async def _request(
        self, http: HttpRequest, fields: _Fields, terms: ClientTerms, limiter: Limiter
    ) -> Request:
        """The request for the cluster. Raises BadRequest, ModelNotFound, NobodyAlive,
        Overloaded."""
        card = await self._ready.card(fields.model)
        tools = self._tools(card.name)
        prompt = await self._prompts.tokens(fields, tools, card.max_len, terms.party)
        rule = self._sampling()
        stopping = openai.stopping(fields, max_tokens(fields, len(prompt), card.max_len))
        http.id = limiter.named(http.id, http.id in self._live)
        return Request(
            id=RequestId(http.id),
            model=card.name,
            length=len(prompt),
            prompt=tuple(prompt),
            sampling=openai.sampling(fields, secrets.randbits(63)),
            stopping=stopping,
            slo=terms.slo,
            priority=terms.priority,
            arrived_us=seconds_to_us(http.arrived_s),
            cache_salt=terms.salt(fields.cache_salt),
            tenant=terms.tenant,
            address=terms.party.address,
            trace=None if rule is None else begin_trace(http.headers, rule).context,
        )

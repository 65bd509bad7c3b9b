"""The API's backend for our own workers: the gateway makes the text, and workers know token ids
only.

`OwnText` is a `front.Backend`. It parses a client's request, tokenizes its prompt, and turns the
tokens of ports.Serving into text. No state of a request is kept after its end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from moonserve.core.errors import ModelNotFound
from moonserve.core.request import Request
from moonserve.core.units import RequestId, Tokens, seconds_to_us
from moonserve.live.access.terms import ClientTerms
from moonserve.live.api.exchange import Exchange
from moonserve.live.api.generation import Generation, TextExchange, WholeExchange
from moonserve.live.api.limiter import Limiter, Limits
from moonserve.live.api.ready_wait import ReadyWait
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.openai import messages, responses, tokenizing
from moonserve.live.openai import request as openai
from moonserve.live.openai.messages import (
    MessagesWriter,
    TokenCount,
    parse_count,
    parse_messages,
)
from moonserve.live.openai.prompts import Prompts, max_tokens
from moonserve.live.openai.reply import ReplyWriter, Writer, reply_head
from moonserve.live.openai.request import PATHS, BodyShape, Form
from moonserve.live.openai.responses import ResponseChat, ResponseWriter, parse_response
from moonserve.live.openai.tokenizing import (
    detokenized,
    parse_detokenize,
    parse_tokenize,
    tokenized,
)
from moonserve.live.openai.trace_context import SamplingRule, begin_trace
from moonserve.live.ports import ModelCard, Serving
from moonserve.live.text.tools import TextTools

_Fields: TypeAlias = openai.ChatRequest | openai.CompletionRequest


_SHAPES: Mapping[Form, BodyShape] = {
    "chat": openai.generation_shape("chat"),
    "completion": openai.generation_shape("completion"),
    "responses": responses.SHAPE,
    "messages": messages.SHAPE,
    "count_tokens": messages.COUNT_SHAPE,
    "tokenize": tokenizing.TOKENIZE_SHAPE,
    "detokenize": tokenizing.DETOKENIZE_SHAPE,
}


class OwnText:
    """See the module. tools: returns the text tools of a model that `serving.models()` names."""

    lack = "no model has both a prefill and a decode instance"
    forms: Sequence[Form] = tuple(_SHAPES)

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
        return _SHAPES[form]

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
        if form in ("count_tokens", "tokenize", "detokenize"):
            http.id = limiter.named(http.id, http.id in self._live)
            reply = await self._reply(form, body, terms)
            return WholeExchange(RequestId(http.id), reply, leave)
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
        return TextExchange(generation, _writer(form, fields, request), PATHS[form], stream, ended)

    def _parse(self, form: Form, body: bytes) -> _Fields:
        most = self.limits.max_messages
        if form == "chat":
            return openai.parse_chat(body, most)
        if form == "responses":
            return parse_response(body, most)
        if form == "messages":
            return parse_messages(body, most)
        return openai.parse_completion(body, self._longest())

    def _longest(self) -> Tokens:
        """The longest context of any model."""
        return max((card.max_len for card in self._serving.models()), default=0)

    async def _reply(self, form: Form, body: bytes, terms: ClientTerms) -> Response:
        """The reply to a request that needs no instance. Raises as `exchange` does."""
        if form == "detokenize":
            asked = parse_detokenize(body, self._longest())
            self.card(asked.model)
            return json_response(detokenized(asked.tokens, self._tools(asked.model)))
        texts = False
        fields: _Fields
        if form == "count_tokens":
            fields = parse_count(body, self.limits.max_messages)
        else:
            fields, texts = parse_tokenize(body, self.limits.max_messages, self._longest())
        card = self.card(fields.model)
        tools = self._tools(card.name)
        ids = await self._prompts.tokens(fields, tools, card.max_len, terms.party)
        if form == "count_tokens":
            return json_response(TokenCount(len(ids)))
        return json_response(tokenized(ids, card.max_len, tools if texts else None))

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


def _writer(form: Form, fields: _Fields, request: Request) -> Writer:
    """What writes the reply to this request."""
    created = int(time.time())
    if isinstance(fields, ResponseChat):
        return ResponseWriter(request.id, fields, created)
    if form == "messages":
        return MessagesWriter(request.id, request.model)
    head = reply_head(request.id, form, bool(fields.stream), created, request.model)
    return ReplyWriter(head, form, openai.wants_usage(fields), bool(fields.return_token_ids))

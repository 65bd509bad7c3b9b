"""The API's backend for our own workers: the gateway makes the text, and workers know token ids
only.

`OwnText` is a `front.Backend`. It parses a client's request, tokenizes its prompt, and turns the
tokens of ports.Serving into text. No state of a request is kept after its end.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from moonserve.core.errors import BadRequest, ModelNotFound
from moonserve.core.request import Request
from moonserve.core.units import RequestId, Tokens, seconds_to_us
from moonserve.live.access.terms import ClientTerms
from moonserve.live.api.choices import ChoiceInWork, ChoicesExchange
from moonserve.live.api.exchange import Exchange
from moonserve.live.api.generation import Generation, TextExchange, WholeExchange
from moonserve.live.api.limiter import Limiter, Limits
from moonserve.live.api.ready_wait import ReadyWait
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.openai import messages, responses, tokenizing
from moonserve.live.openai import request as openai
from moonserve.live.openai.logprobs import LogprobWriter
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
from moonserve.live.text.calls import CallReader
from moonserve.live.text.grammar import check_schema
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

    lack = (
        "no model has both a prefill and a decode instance that take new work; GET /health names"
        " those that are drained"
    )
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
        prompts = [fields]
        if isinstance(fields, openai.CompletionRequest):
            prompts = [*openai.split_prompts(fields)]
        if len(prompts) * (fields.n or 1) > 1:
            return await self._several(http, prompts, form, terms, limiter, leave)
        request = await self._request(http, http.id, fields, terms, limiter)
        http.id = request.id
        generation = self._generation(request, http, fields)

        def ended() -> None:
            self._live.discard(request.id)
            leave()

        stream = bool(fields.stream)
        writer = _writer(form, fields, request, self._tools(request.model))
        return TextExchange(generation, writer, PATHS[form], stream, ended)

    def _generation(
        self, request: Request, http: HttpRequest, fields: _Fields, follows: bool = False
    ) -> Generation:
        """The generation of a request, which is under way from now on; follows: see Generation."""
        self._live.add(request.id)
        return Generation(
            request,
            self._serving.generate(request),
            self._tools(request.model).detokenizer(),
            self.metrics,
            http.arrived_s,
            follows,
            _call_reader(fields),
            openai.schema_fields(fields)[1],
        )

    async def _several(
        self,
        http: HttpRequest,
        prompts: Sequence[_Fields],
        form: Form,
        terms: ClientTerms,
        limiter: Limiter,
        leave: Callable[[], None],
    ) -> Exchange:
        """The exchange of several choices. Each of them takes a place of the gateway."""
        per_prompt = prompts[0].n or 1
        given, places, names = http.id, 0, list[RequestId]()

        def ended() -> None:
            self._live.difference_update(names)
            for _ in range(places):
                limiter.leave(False, terms.party)

        try:
            for _ in range(len(prompts) * per_prompt - 1):
                limiter.enter(terms.party)
                places += 1
            choices: list[ChoiceInWork] = []
            for fields in prompts:
                leader = None
                name = f"{given}-{len(choices)}" if choices else given
                try:
                    request = await self._request(http, name, fields, terms, limiter)
                except BadRequest as error:
                    raise _of_prompt(len(choices) // per_prompt, error) from None
                for at in range(per_prompt):
                    one = self._further(request, at, limiter) if at else request
                    names.append(one.id)
                    generation = self._generation(one, http, fields, follows=at > 0)
                    tools = self._tools(one.model)
                    writer = _reply_writer(form, fields, names[0], tools, len(choices))
                    choices.append(ChoiceInWork(generation, writer, leader))
                    leader = leader or choices[-1]
        except BaseException:
            ended()
            raise
        http.id = names[0]

        def closed() -> None:
            ended()
            leave()

        return ChoicesExchange(choices, PATHS[form], bool(prompts[0].stream), closed)

    def _further(self, request: Request, at: int, limiter: Limiter) -> Request:
        """Choice number `at` of a prompt: with a seed of its own, as in vLLM. It arrives later."""
        name = f"{request.id}.{at}"
        how = msgspec.structs.replace(request.sampling, seed=request.sampling.seed + at)
        return msgspec.structs.replace(
            request, id=limiter.named(name, name in self._live), sampling=how, arrived_us=None
        )

    def _parse(self, form: Form, body: bytes) -> _Fields:
        """The request, with every field checked. Raises BadRequest."""
        fields = self._parsed(form, body)
        if isinstance(fields, openai.ChatRequest) and fields.tool_field is not None:
            self._check_tools(fields.model, fields.tool_field)
        return fields

    def _check_tools(self, model: str, field: str) -> None:
        """Raise BadRequest if our workers cannot use tools with this model; field: has them."""
        if all(card.name != model for card in self._serving.models()):
            return  # another error says so
        tools = self._tools(model)
        if not tools.knows_tools:
            them = "them" if field == "tools" else "tool calls and their results"
            what = f"the chat template of {model!r} has no place for tools; leave {them} out"
            raise BadRequest(f"{field}: {what}", field, "model_without_tools")
        if not tools.has_known_calls:
            what = (
                f"the chat template of {model!r} writes calls of tools in another form than"
                " <tool_call> with JSON, and our workers read this form only; serve the model by"
                " vLLM with --enable-auto-tool-choice and --tool-call-parser"
            )
            raise BadRequest(f"{field}: {what}", field, "unsupported_parameter")

    def _parsed(self, form: Form, body: bytes) -> _Fields:
        most = self.limits.max_messages
        if form == "chat":
            return openai.parse_chat(body, most)
        if form == "responses":
            return parse_response(body, most)
        if form == "messages":
            return parse_messages(body, most)
        if form == "count_tokens":
            return parse_count(body, most)
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
            fields = self._parse(form, body)
        else:
            fields, texts = parse_tokenize(body, self.limits.max_messages, self._longest())
            if isinstance(fields, openai.ChatRequest) and fields.tool_field is not None:
                self._check_tools(fields.model, fields.tool_field)
        card = self.card(fields.model)
        tools = self._tools(card.name)
        ids = await self._prompts.tokens(fields, tools, card.max_len, terms.party)
        if form == "count_tokens":
            return json_response(TokenCount(len(ids)))
        return json_response(tokenized(ids, card.max_len, tools if texts else None))

    async def _request(
        self, http: HttpRequest, given: str, fields: _Fields, terms: ClientTerms, limiter: Limiter
    ) -> Request:
        """The request for the cluster; given: its id, which `limiter` may change.

        Raises BadRequest, ModelNotFound, NobodyAlive, Overloaded.
        """
        card = await self._ready.card(fields.model)
        tools = self._tools(card.name)
        prompt = await self._prompts.tokens(fields, tools, card.max_len, terms.party)
        rule = self._sampling()
        stopping = openai.stopping(fields, max_tokens(fields, len(prompt), card.max_len))
        sampling = openai.sampling(fields, secrets.randbits(63))
        shaping = openai.shaping(fields, tools.vocab_size)
        if shaping is not None:
            if shaping.schema:
                fields_of_schema = openai.schema_fields(fields)
                await asyncio.to_thread(check_schema, shaping.schema, *fields_of_schema)
            sampling = msgspec.structs.replace(sampling, shaping=shaping)
        return Request(
            id=limiter.named(given, given in self._live),
            model=card.name,
            length=len(prompt),
            prompt=tuple(prompt),
            sampling=sampling,
            stopping=stopping,
            slo=terms.slo,
            priority=terms.priority,
            arrived_us=seconds_to_us(http.arrived_s),
            cache_salt=terms.salt(fields.cache_salt),
            tenant=terms.tenant,
            address=terms.party.address,
            trace=None if rule is None else begin_trace(http.headers, rule).context,
        )


def _of_prompt(at: int, error: BadRequest) -> BadRequest:
    """An error about the one prompt of a request as one about prompt number `at` of several."""
    one, several = "prompt[0]", f"prompt[{at}]"
    param = (error.param or "").replace(one, several)
    return BadRequest(str(error).replace(one, several), param or None, error.code)


def _writer(form: Form, fields: _Fields, request: Request, tools: TextTools) -> Writer:
    """What writes the reply to this request."""
    if isinstance(fields, ResponseChat):
        return ResponseWriter(request.id, fields, int(time.time()))
    if form == "messages":
        return MessagesWriter(request.id, request.model, _may_call(fields))
    return _reply_writer(form, fields, request.id, tools)


def _reply_writer(
    form: Form, fields: _Fields, name: RequestId, tools: TextTools, index: int = 0
) -> ReplyWriter:
    """What writes the reply to chat or completions; index: of the choice whose pieces it writes."""
    head = reply_head(name, form, bool(fields.stream), int(time.time()), fields.model)
    logprobs = None
    if openai.most_logprobs(fields) is not None:
        logprobs = LogprobWriter(tools, form == "chat")
    ids = bool(fields.return_token_ids)
    usage = openai.wants_usage(fields)
    return ReplyWriter(head, form, usage, ids, logprobs, index, _may_call(fields))


def _may_call(fields: _Fields) -> bool:
    return isinstance(fields, openai.ChatRequest) and fields.may_call


def _call_reader(fields: _Fields) -> CallReader | None:
    """What takes calls of tools out of an answer; None: it may have none."""
    if not isinstance(fields, openai.ChatRequest) or not fields.may_call:
        return None
    most = 1 if fields.parallel_tool_calls is False else None
    return CallReader(most, is_call=fields.must_call)

"""OpenAI's requests: their fields, and the check of each field before any work is spent.

The gateway's API, the worker's wire and whatever tokenizes prompts call it. Every refusal is a
BadRequest whose `param` is the field's path as OpenAI writes it ("messages[1].role"). Nothing here
knows tokens: the length of a prompt is checked where it has been tokenized.

A body is decoded once, on the event loop that all streams share. So nothing is decoded that may be
long and that no check has bounded: such a field stays raw JSON until its length or its number of
items is known.

There are three kinds of fields. The structs below have the fields that are understood. A field of
`unserved` is refused unless it asks for nothing. All other fields are ignored because they change
nothing here: user, store, metadata, service_tier, safety_identifier, prompt_cache_key,
reasoning_effort, verbosity, and every field that no API has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.request import Penalties, Sampling, Shaping, Stopping
from moonserve.core.units import Bytes, Tokens, whole_number
from moonserve.live.http.message import COUNT_TOKENS, MESSAGES, decode_json
from moonserve.live.openai.calling import (
    Tool,
    ToolChoice,
    call_schema,
    chat_tools,
    check_result,
)
from moonserve.live.openai.unserved import CHAT, COMPLETION, UNTOUCHED, is_any_of
from moonserve.live.text.grammar import ANY_OBJECT

Form: TypeAlias = Literal[
    "chat",
    "completion",
    "responses",
    "messages",
    "count_tokens",
    "embeddings",
    "rerank",
    "score",
    "tokenize",
    "detokenize",
]
"""Which kind of request it is. `messages` and `count_tokens` are Anthropic's."""
PATHS: Mapping[Form, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "responses": "/v1/responses",
    "messages": MESSAGES,
    "count_tokens": COUNT_TOKENS,
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/score",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}

_IN_CHAT = "newer versions of vLLM serve it; with others use /v1/chat/completions"
SERVED_BY: Mapping[Form, str] = {
    "chat": "engines serve it if their model generates text and has a chat template; with others"
    " use /v1/completions",
    "completion": "engines serve it if their model generates text",
    "responses": _IN_CHAT,
    "messages": _IN_CHAT,
    "count_tokens": "newer versions of vLLM serve it; with others use /tokenize",
    "embeddings": "engines serve it if they have an embedding model",
    "rerank": "engines serve it if they have a reranking model; with others compare /v1/embeddings",
    "score": "vLLM serves it with a reranking model; with others use /v1/rerank",
    "tokenize": "vLLM serves it",
    "detokenize": "vLLM serves it",
}
"""Which external engines have a path, and what to use with others."""

MOST_CHOICES = 32
"""The most choices of one request, of all its prompts together."""
MOST_LOGPROBS = 20
"""The most likeliest tokens that are reported with each token."""
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1_024
_MAX_STOP_IDS = 256
_MAX_SALT_CHARS = 1_024
_MAX_BIASES = 1_024
_MOST_BIAS = 100
REPETITION = (0.01, 100)
"""The least and the most repetition_penalty; vLLM has no bounds above 0. Beyond these, logits
would not stay finite, or all would be alike."""
_ITEMS_PER_MESSAGE = 4
"""So many messages and parts may a conversation have on average."""
_STOP_BYTES = 256 << 10
"""More JSON than the longest allowed `stop` has, also where every character is escaped."""
_STOP_IDS_BYTES = 8 << 10
_BIAS_BYTES = 64 << 10
_SCHEMA_BYTES = 64 << 10
_OPENED = 2
"""Brackets of a list with one list of token ids."""
_LONG_FIELDS = (
    ("stop", _STOP_BYTES),
    ("stop_token_ids", _STOP_IDS_BYTES),
    ("logit_bias", _BIAS_BYTES),
    ("response_format", _SCHEMA_BYTES),
)
_FIRST_ITEM = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
_NO_CALL: tuple[object, ...] = ([], {}, "", False, 0)
"""The values of a message's `function_call` that ask for nothing, besides null."""
_TEXT = ("text",)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class BodyShape(msgspec.Struct, frozen=True):
    """The fields of a body, for those who describe it; the parsers do not use it."""

    struct: type[msgspec.Struct]
    """Has the fields that are understood."""
    hidden: tuple[str, ...] = ()
    """Fields of `struct` that are not for clients."""
    harmless: Mapping[str, tuple[object, ...]] = {}
    """Fields that are refused, unless they have one of these values or null."""


def stated(**schema: object) -> msgspec.Meta:
    """Bounds of a field for /openapi.json alone: the checks below word what they refuse."""
    return msgspec.Meta(extra_json_schema=schema)


AtLeastOne: TypeAlias = Annotated[int, stated(minimum=1)]
_MostLogprobs: TypeAlias = Annotated[int, stated(minimum=0, maximum=MOST_LOGPROBS)]
_Penalty: TypeAlias = Annotated[float, stated(minimum=-2, maximum=2)]
_Repetition: TypeAlias = Annotated[float, stated(minimum=REPETITION[0], maximum=REPETITION[1])]


class StreamOptions(msgspec.Struct):
    """What a stream carries besides its text."""

    include_usage: bool | None = None


class _ItemsLeft:
    """How many messages and parts the body that is decoded now may still have.

    msgspec gives a struct no context. One count is enough: to decode a body never waits.
    """

    count = 0
    field = "messages"

    @classmethod
    def take(cls) -> None:
        """Count one. Raises BadRequest, which ends the decoding at once."""
        cls.count -= 1
        if cls.count < 0:
            raise BadRequest(
                f"{cls.field}: too many messages and parts; send fewer, with more text in each",
                cls.field,
            )


class Item(msgspec.Struct, gc=False):
    """A message, or a part of one, in the body that is decoded now: see _ItemsLeft."""

    def __post_init__(self) -> None:
        _ItemsLeft.take()


class ContentPart(Item, gc=False):
    """One part of a message; only text parts are served."""

    type: str
    text: str | None = None

    @property
    def lacks(self) -> str:
        """The field that its type needs and that is missing; empty: none."""
        return "text" if self.text is None else ""


class CalledFunction(msgspec.Struct, gc=False):
    """The function of a call, as OpenAI writes it."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCall(Item, kw_only=True, gc=False):
    """A call in a message of the assistant, as OpenAI writes it."""

    id: str
    type: str = "function"
    function: CalledFunction


class Message(Item, gc=False):
    """One message of a conversation."""

    role: Annotated[str, stated(enum=[*_ROLES])]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """The call whose result it is."""
    function_call: msgspec.Raw = UNTOUCHED


class SharedFields(msgspec.Struct, kw_only=True):
    """The fields of a generation that each API has, Messages too."""

    temperature: Annotated[float, stated(minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, stated(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, stated(minimum=-1, maximum=2**31 - 1)] | None = None
    seed: Annotated[int, stated(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, stated(minLength=1, maxLength=_MAX_SALT_CHARS)] | None = None


class _Common(SharedFields, kw_only=True):
    """The fields that every generation has, and that are short by their type."""

    max_tokens: AtLeastOne | None = None
    n: Annotated[int, stated(minimum=1, maximum=MOST_CHOICES)] | None = None
    min_tokens: Annotated[int, stated(minimum=0, maximum=2**31 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: _Repetition | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class NamedSchema(msgspec.Struct):
    """A JSON schema with a name, which changes nothing."""

    schema: msgspec.Raw
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class GenerationRequest(_Common, kw_only=True):
    """The fields that all generations have besides their model and prompt."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions; Responses and Messages become one too."""

    prompt_field: ClassVar[str] = "messages"
    """The field of the body that has the conversation."""
    model: str
    messages: Annotated[list[Message], stated(minItems=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: _MostLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def tool_field(self) -> str | None:
        """A field that needs a model with tools; None: there is none."""
        if self.tools:
            return "tools"
        needs = any(it.role == "tool" or it.tool_calls for it in self.messages)
        return self.prompt_field if needs else None

    def arguments_path(self, wanted: ToolCall) -> str:
        """Where the body has the arguments of one of the calls in `messages`."""
        calls = (call for message in self.messages for call in message.tool_calls or ())
        paths = zip(calls, self._arguments_paths(), strict=True)
        return next(path for call, path in paths if call is wanted)

    def _arguments_paths(self) -> list[str]:
        """Of each call in `messages`, in their order."""
        return [
            f"messages[{i}].tool_calls[{j}].function.arguments"
            for i, message in enumerate(self.messages)
            for j in range(len(message.tool_calls or ()))
        ]

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    model: str
    prompt: Annotated[str | list[str | int | list[int]], stated(minLength=1, minItems=1)]
    logprobs: _MostLogprobs | None = None


_SERVED: Mapping[Form, type[GenerationRequest]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}


class _GenerationBody(_Common, kw_only=True):
    """A body before its checks: fields that may be long are raw."""

    stop: msgspec.Raw = UNTOUCHED
    stop_token_ids: msgspec.Raw = UNTOUCHED
    logit_bias: msgspec.Raw = UNTOUCHED
    response_format: msgspec.Raw = UNTOUCHED


class _ChatFields(_GenerationBody, kw_only=True):
    model: str
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: msgspec.Raw = UNTOUCHED
    tool_choice: msgspec.Raw = UNTOUCHED
    parallel_tool_calls: bool | None = None


class _CompletionFields(_GenerationBody, kw_only=True):
    model: str
    prompt: msgspec.Raw
    logprobs: int | None = None


_ChatBody = CHAT.added_to(_ChatFields)
_CompletionBody = COMPLETION.added_to(_CompletionFields)


class _Stops(msgspec.Struct):
    """The fields that may be long, once their length is known."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None


class _Sequences(msgspec.Struct):
    stop_sequences: list[str] | None = None


class _Prompt(msgspec.Struct):
    prompt: str | list[str | int | list[int]]


class _Texts(msgspec.Struct):
    prompt: list[str]


def generation_shape(form: Form) -> BodyShape:
    """The fields of a body of chat or completions that our workers serve."""
    refused = CHAT if form == "chat" else COMPLETION
    return BodyShape(_SERVED[form], harmless=refused.harmless)


def expect_items(field: str, max_messages: int) -> None:
    """Allow as many messages and parts as usual in the body that is decoded next.

    field: the one that has them.
    """
    _ItemsLeft.count = _ITEMS_PER_MESSAGE * max_messages
    _ItemsLeft.field = field


def parse_chat(body: bytes, max_messages: int) -> ChatRequest:
    """The request with every field checked. Raises BadRequest."""
    expect_items("messages", max_messages)
    sent = CHAT.decode(body, _ChatBody)
    stops = _stops(sent)
    tools, choice = chat_tools(sent.tools, sent.tool_choice)
    request = ChatRequest(
        model=sent.model,
        messages=sent.messages,
        max_completion_tokens=sent.max_completion_tokens,
        logprobs=sent.logprobs,
        top_logprobs=sent.top_logprobs,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=sent.parallel_tool_calls,
        stop=stops.stop,
        stop_token_ids=stops.stop_token_ids,
        logit_bias=stops.logit_bias,
        response_format=stops.response_format,
        **_common(sent),
    )
    check(request)
    at_least_one("max_completion_tokens", request.max_completion_tokens)
    within("top_logprobs", request.top_logprobs, 0, MOST_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs: needs logprobs too; set it to true", "top_logprobs")
    check_messages(request.messages, "messages", max_messages)
    return request


def parse_completion(body: bytes, max_ids: Tokens) -> CompletionRequest:
    """The request with every field checked but the range of token ids.

    max_ids: the longest context of any model. Raises BadRequest.
    """
    sent = COMPLETION.decode(body, _CompletionBody)
    stops = _stops(sent)
    request = CompletionRequest(
        model=sent.model,
        prompt=_prompt(bytes(sent.prompt), max_ids),
        logprobs=sent.logprobs,
        stop=stops.stop,
        stop_token_ids=stops.stop_token_ids,
        logit_bias=stops.logit_bias,
        response_format=stops.response_format,
        **_common(sent),
    )
    check(request)
    within("logprobs", request.logprobs, 0, MOST_LOGPROBS)
    return request


def plain_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as chat templates take them: role, name and content as one string. Calls of
    tools are still those of the request: `template_calls` has their form.

    Text parts are joined by newlines, as in vLLM.
    """
    plain = []
    for message in request.messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        one: dict[str, Any] = {"role": _ROLES[message.role], "content": content or ""}
        if message.name is not None:
            one["name"] = message.name
        if message.tool_calls:
            one["tool_calls"] = message.tool_calls
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        plain.append(one)
    return plain


def template_calls(
    calls: Sequence[ToolCall], path: Callable[[ToolCall], str]
) -> list[dict[str, Any]]:
    """Calls as chat templates take them: their arguments are objects.

    path: of the arguments of a call. Raises BadRequest.
    """
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call, path)},
        }
        for call in calls
    ]


def _arguments(call: ToolCall, path: Callable[[ToolCall], str]) -> dict[str, Any]:
    text = call.function.arguments
    try:
        return decode_json(text.encode("utf-8", "surrogatepass") or b"{}", dict[str, Any])
    except BadRequest as error:
        where = path(call)
        fault = str(error).removeprefix("request body: ")
        raise BadRequest(f"{where}: must be a JSON object ({fault})", where) from None


def context_exceeded(param: str, what: str, max_len: Tokens) -> BadRequest:
    """The error for `what`, which does not fit a model's context of `max_len` tokens."""
    return BadRequest(
        f"{param}: {what} exceed the model's context of {max_len} tokens",
        param,
        "context_length_exceeded",
    )


def split_prompts(request: CompletionRequest) -> list[CompletionRequest]:
    """One request for each prompt. Raises BadRequest if `n` makes too many choices of them."""
    prompt = request.prompt
    if isinstance(prompt, str) or len(prompt) < 2 or isinstance(prompt[0], int):
        return [request]
    for i, one in enumerate(prompt):
        if not isinstance(one, type(prompt[0])):
            path = f"prompt[{i}]"
            what = "is of another kind than the first prompt; send only text, or only token ids"
            raise BadRequest(f"{path}: {what}", path)
    if len(prompt) * (request.n or 1) > MOST_CHOICES:
        raise BadRequest(f"n: at most {MOST_CHOICES} choices of all prompts together", "n")
    return [msgspec.structs.replace(request, prompt=[it]) for it in prompt]


def single_prompt(request: CompletionRequest, vocab_size: int, max_len: Tokens) -> str | list[int]:
    """The one prompt of a request: text, or at most `max_len` token ids of the vocabulary.

    Raises BadRequest.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise BadRequest("prompt: must not be empty", "prompt")
    first = prompt[0]
    path = "prompt"
    if not isinstance(first, int):
        if len(prompt) > 1:
            raise BadRequest(
                "prompt: only one prompt is possible here; send one request for each", "prompt"
            )
        if isinstance(first, str):
            return first
        prompt = [*first]
        path = "prompt[0]"
    if len(prompt) > max_len:
        raise context_exceeded("prompt", f"{len(prompt)} tokens", max_len)
    ids = []
    for i, token in enumerate(prompt):
        if not isinstance(token, int):
            raise BadRequest(f"{path}[{i}]: mixes token ids with something else", f"{path}[{i}]")
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{path}[{i}]: token id {token} is not in 0..{vocab_size - 1}", f"{path}[{i}]"
            )
        ids.append(token)
    return ids


def most_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    """How many of the likeliest tokens the client wants with each token; None: no log
    probabilities."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def shaping(request: ChatRequest | CompletionRequest, vocab_size: int) -> Shaping | None:
    """What it wants of the logits; None: nothing. Raises BadRequest for an unknown token."""
    most = most_logprobs(request)
    schema = json_schema(request)
    penal = penalties(request)
    if not request.logit_bias and most is None and not schema and penal is None:
        return None
    bias = token_biases(request, vocab_size)
    return Shaping(bias, logprobs=most, schema=schema, penalties=penal)


def penalties(request: GenerationRequest) -> Penalties | None:
    """The penalties that it wants; None: none."""
    presence = request.presence_penalty or 0.0
    frequency = request.frequency_penalty or 0.0
    repetition = 1.0 if request.repetition_penalty is None else request.repetition_penalty
    if not presence and not frequency and repetition == 1:
        return None
    return Penalties(presence, frequency, repetition)


def json_schema(request: GenerationRequest) -> str:
    """The JSON schema that the text must follow; empty: it is free. Raises BadRequest."""
    call = ""
    if isinstance(request, ChatRequest) and request.tools:
        call = call_schema(request.tool_choice, request.tools)
    wanted = request.response_format
    if wanted is not None and wanted.type == "text":
        wanted = None
    if wanted is None and not call:
        return ""
    field, _ = schema_fields(request)
    others = {
        "ignore_eos": request.ignore_eos,
        "min_tokens": request.min_tokens,
        "response_format": call and wanted,
    }
    for name, given in others.items():
        if given:
            raise BadRequest(f"{name}: cannot be kept with {field}; leave it out", name)
    if wanted is None:
        return call
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise BadRequest("response_format.json_schema: is missing", "response_format.json_schema")
    return bytes(wanted.json_schema.schema).decode()


def schema_fields(request: GenerationRequest) -> tuple[str, str]:
    """The field that asks for a `json_schema`, and the one that has the schema."""
    if isinstance(request, ChatRequest) and request.must_call:
        return "tool_choice", "tools"
    return "response_format", "response_format.json_schema.schema"


def token_biases(request: GenerationRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token ids, each with what is added to its logit. Raises BadRequest for an unknown token."""
    bias = []
    for name, added in (request.logit_bias or {}).items():
        token = whole_number(name)
        if token is None or token >= vocab_size:
            what = f"{name[:40]!r} is not a token id below {vocab_size}"
            raise BadRequest(f"logit_bias: {what}", "logit_bias")
        bias.append((token, added))
    return tuple(bias)


def sampling(request: GenerationRequest, drawn_seed: int) -> Sampling:
    """How to sample; a request without a seed gets `drawn_seed`."""
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=drawn_seed if request.seed is None else request.seed,
    )


def stopping(request: GenerationRequest, max_tokens: Tokens) -> Stopping:
    """When to stop."""
    stop = request.stop
    return Stopping(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min(request.min_tokens or 0, max_tokens),
    )


def wants_usage(request: GenerationRequest) -> bool:
    """Whether a stream ends with a chunk of usage."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)


_common_of = attrgetter(*_Common.__struct_fields__)


def _common(sent: _Common) -> dict[str, Any]:
    return dict(zip(_Common.__struct_fields__, _common_of(sent), strict=True))


_shared_of = attrgetter(*SharedFields.__struct_fields__)


def shared(sent: msgspec.Struct) -> dict[str, Any]:
    """The SharedFields of a body, which has all of them, by name."""
    return dict(zip(SharedFields.__struct_fields__, _shared_of(sent), strict=True))


def _stops(sent: _GenerationBody) -> _Stops:
    """What ends a generation, decoded now that its length is known. Raises BadRequest."""
    fields = []
    for name, most in _LONG_FIELDS:
        raw = bytes(getattr(sent, name))
        _at_most(name, raw, most)
        if raw:
            fields.append(b'"%b":%b' % (name.encode(), raw))
    return decode_json(b"{%b}" % b",".join(fields), _Stops) if fields else _Stops()


def decode_stop_sequences(raw: msgspec.Raw) -> list[str] | None:
    """Anthropic's stop_sequences, once their length is known. Raises BadRequest."""
    if raw is UNTOUCHED:
        return None
    _at_most("stop_sequences", bytes(raw), _STOP_BYTES)
    sequences = decode_json(b'{"stop_sequences":%b}' % bytes(raw), _Sequences).stop_sequences
    check_stop_texts("stop_sequences", sequences or [])
    return sequences


def _at_most(name: str, raw: bytes, most: Bytes) -> None:
    if len(raw) > most:
        raise BadRequest(f"{name}: must have at most {most} bytes of JSON", name)


def _prompt(raw: bytes, max_ids: Tokens) -> str | list[str | int | list[int]]:
    """The prompt of a completion. Raises BadRequest, before it decodes more than `max_ids` ids."""
    first = _FIRST_ITEM.match(raw)
    if first is not None and first[1] == b'"':
        quotes = raw.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"')
        _check_prompts(quotes // 2)
        return [*decode_json(b'{"prompt":%b}' % raw, _Texts).prompt]
    if first is not None:
        lists = raw.count(b"[") - 1
        _check_prompts(lists)
        commas = raw.count(b",")
        if commas >= max_ids * max(1, lists):
            raise context_exceeded("prompt", f"{commas + 1} tokens", max_ids)
    return decode_json(b'{"prompt":%b}' % raw, _Prompt).prompt


def _check_prompts(count: int) -> None:
    if count > MOST_CHOICES:
        raise BadRequest(f"prompt: at most {MOST_CHOICES} prompts", "prompt")


def check(request: GenerationRequest) -> None:
    """Raise BadRequest for a value out of its range."""
    at_least_one("max_tokens", request.max_tokens)
    within("temperature", request.temperature, 0, 2)
    within("top_p", request.top_p, 0, 1)
    if request.top_p == 0:
        raise BadRequest("top_p: must be above 0", "top_p")
    within("top_k", request.top_k, -1, 2**31 - 1)
    within("seed", request.seed, -(2**63), 2**63 - 1)
    within("n", request.n, 1, MOST_CHOICES)
    within("min_tokens", request.min_tokens, 0, 2**31 - 1)
    within("presence_penalty", request.presence_penalty, -2, 2)
    within("frequency_penalty", request.frequency_penalty, -2, 2)
    within("repetition_penalty", request.repetition_penalty, *REPETITION)
    _check_bias(request.logit_bias or {})
    if wants_usage(request) and not request.stream:
        raise BadRequest(
            "stream_options: only allowed with stream; set it to true too", "stream_options"
        )
    _check_stops(request)
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= _MAX_SALT_CHARS:
        what = f"must have 1 to {_MAX_SALT_CHARS} characters"
        raise BadRequest(f"cache_salt: {what}", "cache_salt")


def check_stop_texts(name: str, stop: str | Sequence[str]) -> None:
    """Raise BadRequest if these stop strings are too many, too long or empty."""
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > _MAX_STOPS:
        raise BadRequest(f"{name}: at most {_MAX_STOPS} strings", name)
    for i, text in enumerate(stops):
        if not 1 <= len(text) <= _MAX_STOP_CHARS:
            param = name if isinstance(stop, str) else f"{name}[{i}]"
            raise BadRequest(f"{param}: must have 1 to {_MAX_STOP_CHARS} characters", param)


def _check_stops(request: GenerationRequest) -> None:
    check_stop_texts("stop", () if request.stop is None else request.stop)
    ids = request.stop_token_ids or []
    if len(ids) > _MAX_STOP_IDS:
        raise BadRequest(f"stop_token_ids: at most {_MAX_STOP_IDS}", "stop_token_ids")
    for i, token in enumerate(ids):
        within(f"stop_token_ids[{i}]", token, 0, 2**31 - 1)


def _check_bias(bias: Mapping[str, float]) -> None:
    if len(bias) > _MAX_BIASES:
        raise BadRequest(f"logit_bias: at most {_MAX_BIASES} tokens", "logit_bias")
    for name, added in bias.items():
        within(f"logit_bias.{name[:40]}", added, -_MOST_BIAS, _MOST_BIAS)


def check_messages(
    messages: Sequence[Message],
    field: str,
    most: int,
    roles: Collection[str] = _ROLES,
    parts: Collection[str] = _TEXT,
) -> None:
    """Raise BadRequest unless it is a conversation of text.

    field: the field of the body that has it; most: messages; parts: types of content parts.
    """
    check_count(messages, field, most)
    called: set[str] = set()
    for i, message in enumerate(messages):
        _check_message(message, f"{field}[{i}]", roles, parts)
        if message.role == "tool":
            check_result(message.tool_call_id, called, f"{field}[{i}].tool_call_id")
        if message.tool_calls:
            called.update(call.id for call in message.tool_calls)


def check_count(messages: Sequence[object], field: str, most: int) -> None:
    """Raise BadRequest for no message, or too many."""
    if not messages:
        raise BadRequest(f"{field}: must have at least one message", field)
    if len(messages) > most:
        raise BadRequest(f"{field}: {len(messages)} are over the limit of {most}", field)


def check_role(role: str, path: str, roles: Collection[str]) -> None:
    """Raise BadRequest for a message of another role than these; path: of the message."""
    if role not in roles:
        known = ", ".join(roles)
        what = f"{role[:40]!r} is not one of {known}" if role else f"is missing; set one of {known}"
        raise BadRequest(f"{path}.role: {what}", f"{path}.role")


def check_content(
    content: str | Sequence[ContentPart] | None, path: str, parts: Collection[str] = _TEXT
) -> None:
    """Raise BadRequest for a message without content, or with parts that are not served."""
    if content is None:
        raise BadRequest(f"{path}.content: must be text or text parts", f"{path}.content")
    check_parts(content, f"{path}.content", parts)


def _check_message(
    message: Message, path: str, roles: Collection[str], parts: Collection[str]
) -> None:
    check_role(message.role, path, roles)
    called = message.function_call
    if called is not UNTOUCHED and not is_any_of(bytes(called), _NO_CALL):
        where = f"{path}.function_call"
        what = "not supported here; use tool_calls"
        raise BadRequest(f"{where}: {what}", where, "unsupported_parameter")
    if message.tool_calls:
        _check_calls(message, path)
        if message.content is None:
            return
    check_content(message.content, path, parts)


def _check_calls(message: Message, path: str) -> None:
    if message.role != "assistant":
        where = f"{path}.tool_calls"
        raise BadRequest(f"{where}: only messages of the role assistant have them", where)
    for i, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            where = f"{path}.tool_calls[{i}].type"
            what = f"{call.type[:40]!r} is not supported here; only function is"
            raise BadRequest(f"{where}: {what}", where, "unsupported_parameter")


def check_parts(
    content: str | Sequence[ContentPart], path: str, types: Collection[str] = _TEXT
) -> None:
    """Raise BadRequest if content has a part that is not whole, or of another type than these."""
    if isinstance(content, str):
        return
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if part.type not in types:
            what = f"{part.type[:40]!r} is not supported here; send parts of {', '.join(types)}"
            raise BadRequest(f"{where}.type: {what}", f"{where}.type", "unsupported_parameter")
        if part.lacks:
            raise BadRequest(f"{where}.{part.lacks}: is missing", f"{where}.{part.lacks}")


def at_least_one(name: str, value: int | None) -> None:
    """Raise BadRequest for a number below 1."""
    if value is not None and value < 1:
        raise BadRequest(f"{name}: must be at least 1, not {value}", name)


def within(name: str, value: float | None, low: float, high: float) -> None:
    """Raise BadRequest for a number out of its range."""
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{name}: must be from {low} to {high}, not {value}", name)

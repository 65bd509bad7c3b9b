"""A client's request on its way to an external engine: what the gateway reads, and what it adds.

The gateway's API and `live/drive` call it. All other bytes pass through unchanged and in the order
of fields; the engine checks what they mean. The gateway refuses fields by which engines hand KV to
each other, because a client could use them to reach another client's KV, and those that choose a
data-parallel rank, because the Conductor chooses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import UNREADABLE, BadRequest
from moonserve.core.units import Tokens
from moonserve.live.http.message import decode_json
from moonserve.live.openai.request import BodyShape, Form

_RESERVED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "routed_dp_rank",
)
_UNTOUCHED = msgspec.Raw(b"")
_MAX_QUOTES = 64 << 10
_NOTHING = (b"", b"null", b"[]")
_FREE_CHOICES = (b"", b"null", b'"auto"', b'"none"')
"""Values of tool_choice by which no tool is forced."""
_OWN_TOOLS = frozenset({"", "custom", "function"})
"""Types of tools that the client runs, and not the engine."""
_LISTED = (b"[",)
_TEXT_OR_LISTED = (b'"', b"[")


class _Reads(msgspec.Struct, frozen=True):
    """What the gateway reads of the bodies of one form."""

    prompt: tuple[str, ...]
    """The fields that may have the prompt; the first that is there counts."""
    begins: tuple[bytes, ...]
    """What a prompt may begin with."""
    what: str
    """What the prompt must be."""
    before: tuple[str, ...] = ()
    """Fields that engines put before the prompt, in this order."""
    limits: tuple[str, ...] = ()
    """The fields with the most tokens to generate; the first that is there counts."""
    others: tuple[str, ...] = ("stream", "cache_salt", "vllm_xargs")
    """Further fields."""


_SEVERAL = ("n", "best_of", "use_beam_search", "echo", "prompt_logprobs")
_GENERATING = ("stream", *_SEVERAL, "cache_salt", "vllm_xargs")
_READS: Mapping[Form, _Reads] = {
    "chat": _Reads(
        ("messages",),
        _LISTED,
        "a list of messages",
        before=("tools",),
        limits=("max_completion_tokens", "max_tokens"),
        others=_GENERATING,
    ),
    "completion": _Reads(
        ("prompt",),
        _TEXT_OR_LISTED,
        "text, or a list of texts or of token ids",
        limits=("max_tokens",),
        others=_GENERATING,
    ),
    "responses": _Reads(
        ("input",),
        _TEXT_OR_LISTED,
        "text, or a list of items",
        before=("tools", "instructions"),
        limits=("max_output_tokens",),
    ),
    "messages": _Reads(
        ("messages",),
        _LISTED,
        "a list of messages",
        before=("tools", "system"),
        limits=("max_tokens",),
    ),
    "count_tokens": _Reads(
        ("messages",), _LISTED, "a list of messages", before=("tools", "system"), others=()
    ),
    "embeddings": _Reads(
        ("input", "messages"),
        _TEXT_OR_LISTED,
        "text, or a list of texts, of token ids or of messages",
        others=("cache_salt",),
    ),
    "rerank": _Reads(
        ("documents",),
        (*_TEXT_OR_LISTED, b"{"),
        "a list of documents",
        before=("query",),
        others=("cache_salt",),
    ),
    "score": _Reads(
        ("text_2", "data_2", "documents", "items"),
        (*_TEXT_OR_LISTED, b"{"),
        "text, or a list of texts",
        before=("text_1", "data_1", "queries"),
        others=("cache_salt",),
    ),
    "tokenize": _Reads(
        ("prompt", "messages"), _TEXT_OR_LISTED, "text, or a list of messages", others=()
    ),
    "detokenize": _Reads(("tokens",), _LISTED, "a list of token ids", others=()),
}
GENERATING: frozenset[Form] = frozenset({"chat", "completion", "responses", "messages"})
"""The forms whose replies are made token by token."""
FREE: frozenset[Form] = frozenset({"tokenize", "detokenize", "count_tokens"})
"""The forms that need no KV."""


class _Body(msgspec.Struct):
    """The fields that the gateway reads."""

    model: str
    messages: msgspec.Raw = _UNTOUCHED
    tools: msgspec.Raw = _UNTOUCHED
    prompt: msgspec.Raw = _UNTOUCHED
    input: msgspec.Raw = _UNTOUCHED
    instructions: msgspec.Raw = _UNTOUCHED
    system: msgspec.Raw = _UNTOUCHED
    documents: msgspec.Raw = _UNTOUCHED
    query: msgspec.Raw = _UNTOUCHED
    queries: msgspec.Raw = _UNTOUCHED
    items: msgspec.Raw = _UNTOUCHED
    text_1: msgspec.Raw = _UNTOUCHED
    text_2: msgspec.Raw = _UNTOUCHED
    data_1: msgspec.Raw = _UNTOUCHED
    data_2: msgspec.Raw = _UNTOUCHED
    tokens: msgspec.Raw = _UNTOUCHED
    tool_choice: msgspec.Raw = _UNTOUCHED
    max_output_tokens: msgspec.Raw = _UNTOUCHED
    background: msgspec.Raw = _UNTOUCHED
    previous_response_id: msgspec.Raw = _UNTOUCHED
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | UnsetType | None = UNSET
    vllm_xargs: msgspec.Raw = _UNTOUCHED
    """vLLM copies it into kv_transfer_params, so it must not contain any of the reserved fields."""
    kv_transfer_params: msgspec.Raw = _UNTOUCHED
    ec_transfer_params: msgspec.Raw = _UNTOUCHED
    bootstrap_host: msgspec.Raw = _UNTOUCHED
    bootstrap_port: msgspec.Raw = _UNTOUCHED
    bootstrap_room: msgspec.Raw = _UNTOUCHED
    disagg_prefill_dp_rank: msgspec.Raw = _UNTOUCHED
    data_parallel_rank: msgspec.Raw = _UNTOUCHED
    routed_dp_rank: msgspec.Raw = _UNTOUCHED


def body_shape(form: Form) -> BodyShape:
    """The fields of a body that the gateway reads; all others go to the engine as they are."""
    reads = _READS[form]
    shown = {"model", *reads.prompt, *reads.before, *reads.limits, *reads.others}
    if form == "responses":
        shown |= {"background", "previous_response_id", "tool_choice"}
    if form == "messages":
        shown.add("tool_choice")
    return BodyShape(
        _Body, hidden=tuple(name for name in _Body.__struct_fields__ if name not in shown)
    )


class _Xargs(msgspec.Struct):
    vllm_xargs: dict[str, msgspec.Raw] | None = None


class _OutputLimit(msgspec.Struct):
    max_output_tokens: int | None = None


class _Typed(msgspec.Struct):
    type: str = ""


class ExternalRequest:
    """One client's request. Raises BadRequest for what the gateway can see without an engine."""

    def __init__(self, form: Form, raw: bytes, trace: Mapping[str, str] | None = None) -> None:
        """trace: headers of distributed tracing, for every call to an engine."""
        self.trace = trace or {}
        body = decode_json(raw, _Body)
        reads = _READS[form]
        if len(raw) > _MAX_QUOTES:
            _refuse_many_fields(raw, body, reads)
        if not _is_usual(body):
            _refuse_reserved(body)
        self.form = form
        self.raw = raw
        self.model = body.model
        self.generates = form in GENERATING
        self.stream = self.generates and bool(body.stream)
        self.salt = body.cache_salt or ""
        self._has_salt = body.cache_salt is not UNSET
        self.prompt = _prompt(body, reads)
        before = [bytes(getattr(body, name)) for name in reads.before]
        self.before = [raw for raw in before if raw not in _NOTHING]
        """What engines put before the prompt: JSON, in this order."""
        self.tools = bytes(body.tools) if form == "chat" and self.before else b""
        self.max_tokens: Tokens | None = body.max_tokens
        """None: the engine's own default."""
        if form == "chat":
            asked = body.max_completion_tokens
            self.max_tokens = body.max_tokens if asked is None else asked
        elif form == "responses":
            self.max_tokens = _checked_response(body)
        elif not self.generates:
            self.max_tokens = 1
        self.choices = max(1, body.n or 1, body.best_of or 1) if reads.others is _GENERATING else 1
        self.prompts = 1
        """How many prompts a completion has; the reader of the prompt sets it."""
        self._several = bool(body.use_beam_search)
        self._prompt_logprobs = body.prompt_logprobs is not None or bool(body.echo)
        self._alone = not self.generates or (
            reads.others is not _GENERATING and _needs_one_engine(body)
        )

    @property
    def whole(self) -> bool:
        """Whether one engine must serve all of the request.

        An engine hands KV to one reader, so not to several choices, beams or prompts. Only the
        engine that computes a prompt has its logprobs. See also _needs_one_engine.
        """
        several = self.choices > 1 or self.prompts > 1 or self._several
        return several or self._prompt_logprobs or self._alone

    def for_prefill(self, kv_params: bytes) -> bytes:
        """The body of a prefill call: one token, no stream, and `kv_params` (JSON) for the KV."""
        one = msgspec.Raw(b"1")
        fields = self.fields()
        for name in ("stream_options", "min_tokens"):
            fields.pop(name, None)
        for name in _READS[self.form].limits:
            fields[name] = one
        if self.form == "responses":
            fields["store"] = msgspec.Raw(b"false")
        fields["stream"] = msgspec.Raw(b"false")
        fields["kv_transfer_params"] = msgspec.Raw(kv_params)
        return msgspec.json.encode(fields)

    def with_fields(self, fields: Mapping[str, bytes]) -> bytes:
        """The body with these fields (name to JSON) appended."""
        added = b"".join([b',"%b":%b' % (name.encode(), value) for name, value in fields.items()])
        return self.raw.rstrip()[:-1].rstrip() + added + b"}"

    def use_salt(self, salt: str) -> None:
        """Have engines share the KV of this request with requests of this cache salt only."""
        if salt == self.salt:
            return
        value = msgspec.json.encode(salt)
        if self._has_salt:  # a field that comes twice would be read by some engines only
            fields = self.fields()
            fields["cache_salt"] = msgspec.Raw(value)
            self.raw = msgspec.json.encode(fields)
        else:
            self.raw = self.with_fields({"cache_salt": value})
        self.salt = salt

    def with_raw(self, raw: bytes) -> ExternalRequest:
        """The same request with another body, in which this gateway has changed fields."""
        changed = copy(self)
        changed.raw = raw
        return changed

    def fields(self) -> dict[str, msgspec.Raw]:
        """The fields of the body, as they came."""
        return decode_json(self.raw, dict[str, msgspec.Raw])


def _is_usual(body: _Body) -> bool:
    """Whether it has no field that the gateway may have to refuse."""
    return (
        body.vllm_xargs is _UNTOUCHED
        and body.kv_transfer_params is _UNTOUCHED
        and body.ec_transfer_params is _UNTOUCHED
        and body.bootstrap_host is _UNTOUCHED
        and body.bootstrap_port is _UNTOUCHED
        and body.bootstrap_room is _UNTOUCHED
        and body.disagg_prefill_dp_rank is _UNTOUCHED
        and body.data_parallel_rank is _UNTOUCHED
        and body.routed_dp_rank is _UNTOUCHED
    )


def _refuse_reserved(body: _Body) -> None:
    """Raise BadRequest if it has a field that only the gateway sets, also in vllm_xargs."""
    xargs = _xargs(bytes(body.vllm_xargs))
    for name in _RESERVED:
        if getattr(body, name) is not _UNTOUCHED:
            raise BadRequest(f"{name}: only the gateway sets it; leave it out", name)
        if name in xargs:
            raise BadRequest(
                f"vllm_xargs: only the gateway sets {name}; leave it out", "vllm_xargs"
            )


def _prompt(body: _Body, reads: _Reads) -> bytes:
    """The prompt as JSON. Raises BadRequest if there is none."""
    for name in reads.prompt:
        given = bytes(getattr(body, name))
        if not given:
            continue
        if given[:1] not in reads.begins:
            raise BadRequest(f"{name}: must be {reads.what}", name)
        return given
    raise BadRequest(f"{' or '.join(reads.prompt)}: is missing", reads.prompt[0])


def _checked_response(body: _Body) -> Tokens | None:
    """The most tokens of a response. Raises BadRequest for what only one engine could know."""
    for name, remedy in (
        ("previous_response_id", "responses are not kept; send the whole conversation in input"),
        ("background", "is not served through a gateway; leave it out, and use stream"),
    ):
        raw = bytes(getattr(body, name))
        if raw not in (b"", b"null", b"false"):
            raise BadRequest(f"{name}: {remedy}", name, "unsupported_parameter")
    raw = bytes(body.max_output_tokens)
    if not raw:
        return None
    return decode_json(b'{"max_output_tokens":%b}' % raw, _OutputLimit).max_output_tokens


def _needs_one_engine(body: _Body) -> bool:
    """Whether the body has what prefill and decode of two engines cannot serve.

    A tool that the engine runs makes further prompts of one request. And vLLM does not answer to a
    prefill of one token if a tool must be called: it cannot read the call.
    """
    choice = bytes(body.tool_choice)
    if choice not in _FREE_CHOICES and _type_of(choice) not in ("auto", "none"):
        return True
    tools = bytes(body.tools)
    if tools in _NOTHING:
        return False
    try:
        types = msgspec.json.decode(tools, type=list[_Typed])
    except UNREADABLE:
        return True  # the engine reports what is wrong with it
    return any(tool.type not in _OWN_TOOLS for tool in types)


def _type_of(raw: bytes) -> str:
    try:
        return msgspec.json.decode(raw, type=_Typed).type
    except UNREADABLE:
        return ""


def _refuse_many_fields(raw: bytes, body: _Body, reads: _Reads) -> None:
    """Raise BadRequest if the fields beside the prompt would take long to take apart.

    Quotation marks are counted, since each field has two: it is quick, and never too few.
    """
    parts = (*reads.prompt, *reads.before)
    prompt = sum(bytes(getattr(body, name)).count(b'"') for name in parts)
    if raw.count(b'"') - prompt > _MAX_QUOTES:
        raise BadRequest(
            f"request body: has more than {_MAX_QUOTES} quotation marks beside {', '.join(parts)};"
            " send fewer fields"
        )


def _xargs(raw: bytes) -> Collection[str]:
    """The names in vllm_xargs, if it is there. Raises BadRequest."""
    return (raw and decode_json(b'{"vllm_xargs":%b}' % raw, _Xargs).vllm_xargs) or ()

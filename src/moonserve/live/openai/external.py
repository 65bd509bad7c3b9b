"""A client's request on its way to an external engine: what the gateway reads, and what it adds.

The gateway's API and `live/drive` call it. All other bytes pass through unchanged and in the order
of fields; the engine checks what they mean. The gateway refuses fields by which engines hand KV to
each other, because a client could use them to reach another client's KV, and those that choose a
data-parallel rank, because the Conductor chooses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import BadRequest
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
_NO_TOOLS = (b"null", b"[]")
_PROMPTS: Mapping[Form, tuple[str, tuple[bytes, ...], str]] = {
    "chat": ("messages", (b"[",), "a list of messages"),
    "completion": ("prompt", (b'"', b"["), "text, or a list of texts or of token ids"),
}
"""The field of the prompt, the bytes it may begin with, and what it must be."""


class _Body(msgspec.Struct):
    """The fields that the gateway reads."""

    model: str
    messages: msgspec.Raw = _UNTOUCHED
    tools: msgspec.Raw = _UNTOUCHED
    prompt: msgspec.Raw = _UNTOUCHED
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
    other = ("prompt",) if form == "chat" else ("messages", "tools", "max_completion_tokens")
    return BodyShape(_Body, hidden=(*_RESERVED, *other))


class _Xargs(msgspec.Struct):
    vllm_xargs: dict[str, msgspec.Raw] | None = None


class ExternalRequest:
    """One client's request. Raises BadRequest for what the gateway can see without an engine."""

    def __init__(self, form: Form, raw: bytes, trace: Mapping[str, str] | None = None) -> None:
        """trace: headers of distributed tracing, for every call to an engine."""
        self.trace = trace or {}
        body = decode_json(raw, _Body)
        if len(raw) > _MAX_QUOTES:
            _refuse_many_fields(raw, body)
        if not _is_usual(body):
            _refuse_reserved(body)
        self.form = form
        self.raw = raw
        self.model = body.model
        self.stream = bool(body.stream)
        self.messages = bytes(body.messages)
        self.prompt = bytes(body.prompt)
        tools = bytes(body.tools)
        self.tools = b"" if tools in _NO_TOOLS else tools
        self.salt = body.cache_salt or ""
        self._has_salt = body.cache_salt is not UNSET
        prompt, begins, what = _PROMPTS[form]
        given = self.messages if form == "chat" else self.prompt
        if not given:
            raise BadRequest(f"{prompt}: is missing", prompt)
        if given[:1] not in begins:
            raise BadRequest(f"{prompt}: must be {what}", prompt)
        asked = body.max_completion_tokens if form == "chat" else None
        self.max_tokens: Tokens | None = body.max_tokens if asked is None else asked
        """None: the engine's own default."""
        self.choices = max(1, body.n or 1, body.best_of or 1)
        self.prompts = 1
        """How many prompts a completion has; the reader of the prompt sets it."""
        self._several = bool(body.use_beam_search)
        self._prompt_logprobs = body.prompt_logprobs is not None or bool(body.echo)

    @property
    def whole(self) -> bool:
        """Whether one engine must serve all of the request.

        An engine hands KV to one reader, so not to several choices, beams or prompts. Only the
        engine that computes a prompt has its logprobs.
        """
        several = self.choices > 1 or self.prompts > 1 or self._several
        return several or self._prompt_logprobs

    def for_prefill(self, kv_params: bytes) -> bytes:
        """The body of a prefill call: one token, no stream, and `kv_params` (JSON) for the KV."""
        one = msgspec.Raw(b"1")
        fields = self._fields()
        for name in ("stream_options", "min_tokens"):
            fields.pop(name, None)
        fields["max_tokens"] = one
        if self.form == "chat":
            fields["max_completion_tokens"] = one
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
            fields = self._fields()
            fields["cache_salt"] = msgspec.Raw(value)
            self.raw = msgspec.json.encode(fields)
        else:
            self.raw = self.with_fields({"cache_salt": value})
        self.salt = salt

    def _fields(self) -> dict[str, msgspec.Raw]:
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


def _refuse_many_fields(raw: bytes, body: _Body) -> None:
    """Raise BadRequest if the fields beside the prompt would take long to take apart.

    Quotation marks are counted, since each field has two: it is quick, and never too few.
    """
    prompt = sum(bytes(part).count(b'"') for part in (body.messages, body.prompt, body.tools))
    if raw.count(b'"') - prompt > _MAX_QUOTES:
        raise BadRequest(
            f"request body: has more than {_MAX_QUOTES} quotation marks beside messages, prompt and"
            " tools; send fewer fields"
        )


def _xargs(raw: bytes) -> Collection[str]:
    """The names in vllm_xargs, if it is there. Raises BadRequest."""
    return (raw and decode_json(b'{"vllm_xargs":%b}' % raw, _Xargs).vllm_xargs) or ()

"""The worker's wire: bodies of requests to Jobs, and pieces of a generation to vLLM's replies.

`app` calls it. It adds KV hand-over to the shapes of live/openai; those follow captures of vLLM
0.32. Nothing here waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import UNREADABLE, BadRequest, ModelNotFound
from moonserve.core.request import Sampling, Shaping, Stopping, TokenLogprobs
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes
from moonserve.core.shares import Party
from moonserve.core.units import LeaseId, RequestId, SegmentId, Tokens
from moonserve.live.openai.logprobs import by_ids
from moonserve.live.openai.reply import DONE, Choice, Reply, Usage, event
from moonserve.live.openai.request import (
    MOST_LOGPROBS,
    REPETITION,
    GenerationRequest,
    penalties,
    sampling,
    stopping,
    token_biases,
    wants_usage,
)
from moonserve.live.openai.text import TextStream
from moonserve.live.ports import EngineShape
from moonserve.live.worker.job import Job, Piece, PromptPart

_CONNECTOR = "moonserve"
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)]
_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


_Body = TypeVar("_Body")


class KVTransferParams(msgspec.Struct, frozen=True):
    """vLLM's hand-over parameters and moonserve's own; those of other connectors are ignored."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    lease: _Name | None = None
    reuse_tokens: _Count | None = None
    first_token_id: _Count | None = None
    segment: _Name | None = None
    """The segment that prefill published to."""
    part: PromptPart | None = None


class PrefetchBody(msgspec.Struct, frozen=True):
    """The body of POST /internal/prefetch, in msgpack.

    A decode call under this lease will want these blocks, which its prefill publishes in order.
    """

    lease: _Name
    keys: tuple[_Key, ...]


class PartBody(msgspec.Struct, frozen=True):
    """The body of POST /internal/chain, in msgpack: send the KV of the part with this lease."""

    lease: _Name


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's field for what the text must be."""

    json: msgspec.Raw


class CompletionBody(GenerationRequest, kw_only=True):
    """The body of POST /v1/completions; other fields are ignored, as vLLM does.

    Its bounds are vLLM's, which are wider than the gateway's.
    """

    prompt: list[Any] | str
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    stop_token_ids: list[_Count] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    min_tokens: _Count = 0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: (
        Annotated[float, msgspec.Meta(ge=REPETITION[0], le=REPETITION[1])] | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    generated_tokens: _Count = 0
    """How many of the prompt's last tokens other calls have generated for this request."""
    knows_prompt: bool = False
    """Whether the caller has the ids of the prompt: then no reply has them. Those of a long prompt
    are hundreds of KB of JSON."""
    cache_salt: _Salt | None = None
    kv_transfer_params: KVTransferParams | None = None


class CompletionDelta(msgspec.Struct, frozen=True):
    """What one step adds to a completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: Tokens
    times: PrefillTimes | None = None
    """See Piece."""
    entry: DecodeTimes | UnsetType = UNSET
    """See Piece."""
    logprobs: TokenLogprobs | None = None
    """See Piece."""


def parse_packed(raw: bytes, shape: type[_Body]) -> _Body:
    """Decode a msgpack body. Raises BadRequest."""
    try:
        return msgspec.msgpack.decode(raw, type=shape)
    except UNREADABLE as error:
        raise BadRequest(f"request body: is not a {shape.__name__} in msgpack: {error}") from None


def make_job(
    body: CompletionBody,
    *,
    request: RequestId,
    lease: str,
    model: str,
    shape: EngineShape,
    encode: Callable[[str], Sequence[int]] | None,
    party: Party = Party(),  # noqa: B008 - immutable
) -> Job:
    """Check a body against this worker. Raises BadRequest or ModelNotFound naming the field."""
    if body.model is not None and body.model != model:
        raise ModelNotFound(f"model: {body.model!r} is not served here; {model!r} is", "model")
    params = body.kv_transfer_params or KVTransferParams()
    if params.do_remote_decode and params.do_remote_prefill:
        raise BadRequest(
            "kv_transfer_params: set do_remote_decode or do_remote_prefill, not both",
            "kv_transfer_params",
        )
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if params.do_remote_decode and max_tokens != 1:
        what = "must be 1 with kv_transfer_params.do_remote_decode"
        raise BadRequest(f"max_tokens: {what}", "max_tokens")
    prompt = _prompt(body.prompt, shape, encode)
    if len(prompt) + max_tokens > shape.max_len:
        raise BadRequest(
            f"prompt ({len(prompt)} tokens) and max_tokens ({max_tokens}) exceed the model's"
            f" context of {shape.max_len} tokens",
            "prompt" if len(prompt) >= shape.max_len else "max_tokens",
            "context_length_exceeded",
        )
    stop = stopping(body, max_tokens)
    if body.min_tokens:
        least = max(0, body.min_tokens - body.generated_tokens)
        stop = msgspec.structs.replace(stop, min_tokens=least)
    _check_stops(stop.stop, encode is not None)
    if params.part is not None:
        _check_part(params.part, params.do_remote_decode, len(prompt), shape)
    first = params.first_token_id if params.do_remote_prefill else None
    if first is not None and first >= shape.vocab_size:
        what = f"first_token_id must be from 0 to {shape.vocab_size - 1}"
        raise BadRequest(f"kv_transfer_params: {what}", "kv_transfer_params")
    return Job(
        request=request,
        prompt=prompt,
        sampling=_sampling(body, stop, len(prompt), shape),
        stopping=stop,
        lease=LeaseId(params.lease or lease),
        send_kv=params.do_remote_decode,
        take_kv=params.do_remote_prefill,
        reuse=params.reuse_tokens,
        first_token=first,
        generated=min(len(prompt), body.generated_tokens),
        near=SegmentId(params.segment) if params.segment is not None else None,
        part=params.part,
        salt=body.cache_salt or "",
        party=party,
    )


def _sampling(body: CompletionBody, stop: Stopping, length: Tokens, shape: EngineShape) -> Sampling:
    """How to sample, with what the body wants of the logits."""
    how = sampling(body, secrets.randbits(32))
    bias = token_biases(body, shape.vocab_size)
    schema = "" if body.structured_outputs is None else _schema(body.structured_outputs)
    penal = penalties(body)
    plain = not bias and not stop.min_tokens and body.logprobs is None
    if plain and not schema and penal is None:
        return how
    ends = () if stop.ignore_eos else shape.eos_token_ids
    shaping = Shaping(
        bias,
        tuple(it for it in {*ends, *stop.stop_token_ids} if it < shape.vocab_size),
        length + stop.min_tokens,
        body.logprobs,
        schema,
        penalties=penal,
    )
    return msgspec.structs.replace(how, shaping=shaping)


def _schema(wanted: StructuredOutputs) -> str:
    return bytes(wanted.json).decode()


def _check_part(part: PromptPart, send_kv: bool, length: Tokens, shape: EngineShape) -> None:
    size = shape.block_size
    if (
        not send_kv
        or part.start >= length
        or part.start % size
        or (part.followed and length % size)
    ):
        raise BadRequest(
            f"kv_transfer_params: part needs do_remote_decode, and multiples of {size} tokens"
            " within the prompt",
            "kv_transfer_params",
        )


def _prompt(
    given: list[Any] | str, shape: EngineShape, encode: Callable[[str], Sequence[int]] | None
) -> tuple[int, ...]:
    if isinstance(given, str):
        if encode is None:
            raise BadRequest("prompt: this worker has no tokenizer; send token ids", "prompt")
        given = list(encode(given))
    if not given:
        raise BadRequest("prompt: must have at least one token", "prompt")
    # type() and not isinstance(): true is an int in Python, and no token.
    if not all(type(token) is int and 0 <= token < shape.vocab_size for token in given):
        raise BadRequest(
            f"prompt: must be one list of token ids from 0 to {shape.vocab_size - 1}", "prompt"
        )
    return tuple(given)


def _check_stops(stops: tuple[str, ...], has_text: bool) -> None:
    if not all(stops):
        raise BadRequest("stop: a stop string must not be empty", "stop")
    if stops and not has_text:
        raise BadRequest("stop: this worker has no tokenizer; use stop_token_ids", "stop")


def delta_of(piece: Piece, text: TextStream | None) -> CompletionDelta:
    """What a piece adds to the reply; text: None where the worker has no tokenizer."""
    reason: str | None = None
    stop: int | str | None = None
    if piece.finish is not None:
        reason = piece.finish.reason
        stop = piece.finish.stop_token
    ids = (piece.token,)
    added = ""
    if text is not None:
        if reason is None:
            added = text.feed(ids)
        elif reason == "stop":
            added = text.end()  # the text does not contain the token that stops it
        else:
            added = text.end(ids)
        if text.met is not None:
            reason, stop = "stop", text.met
    return CompletionDelta(
        added,
        ids,
        reason,
        stop,
        piece.cached_tokens,
        piece.times,
        piece.entry,
        piece.logprobs,
    )


def hand_over_params(info: InstanceInfo, job: Job, last: CompletionDelta) -> dict[str, Any] | None:
    """The kv_transfer_params for a decode worker; None if the job does not go on there."""
    if not job.send_kv or last.finish_reason != "length":
        return None
    host, _, port = info.url.rpartition("//")[2].rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "connector": _CONNECTOR,
        "remote_engine_id": info.id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_num_tokens": len(job.prompt),
        "first_token_id": last.token_ids[0],
        "lease": job.lease,
        "segment": info.segment,
    }


class Shaper:
    """Writes the replies to one request."""

    def __init__(self, body: CompletionBody, job: Job, head: Reply) -> None:
        """head: what `reply_head` returns for this request."""
        self._head = head
        self._choice = Choice(stop_reason=None, token_ids=None, prompt_token_ids=None)
        head.choices = [self._choice]
        self._prompt_tokens = len(job.prompt)
        self._wants_usage = wants_usage(body)
        self._wants_ids = bool(body.return_token_ids)
        self._wants_logprobs = body.logprobs is not None
        if self._wants_ids and not body.knows_prompt:
            self._choice.prompt_token_ids = job.prompt
        self._sent = 0

    def chunk(self, delta: CompletionDelta, hand_over: dict[str, Any] | None) -> bytes:
        """One server-sent event; the first one has the prompt's ids where the client wants them."""
        if self._sent:
            self._choice.prompt_token_ids = None
        self._fill([delta])
        self._head.decode_times = delta.entry
        self._sent += len(delta.token_ids)
        if hand_over is not None:
            self._head.kv_transfer_params = hand_over
        return event(self._head)

    def last_events(self, cached_tokens: Tokens) -> bytes:
        """The usage event, where the client wants it, and the end of the stream."""
        if not self._wants_usage:
            return DONE
        self._head.choices = []
        self._head.kv_transfer_params = UNSET
        self._head.usage = Usage.of(self._prompt_tokens, self._sent, cached_tokens)
        return event(self._head) + DONE

    def whole(self, deltas: Sequence[CompletionDelta], hand_over: dict[str, Any] | None) -> Reply:
        """The whole reply."""
        self._fill(deltas)
        generated = sum(len(delta.token_ids) for delta in deltas)
        self._head.usage = Usage.of(self._prompt_tokens, generated, deltas[-1].cached_tokens)
        self._head.kv_transfer_params = hand_over
        if deltas[-1].times is not None:
            self._head.prefill_times = deltas[-1].times
        return self._head

    def _fill(self, deltas: Sequence[CompletionDelta]) -> None:
        choice = self._choice
        choice.text = "".join(delta.text for delta in deltas)
        choice.finish_reason = deltas[-1].finish_reason
        choice.stop_reason = deltas[-1].stop_reason
        if self._wants_ids:
            choice.token_ids = [token for delta in deltas for token in delta.token_ids]
        if self._wants_logprobs:
            ids = [token for delta in deltas for token in delta.token_ids]
            choice.logprobs = by_ids(ids, [delta.logprobs for delta in deltas])

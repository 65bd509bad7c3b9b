"""OpenAI's replies: the shapes that gateways and workers write, and the one shape that is read.

`live/api` and `live/worker` write, `live/drive` and `live/replay` read. Replies of external engines
pass through as bytes; see `usage` for what is read of those.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import MoonserveError
from moonserve.core.request import TokenLogprobs
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes
from moonserve.core.units import Tokens
from moonserve.live.http.message import error_reply
from moonserve.live.openai.logprobs import ChoiceLogprobs, LogprobWriter, ReadLogprobs
from moonserve.live.openai.request import PATHS, Form
from moonserve.live.text.calls import FoundCall

_NAMED_EVENTS = (PATHS["responses"], PATHS["messages"])
_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def event(value: object) -> bytes:
    """One server-sent event with this value as JSON."""
    return b"data: %b\n\n" % _encode(value)


def named_event(name: str, value: object) -> bytes:
    """One server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))


def error_event(path: str, error: MoonserveError) -> bytes:
    """The event by which a stream of this path ends with an error."""
    reply = error_reply(error, path)
    if path not in _NAMED_EVENTS:
        return event(reply)
    reply.type = "error"
    return b"event: error\n" + event(reply)


class PromptDetails(msgspec.Struct):
    """How many tokens of the prompt had their KV before the request came."""

    cached_tokens: Tokens


class Usage(msgspec.Struct):
    """Tokens of one request; completion_tokens counts all generated tokens, EOS included."""

    prompt_tokens: Tokens
    completion_tokens: Tokens
    total_tokens: Tokens
    prompt_tokens_details: PromptDetails

    @staticmethod
    def of(prompt: Tokens, generated: Tokens, cached: Tokens) -> Usage:
        """The usage of a prompt with `cached` reused tokens, after `generated` tokens."""
        return Usage(prompt, generated, prompt + generated, PromptDetails(cached))

    def plus(self, other: Usage) -> Usage:
        """The usage of both together."""
        return Usage.of(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.prompt_tokens_details.cached_tokens + other.prompt_tokens_details.cached_tokens,
        )


class WrittenFunction(msgspec.Struct):
    """The function of a call."""

    name: str
    arguments: str
    """A JSON object."""


class WrittenCall(msgspec.Struct):
    """A call of a tool; a chunk has it whole, with its number in the choice."""

    id: str
    function: WrittenFunction
    type: str = "function"
    index: int | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to a chat message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: Sequence[WrittenCall] | UnsetType = UNSET


class ReplyMessage(msgspec.Struct):
    """The assistant's whole message."""

    role: str
    content: str | None
    tool_calls: Sequence[WrittenCall] | UnsetType = UNSET


class Choice(msgspec.Struct):
    """The one choice: `delta` in chat chunks, `message` in chat replies, `text` in completions.

    The last three fields are vLLM's extensions. A worker writes all of them; a gateway writes
    `token_ids` where return_token_ids asks for it.
    """

    index: int = 0
    delta: Delta | UnsetType = UNSET
    message: ReplyMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType | None = UNSET
    """Ids since the last chunk."""
    prompt_token_ids: Sequence[int] | UnsetType | None = UNSET


class Reply(msgspec.Struct):
    """A whole reply, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    """vLLM's extension: what a decode instance needs to fetch the KV."""
    prefill_times: PrefillTimes | UnsetType = UNSET
    """Of our workers: how a prefill that leaves its KV for a decode spent its time."""
    decode_times: DecodeTimes | UnsetType = UNSET
    """Of our workers, with the first token of a decode that takes KV: how it spent its time."""


_OBJECTS: dict[tuple[Form, bool], str] = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}


def reply_head(id: str, form: Form, stream: bool, created: int, model: str) -> Reply:
    """The fields that all chunks of a reply share; `id` is the request's, `created` in seconds."""
    prefix = "chatcmpl" if form == "chat" else "cmpl"
    return Reply(f"{prefix}-{id}", _OBJECTS[form, stream], created, model, [])


class ChoiceState(Protocol):
    """What a writer reads of one choice, besides its text."""

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, as OpenAI says it; None: it goes on."""

    @property
    def met(self) -> str | None:
        """The stop string that ended it."""

    def take_ids(self) -> list[int]:
        """The token ids that came since the last call."""

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Their log probabilities; empty if the client does not want them."""

    def take_calls(self) -> list[FoundCall]:
        """The calls of tools that came since the last call; empty if it has no tools."""


class Writer(Protocol):
    """Writes one reply of a gateway: `whole`, or `begin`, each `piece` and `end` as events."""

    def whole(self, said: Sequence[tuple[str, ChoiceState]], usage: Usage) -> bytes:
        """The reply as one JSON object. said: each choice with its text."""

    def begin(self, usage: Usage) -> bytes:
        """What comes before the first piece; usage: of the prompt and that piece."""

    def piece(self, text: str, choice: ChoiceState) -> bytes:
        """The events of one piece; b"" where it adds nothing."""

    def end(self, usage: Usage) -> bytes:
        """What comes after the last piece."""


class ReplyWriter:
    """Writes a reply to chat or completions: see Writer."""

    def __init__(
        self,
        head: Reply,
        form: Form,
        usage: bool,
        ids: bool = False,
        logprobs: LogprobWriter | None = None,
        index: int = 0,
        calls: bool = False,
    ) -> None:
        """usage: whether the stream ends with a chunk of usage; ids: whether the client wants the
        token ids; logprobs: None: it wants none; index: of the choice whose pieces it writes;
        calls: whether there may be calls of tools."""
        self._head = head
        self._chat = form == "chat"
        self._wants_usage = usage
        self._wants_ids = ids
        self._logprobs = logprobs
        self._may_call = calls
        self._called = 0
        self._delta = Delta()
        self._choice = Choice(index)
        head.choices = [self._choice]

    def whole(self, said: Sequence[tuple[str, ChoiceState]], usage: Usage) -> bytes:
        """See Writer."""
        self._head.choices = [self._whole(at, *it) for at, it in enumerate(said)]
        self._head.usage = usage
        return _encode(self._head)

    def _whole(self, index: int, text: str, choice: ChoiceState) -> Choice:
        written = Choice(index, finish_reason=choice.finish_reason)
        if self._chat:
            written.message = ReplyMessage("assistant", text)
            if self._may_call and (calls := choice.take_calls()):
                message = ReplyMessage("assistant", text or None, [*map(_written, calls)])
                written.message = message
        else:
            written.text = text
        ids = choice.take_ids()
        if self._logprobs is not None:
            written.logprobs = self._logprobs.write(ids, choice.take_logprobs())
        if self._wants_ids:
            written.token_ids = ids
        return written

    def begin(self, usage: Usage) -> bytes:
        """See Writer. Chat streams begin with the role."""
        if self._wants_usage:
            self._head.usage = None
        if not self._chat:
            return b""
        self._choice.delta = Delta("assistant", "")
        first = event(self._head)
        self._choice.delta = self._delta
        return first

    def piece(self, text: str, choice: ChoiceState) -> bytes:
        """See Writer."""
        reason = choice.finish_reason
        ids = None
        if self._wants_ids or self._logprobs is not None:
            ids = self._reported(choice)
        if not self._chat:
            self._choice.text = text
            self._choice.finish_reason = reason
            return b"data: %b\n\n" % _encode(self._head) if text or reason or ids else b""
        self._delta.content = text
        events = b"data: %b\n\n" % _encode(self._head) if text or ids else b""
        if self._may_call and (calls := choice.take_calls()):
            events += self._call_event(calls)
        if reason:
            self._delta.content = UNSET
            self._choice.token_ids = UNSET
            self._choice.logprobs = None
            self._choice.finish_reason = reason
            events += event(self._head)
        return events

    def _call_event(self, calls: Sequence[FoundCall]) -> bytes:
        """One event with new calls. Their ids were reported beside text, if the client wants
        them."""
        written = [*map(_written, calls)]
        for call in written:
            call.index = self._called
            self._called += 1
        self._choice.token_ids = UNSET
        self._choice.logprobs = None
        self._choice.delta = Delta(tool_calls=written)
        events = event(self._head)
        self._choice.delta = self._delta
        return events

    def _reported(self, choice: ChoiceState) -> list[int]:
        """Put what the client wants of the new tokens beside their text; return their ids."""
        ids = choice.take_ids()
        if self._wants_ids:
            self._choice.token_ids = ids
        if self._logprobs is not None:
            self._choice.logprobs = self._logprobs.write(ids, choice.take_logprobs())
        return ids

    def end(self, usage: Usage) -> bytes:
        """See Writer."""
        if not self._wants_usage:
            return DONE
        self._head.choices = []
        self._head.usage = usage
        return event(self._head) + DONE


def _written(call: FoundCall) -> WrittenCall:
    return WrittenCall(call_id(), WrittenFunction(call.name, call.arguments))


def call_id() -> str:
    """A new id for a call of a tool."""
    return f"call_{secrets.token_hex(12)}"


class ReadDetails(msgspec.Struct):
    """How much of the prompt an engine reused."""

    cached_tokens: Tokens | None = None


class ReadUsage(msgspec.Struct):
    """The tokens that an engine counted."""

    prompt_tokens: Tokens | None = None
    prompt_tokens_details: ReadDetails | None = None


class ReadChoice(msgspec.Struct):
    """What is read of a choice."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: ReadLogprobs | None = None


class ReadReply(msgspec.Struct):
    """What is read of a reply or of a chunk; an error event has `error` in place of choices."""

    choices: list[ReadChoice] = []
    usage: ReadUsage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    prefill_times: PrefillTimes | None = None
    decode_times: DecodeTimes | None = None
    error: Any = None

    def cached_tokens(self) -> Tokens | None:
        """Reused prompt tokens, at most the prompt's; None: the engine does not report them."""
        usage = self.usage
        if usage is None or usage.prompt_tokens_details is None:
            return None
        cached = usage.prompt_tokens_details.cached_tokens
        if cached is None or usage.prompt_tokens is None:
            return cached
        return min(cached, usage.prompt_tokens)


read_reply = msgspec.json.Decoder(ReadReply).decode
"""Decodes a reply or chunk. Raises the errors of core.errors.UNREADABLE."""

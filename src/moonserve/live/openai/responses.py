"""OpenAI's Responses with our own workers: a body as a chat, and the chat's reply as a Response.

`live/api/own_text` calls it. Responses are text and are not kept. A field that asks for something
else is a BadRequest that names it; the fields store (false), metadata and user come back as sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import BadRequest
from moonserve.core.units import Tokens
from moonserve.live.http.message import decode_json
from moonserve.live.openai.reply import ChoiceState, Usage, named_event
from moonserve.live.openai.request import (
    BodyShape,
    ChatRequest,
    Message,
    SharedFields,
    StreamOptions,
    at_least_one,
    check,
    check_messages,
    expect_items,
    shared,
)
from moonserve.live.openai.unserved import RESPONSES, UNTOUCHED, Refused, refuse_unless

_FIELD = "input"
_PARTS = ("input_text", "output_text", "text")
_MAX_METADATA_BYTES = 32 << 10
_TEXT_ONLY = Refused(("text",), "use response_format in /v1/chat/completions")


class ResponseItem(Message, kw_only=True):
    """One item of the input: a message."""

    role: str = ""
    type: str = "message"


class AskedFormat(msgspec.Struct):
    """The form of the output."""

    type: msgspec.Raw = UNTOUCHED


class AskedText(msgspec.Struct):
    """How the text is to be made; verbosity changes nothing here, as in chat."""

    format: AskedFormat | None = None


class ResponseRequest(SharedFields, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: str | list[ResponseItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream_options: StreamOptions | None = None
    text: AskedText | None = None
    metadata: msgspec.Raw = UNTOUCHED
    user: str | None = None


_ResponseBody = RESPONSES.added_to(ResponseRequest)


class _GivenMetadata(msgspec.Struct):
    metadata: dict[str, str] | None = None


class ResponseChat(ChatRequest, kw_only=True):
    """A Response as the chat that it is."""

    prompt_field: ClassVar[str] = _FIELD
    asked: ResponseRequest


SHAPE = BodyShape(ResponseRequest, harmless=RESPONSES.harmless)


def parse_response(body: bytes, max_messages: int) -> ResponseChat:
    """The request with every field checked. Raises BadRequest."""
    expect_items(_FIELD, max_messages)
    sent = decode_json(body, _ResponseBody)
    RESPONSES.check(sent)
    if sent.text is not None and sent.text.format is not None:
        refuse_unless("text.format.type", sent.text.format.type, _TEXT_ONLY)
    at_least_one("max_output_tokens", sent.max_output_tokens)
    _check_metadata(bytes(sent.metadata))
    messages = _messages(sent)
    check_messages(messages, _FIELD, max_messages, parts=_PARTS)
    if sent.instructions is not None:
        messages.insert(0, Message("system", sent.instructions))
    chat = ResponseChat(
        model=sent.model,
        messages=messages,
        max_tokens=sent.max_output_tokens,
        asked=sent,
        **shared(sent),
    )
    check(chat)
    return chat


def _messages(sent: ResponseRequest) -> list[Message]:
    if isinstance(sent.input, str):
        return [Message("user", sent.input)]
    for i, item in enumerate(sent.input):
        if item.type != "message":
            path = f"{_FIELD}[{i}].type"
            raise BadRequest(
                f"{path}: {item.type[:40]!r} is not supported here; send messages",
                path,
                "unsupported_parameter",
            )
    return [*sent.input]


def _check_metadata(raw: bytes) -> None:
    if len(raw) > _MAX_METADATA_BYTES:
        what = f"must have at most {_MAX_METADATA_BYTES} bytes of JSON"
        raise BadRequest(f"metadata: {what}", "metadata")
    if raw:
        decode_json(b'{"metadata":%b}' % raw, _GivenMetadata)


class InputDetails(msgspec.Struct):
    """How much of the input was reused."""

    cached_tokens: Tokens


class OutputDetails(msgspec.Struct):
    """Tokens of the output that are not text: none."""

    reasoning_tokens: Tokens = 0


class ResponseUsage(msgspec.Struct):
    """The tokens of one Response."""

    input_tokens: Tokens
    input_tokens_details: InputDetails
    output_tokens: Tokens
    output_tokens_details: OutputDetails
    total_tokens: Tokens


class OutputText(msgspec.Struct):
    """The one part of the one output message."""

    text: str
    type: str = "output_text"
    annotations: Sequence[Any] = ()
    logprobs: Sequence[Any] = ()


class OutputMessage(msgspec.Struct):
    """The one output item."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: Sequence[OutputText] = ()
    type: str = "message"
    role: str = "assistant"


class Incomplete(msgspec.Struct):
    """Why the output ends early."""

    reason: str


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the output."""

    type: str = "text"


class TextSettings(msgspec.Struct, frozen=True):
    """How the text is made."""

    format: TextFormat = TextFormat()


class ResponseReply(msgspec.Struct, kw_only=True):
    """A Response."""

    id: str
    object: str = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    background: bool = False
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: Sequence[OutputMessage] = ()
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: TextSettings = TextSettings()
    tool_choice: str = "auto"
    tools: Sequence[Any] = ()
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: msgspec.Raw


class _ResponseEvent(msgspec.Struct, omit_defaults=True):
    """An event of a stream; each kind has some of the fields."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    item: OutputMessage | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Sequence[Any] | UnsetType = UNSET


class ResponseWriter:
    """Writes one Response: see reply.Writer."""

    def __init__(self, request: str, chat: ResponseChat, created: int) -> None:
        """request: its id; created: in seconds."""
        asked = chat.asked
        self._reply = ResponseReply(
            id=f"resp_{request}",
            created_at=created,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            model=asked.model,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            user=asked.user,
            metadata=asked.metadata if bytes(asked.metadata) else msgspec.Raw(b"{}"),
        )
        self._item = f"msg_{request}"
        self._count = 0
        self._pieces: list[str] = []
        self._reason = "stop"
        self._delta = self._event("response.output_text.delta", logprobs=())

    def whole(self, said: Sequence[tuple[str, ChoiceState]], usage: Usage) -> bytes:
        """See Writer."""
        ((text, choice),) = said
        self._finish(text, choice.finish_reason, usage)
        return msgspec.json.encode(self._reply)

    def begin(self, usage: Usage) -> bytes:
        """See Writer."""
        item = OutputMessage(self._item, "in_progress")
        return b"".join(
            (
                self._write("response.created", response=self._reply),
                self._write("response.in_progress", response=self._reply),
                self._write("response.output_item.added", item=item, output_index=0),
                self._write("response.content_part.added", part=OutputText("")),
            )
        )

    def piece(self, text: str, choice: ChoiceState) -> bytes:
        """See Writer."""
        self._reason = choice.finish_reason or self._reason
        if not text:
            return b""
        self._pieces.append(text)
        event = self._delta
        event.sequence_number = self._count
        event.delta = text
        self._count += 1
        return named_event(event.type, event)

    def end(self, usage: Usage) -> bytes:
        """See Writer."""
        text = "".join(self._pieces)
        self._finish(text, self._reason, usage)
        item = self._reply.output[0]
        return b"".join(
            (
                self._write("response.output_text.done", text=text, logprobs=()),
                self._write("response.content_part.done", part=item.content[0]),
                self._write("response.output_item.done", item=item, output_index=0),
                self._write(f"response.{self._reply.status}", response=self._reply),
            )
        )

    def _finish(self, text: str, reason: str | None, usage: Usage) -> None:
        reply = self._reply
        reply.status = "completed"
        if reason == "length":
            reply.status = "incomplete"
            reply.incomplete_details = Incomplete("max_output_tokens")
        reply.output = [OutputMessage(self._item, reply.status, [OutputText(text)])]
        reply.usage = ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(),
            usage.total_tokens,
        )

    def _write(self, kind: str, **fields: Any) -> bytes:
        event = self._event(kind, **fields)
        event.sequence_number = self._count
        self._count += 1
        return named_event(kind, event)

    def _event(self, kind: str, **fields: Any) -> _ResponseEvent:
        """An event; one about the text names its place."""
        if "response" in fields or "item" in fields:
            return _ResponseEvent(kind, 0, **fields)
        return _ResponseEvent(
            kind, 0, item_id=self._item, output_index=0, content_index=0, **fields
        )

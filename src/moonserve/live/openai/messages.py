"""Anthropic's Messages with our own workers: a body as a chat, and the chat's reply as a Message.

`live/api/own_text` calls it. Messages are text. A field that asks for something else is a
BadRequest that names it; metadata, service_tier and cache_control change nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.units import Tokens
from moonserve.live.http.message import decode_json
from moonserve.live.openai.reply import ChoiceState, Usage, named_event
from moonserve.live.openai.request import (
    BodyShape,
    ChatRequest,
    ContentPart,
    Message,
    SharedFields,
    at_least_one,
    check,
    check_messages,
    check_parts,
    decode_stop_sequences,
    expect_items,
    shared,
)
from moonserve.live.openai.unserved import COUNT_TOKENS, MESSAGES, UNTOUCHED

_FIELD = "messages"
_ROLES = ("user", "assistant")


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Message]
    system: str | list[ContentPart] | None = None


class MessagesRequest(SharedFields, kw_only=True):
    """POST /v1/messages."""

    model: str
    messages: list[Message]
    system: str | list[ContentPart] | None = None
    max_tokens: int
    stop_sequences: list[str] | None = None


class _MessagesFields(SharedFields, kw_only=True):
    model: str
    messages: list[Message]
    system: str | list[ContentPart] | None = None
    max_tokens: int
    stop_sequences: msgspec.Raw = UNTOUCHED


_CountBody = COUNT_TOKENS.added_to(CountTokensRequest)
_MessagesBody = MESSAGES.added_to(_MessagesFields)


class MessagesChat(ChatRequest, kw_only=True):
    """Messages as the chat that they are."""

    prompt_field: ClassVar[str] = _FIELD


SHAPE = BodyShape(MessagesRequest, harmless=MESSAGES.harmless)
COUNT_SHAPE = BodyShape(CountTokensRequest, harmless=COUNT_TOKENS.harmless)


def parse_messages(body: bytes, max_messages: int) -> MessagesChat:
    """The request with every field checked. Raises BadRequest."""
    expect_items(_FIELD, max_messages)
    sent = decode_json(body, _MessagesBody)
    MESSAGES.check(sent)
    at_least_one("max_tokens", sent.max_tokens)
    chat = MessagesChat(
        model=sent.model,
        messages=_conversation(sent, max_messages),
        max_tokens=sent.max_tokens,
        stop=decode_stop_sequences(sent.stop_sequences),
        **shared(sent),
    )
    check(chat)
    return chat


def parse_count(body: bytes, max_messages: int) -> MessagesChat:
    """The request to count the tokens of a prompt, with every field checked. Raises BadRequest."""
    expect_items(_FIELD, max_messages)
    sent = decode_json(body, _CountBody)
    COUNT_TOKENS.check(sent)
    return MessagesChat(model=sent.model, messages=_conversation(sent, max_messages))


def _conversation(sent: CountTokensRequest | _MessagesFields, max_messages: int) -> list[Message]:
    """The system prompt and the messages. Raises BadRequest."""
    check_messages(sent.messages, _FIELD, max_messages, roles=_ROLES)
    if sent.system is None:
        return sent.messages
    check_parts(sent.system, "system")
    return [Message("system", sent.system), *sent.messages]


class MessagesUsage(msgspec.Struct):
    """The tokens of one Message; `input_tokens` are those that were not reused."""

    input_tokens: Tokens
    output_tokens: Tokens
    cache_read_input_tokens: Tokens
    cache_creation_input_tokens: Tokens = 0


class TextBlock(msgspec.Struct):
    """The one block of the content."""

    text: str
    type: str = "text"


class MessagesReply(msgspec.Struct):
    """A Message."""

    id: str
    model: str
    usage: MessagesUsage
    content: Sequence[TextBlock] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    """The reply of /v1/messages/count_tokens."""

    input_tokens: Tokens


class _TextDelta(msgspec.Struct):
    text: str
    type: str = "text_delta"


class _StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class _MessagesEvent(msgspec.Struct, omit_defaults=True):
    """An event of a stream; each kind has some of the fields."""

    type: str
    message: MessagesReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | UnsetType = UNSET
    delta: _TextDelta | _StopDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class MessagesWriter:
    """Writes one Message: see reply.Writer."""

    def __init__(self, request: str, model: str) -> None:
        """request: its id."""
        self._id = f"msg_{request}"
        self._model = model
        self._ended = _StopDelta("end_turn", None)
        self._text = _TextDelta("")
        self._delta = _MessagesEvent("content_block_delta", index=0, delta=self._text)

    def whole(self, said: Sequence[tuple[str, ChoiceState]], usage: Usage) -> bytes:
        """See Writer."""
        ((text, choice),) = said
        ended = _ended(choice)
        reply = MessagesReply(
            self._id,
            self._model,
            _usage(usage),
            [TextBlock(text)],
            ended.stop_reason,
            ended.stop_sequence,
        )
        return msgspec.json.encode(reply)

    def begin(self, usage: Usage) -> bytes:
        """See Writer."""
        message = MessagesReply(self._id, self._model, _usage(usage))
        return _write("message_start", message=message) + _write(
            "content_block_start", index=0, content_block=TextBlock("")
        )

    def piece(self, text: str, choice: ChoiceState) -> bytes:
        """See Writer."""
        if choice.finish_reason is not None:
            self._ended = _ended(choice)
        if not text:
            return b""
        self._text.text = text
        return named_event("content_block_delta", self._delta)

    def end(self, usage: Usage) -> bytes:
        """See Writer."""
        return b"".join(
            (
                _write("content_block_stop", index=0),
                _write("message_delta", delta=self._ended, usage=_usage(usage)),
                _write("message_stop"),
            )
        )


def _ended(choice: ChoiceState) -> _StopDelta:
    """Why it ended, in Anthropic's words."""
    if choice.met is not None:
        return _StopDelta("stop_sequence", choice.met)
    return _StopDelta("max_tokens" if choice.finish_reason == "length" else "end_turn", None)


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _write(kind: str, **fields: Any) -> bytes:
    return named_event(kind, _MessagesEvent(kind, **fields))

"""Anthropic's Messages with our own workers: a body as a chat, and the chat's reply as a Message.

`live/api/own_text` calls it. Messages are text and calls of tools. A field that asks for something
else is a BadRequest that names it. metadata, service_tier and cache_control change nothing here.
Nor does the is_error of a tool's result, since chat templates have no place for it: the model sees
the text of the result.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import BadRequest
from moonserve.core.units import Tokens
from moonserve.live.openai.calling import (
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    check_choice,
    check_result,
    check_tools,
    decode_choice,
    decode_tools,
)
from moonserve.live.openai.reply import ChoiceState, Usage, named_event
from moonserve.live.openai.request import (
    AtLeastOne,
    BodyShape,
    CalledFunction,
    ChatRequest,
    ContentPart,
    Item,
    Message,
    SharedFields,
    ToolCall,
    at_least_one,
    check,
    check_content,
    check_count,
    check_parts,
    check_role,
    decode_stop_sequences,
    expect_items,
    shared,
    stated,
)
from moonserve.live.openai.unserved import COUNT_TOKENS, MESSAGES, UNTOUCHED
from moonserve.live.text.calls import FoundCall

_FIELD = "messages"
_NAME_CHARS = 128
"""The longest name of a tool, as at Anthropic."""
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use")}
"""Role -> the blocks that its messages may have."""
_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""Type of a block -> the fields that it must have."""


class Block(ContentPart, kw_only=True):
    """One block of a message: text, a call of a tool, or the result of one."""

    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = UNTOUCHED
    """Of a call: a JSON object."""
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None
    """Of a result: its text."""

    @property
    def lacks(self) -> str:
        """See ContentPart."""
        needed = _NEEDED[self.type]
        missing = (name for name in needed if getattr(self, name) in (None, UNTOUCHED))
        return next(missing, "")


class BlockMessage(Item, gc=False):
    """One message of a conversation."""

    role: Annotated[str, stated(enum=[*_BLOCKS])]
    content: str | list[Block] | None = None


class MessagesTool(msgspec.Struct):
    """A tool of the client; Anthropic's own tools are not served."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class MessagesToolChoice(msgspec.Struct):
    """Which tools a model may or must call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[BlockMessage], stated(minItems=1)]
    system: str | list[ContentPart] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None


class MessagesRequest(SharedFields, kw_only=True):
    """POST /v1/messages."""

    model: str
    messages: Annotated[list[BlockMessage], stated(minItems=1)]
    system: str | list[ContentPart] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    max_tokens: AtLeastOne
    stop_sequences: list[str] | None = None


class _MessagesTools(msgspec.Struct):
    tools: list[MessagesTool] | None = None


class _MessagesChoice(msgspec.Struct):
    tool_choice: MessagesToolChoice | None = None


class _CountFields(msgspec.Struct, kw_only=True):
    model: str
    messages: list[BlockMessage]
    system: str | list[ContentPart] | None = None
    tools: msgspec.Raw = UNTOUCHED
    tool_choice: msgspec.Raw = UNTOUCHED


class _MessagesFields(SharedFields, kw_only=True):
    model: str
    messages: list[BlockMessage]
    system: str | list[ContentPart] | None = None
    tools: msgspec.Raw = UNTOUCHED
    tool_choice: msgspec.Raw = UNTOUCHED
    max_tokens: int
    stop_sequences: msgspec.Raw = UNTOUCHED


_CountBody = COUNT_TOKENS.added_to(_CountFields)
_MessagesBody = MESSAGES.added_to(_MessagesFields)


class MessagesChat(ChatRequest, kw_only=True):
    """Messages as the chat that they are."""

    prompt_field: ClassVar[str] = _FIELD

    turns: list[BlockMessage]
    """The messages of the body."""

    def _arguments_paths(self) -> list[str]:
        """See ChatRequest."""
        return [
            f"{_FIELD}[{i}].content[{j}].input"
            for i, message in enumerate(self.turns)
            for j, block in enumerate(message.content or ())
            if isinstance(block, Block) and block.type == "tool_use"
        ]


SHAPE = BodyShape(MessagesRequest, harmless=MESSAGES.harmless)
COUNT_SHAPE = BodyShape(CountTokensRequest, harmless=COUNT_TOKENS.harmless)


def parse_messages(body: bytes, max_messages: int) -> MessagesChat:
    """The request with every field checked. Raises BadRequest."""
    expect_items(_FIELD, max_messages)
    sent = MESSAGES.decode(body, _MessagesBody)
    at_least_one("max_tokens", sent.max_tokens)
    chat = MessagesChat(
        model=sent.model,
        messages=_conversation(sent, max_messages),
        turns=sent.messages,
        max_tokens=sent.max_tokens,
        stop=decode_stop_sequences(sent.stop_sequences),
        **_tool_fields(sent),
        **shared(sent),
    )
    check(chat)
    return chat


def parse_count(body: bytes, max_messages: int) -> MessagesChat:
    """The request to count the tokens of a prompt, with every field checked. Raises BadRequest."""
    expect_items(_FIELD, max_messages)
    sent = COUNT_TOKENS.decode(body, _CountBody)
    messages = _conversation(sent, max_messages)
    return MessagesChat(
        model=sent.model, messages=messages, turns=sent.messages, **_tool_fields(sent)
    )


def _conversation(sent: _CountFields | _MessagesFields, max_messages: int) -> list[Message]:
    """The system prompt and the messages. Raises BadRequest."""
    check_count(sent.messages, _FIELD, max_messages)
    messages: list[Message] = []
    if sent.system is not None:
        check_parts(sent.system, "system")
        messages.append(Message("system", sent.system))
    called: set[str] = set()
    for i, message in enumerate(sent.messages):
        for plain in _plain(message, f"{_FIELD}[{i}]", called):
            called.update(call.id for call in plain.tool_calls or ())
            messages.append(plain)
    return messages


def _plain(message: BlockMessage, path: str, called: Collection[str]) -> Iterator[Message]:
    """One message as those of a chat: results of tools have their own. Raises BadRequest.

    called: the ids of the calls before it.
    """
    check_role(message.role, path, _BLOCKS)
    content = message.content
    if content is None or isinstance(content, str):
        check_content(content, path)
        yield Message(message.role, content)
        return
    check_parts(content, f"{path}.content", _BLOCKS[message.role])
    for i, block in enumerate(content):
        if block.type == "tool_result":
            result = block.content or ""
            check_parts(result, f"{path}.content[{i}].content")
            check_result(block.tool_use_id, called, f"{path}.content[{i}].tool_use_id")
            yield Message("tool", result, tool_call_id=block.tool_use_id)
    texts: list[ContentPart] = [block for block in content if block.type == "text"]
    calls = [
        _call(block, f"{path}.content[{i}]")
        for i, block in enumerate(content)
        if block.type == "tool_use"
    ]
    if texts or calls or not content:
        yield Message(message.role, texts, tool_calls=calls)


def _call(block: Block, path: str) -> ToolCall:
    """A block as the call that it is. Raises BadRequest."""
    input = bytes(block.input).decode("utf-8", "replace")
    if not input.startswith("{"):
        raise BadRequest(f"{path}.input: must be an object", f"{path}.input")
    function = CalledFunction(block.name or "", input)
    return ToolCall(id=block.id or "", function=function)


def _tool_fields(sent: _CountFields | _MessagesFields) -> dict[str, Any]:
    """The fields of a chat that are about tools. Raises BadRequest."""
    if sent.tools is UNTOUCHED and sent.tool_choice is UNTOUCHED:
        return {}
    sent_tools = decode_tools(sent.tools, _MessagesTools).tools or []
    check_tools([tool.name for tool in sent_tools], most=_NAME_CHARS)
    tools = [
        Tool("function", Function(tool.name, tool.description, tool.input_schema))
        for tool in sent_tools
    ]
    sent_choice = decode_choice(sent.tool_choice, _MessagesChoice).tool_choice
    choice = sent_choice or MessagesToolChoice("auto")
    check_choice(_choice(choice), tools)
    return {
        "tools": tools,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    """The same in a chat. Raises BadRequest."""
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice.name: is missing", "tool_choice.name")
        return NamedTool("function", FunctionName(choice.name))
    return "required" if choice.type == "any" else choice.type


class MessagesUsage(msgspec.Struct):
    """The tokens of one Message; `input_tokens` are those that were not reused."""

    input_tokens: Tokens
    output_tokens: Tokens
    cache_read_input_tokens: Tokens
    cache_creation_input_tokens: Tokens = 0


class TextBlock(msgspec.Struct):
    """A block of text."""

    text: str
    type: str = "text"


class ToolUseBlock(msgspec.Struct):
    """A block that is a call of a tool."""

    id: str
    name: str
    input: msgspec.Raw = msgspec.Raw(b"{}")
    type: str = "tool_use"


class MessagesReply(msgspec.Struct):
    """A Message."""

    id: str
    model: str
    usage: MessagesUsage
    content: Sequence[TextBlock | ToolUseBlock] = ()
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


class _InputDelta(msgspec.Struct):
    partial_json: str
    type: str = "input_json_delta"


class _StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class _MessagesEvent(msgspec.Struct, omit_defaults=True):
    """An event of a stream; each kind has some of the fields."""

    type: str
    message: MessagesReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | ToolUseBlock | UnsetType = UNSET
    delta: _TextDelta | _InputDelta | _StopDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class MessagesWriter:
    """Writes one Message: see reply.Writer."""

    def __init__(self, request: str, model: str, calls: bool = False) -> None:
        """request: its id; calls: whether there may be calls of tools."""
        self._id = f"msg_{request}"
        self._model = model
        self._may_call = calls
        self._ended = _StopDelta("end_turn", None)
        self._text = _TextDelta("")
        self._delta = _MessagesEvent("content_block_delta", index=0, delta=self._text)
        self._blocks = 0
        """That have ended; the next one has this index."""
        self._in_text = False
        """Whether a block of text is open."""

    def whole(self, said: Sequence[tuple[str, ChoiceState]], usage: Usage) -> bytes:
        """See Writer."""
        ((text, choice),) = said
        ended = _ended(choice)
        calls = [_used(call) for call in choice.take_calls()] if self._may_call else []
        reply = MessagesReply(
            self._id,
            self._model,
            _usage(usage),
            [TextBlock(text), *calls] if text or not calls else calls,
            ended.stop_reason,
            ended.stop_sequence,
        )
        return msgspec.json.encode(reply)

    def begin(self, usage: Usage) -> bytes:
        """See Writer."""
        message = MessagesReply(self._id, self._model, _usage(usage))
        begun = _write("message_start", message=message)
        return begun if self._may_call else begun + self._open_text()

    def piece(self, text: str, choice: ChoiceState) -> bytes:
        """See Writer."""
        if choice.finish_reason is not None:
            self._ended = _ended(choice)
        events = b""
        if text:
            self._text.text = text
            opened = b"" if self._in_text else self._open_text()
            events = opened + named_event("content_block_delta", self._delta)
        if self._may_call:
            for call in choice.take_calls():
                events += self._close_text() + self._called(_used(call))
        return events

    def end(self, usage: Usage) -> bytes:
        """See Writer. A Message without a call has a block of text, if it is an empty one."""
        opened = b"" if self._blocks or self._in_text else self._open_text()
        return b"".join(
            (
                opened,
                self._close_text(),
                _write("message_delta", delta=self._ended, usage=_usage(usage)),
                _write("message_stop"),
            )
        )

    def _open_text(self) -> bytes:
        self._in_text = True
        self._delta.index = self._blocks
        return _write("content_block_start", index=self._blocks, content_block=TextBlock(""))

    def _close_text(self) -> bytes:
        if not self._in_text:
            return b""
        self._in_text = False
        return self._stop()

    def _called(self, used: ToolUseBlock) -> bytes:
        """The events of a call: its input comes as one delta."""
        begun = ToolUseBlock(used.id, used.name)
        delta = _InputDelta(bytes(used.input).decode())
        return b"".join(
            (
                _write("content_block_start", index=self._blocks, content_block=begun),
                _write("content_block_delta", index=self._blocks, delta=delta),
                self._stop(),
            )
        )

    def _stop(self) -> bytes:
        self._blocks += 1
        return _write("content_block_stop", index=self._blocks - 1)


def _used(call: FoundCall) -> ToolUseBlock:
    input = msgspec.Raw(call.arguments.encode())
    return ToolUseBlock(f"toolu_{secrets.token_hex(12)}", call.name, input)


def _ended(choice: ChoiceState) -> _StopDelta:
    """Why it ended, in Anthropic's words."""
    if choice.finish_reason == "tool_calls":
        return _StopDelta("tool_use", None)
    if choice.met is not None:
        return _StopDelta("stop_sequence", choice.met)
    return _StopDelta("max_tokens" if choice.finish_reason == "length" else "end_turn", None)


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _write(kind: str, **fields: Any) -> bytes:
    return named_event(kind, _MessagesEvent(kind, **fields))

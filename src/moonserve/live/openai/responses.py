"""OpenAI's Responses with our own workers: a body as a chat, and the chat's reply as a Response.

`live/api/own_text` calls it. Responses are text and calls of functions, and are not kept. A field
that asks for something else is a BadRequest that names it. The fields store (false), tools,
tool_choice, parallel_tool_calls, metadata and user come back as sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import BadRequest
from moonserve.core.units import Tokens
from moonserve.live.http.message import decode_json
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
from moonserve.live.openai.reply import ChoiceState, Usage, call_id, named_event
from moonserve.live.openai.request import (
    AtLeastOne,
    BodyShape,
    CalledFunction,
    ChatRequest,
    ContentPart,
    Item,
    Message,
    SharedFields,
    StreamOptions,
    ToolCall,
    at_least_one,
    check,
    check_content,
    check_count,
    check_parts,
    check_role,
    expect_items,
    shared,
    stated,
)
from moonserve.live.openai.unserved import RESPONSES, UNTOUCHED, Refused, refuse_unless
from moonserve.live.text.calls import FoundCall

_FIELD = "input"
_PARTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_NEEDED = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of an item -> the fields that it must have."""
_MAX_METADATA_BYTES = 32 << 10
_TEXT_ONLY = Refused(("text",), "use response_format in /v1/chat/completions")


class ResponseItem(Item, kw_only=True):
    """One item of the input: a message, a call of a function, or what it returned."""

    type: Annotated[str, stated(enum=["message", *_NEEDED])] = "message"
    role: Annotated[str, stated(enum=[*_ROLES])] = ""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    """Of a call: the function."""
    arguments: str | None = None
    """Of a call: a JSON object."""
    call_id: str | None = None
    """Of a call and of what it returned."""
    output: str | list[ContentPart] | None = None
    """What a call returned."""


class ResponseTool(msgspec.Struct):
    """A tool. Only functions are served."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedFunction(msgspec.Struct):
    """A tool_choice of one function."""

    type: Literal["function"]
    name: str


class AskedFormat(msgspec.Struct):
    """The form of the output."""

    type: msgspec.Raw = UNTOUCHED


class AskedText(msgspec.Struct):
    """How the text is to be made; verbosity changes nothing here, as in chat."""

    format: AskedFormat | None = None


class ResponseRequest(SharedFields, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: Annotated[str | list[ResponseItem], stated(minItems=1)]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: AtLeastOne | None = None
    stream_options: StreamOptions | None = None
    text: AskedText | None = None
    metadata: msgspec.Raw = UNTOUCHED
    user: str | None = None


class _ResponseFields(SharedFields, kw_only=True):
    model: str
    input: str | list[ResponseItem]
    instructions: str | None = None
    tools: msgspec.Raw = UNTOUCHED
    tool_choice: msgspec.Raw = UNTOUCHED
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stream_options: StreamOptions | None = None
    text: AskedText | None = None
    metadata: msgspec.Raw = UNTOUCHED
    user: str | None = None


_ResponseBody = RESPONSES.added_to(_ResponseFields)


class _ResponseTools(msgspec.Struct):
    tools: list[ResponseTool] | None = None


class _ResponseToolChoice(msgspec.Struct):
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None


class _GivenMetadata(msgspec.Struct):
    metadata: dict[str, str] | None = None


class ResponseChat(ChatRequest, kw_only=True):
    """A Response as the chat that it is."""

    prompt_field: ClassVar[str] = _FIELD
    asked: _ResponseFields

    def _arguments_paths(self) -> list[str]:
        """See ChatRequest."""
        return [
            f"{_FIELD}[{i}].arguments"
            for i, item in enumerate(self.asked.input)
            if isinstance(item, ResponseItem) and item.type == "function_call"
        ]


SHAPE = BodyShape(ResponseRequest, harmless=RESPONSES.harmless)


def parse_response(body: bytes, max_messages: int) -> ResponseChat:
    """The request with every field checked. Raises BadRequest."""
    expect_items(_FIELD, max_messages)
    sent = RESPONSES.decode(body, _ResponseBody)
    if sent.text is not None and sent.text.format is not None:
        refuse_unless("text.format.type", sent.text.format.type, _TEXT_ONLY)
    at_least_one("max_output_tokens", sent.max_output_tokens)
    _check_metadata(bytes(sent.metadata))
    messages = _messages(sent, max_messages)
    if sent.instructions is not None:
        messages.insert(0, Message("system", sent.instructions))
    chat = ResponseChat(
        model=sent.model,
        messages=messages,
        max_tokens=sent.max_output_tokens,
        asked=sent,
        parallel_tool_calls=sent.parallel_tool_calls,
        **_tool_fields(sent),
        **shared(sent),
    )
    check(chat)
    return chat


def _messages(sent: _ResponseFields, most: int) -> list[Message]:
    """The messages of the input; calls belong to the assistant's message before them.

    Raises BadRequest.
    """
    if isinstance(sent.input, str):
        return [Message("user", sent.input)]
    check_count(sent.input, _FIELD, most)
    messages: list[Message] = []
    called: set[str] = set()
    for i, item in enumerate(sent.input):
        message = _message(item, f"{_FIELD}[{i}]")
        if message.role == "tool":
            check_result(message.tool_call_id, called, f"{_FIELD}[{i}].call_id")
        called.update(call.id for call in message.tool_calls or ())
        before = messages[-1] if messages else None
        if message.tool_calls and before is not None and before.role == "assistant":
            before.tool_calls = [*(before.tool_calls or ()), *message.tool_calls]
        else:
            messages.append(message)
    return messages


def _message(item: ResponseItem, path: str) -> Message:
    """One item as a message. Raises BadRequest."""
    if item.type == "message":
        check_role(item.role, path, _ROLES)
        check_content(item.content, path, _PARTS)
        return Message(item.role, item.content)
    if item.type not in _NEEDED:
        what = f"{item.type[:40]!r} is not supported here; only message, {', '.join(_NEEDED)}"
        raise BadRequest(f"{path}.type: {what}", f"{path}.type", "unsupported_parameter")
    for name in _NEEDED[item.type]:
        if getattr(item, name) is None:
            raise BadRequest(f"{path}.{name}: is missing", f"{path}.{name}")
    if item.type == "function_call":
        function = CalledFunction(item.name or "", item.arguments or "")
        call = ToolCall(id=item.call_id or "", function=function)
        return Message("assistant", tool_calls=[call])
    check_parts(item.output or "", f"{path}.output", _PARTS)
    return Message("tool", item.output, tool_call_id=item.call_id)


def _tool_fields(sent: _ResponseFields) -> dict[str, Any]:
    """The fields of a chat that are about tools. Raises BadRequest."""
    if sent.tools is UNTOUCHED and sent.tool_choice is UNTOUCHED:
        return {}
    sent_tools = decode_tools(sent.tools, _ResponseTools).tools or []
    check_tools([tool.name for tool in sent_tools])
    tools = [
        Tool("function", Function(tool.name, tool.description, tool.parameters))
        for tool in sent_tools
    ]
    sent_choice = decode_choice(sent.tool_choice, _ResponseToolChoice).tool_choice or "auto"
    choice: ToolChoice
    if isinstance(sent_choice, NamedFunction):
        choice = NamedTool("function", FunctionName(sent_choice.name))
    else:
        choice = sent_choice
    check_choice(choice, tools)
    return {"tools": tools, "tool_choice": choice}


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
    """The one part of an output message."""

    text: str
    type: str = "output_text"
    annotations: Sequence[Any] = ()
    logprobs: Sequence[Any] = ()


class OutputMessage(msgspec.Struct):
    """An output item with text."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: Sequence[OutputText] = ()
    type: str = "message"
    role: str = "assistant"


class FunctionCall(msgspec.Struct):
    """An output item that is a call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    """A JSON object."""
    status: Literal["in_progress", "completed"]
    type: str = "function_call"


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
    output: Sequence[OutputMessage | FunctionCall] = ()
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: TextSettings = TextSettings()
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
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
    item: OutputMessage | FunctionCall | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
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
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            tool_choice=_or_else(asked.tool_choice, b'"auto"'),
            tools=_or_else(asked.tools, b"[]"),
            top_p=1.0 if asked.top_p is None else asked.top_p,
            user=asked.user,
            metadata=_or_else(asked.metadata, b"{}"),
        )
        self._request = request
        self._may_call = chat.may_call
        self._count = 0
        self._done: list[OutputMessage | FunctionCall] = []
        self._item: str | None = None
        """Id of the message that gets text now; None: none is open."""
        self._pieces: list[str] = []
        self._reason: str | None = "stop"
        self._delta = _ResponseEvent("response.output_text.delta", 0, content_index=0, logprobs=())

    def whole(self, said: Sequence[tuple[str, ChoiceState]], usage: Usage) -> bytes:
        """See Writer."""
        ((text, choice),) = said
        self._reason = choice.finish_reason
        calls = choice.take_calls() if self._may_call else ()
        if text or not calls:
            self._done.append(OutputMessage(self._next_id(), self._status(), [OutputText(text)]))
        self._done += map(_called, calls)
        self._finish(usage)
        return msgspec.json.encode(self._reply)

    def begin(self, usage: Usage) -> bytes:
        """See Writer. Where a call may come first, the message begins with its text."""
        begun = self._write("response.created", response=self._reply)
        begun += self._write("response.in_progress", response=self._reply)
        return begun if self._may_call else begun + self._open_text()

    def piece(self, text: str, choice: ChoiceState) -> bytes:
        """See Writer."""
        self._reason = choice.finish_reason or self._reason
        events = b""
        if text:
            if self._item is None:
                events = self._open_text()
            self._pieces.append(text)
            event = self._delta
            event.sequence_number = self._count
            event.delta = text
            self._count += 1
            events += named_event(event.type, event)
        if self._may_call:
            for call in choice.take_calls():
                events += self._close_text() + self._call_events(_called(call))
        return events

    def end(self, usage: Usage) -> bytes:
        """See Writer. A Response without a call has a message, if it is an empty one."""
        events = b"" if self._done or self._item is not None else self._open_text()
        events += self._close_text()
        self._finish(usage)
        return events + self._write(f"response.{self._reply.status}", response=self._reply)

    def _open_text(self) -> bytes:
        """Begin a message."""
        self._item = self._delta.item_id = self._next_id()
        self._delta.output_index = len(self._done)
        item = OutputMessage(self._item, "in_progress")
        added = self._write("response.output_item.added", item=item, output_index=len(self._done))
        return added + self._of_text("response.content_part.added", part=OutputText(""))

    def _close_text(self) -> bytes:
        """End the message that is open."""
        if self._item is None:
            return b""
        text = "".join(self._pieces)
        item = OutputMessage(self._item, self._status(), [OutputText(text)])
        events = b"".join(
            (
                self._of_text("response.output_text.done", text=text, logprobs=()),
                self._of_text("response.content_part.done", part=item.content[0]),
                self._write("response.output_item.done", item=item, output_index=len(self._done)),
            )
        )
        self._done.append(item)
        self._item = None
        self._pieces.clear()
        return events

    def _call_events(self, call: FunctionCall) -> bytes:
        """The events of a call: its arguments come as one delta."""
        place: dict[str, Any] = {"item_id": call.id, "output_index": len(self._done)}
        begun = msgspec.structs.replace(call, arguments="", status="in_progress")
        name = "response.function_call_arguments"
        events = b"".join(
            (
                self._write("response.output_item.added", item=begun, output_index=len(self._done)),
                self._write(f"{name}.delta", delta=call.arguments, **place),
                self._write(f"{name}.done", arguments=call.arguments, **place),
                self._write("response.output_item.done", item=call, output_index=len(self._done)),
            )
        )
        self._done.append(call)
        return events

    def _next_id(self) -> str:
        """The id of the next message."""
        number = len(self._done)
        return f"msg_{self._request}" + (f"_{number}" if number else "")

    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._reason == "length" else "completed"

    def _finish(self, usage: Usage) -> None:
        reply = self._reply
        reply.status = self._status()
        if reply.status == "incomplete":
            reply.incomplete_details = Incomplete("max_output_tokens")
        reply.output = self._done
        reply.usage = ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(),
            usage.total_tokens,
        )

    def _of_text(self, kind: str, **fields: Any) -> bytes:
        """An event of the message that is open."""
        place: dict[str, Any] = {"item_id": self._item, "output_index": len(self._done)}
        return self._write(kind, **place, content_index=0, **fields)

    def _write(self, kind: str, **fields: Any) -> bytes:
        event = _ResponseEvent(kind, self._count, **fields)
        self._count += 1
        return named_event(kind, event)


def _called(call: FoundCall) -> FunctionCall:
    item = f"fc_{secrets.token_hex(12)}"
    return FunctionCall(item, call_id(), call.name, call.arguments, "completed")


def _or_else(sent: msgspec.Raw, default: bytes) -> msgspec.Raw:
    """A field as it was sent, or its default where it was not."""
    return msgspec.Raw(default) if bytes(sent) in (b"", b"null") else sent

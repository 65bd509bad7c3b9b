"""Tools of OpenAI's chat: their definitions, and which of them a model may call.

`request` has these fields in a chat, and Responses and Messages are translated to them. Each field
is decoded once its length is known. Every refusal is a BadRequest that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.units import Bytes
from moonserve.live.http.message import decode_json

_TOOLS_BYTES: Bytes = 256 << 10
"""More JSON than the tools of a coding agent have."""
_CHOICE_BYTES: Bytes = 1 << 10
_MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NAME_CHARS = 64
_TYPE_PATH = re.compile(r"tools\[(\d+|\.\.\.)\]\.type")
_T = TypeVar("_T")


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the client has."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""


class Tool(msgspec.Struct):
    """A tool. Only functions are served."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct):
    """Which function."""

    name: str


class NamedTool(msgspec.Struct):
    """A tool_choice of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool
"""Which tools a model may or must call."""


def decode_field(name: str, raw: msgspec.Raw, most: Bytes, shape: type[_T]) -> _T:
    """Decode one field into the struct that has this field alone. Raises BadRequest."""
    data = bytes(raw)
    if len(data) > most:
        raise BadRequest(f"{name}: must have at most {most} bytes of JSON", name)
    return decode_json(b'{"%b":%b}' % (name.encode(), data) if data else b"{}", shape)


class _ChatTools(msgspec.Struct):
    tools: list[Tool] | None = None


class _ChatToolChoice(msgspec.Struct):
    tool_choice: ToolChoice | None = None


def decode_tools(raw: msgspec.Raw, shape: type[_T]) -> _T:
    """The field `tools` in the struct of an API. Raises BadRequest."""
    try:
        return decode_field("tools", raw, _TOOLS_BYTES, shape)
    except BadRequest as error:
        path = error.param or ""
        if _TYPE_PATH.fullmatch(path) and ": must be " in str(error):
            what = f"{error}; only such tools are served here"
            raise BadRequest(what, path, "unsupported_parameter") from None
        raise


def decode_choice(raw: msgspec.Raw, shape: type[_T]) -> _T:
    """The field `tool_choice` in the struct of an API. Raises BadRequest."""
    return decode_field("tool_choice", raw, _CHOICE_BYTES, shape)


def chat_tools(tools: msgspec.Raw, choice: msgspec.Raw) -> tuple[list[Tool], ToolChoice]:
    """The tools of a chat, and which of them it may call. Raises BadRequest."""
    if not bytes(tools) and not bytes(choice):
        return [], "auto"
    found = decode_tools(tools, _ChatTools).tools or []
    chosen = decode_choice(choice, _ChatToolChoice).tool_choice or "auto"
    check_tools([tool.function.name for tool in found], "function.name")
    check_choice(chosen, found)
    return found, chosen


def check_tools(names: Sequence[str], field: str = "name", most: int = _NAME_CHARS) -> None:
    """Raise BadRequest for too many tools, or a name that is no good or that two tools have.

    field: the one of a tool that has its name; most: characters of a name.
    """
    if len(names) > _MAX_TOOLS:
        raise BadRequest(f"tools: at most {_MAX_TOOLS}", "tools")
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        where = f"tools[{i}].{field}"
        if len(name) > most or _NAME.fullmatch(name) is None:
            what = f"must have 1 to {most} of the characters A-Z, a-z, 0-9, _ and -"
            raise BadRequest(f"{where}: {what}, not {name[:80]!r}", where)
        if seen.setdefault(name, i) != i:
            what = f"tools[{seen[name]}] has the name {name!r} too; names must differ"
            raise BadRequest(f"{where}: {what}", where)


def check_result(call: str | None, known: Collection[str], path: str) -> None:
    """Raise BadRequest for what a tool returned, if no call before it has that id.

    call: the id, which the body has at `path`; known: the ids of the calls before it.
    """
    if call is None:
        raise BadRequest(f"{path}: is missing", path)
    if call not in known:
        what = f"no call before it has the id {call[:80]!r}; send the message with that call too"
        raise BadRequest(f"{path}: {what}", path)


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raise BadRequest for a choice that these tools do not have."""
    names = [tool.function.name for tool in tools]
    if choice == "required" and not names:
        raise BadRequest("tool_choice: needs tools; add them, or leave it out", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        what = f"{choice.function.name[:80]!r} is not one of the tools"
        raise BadRequest(f"tool_choice: {what}", "tool_choice")


def call_schema(choice: ToolChoice | None, tools: Sequence[Tool]) -> str:
    """The JSON schema of one call, where the choice demands one; empty: none is demanded.

    Raises BadRequest.
    """
    if choice is None or choice in ("none", "auto"):
        return ""
    wanted = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        wanted = [it for it in wanted if it.name == choice.function.name]
    shared: dict[str, dict[str, Any]] = {}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": it.name}, "arguments": _without_shared(it, shared)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for it in wanted
    ]
    return msgspec.json.encode({"anyOf": calls, **shared}).decode()


def _without_shared(function: Function, shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The schema of a function's arguments. What its references name goes to `shared`, since they
    count from the root of the whole schema. Raises BadRequest."""
    parameters = dict(function.parameters or {"type": "object"})
    for field in ("$defs", "definitions"):
        named = parameters.pop(field, None)
        if not isinstance(named, dict):
            continue
        for name, schema in named.items():
            if shared.setdefault(field, {}).setdefault(name, schema) != schema:
                what = f"two of them have different schemas {name[:80]!r} in {field}; rename one"
                raise BadRequest(f"tools: {what}", "tools")
    return parameters

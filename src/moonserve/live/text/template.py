"""Chat templates: from a conversation to the prompt text that the model was trained on.

The gateway uses it. The template is the model's own Jinja template. It runs in a sandbox, with the
variables and functions of Hugging Face's apply_chat_template. It cannot reach Python's internals,
and ranges, repeats and the result have limits, so a faulty template ends in an error. (A template
written to exhaust memory still can; it comes with the model's files, which are trusted.)

Special tokens in messages, such as "<|im_end|>", are not escaped. After rendering they look like
the template's own, and become special tokens, as in vLLM and transformers. So a user can end their
own turn early. An operator who must prevent this has to filter messages before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moonserve.core.errors import BadRequest
from moonserve.live.model.config import read_json
from moonserve.live.model.errors import BadModel
from moonserve.live.model.gguf import open_gguf
from moonserve.live.text.calls import CallReader, FoundCall
from moonserve.live.text.tokenizer import Tokenizer

MAX_RENDERED = 16 << 20
"""The most characters of a rendered prompt: more than any model's context, and still harmless."""
MAX_LOOPS = 1_000_000
"""The most numbers of all range() calls together in one rendering."""
_MAX_EXPONENT = 64
_GGUF_KEY = "tokenizer.chat_template"

# Errors that a template's code may raise for messages that it does not expect.
_RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox. It refuses repeats such as "a" * 10**9 before they use memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            repeats = [(len(a), b) for a, b in ((left, right), (right, left)) if _is_sequence(a)]
            too_much = any(isinstance(n, int) and n * size > MAX_RENDERED for size, n in repeats)
        else:
            too_much = isinstance(right, int) and right > _MAX_EXPONENT
        if too_much:
            raise SecurityError(f"the result of {operator} is too large for a chat template")
        return super().call_binop(context, operator, left, right)


def _is_sequence(value: object) -> bool:
    return isinstance(value, str | list | tuple)


class ChatTemplate:
    """The compiled template of one model. Threads may share it."""

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, with_tools: str | None = None
    ) -> None:
        """source: None: the model has no chat template; with_tools: the template that it has for
        prompts with tools; None: the same one. Raises ConfigError if one is not Jinja."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        try:
            self._template = None if source is None else environment.from_string(source)
            self._with_tools = self._template
            if with_tools is not None:
                self._with_tools = environment.from_string(with_tools)
            reads = meta.find_undeclared_variables(environment.parse(with_tools or source or ""))
        except TemplateError as error:
            raise BadModel(f"the model's chat template is not valid: {error}") from error
        self.knows_tools = "tools" in reads
        """Whether it has a place for tools."""
        self._globals = {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.has_known_calls = self.knows_tools and self._writes_calls()
        """Whether it writes calls of tools in the form that `calls` reads."""

    def _writes_calls(self) -> bool:
        """Whether a call that it renders is read again. The model was trained on that form."""
        called = {"name": "known_tool", "arguments": {"count": 1}}
        call = {"id": "call_1", "type": "function", "function": called}
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": "Call it."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "Done.", "tool_call_id": "call_1", "name": "known_tool"},
        ]
        try:
            text = self.render(conversation, ())
        except BadRequest:
            return False
        reader = CallReader()
        reader.feed(text)
        return FoundCall("known_tool", '{"count":1}') in reader.take()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text, ready for the reply. It has its BOS: encode with add_bos=False.

        messages: role, content and perhaps name, each one string; also tool_calls and tool_call_id.
        tools: in OpenAI's form; None: there are none. Raises BadRequest for `messages` if the
        template refuses them.
        """
        template = self._template if tools is None else self._with_tools
        if template is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions with a prompt", "messages"
            )
        variables = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
            "range": _Ranges(),
            **self._globals,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                size += len(piece)
                if size > MAX_RENDERED:
                    raise BadRequest(
                        f"the prompt is longer than {MAX_RENDERED} characters", "messages"
                    )
                pieces.append(piece)
        except _RENDER_ERRORS as error:
            raise BadRequest(
                f"the model's chat template refused the messages: {error}", "messages"
            ) from error
        return "".join(pieces)


class _Ranges:
    """range() for one rendering, with a limit on the numbers of all its calls."""

    def __init__(self) -> None:
        self.left = MAX_LOOPS

    def __call__(self, *args: int) -> range:
        numbers = range(*args)
        self.left -= len(numbers)
        if self.left < 0:
            raise SecurityError(f"a chat template may loop over {MAX_LOOPS} numbers at most")
        return numbers


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as apply_chat_template writes it; Jinja's own filter would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def load_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Read the chat template of a .gguf file or a Hugging Face folder; none is no error yet.

    If there are several, it takes those named "default" and "tool_use".
    """
    if not path.is_dir():
        return ChatTemplate(template_of_gguf(path), tokenizer)
    named = _of_folder(path)
    return ChatTemplate(named.get("default"), tokenizer, named.get("tool_use"))


def template_of_gguf(path: Path) -> str | None:
    """Return the source of the chat template in a GGUF file; None: it has none."""
    source = open_gguf(path).metadata.get(_GGUF_KEY)
    return source if isinstance(source, str) else None


class _Named(msgspec.Struct):
    name: str
    template: str


class _TemplateConfig(msgspec.Struct):
    """The field of tokenizer_config.json that is read: one template, or several with names."""

    chat_template: str | list[_Named] | None = None


def _of_folder(folder: Path) -> dict[str, str]:
    """Read the templates by name: of files, which are the newer place, or else of
    tokenizer_config.json."""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    config = folder / "tokenizer_config.json"
    if not files["default"].exists() and config.exists():
        found = read_json(config, _TemplateConfig).chat_template or []
        if isinstance(found, str):
            return {"default": found}
        return {entry.name: entry.template for entry in found}
    return {name: _read(file) for name, file in files.items() if file.exists()}


def _read(file: Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel(f"cannot read {file}: {error}") from error

"""Which tokens may come next so that the text stays JSON of a schema, by llguidance.

The gateway checks schemas with it, and workers make a Grammar for each request that has one. The
package is the optional extra `grammar`; without it such requests are refused with what to install.
A Grammar is not for several threads at once. Nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, EngineFailed, PackageMissing
from moonserve.live.text.tokenizer import Tokenizer

FIELDS = "response_format and tool_choice"
"""What clients ask for by fields that need grammars."""
SCHEMA_FAILED = "json_schema_failed"
"""The code of a BadRequest about a schema that failed in the middle of its text."""
ANY_OBJECT = '{"type":"object"}'
"""The schema of every JSON object."""
_MOST_PROPERTIES = 2000
"""Of one object in a schema. These take a second to compile; the time grows with their square."""
_MOST_ITEMS = 10_000
"""What llguidance may keep for one place of a text; an object takes four for each property."""
_MISFIT = "doesn't satisfy the grammar"
"""In llguidance's error about a token that was not allowed."""
_WRITE_BYTES = 1000
_WRITE_S = 0.5
"""How far, and for how long, a schema is tried at the gateway."""
_MISSING = (
    f"{FIELDS} need the package llguidance at the gateway and at the workers, and {{where}} has it"
    " not; install it there with: pip install 'moonserve[grammar]'"
)


def check_schema(schema: str, asked_by: str, param: str) -> None:
    """Raise BadRequest if no text can be made by this JSON schema. It may take seconds.

    It writes a short text of the schema, one byte at a time. So it finds faults that every text
    meets. A fault behind an optional property stays unseen.

    asked_by: the field that asks for JSON; param: the one that has the schema.
    """
    try:
        library = _library("the gateway")
    except PackageMissing as error:
        raise BadRequest(f"{asked_by}: {error}", asked_by, "unsupported_parameter") from None
    wrong = _shape_fault(schema)
    if not wrong:
        matcher = _matcher(library, library.LLTokenizer("byte"), schema)
        _write_short(matcher)
        wrong = _fault(matcher)
    if wrong:
        raise BadRequest(f"{param}: {wrong}", param)


def _shape_fault(schema: str) -> str:
    """What is wrong with a schema before it is compiled; empty: nothing."""
    try:
        root = msgspec.json.decode(schema)
    except UNREADABLE as error:
        return f"cannot be read: {error}"
    if not isinstance(root, dict):
        return "must be an object; {} allows any JSON"
    parts: list[Any] = [root]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            properties = part.get("properties")
            if isinstance(properties, dict) and len(properties) > _MOST_PROPERTIES:
                return (
                    f"an object has {len(properties)} properties, and {_MOST_PROPERTIES} are the"
                    " most; leave some out, or put them into objects of their own"
                )
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return ""


def _write_short(matcher: Any) -> None:
    """Take the matcher along a short text, until it is whole, fails, or is long enough."""
    until_s = time.monotonic() + _WRITE_S
    last = 0
    for _ in range(_WRITE_BYTES):
        if matcher.is_error() or matcher.is_accepting() or time.monotonic() > until_s:
            return
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if not allowed:
            return
        # A quotation mark ends a string, but after a bracket it would begin one.
        ends = b'}]"' if last in b"[{" else b'"}]'
        lowest = (allowed & -allowed).bit_length() - 1
        last = next((end for end in ends if allowed >> end & 1), lowest)
        matcher.consume_token(last)


def _fault(matcher: Any) -> str:
    """Why a matcher failed, in one line, with the remedy; empty: it did not."""
    if not matcher.is_error():
        return ""
    said = matcher.get_error().partition("\n<state>")[0]
    if said.startswith("NoExtension") or "ff_tokens" in said:
        return (
            "cannot be followed: its text would have no end; let a $ref that leads back to itself"
            " be optional, or leave it out"
        )
    if "Current row has" in said:
        return (
            "cannot be followed: too much may come next at one place of its text; give its objects"
            " fewer properties, or anyOf fewer choices"
        )
    lines = [line.strip() for line in said.splitlines()]
    words = " ".join(line for line in lines if line.strip("^"))
    return f"cannot be followed: {words[:300]}"


def _library(where: str) -> Any:
    """The package. Raises PackageMissing, which names this process as `where`."""
    try:
        import llguidance
    except ImportError:
        raise PackageMissing(_MISSING.format(where=where)) from None
    return llguidance


def _matcher(library: Any, tokenizer: Any, schema: str) -> Any:
    """What follows a text in its schema, a JSON object. Its errors are in it."""
    # Small models would fill their answer with the white space that JSON allows between tokens.
    compiled = library.LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False}
    )
    limits = library.LLParserLimits(max_items_in_row=_MOST_ITEMS)
    return library.LLMatcher(tokenizer, compiled, log_level=0, limits=limits)


class Grammar:
    """How far the text of one request has come in its schema."""

    def __init__(self, matcher: Any, eos_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids

    def take(self, tokens: Sequence[int]) -> None:
        """Tokens that were generated. Raises EngineFailed if they do not fit the schema, and
        BadRequest if the schema cannot be followed further."""
        for token in tokens:
            if token in self._eos_ids and self._matcher.is_accepting():
                return  # a text that is whole takes no token more
            if not self._matcher.consume_token(token):
                raise self._failed()

    def allowed(self) -> bytes:
        """A bit for each token that may come next, the lowest id first. Raises BadRequest."""
        mask = bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._failed()
        return mask

    def _failed(self) -> BadRequest | EngineFailed:
        if _MISFIT in self._matcher.get_error():
            return EngineFailed("the text left its JSON schema")
        why = _fault(self._matcher) or "cannot be followed: no token fits"
        return BadRequest(f"{FIELDS}: the JSON schema {why}", code=SCHEMA_FAILED)


def of_schema(error: BadRequest, field: str) -> BadRequest:
    """A worker's error about a schema as one about the field that has it; others as they are."""
    if error.code != SCHEMA_FAILED:
        return error
    return BadRequest(str(error).replace(FIELDS, field, 1), field, SCHEMA_FAILED)


class Grammars:
    """Makes the grammars of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: Any = None

    def grammar(self, schema: str, generated: Sequence[int]) -> Grammar:
        """The grammar of a schema after these tokens. It may take a second.

        Raises BadRequest, EngineFailed, PackageMissing.
        """
        library = _library("this worker")
        if self._known is None:
            wrapped = library.TokenizerWrapper(_Vocabulary(self._tokenizer))
            eos = [*self._tokenizer.eos_ids]
            self._known = library.LLTokenizer(wrapped, eos_token=eos)
        wrong = _shape_fault(schema)
        if wrong:
            raise BadRequest(f"structured_outputs: {wrong}", "structured_outputs")
        matcher = _matcher(library, self._known, schema)
        wrong = _fault(matcher)
        if wrong:
            raise BadRequest(f"structured_outputs: {wrong}", "structured_outputs")
        grammar = Grammar(matcher, self._tokenizer.eos_ids)
        if generated:
            grammar.take(generated)
        return grammar


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.spelled(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = self._specials()

    def _specials(self) -> list[int]:
        named = range(self._tokenizer.vocab_size)
        return [id for id in named if self.tokens[id] and not self._tokenizer.token_bytes(id)]

    def __call__(self, text: bytes | str) -> Iterable[int]:
        raw = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(raw, special=False)

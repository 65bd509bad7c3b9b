"""Which tokens may come next so that the text stays JSON of a schema, by llguidance.

The gateway checks schemas with it, and workers make a Grammar for each request that has one. The
package is the optional extra `grammar`; without it such requests are refused with what to install.
A Grammar is not for several threads at once. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from moonserve.core.errors import BadRequest, EngineFailed, PackageMissing
from moonserve.live.text.tokenizer import Tokenizer

FIELDS = "response_format and tool_choice"
"""What clients ask for by fields that need grammars."""
ANY_OBJECT = '{"type":"object"}'
"""The schema of every JSON object."""
_MISSING = (
    f"{FIELDS} need the package llguidance at the gateway and at the workers, and {{where}} has it"
    " not; install it there with: pip install 'moonserve[grammar]'"
)


def check_schema(schema: str, asked_by: str, param: str) -> None:
    """Raise BadRequest if no text can be made by this JSON schema. It may take a second.

    asked_by: the field that asks for JSON; param: the one that has the schema.
    """
    try:
        library = _library("the gateway")
    except PackageMissing as error:
        raise BadRequest(f"{asked_by}: {error}", asked_by, "unsupported_parameter") from None
    try:
        grammar = _compiled(library, schema)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}", param) from None
    wrong = library.LLMatcher.validate_grammar(grammar)
    if wrong:
        raise BadRequest(f"{param}: cannot be followed: {wrong[:300]}", param)


def _library(where: str) -> Any:
    """The package. Raises PackageMissing, which names this process as `where`."""
    try:
        import llguidance
    except ImportError:
        raise PackageMissing(_MISSING.format(where=where)) from None
    return llguidance


def _compiled(library: Any, schema: str) -> str:
    """A schema in llguidance's form. Raises ValueError."""
    # Small models would fill their answer with the white space that JSON allows between tokens.
    made: str = library.LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False}
    )
    return made


class Grammar:
    """How far the text of one request has come in its schema."""

    def __init__(self, matcher: Any, eos_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids

    def take(self, tokens: Sequence[int]) -> None:
        """Tokens that were generated. Raises EngineFailed if they do not fit the schema."""
        for token in tokens:
            if token in self._eos_ids and self._matcher.is_accepting():
                return  # a text that is whole takes no token more
            if not self._matcher.consume_token(token):
                raise self._failed()

    def allowed(self) -> bytes:
        """A bit for each token that may come next, the lowest id first. Raises EngineFailed."""
        mask = bytes(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise self._failed()
        return mask

    def _failed(self) -> EngineFailed:
        why = self._matcher.get_error().partition("\n")[0]
        return EngineFailed(f"the text left its JSON schema: {why or 'no token fits'}")


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
        matcher = library.LLMatcher(self._known, _compiled(library, schema), log_level=0)
        if matcher.is_error():
            raise BadRequest(f"structured_outputs: {matcher.get_error()[:300]}")
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

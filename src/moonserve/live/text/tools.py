"""What the gateway needs to turn text into token ids and back, per model.

`TextTools` is the seam (tests use a fake), `ModelText` the real one. A Detokenizer makes text of
token ids as they come, in whole characters; a generation has one. What its `feed` and `flush`
return, joined, never depends on how the input was cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from moonserve.live.text.template import ChatTemplate
from moonserve.live.text.tokenizer import Tokenizer


class TokenText(Protocol):
    """Token ids to text as they come, in whole characters. One object per generation."""

    def feed(self, ids: Iterable[int]) -> str:
        """Take more ids; the text that is now certain."""

    def flush(self) -> str:
        """The text that was held back, at the end."""


class TextTools(Protocol):
    """The text tools of one model. Several threads may call them."""

    @property
    def vocab_size(self) -> int:
        """Ids are from 0 to this, exclusive."""

    @property
    def longest_token_bytes(self) -> int:
        """The most UTF-8 bytes of text that one token stands for, special tokens included."""

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template has a place for tools."""

    @property
    def has_known_calls(self) -> bool:
        """Whether it writes calls of tools in the form that `calls` reads."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Text to ids. Raises BadRequest if it cannot be encoded."""

    def spelled(self, id: int) -> bytes:
        """The bytes of a token, whole characters or not; of a special token, those of its name."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Messages to the prompt's text, BOS included; see ChatTemplate.render. Raises BadRequest
        if the template refuses them."""

    def detokenizer(self) -> TokenText:
        """A new TokenText, for ids that continue a prompt."""


class Detokenizer:
    """The joined output is the text of all ids; U+FFFD replaces only bytes that are not UTF-8.

    at_start: whether the ids begin a text, as in Tokenizer.decode, or continue a prompt. At the
    start of a text, SentencePiece adds a space that does not belong to it.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = True) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and tokenizer.strips_space

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that is certain now; bytes of an incomplete character wait."""
        raw = b"".join(map(self._tokenizer.token_bytes, ids))
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """End the text: an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)


class ModelText:
    """The text tools of a real model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.longest_token_bytes = tokenizer.longest_token_bytes
        self.encode = tokenizer.encode
        self.spelled = tokenizer.spelled
        self.render_chat = template.render
        self.knows_tools = template.knows_tools
        self.has_known_calls = template.has_known_calls

    def detokenizer(self) -> TokenText:
        """See TextTools."""
        return Detokenizer(self._tokenizer, at_start=False)

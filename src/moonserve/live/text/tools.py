"""What the gateway needs to turn text into token ids and back, per model.

`TextTools` is the seam (tests use a fake), `ModelText` the real one over live/text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from moonserve.live.text.detok import Detokenizer
from moonserve.live.text.template import ChatTemplate
from moonserve.live.text.tokenizer import Tokenizer


class TokenText(Protocol):
    """Ids to text as they come, whole characters only; one object per generation."""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is now certain."""

    def flush(self) -> str:
        """The end: what was held back."""


class TextTools(Protocol):
    """One model's text side. May be called from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to below this."""

    @property
    def longest_token_bytes(self) -> int:
        """The most UTF-8 bytes of a text that one token stands for, special tokens included."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Text to ids; BadRequest where it cannot be."""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages to prompt text, BOS included; BadRequest where the template refuses."""

    def detokenizer(self) -> TokenText:
        """A fresh one, for ids that continue a prompt."""


class ModelText:
    """TextTools of a real model's files."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def vocab_size(self) -> int:
        """See TextTools."""
        return self._tokenizer.vocab_size

    @property
    def longest_token_bytes(self) -> int:
        """See TextTools."""
        return self._tokenizer.longest_token_bytes

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """See TextTools."""
        return self._tokenizer.encode(text, add_bos=add_bos)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """See TextTools."""
        return self._template.render(messages)

    def detokenizer(self) -> TokenText:
        """See TextTools."""
        return Detokenizer(self._tokenizer, at_start=False)

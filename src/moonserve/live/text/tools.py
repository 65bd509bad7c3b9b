"""What a process needs to turn text into token ids and back, per model.

`TextTools` is the interface, which tests fake; `ModelText` implements it with the files of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from moonserve.live.text.detok import Detokenizer
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

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Text to ids. Raises BadRequest if it cannot be encoded."""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages to the prompt's text, BOS included. Raises BadRequest if the template refuses
        them."""

    def detokenizer(self) -> TokenText:
        """A new TokenText, for ids that continue a prompt."""


class ModelText:
    """The text tools of a real model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.longest_token_bytes = tokenizer.longest_token_bytes
        self.encode = tokenizer.encode
        self.render_chat = template.render

    def detokenizer(self) -> TokenText:
        """See TextTools."""
        return Detokenizer(self._tokenizer, at_start=False)

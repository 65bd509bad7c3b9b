"""Log probabilities in the shapes of OpenAI's chat and completions.

Workers write those of a completion with ids in place of texts, and `live/drive` reads them. The
gateway writes what its client asked for, by `LogprobWriter`. Nothing here computes a probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.request import TokenLogprobs
from moonserve.core.units import Tokens
from moonserve.live.text.tools import TextTools

_ID = "token_id:"


class LikelyToken(msgspec.Struct):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: Sequence[int]


class ChatToken(msgspec.Struct):
    """A token that came, with the likeliest ones."""

    token: str
    logprob: float
    bytes: Sequence[int]
    top_logprobs: Sequence[LikelyToken]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a choice: the first two fields in a chat, the others in a
    completion."""

    content: Sequence[ChatToken] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    tokens: Sequence[str] | UnsetType = UNSET
    token_logprobs: Sequence[float | None] | UnsetType = UNSET
    top_logprobs: Sequence[Mapping[str, float] | None] | UnsetType = UNSET
    text_offset: Sequence[int] | UnsetType = UNSET
    """Where each token begins in the text, in characters."""


class ReadLogprobs(msgspec.Struct):
    """What is read of a worker's reply."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


def by_ids(ids: Sequence[int], given: Sequence[TokenLogprobs | None]) -> ChoiceLogprobs:
    """What a worker writes: of each token its id, and null where it was not sampled there."""
    return ChoiceLogprobs(
        tokens=[f"{_ID}{id}" for id in ids],
        token_logprobs=[None if it is None else it.logprob for it in given],
        top_logprobs=[
            None if it is None else {f"{_ID}{id}": x for id, x in it.top} for it in given
        ],
    )


def read_ids(found: ReadLogprobs) -> list[TokenLogprobs | None]:
    """What `by_ids` wrote. Raises ValueError."""
    read: list[TokenLogprobs | None] = []
    for logprob, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        if logprob is None:
            read.append(None)
            continue
        likely = [(int(name.removeprefix(_ID)), x) for name, x in (top or {}).items()]
        read.append(TokenLogprobs(logprob, tuple(likely)))
    return read


class LogprobWriter:
    """Writes the log probabilities of one choice as its tokens come."""

    def __init__(self, tools: TextTools, chat: bool) -> None:
        self._tools = tools
        self._chat = chat
        self._written: Tokens = 0
        """Characters of the tokens so far."""

    def write(self, ids: Sequence[int], given: Sequence[TokenLogprobs]) -> ChoiceLogprobs:
        """Those of the next tokens."""
        if self._chat:
            content = [self._token(*it) for it in zip(ids, given, strict=True)]
            return ChoiceLogprobs(content=content, refusal=None)
        texts = [self._text(id) for id in ids]
        offsets = []
        for text in texts:
            offsets.append(self._written)
            self._written += len(text)
        return ChoiceLogprobs(
            tokens=texts,
            token_logprobs=[it.logprob for it in given],
            top_logprobs=[{self._text(id): x for id, x in it.top} for it in given],
            text_offset=offsets,
        )

    def _token(self, id: int, given: TokenLogprobs) -> ChatToken:
        likely = [LikelyToken(self._text(it), x, [*self._tools.spelled(it)]) for it, x in given.top]
        return ChatToken(self._text(id), given.logprob, [*self._tools.spelled(id)], likely)

    def _text(self, id: int) -> str:
        return self._tools.spelled(id).decode("utf-8", "replace")

"""vLLM's /tokenize and /detokenize with this gateway's own tokenizer.

`live/api/own_text` calls it. A prompt is a chat or a completion, so that its tokens are those that
a generation would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.units import Tokens
from moonserve.live.http.message import decode_json
from moonserve.live.openai.request import (
    BodyShape,
    ChatRequest,
    CompletionRequest,
    Message,
    context_exceeded,
    parse_chat,
    parse_completion,
)
from moonserve.live.openai.unserved import UNTOUCHED, is_any_of
from moonserve.live.text.tools import TextTools


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a prompt or of a conversation."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: list[int]


class TokenizeReply(msgspec.Struct):
    """The tokens of a prompt."""

    count: Tokens
    max_model_len: Tokens
    tokens: Sequence[int]
    token_strs: Sequence[str] | None = None


class DetokenizeReply(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class _TokenizeBody(msgspec.Struct):
    """What is read of a body besides its prompt."""

    prompt: msgspec.Raw = UNTOUCHED
    messages: msgspec.Raw = UNTOUCHED
    tools: msgspec.Raw = UNTOUCHED
    tool_choice: msgspec.Raw = UNTOUCHED
    return_token_strs: bool | None = None


class _DetokenizeBody(msgspec.Struct):
    model: str
    tokens: msgspec.Raw


class _TokenList(msgspec.Struct):
    tokens: list[int]


_Prompt: TypeAlias = ChatRequest | CompletionRequest
_OF_MESSAGES: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
"""Fields that go with messages only -> their values that ask for nothing."""
_HARMLESS = {"add_special_tokens": (True,)}
TOKENIZE_SHAPE = BodyShape(TokenizeRequest, harmless=_HARMLESS)
DETOKENIZE_SHAPE = BodyShape(DetokenizeRequest)


def parse_tokenize(body: bytes, max_messages: int, max_ids: Tokens) -> tuple[_Prompt, bool]:
    """The prompt, and whether the client wants the text of each token. Raises BadRequest.

    max_ids: the longest context of any model.
    """
    sent = decode_json(body, _TokenizeBody)
    texts = bool(sent.return_token_strs)
    if sent.messages is not UNTOUCHED:
        if not is_any_of(bytes(sent.prompt) or b"null", ()):
            raise BadRequest("prompt: send either prompt or messages, not both", "prompt")
        return parse_chat(body, max_messages), texts
    if sent.prompt is UNTOUCHED:
        raise BadRequest("prompt or messages: is missing", "prompt")
    for name, harmless in _OF_MESSAGES.items():
        given = getattr(sent, name)
        if given is not UNTOUCHED and not is_any_of(bytes(given), harmless):
            what = "goes with messages, not with a prompt; send messages, or leave it out"
            raise BadRequest(f"{name}: {what}", name, "unsupported_parameter")
    return parse_completion(body, max_ids), texts


def parse_detokenize(body: bytes, max_ids: Tokens) -> DetokenizeRequest:
    """The request with every field checked but the range of token ids. Raises BadRequest."""
    sent = decode_json(body, _DetokenizeBody)
    raw = bytes(sent.tokens)
    if raw.count(b",") >= max_ids:
        raise context_exceeded("tokens", f"{raw.count(b',') + 1} tokens", max_ids)
    tokens = decode_json(b'{"tokens":%b}' % raw, _TokenList).tokens
    return DetokenizeRequest(model=sent.model, tokens=tokens)


def tokenized(ids: Sequence[int], max_len: Tokens, tools: TextTools | None) -> TokenizeReply:
    """The reply to /tokenize; tools: None where the client does not want the texts."""
    texts = None
    if tools is not None:
        texts = [tools.spelled(id).decode("utf-8", "replace") for id in ids]
    return TokenizeReply(len(ids), max_len, ids, texts)


def detokenized(ids: Sequence[int], tools: TextTools) -> DetokenizeReply:
    """The reply to /detokenize. Raises BadRequest for an id that is none."""
    for i, id in enumerate(ids):
        if not 0 <= id < tools.vocab_size:
            path = f"tokens[{i}]"
            raise BadRequest(f"{path}: token id {id} is not in 0..{tools.vocab_size - 1}", path)
    return DetokenizeReply(b"".join(map(tools.spelled, ids)).decode("utf-8", "replace"))

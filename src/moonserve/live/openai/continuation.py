"""Going on with an engine's stream at another one: which bodies allow it, and the body that does.

If its engine is lost, a completion whose prompt is the stream's tokens goes on with it, with the
client's sampling settings. That is right only if no setting depends on what the first engine
remembers of the answer, so every field must be one that is known here. `live/drive` calls it.
Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moonserve.core.errors import UNREADABLE
from moonserve.core.units import Tokens
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.request import PATHS

IDS = "return_token_ids"
"""vLLM's field by which a reply has the ids of its tokens, and of the prompt's."""
_CARRIED = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "logit_bias",
        "allowed_token_ids",
        "repetition_penalty",
        "cache_salt",
        "stream_options",
        "priority",
        "session_id",
        "user",
    }
)
"""Fields that mean the same for the rest of an answer as for all of it."""
_LEFT = frozenset(
    {
        "messages",
        "prompt",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "truncate_prompt_tokens",
        "truncation_side",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stream",
        IDS,
        "request_id",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields that have done their part when the answer begins, that are written anew, or that engines
ignore."""
_OFF: Mapping[str, tuple[bytes, ...]] = {
    "bad_words": (b"[]",),
    "best_of": (b"1",),
    "echo": (b"false",),
    "frequency_penalty": (b"0", b"0.0"),
    "include_reasoning": (b"true",),
    "length_penalty": (b"1", b"1.0"),
    "logprobs": (b"false",),
    "n": (b"1",),
    "presence_penalty": (b"0", b"0.0"),
    "response_format": (b'{"type":"text"}', b'{"type": "text"}'),
    "stop": (b"[]", b'""'),
    "suffix": (b'""',),
    "tool_choice": (b'"none"',),
    "tools": (b"[]",),
    "top_logprobs": (b"0",),
    "use_beam_search": (b"false",),
    "vllm_xargs": (b"{}",),
}
"""Fields that are no obstacle with these values. Any field may be null."""
_NOT_WITH_STOPS: Mapping[str, tuple[bytes, ...]] = {
    "include_stop_str_in_output": (b"null", b"false"),
    "min_tokens": (b"null", b"0"),
}
"""Fields that change what a stop string does, and the values with which they do not."""
_COMPLETION_TOKENS: Tokens = 16
"""vLLM's max_tokens of a completion that has none."""


class _Options(msgspec.Struct):
    include_usage: bool | None = None


class _MessagePart(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[_MessagePart | str] | None = None


class Continuation:
    """How one client's stream goes on at another engine, if it can. See `why_not`."""

    def __init__(self, asked: ExternalRequest) -> None:
        self._asked = asked
        self._fields = asked.fields()
        self.why_not = _obstacle(asked, self._fields)
        """Why it cannot; empty: it can, if its engine reports the tokens."""
        self.stops = () if self.why_not else _stops(bytes(self._fields.get("stop", b"")))
        """The strings that end the answer. One may stand across the joint, so the engine that goes
        on does not get them: see drive.streamed."""
        self.wants_ids = bytes(self._fields.get(IDS, b"")) == b"true"
        """Whether the client itself wants the ids."""

    @property
    def wants_usage(self) -> bool:
        """Whether the client wants an event with the usage."""
        options = bytes(self._fields.get("stream_options", b"null"))
        try:
            read = msgspec.json.decode(options, type=_Options | None)
        except UNREADABLE:
            return False
        return read is not None and bool(read.include_usage)

    def with_ids(self) -> ExternalRequest:
        """The client's request, changed so that the engine reports the ids of tokens."""
        if self.wants_ids:
            return self._asked
        if IDS in self._fields:  # a field that comes twice would be read by some engines only
            raw = msgspec.json.encode({**self._fields, IDS: msgspec.Raw(b"true")})
        else:
            return asking_ids(self._asked)
        return self._asked.with_raw(raw)

    def at(self, prompt: bytes, known: bytes, count: Tokens, longest: Tokens) -> ExternalRequest:
        """The request that goes on.

        prompt: its token ids, separated by commas; known: those of the answer so far, each after a
        comma; count: how many these are; longest: prompt and answer together, at its engine.
        """
        fields = {name: raw for name, raw in self._fields.items() if name in _CARRIED}
        if self._asked.max_tokens is not None:
            left = self._asked.max_tokens - count
        elif self._asked.form == "completion":
            left = _COMPLETION_TOKENS - count
        else:
            left = longest - prompt.count(b",") - 1 - count
        fields["prompt"] = msgspec.Raw(b"[%b%b]" % (prompt, known))
        fields["max_tokens"] = msgspec.Raw(b"%d" % max(1, left))
        least = bytes(self._fields.get("min_tokens", b""))
        if least.isdigit():
            fields["min_tokens"] = msgspec.Raw(b"%d" % max(0, int(least) - count))
        fields["stream"] = msgspec.Raw(b"true")
        return ExternalRequest("completion", msgspec.json.encode(fields), self._asked.trace)


def asking_ids(asked: ExternalRequest) -> ExternalRequest:
    """The request, changed so that the engine reports the ids of tokens. It must not have the
    field."""
    return asked.with_raw(asked.with_fields({IDS: b"true"}))


def _obstacle(asked: ExternalRequest, fields: Mapping[str, msgspec.Raw]) -> str:
    """Why a stream of this body cannot go on at another engine; empty: it can."""
    if asked.form not in ("chat", "completion"):
        return f"replies of {PATHS[asked.form]} do not have the ids of their tokens"
    stops = _stops(bytes(fields.get("stop", b"")))
    for name, raw in fields.items():
        if stops and name in _NOT_WITH_STOPS and bytes(raw) not in _NOT_WITH_STOPS[name]:
            return f"another engine cannot go on with its {name} and its stop strings"
        if name in _CARRIED or name in _LEFT or (name == "stop" and stops):
            continue
        value = bytes(raw)
        if value != b"null" and value not in _OFF.get(name, ()):
            if name == "tools" and bytes(fields.get("tool_choice", b"")) == b'"none"':
                continue
            return f"another engine cannot go on with its {name}"
    if asked.prompts > 1:
        return "it has several prompts"
    if asked.form == "chat" and not _is_text(asked.prompt):
        return "another engine cannot go on with parts of messages that are no text"
    return ""


def _stops(raw: bytes) -> tuple[str, ...]:
    """The stop strings of a body; none if it has none, or they are not as they must be."""
    if not raw or raw == b"null":
        return ()
    try:
        read = msgspec.json.decode(raw, type=str | list[str])
    except UNREADABLE:
        return ()
    stops = (read,) if isinstance(read, str) else tuple(read)
    return stops if all(stops) else ()


def _is_text(messages: bytes) -> bool:
    """Whether all parts of a chat's messages are text: then their tokens are the whole prompt."""
    if b'"type"' not in messages:
        return True
    try:
        read = msgspec.json.decode(messages, type=list[_Message])
    except UNREADABLE:
        return False
    lists = [message.content for message in read if isinstance(message.content, list)]
    parts = [part for content in lists for part in content]
    return all(isinstance(part, str) or part.type == "text" for part in parts)

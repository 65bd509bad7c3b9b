"""OpenAI's requests: their fields, and the judgement of each field before any work is spent.

Called by `app`. Every refusal is a BadRequest whose `param` is the field's path as OpenAI writes it
("messages[1].role"). Knows no tokens: lengths are judged where the prompt has been tokenised.

Three kinds of fields. Understood: those of the structs below. Refused unless they ask for nothing:
`_UNSUPPORTED`, because to ignore them would change the answer. Ignored on purpose, as they change
nothing here: user, store, metadata, parallel_tool_calls, service_tier, safety_identifier,
prompt_cache_key, reasoning_effort, verbosity; and so is any field nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moonserve.core.errors import BadRequest
from moonserve.core.request import Sampling, Stopping
from moonserve.core.units import Tokens
from moonserve.live.http.message import decode_json

_MAX_STOPS = 16
_MAX_STOP_CHARS = 1_024
_MAX_STOP_IDS = 256
_MAX_SALT_CHARS = 1_024
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "prompt_embeds": (),
}
"""Field -> the values, besides null, that ask for nothing."""


class StreamOptions(msgspec.Struct):
    """What a stream shall carry besides its text."""

    include_usage: bool | None = None


class ContentPart(msgspec.Struct):
    """One part of a message; only text parts are served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Common(msgspec.Struct, kw_only=True):
    """The fields that both kinds of request have."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None


class ChatRequest(_Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None


class CompletionRequest(_Common, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]


def parse_chat(body: bytes, max_messages: int) -> ChatRequest:
    """The request, every field judged; BadRequest otherwise."""
    request = decode_json(body, ChatRequest)
    _refuse_unsupported(body)
    _judge(request)
    _at_least_one("max_completion_tokens", request.max_completion_tokens)
    if not request.messages:
        raise BadRequest("messages: must have at least one message", "messages")
    if len(request.messages) > max_messages:
        raise BadRequest(
            f"messages: {len(request.messages)} are over the limit of {max_messages}", "messages"
        )
    for i, message in enumerate(request.messages):
        _judge_message(message, f"messages[{i}]")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """The request, every field judged but the token ids' range; BadRequest otherwise."""
    request = decode_json(body, CompletionRequest)
    _refuse_unsupported(body)
    _judge(request)
    return request


def plain_messages(request: ChatRequest) -> list[dict[str, str]]:
    """The messages as chat templates take them: role, name, content as one string.

    Text parts are joined by newlines, as in vLLM.
    """
    plain = []
    for message in request.messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        one = {"role": _ROLES[message.role], "content": content or ""}
        if message.name is not None:
            one["name"] = message.name
        plain.append(one)
    return plain


def context_exceeded(param: str, what: str, max_len: Tokens) -> BadRequest:
    """The error where `what` is more than a model's context of `max_len` tokens can hold."""
    return BadRequest(
        f"{param}: {what} exceed the model's context of {max_len} tokens",
        param,
        "context_length_exceeded",
    )


def single_prompt(request: CompletionRequest, vocab_size: int, max_len: Tokens) -> str | list[int]:
    """The one prompt of a request: text, or at most `max_len` token ids that exist.

    BadRequest otherwise.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise BadRequest("prompt: must not be empty", "prompt")
    first, path = prompt[0], "prompt"
    if not isinstance(first, int):
        if len(prompt) > 1:
            raise BadRequest("prompt: one prompt per request is supported", "prompt")
        if isinstance(first, str):
            return first
        prompt, path = [*first], "prompt[0]"
    if len(prompt) > max_len:
        raise context_exceeded("prompt", f"{len(prompt)} tokens", max_len)
    ids = []
    for i, token in enumerate(prompt):
        if not isinstance(token, int):
            raise BadRequest(f"{path}[{i}]: mixes token ids with something else", f"{path}[{i}]")
        if not 0 <= token < vocab_size:
            raise BadRequest(
                f"{path}[{i}]: token id {token} is not in 0..{vocab_size - 1}", f"{path}[{i}]"
            )
        ids.append(token)
    return ids


def sampling(request: _Common, drawn_seed: int) -> Sampling:
    """How to sample; `drawn_seed` is for requests that have none of their own."""
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=drawn_seed if request.seed is None else request.seed,
    )


def stopping(request: _Common, max_tokens: Tokens) -> Stopping:
    """When to stop."""
    stop = request.stop
    return Stopping(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def wants_usage(request: _Common) -> bool:
    """Whether a stream ends with a chunk of usage."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _refuse_unsupported(body: bytes) -> None:
    for name, raw in decode_json(body, dict[str, msgspec.Raw]).items():
        if (harmless := _UNSUPPORTED.get(name)) is None:
            continue
        value = decode_json(raw, object)
        # True == 1 in Python, not in JSON.
        if value is not None and not any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless
        ):
            only = " or ".join(msgspec.json.encode(h).decode() for h in harmless)
            what = f"only {only} is supported here" if only else "not supported here; leave it out"
            raise BadRequest(f"{name}: {what}", name, "unsupported_parameter")


def _judge(request: _Common) -> None:
    _at_least_one("max_tokens", request.max_tokens)
    _within("temperature", request.temperature, 0, 2)
    _within("top_p", request.top_p, 0, 1)
    if request.top_p == 0:
        raise BadRequest("top_p: must be above 0", "top_p")
    _within("top_k", request.top_k, -1, 2**31 - 1)
    _within("seed", request.seed, -(2**63), 2**63 - 1)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only allowed with stream", "stream_options")
    _judge_stops(request)
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= _MAX_SALT_CHARS:
        what = f"must have 1 to {_MAX_SALT_CHARS} characters"
        raise BadRequest(f"cache_salt: {what}", "cache_salt")


def _judge_stops(request: _Common) -> None:
    stop = request.stop
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > _MAX_STOPS:
        raise BadRequest(f"stop: at most {_MAX_STOPS} strings", "stop")
    for i, text in enumerate(stops):
        if not 1 <= len(text) <= _MAX_STOP_CHARS:
            param = "stop" if isinstance(stop, str) else f"stop[{i}]"
            raise BadRequest(f"{param}: must have 1 to {_MAX_STOP_CHARS} characters", param)
    ids = request.stop_token_ids or []
    if len(ids) > _MAX_STOP_IDS:
        raise BadRequest(f"stop_token_ids: at most {_MAX_STOP_IDS}", "stop_token_ids")
    for i, token in enumerate(ids):
        _within(f"stop_token_ids[{i}]", token, 0, 2**31 - 1)


def _judge_message(message: Message, path: str) -> None:
    if message.role not in _ROLES:
        raise BadRequest(
            f"{path}.role: {message.role!r} is not one of {', '.join(_ROLES)}", f"{path}.role"
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise BadRequest(
                f"{path}.{name}: not supported here", f"{path}.{name}", "unsupported_parameter"
            )
    if message.content is None:
        raise BadRequest(f"{path}.content: must be text or text parts", f"{path}.content")
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                where = f"{path}.content[{i}]"
                raise BadRequest(f"{where}: only text parts are supported", f"{where}.type")


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BadRequest(f"{name}: must be at least 1, not {value}", name)


def _within(name: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{name}: must be from {low} to {high}, not {value}", name)

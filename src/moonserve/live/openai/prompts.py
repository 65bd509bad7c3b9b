"""From a request's prompt to token ids, within bounds of time and memory.

The gateway's API and `live/drive` call it. A prompt that cannot fit the context is refused before
any work is spent on it. Long prompts are tokenized one at a time, on a thread of their own; clients
take turns there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import msgspec

from moonserve.core.errors import BadRequest, Overloaded
from moonserve.core.shares import Party, Shares
from moonserve.core.units import Bytes, Tokens
from moonserve.live.openai import request as openai
from moonserve.live.text.tools import TextTools
from moonserve.live.turns import Turns

_COMPLETION_DEFAULT_TOKENS = 16
_Fields: TypeAlias = openai.ChatRequest | openai.CompletionRequest


class Prompts:
    """Tokenizes prompts; texts over `offload_bytes` on a thread that does nothing else.

    It is one thread, so that many long prompts leave the other cores to the streams. At most
    `max_waiting_bytes` of text wait for it (or one text of any size), and a part of that more of
    clients below their equal share: see core.shares.
    """

    def __init__(self, offload_bytes: Bytes, max_waiting_bytes: Bytes) -> None:
        self._offload_bytes = offload_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting = Shares()
        """Bytes of text."""
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    async def tokens(
        self, fields: _Fields, tools: TextTools, max_len: Tokens, party: Party
    ) -> list[int]:
        """The prompt's ids. Raises BadRequest, and Overloaded where too much text waits."""
        work: Callable[[], list[int]]
        if isinstance(fields, openai.ChatRequest):
            messages = openai.plain_messages(fields)
            size = sum(_size(text) for it in messages for text in _texts(it))
            field = fields.prompt_field
            _refuse_hopeless(field, size, tools, max_len)
            if fields.tools:
                size += len(msgspec.json.encode(fields.tools))
            work = partial(_chat_tokens, messages, fields, tools, max_len)
        else:
            prompt = openai.single_prompt(fields, tools.vocab_size, max_len)
            if isinstance(prompt, list):
                return prompt
            size = _size(prompt)
            _refuse_hopeless("prompt", size, tools, max_len)
            work = partial(tools.encode, prompt, add_bos=True)
        return work() if size <= self._offload_bytes else await self._offload(size, work, party)

    async def _offload(self, size: Bytes, work: Callable[[], list[int]], party: Party) -> list[int]:
        used = self._waiting.used
        if used and used + size > self._waiting.limit(self._max_waiting_bytes, party):
            raise Overloaded(
                f"{used} bytes of long prompts wait to be tokenized", "tokenizer_queue", 1.0
            )
        self._waiting.take(party, size)
        try:
            # If the client disconnects, its work leaves the queue.
            await self._turns.begin(party, size)
            return await self._in_thread(work)
        finally:
            self._waiting.give(party, size)

    async def _in_thread(self, work: Callable[[], list[int]]) -> list[int]:
        """Work that has its turn, which lasts until the thread is free, also if nobody waits."""
        loop = asyncio.get_running_loop()
        job = self._thread.submit(work)
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.end))
        return await asyncio.wrap_future(job)


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message as `plain_messages` returns it."""
    for name, value in message.items():
        if name != "tool_calls":
            yield value
            continue
        for call in value:
            yield call.function.name
            yield call.function.arguments


def _chat_tokens(
    messages: list[dict[str, Any]], fields: openai.ChatRequest, tools: TextTools, max_len: Tokens
) -> list[int]:
    field = fields.prompt_field
    for message in messages:
        if "tool_calls" in message:
            message["tool_calls"] = openai.template_calls(
                message["tool_calls"], fields.arguments_path
            )
    try:
        text = tools.render_chat(
            messages, msgspec.to_builtins(fields.tools) if fields.tools else None
        )
    except BadRequest as error:
        error.param = field
        raise
    _refuse_hopeless(field, _size(text), tools, max_len)
    return tools.encode(text, add_bos=False)  # the template writes BOS itself


def _refuse_hopeless(param: str, size: Bytes, tools: TextTools, max_len: Tokens) -> None:
    """Raise BadRequest if so many bytes of text have more tokens than the context, however cut."""
    bound = max_len * tools.longest_token_bytes
    if size > bound:
        what = f"{size} bytes of text (over {bound}, {tools.longest_token_bytes} a token)"
        raise openai.context_exceeded(param, what, max_len)


def _size(text: str) -> Bytes:
    """Its bytes in UTF-8, with unpaired surrogates, which `encode` will refuse."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def max_tokens(fields: _Fields, prompt: Tokens, max_len: Tokens) -> Tokens:
    """The most tokens to generate: as the client asks, at most what the context leaves.

    Raises BadRequest if the context leaves none. vLLM refuses a request for more than it leaves.
    The gateway does not: most replies never reach the bound, and one that does ends with
    finish_reason "length".
    """
    asked = fields.max_tokens
    if isinstance(fields, openai.ChatRequest):
        param = fields.prompt_field
        default = max_len
        if fields.max_completion_tokens is not None:
            asked = fields.max_completion_tokens
    else:
        param = "prompt"
        default = _COMPLETION_DEFAULT_TOKENS
    if prompt == 0:
        raise BadRequest(f"{param}: has no tokens", param)
    room = max_len - prompt
    if room < 1:
        what = f"{prompt} tokens and one to generate"
        raise openai.context_exceeded(param, what, max_len)
    return min(default if asked is None else asked, room)

"""One generation on its way to the client: token ids to text, text to OpenAI's reply or chunks.

`Generation` follows one request whatever the form of its reply; `EventStream` sends it as
server-sent events, `whole_reply` as one object. Used by `app`; decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.request import Request
from moonserve.core.units import Tokens
from moonserve.live.api.front import Form
from moonserve.live.control.metrics import Metrics
from moonserve.live.http.message import error_reply
from moonserve.live.ports import Output
from moonserve.live.text.detok import StopMatcher
from moonserve.live.text.tools import TokenText

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


class PromptDetails(msgspec.Struct):
    """How much of the prompt was there already."""

    cached_tokens: Tokens


class Usage(msgspec.Struct):
    """Tokens of one request; completion_tokens counts all that were generated, EOS included."""

    prompt_tokens: Tokens
    completion_tokens: Tokens
    total_tokens: Tokens
    prompt_tokens_details: PromptDetails


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ReplyMessage(msgspec.Struct):
    """The assistant's message, whole."""

    role: str
    content: str


class Choice(msgspec.Struct, omit_defaults=True):
    """The one choice: `delta` in chat chunks, `message` in chat replies, `text` in completions."""

    index: int | None = None
    delta: Delta | None = None
    message: ReplyMessage | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    """vLLM's extension, where return_token_ids asks for it: the ids since the chunk before."""
    logprobs: msgspec.UnsetType | None = msgspec.UNSET
    finish_reason: str | msgspec.UnsetType | None = msgspec.UNSET


class Reply(msgspec.Struct):
    """A reply or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


_OBJECTS: dict[tuple[Form, bool], str] = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}


class Generation:
    """Turns a request's Outputs into text, counts them, and ends the source on every path.

    `close` must be called, once the reply is done or given up; the first call ends the source.
    """

    def __init__(
        self,
        request: Request,
        source: AsyncIterator[Output],
        text: TokenText,
        metrics: Metrics,
        arrived_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self.request = request
        self.finish_reason: str | None = None
        self._source = source
        self._text = text
        self._stops = StopMatcher(request.stopping.stop) if request.stopping.stop else None
        self._metrics = metrics
        self._last_s = arrived_s
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._generated = 0
        self._fresh: list[int] = []
        self._cached = 0
        self._closed = False

    async def next_text(self) -> str:
        """The text of the next piece, "" where none is certain yet. Not called after the last.

        Sets finish_reason with the last piece. Raises what Serving raises.
        """
        assert self.finish_reason is None
        try:
            output = await anext(self._source)
        except StopAsyncIteration:
            raise EngineFailed("the generation ended without a finish reason") from None
        self._count(output)
        if output.finish_reason is None:
            text = self._text.feed(output.token_ids)
        else:
            text = self._text.feed(self._spoken(output)) + self._text.flush()
        stopped = False
        if self._stops is not None:
            text, stopped = self._stops.feed(text)
            if output.finish_reason is not None and not stopped:
                text += self._stops.flush()
        self.finish_reason = "stop" if stopped else output.finish_reason
        return text

    def _spoken(self, output: Output) -> tuple[int, ...]:
        """The ids whose text the client gets: all but the stop token that ended it, as in vLLM."""
        ids = output.token_ids
        stop_ids = self.request.stopping.stop_token_ids
        stopped = output.finish_reason == "stop" and ids and ids[-1] in stop_ids
        return ids[:-1] if stopped else ids

    def _count(self, output: Output) -> None:
        metrics = self._metrics
        now_s = self._loop.time()
        waited_s, self._last_s = now_s - self._last_s, now_s
        if self._generated:
            metrics.tbt.observe(waited_s)
        else:
            metrics.ttft.observe(waited_s)
            metrics.prompt_tokens += len(self.request.prompt)
        if output.cached_tokens:
            self._cached = min(output.cached_tokens, len(self.request.prompt))
            metrics.cached_tokens += self._cached
        self._generated += len(output.token_ids)
        self._fresh += output.token_ids
        metrics.completion_tokens += len(output.token_ids)

    def take_ids(self) -> list[int]:
        """The token ids that came since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def usage(self) -> Usage:
        """As counted so far."""
        prompt = len(self.request.prompt)
        return Usage(prompt, self._generated, prompt + self._generated, PromptDetails(self._cached))

    async def close(self) -> None:
        """End the source, so that the cluster stops working for this request."""
        if self._closed:
            return
        self._closed = True
        try:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        finally:
            self._on_close()


async def whole_reply(generation: Generation, head: Reply, form: Form, ids: bool) -> bytes:
    """The reply as one JSON object, with token ids where wanted. `head` is filled in."""
    pieces = []
    while generation.finish_reason is None:
        pieces.append(await generation.next_text())
    text = "".join(pieces)
    choice = Choice(index=0, logprobs=None, finish_reason=generation.finish_reason)
    if ids:
        choice.token_ids = generation.take_ids()
    if form == "chat":
        choice.message = ReplyMessage("assistant", text)
    else:
        choice.text = text
    head.choices = [choice]
    head.usage = generation.usage()
    return _encode(head)


class EventStream:
    """The reply as server-sent events: chunks, the usage if wanted, `[DONE]`.

    A failure after the first piece becomes an error event, the last one. A class and not an async
    generator, since closing a generator that never started would not close the generation.
    """

    def __init__(
        self,
        generation: Generation,
        first_text: str,
        head: Reply,
        form: Form,
        usage: bool,
        ids: bool,
    ) -> None:
        self._generation = generation
        self._first_text: str | None = first_text
        self._wants_usage = usage
        self._wants_ids = ids
        self._chat = form == "chat"
        self._delta = Delta(role="assistant", content="")
        self._choice = Choice(index=0, logprobs=None, finish_reason=None)
        self._head = head
        self._ended = False
        head.choices = [self._choice]
        if self._chat:
            self._choice.delta = self._delta
        if usage:
            head.usage = None

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        if self._first_text is not None:
            text, self._first_text = self._first_text, None
            begin = self._begin()
            return begin + self._piece(text)
        while True:
            try:
                text = await self._generation.next_text()
            except MoonserveError as error:
                self._ended = True
                log.warning("%s: failed in mid-stream: %s", self._generation.request.id, error)
                return b"data: %b\n\n" % _encode(error_reply(error))
            if event := self._piece(text):
                return event

    def _begin(self) -> bytes:
        """Chat streams begin with the role."""
        if not self._chat:
            return b""
        event = self._event()
        self._delta.role = None
        return event

    def _piece(self, text: str) -> bytes:
        """The events of one piece of text; b"" where it has none."""
        reason = self._generation.finish_reason
        if self._wants_ids:
            self._choice.token_ids = self._generation.take_ids()
        if not self._chat:
            self._choice.text = text
            self._choice.finish_reason = reason
            events = self._event() if text or reason or self._choice.token_ids else b""
        else:
            self._delta.content = text
            events = self._event() if text or self._choice.token_ids else b""
            if reason:
                self._delta.content = None
                self._choice.token_ids = None
                self._choice.finish_reason = reason
                events += self._event()
        return events + self._end() if reason else events

    def _end(self) -> bytes:
        self._ended = True
        if not self._wants_usage:
            return _DONE
        self._head.choices = []
        self._head.usage = self._generation.usage()
        return self._event() + _DONE

    def _event(self) -> bytes:
        return b"data: %b\n\n" % _encode(self._head)

    async def aclose(self) -> None:
        """Called by the server on every path."""
        await self._generation.close()


def reply_head(request: Request, form: Form, stream: bool, created: int) -> Reply:
    """The fields all chunks of a reply share."""
    prefix = "chatcmpl" if form == "chat" else "cmpl"
    return Reply(f"{prefix}-{request.id}", _OBJECTS[form, stream], created, request.model, [])

"""One generation on its way to the client: token ids to text, text to OpenAI's reply or chunks.

`Generation` follows one request whatever the form of its reply; `EventStream` sends it as
server-sent events, `whole_reply` as one object. Used by `app`; decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.request import Request
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.message import error_reply
from moonserve.live.openai.reply import ReplyWriter, Usage, event
from moonserve.live.openai.text import TextStream
from moonserve.live.ports import Output
from moonserve.live.text.tools import TokenText

log = logging.getLogger(__name__)


class Generation:
    """Turns a request's Outputs into text, counts them, and ends the source on every path.

    `close` must be called, once the reply is done or given up; the first call ends the source.
    """

    def __init__(
        self,
        request: Request,
        source: AsyncIterator[Output],
        text: TokenText,
        metrics: RequestMetrics,
        arrived_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self.request = request
        self.finish_reason: str | None = None
        self._source = source
        self._text = TextStream(text, request.stopping.stop)
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
            text = self._text.end(self._spoken(output))
        self.finish_reason = output.finish_reason if self._text.met is None else "stop"
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
            metrics.prompt_tokens += self.request.length
        if output.cached_tokens:
            self._cached = min(output.cached_tokens, self.request.length)
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
        return Usage.of(self.request.length, self._generated, self._cached)

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


async def whole_reply(generation: Generation, writer: ReplyWriter, ids: bool) -> bytes:
    """The reply as one JSON object, with token ids where the client wants them."""
    pieces = []
    while generation.finish_reason is None:
        pieces.append(await generation.next_text())
    fresh = generation.take_ids() if ids else None
    return writer.whole("".join(pieces), generation.finish_reason, fresh, generation.usage())


class EventStream:
    """The reply as server-sent events: chunks, the usage if wanted, `[DONE]`.

    A failure after the first piece becomes an error event, the last one. A class and not an async
    generator, since closing a generator that never started would not close the generation.
    """

    def __init__(
        self, generation: Generation, first_text: str, writer: ReplyWriter, ids: bool
    ) -> None:
        """ids: whether the client wants the token ids."""
        self._generation = generation
        self._first_text: str | None = first_text
        self._writer = writer
        self._wants_ids = ids
        self._ended = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        if self._first_text is not None:
            text, self._first_text = self._first_text, None
            return self._writer.begin() + self._piece(text)
        while True:
            try:
                text = await self._generation.next_text()
            except MoonserveError as error:
                self._ended = True
                log.warning("%s: failed in mid-stream: %s", self._generation.request.id, error)
                return event(error_reply(error))
            if events := self._piece(text):
                return events

    def _piece(self, text: str) -> bytes:
        """The events of one piece of text; b"" where it adds nothing."""
        generation = self._generation
        ids = generation.take_ids() if self._wants_ids else None
        events = self._writer.piece(text, generation.finish_reason, ids)
        if generation.finish_reason is None:
            return events
        self._ended = True
        return events + self._writer.end(generation.usage())

    async def aclose(self) -> None:
        """Called by the server on every path."""
        await self._generation.close()

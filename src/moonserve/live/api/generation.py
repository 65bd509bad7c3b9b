"""One generation on our own workers: from token ids to text, and to the reply or its events.

`Generation` makes the text, whatever the form of the reply; `TextExchange` sends it. `own_text`
creates both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from moonserve.core.errors import BadRequest, EngineFailed
from moonserve.core.request import Request, TokenLogprobs
from moonserve.core.units import RequestId, Tokens
from moonserve.live.api.exchange import Exchange
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.http.message import Response, StreamingResponse, Write
from moonserve.live.openai.reply import Usage, Writer
from moonserve.live.openai.text import TextStream
from moonserve.live.ports import Output
from moonserve.live.text.calls import CallReader, FoundCall
from moonserve.live.text.grammar import of_schema
from moonserve.live.text.tools import TokenText


class Generation:
    """Turns a request's Outputs into text, and counts them. `close` must be called at the end."""

    def __init__(
        self,
        request: Request,
        source: AsyncGenerator[Output, None],
        text: TokenText,
        metrics: RequestMetrics,
        arrived_s: float,
        follows: bool = False,
        calls: CallReader | None = None,
        schema_field: str = "",
    ) -> None:
        """follows: whether it is a further choice, whose prompt and TTFT are counted already.
        calls: takes calls of tools out of its text; None: it has none. schema_field: the field of
        the body that has its JSON schema."""
        self.request = request
        self.finish_reason: str | None = None
        self._source = source
        self._text = TextStream(text, request.stopping.stop, request.stopping.min_tokens)
        self._calls = calls
        self._schema_field = schema_field
        self._metrics = metrics
        self._last_s = arrived_s
        self._loop = asyncio.get_running_loop()
        self._generated = 0
        self._follows = follows
        self._fresh: list[int] = []
        self._fresh_logprobs: list[TokenLogprobs] = []
        self._cached = 0

    async def next_text(self) -> str:
        """The text of the next piece, "" if none is certain yet. Do not call it after the last
        piece.

        Sets finish_reason with the last piece. Raises the errors of ports.Serving.
        """
        assert self.finish_reason is None
        try:
            output = await anext(self._source)
        except StopAsyncIteration:
            raise EngineFailed("the generation ended without a finish reason") from None
        except BadRequest as error:
            raise of_schema(error, self._schema_field) from None
        self._count(output)
        if output.finish_reason is None:
            text = self._text.feed(output.token_ids)
        else:
            text = self._text.end(self._spoken(output))
        self.finish_reason = output.finish_reason if self._text.met is None else "stop"
        return text if self._calls is None else self._without_calls(text, self._calls)

    def _without_calls(self, text: str, calls: CallReader) -> str:
        """The text outside calls of tools. It ends with them where the client must act on them."""
        text = calls.feed(text)
        if self.finish_reason is not None:
            text += calls.end()
            if calls.count and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return text

    def _spoken(self, output: Output) -> tuple[int, ...]:
        """The ids whose text the client gets: all except the stop token that ended the generation,
        as in vLLM."""
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
        elif not self._follows:
            metrics.ttft.observe(waited_s)
            metrics.prompt_tokens += self.request.length
        if output.cached_tokens:
            self._cached = min(output.cached_tokens, self.request.length)
            metrics.cached_tokens += 0 if self._follows else self._cached
        self._generated += len(output.token_ids)
        self._fresh += output.token_ids
        if output.logprobs:
            self._fresh_logprobs += output.logprobs
        metrics.completion_tokens += len(output.token_ids)

    @property
    def met(self) -> str | None:
        """See ChoiceState."""
        return self._text.met

    def take_ids(self) -> list[int]:
        """The token ids that came since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Their log probabilities; empty if the client does not want them."""
        fresh, self._fresh_logprobs = self._fresh_logprobs, []
        return fresh

    def take_calls(self) -> list[FoundCall]:
        """See ChoiceState."""
        return [] if self._calls is None else self._calls.take()

    def usage(self) -> Usage:
        """The tokens counted so far; a further choice has no prompt of its own."""
        if self._follows:
            return Usage.of(0, self._generated, 0)
        return Usage.of(self.request.length, self._generated, self._cached)

    async def close(self) -> None:
        """End the source, so that the cluster stops working for this request."""
        await self._source.aclose()


class TextExchange(Exchange):
    """The reply as one JSON object, or as the events of its form."""

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        path: str,
        stream: bool,
        on_close: Callable[[], None],
    ) -> None:
        """path: the one that the client called."""
        super().__init__(generation.request.id, on_close)
        self._path = path
        self._generation = generation
        self._writer = writer
        self._streams = stream
        self._ended = False

    @property
    def tokens(self) -> Tokens:
        """See Exchange."""
        return self._generation.usage().total_tokens

    async def begin(self) -> Response | StreamingResponse:
        """See Exchange."""
        if not self._streams:
            return Response(body=await self._whole())
        # A failure before the first piece has its own status: the status line is not sent yet.
        first = await self._generation.next_text()
        begun = self._writer.begin(self._generation.usage())
        self._first = begun + self._piece(first)
        return StreamingResponse(self)

    async def _whole(self) -> bytes:
        generation = self._generation
        pieces = []
        while generation.finish_reason is None:
            pieces.append(await generation.next_text())
        return self._writer.whole([("".join(pieces), generation)], generation.usage())

    async def _pour(self, write: Write) -> bool:
        while not self._ended:
            events = self._piece(await self._generation.next_text())
            if events and not write(events):
                return self._ended
        return True

    def _piece(self, text: str) -> bytes:
        """The events of one piece of text; b"" where it adds nothing."""
        generation = self._generation
        events = self._writer.piece(text, generation)
        if generation.finish_reason is None:
            return events
        self._ended = True
        return events + self._writer.end(generation.usage())

    async def _close(self) -> None:
        await self._generation.close()


class WholeExchange(Exchange):
    """A reply that is known at once, without a generation."""

    tokens = 0

    def __init__(self, request: RequestId, reply: Response, on_close: Callable[[], None]) -> None:
        super().__init__(request, on_close)
        self._reply = reply

    async def begin(self) -> Response:
        """See Exchange."""
        return self._reply

    async def _pour(self, write: Write) -> bool:
        return True

    async def _close(self) -> None:
        return

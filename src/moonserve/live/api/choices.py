"""Several choices of one request on our own workers, each a generation of its own.

`own_text` makes a ChoicesExchange for `n` above 1 and for several prompts. The first choice of a
prompt puts the prompt's KV into the store; the others begin once it has its first token, and load
that KV. The client gets all choices or none: nothing is sent before each has its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import reduce

from moonserve.core.units import Tokens
from moonserve.live.api.exchange import Exchange
from moonserve.live.api.generation import Generation
from moonserve.live.http.message import Response, StreamingResponse, Write
from moonserve.live.openai.reply import ReplyWriter, Usage

_MOST_EVENTS = 256
"""Events of all choices that wait for the client."""


class ChoiceInWork:
    """One choice on its way: its generation, and what writes it."""

    def __init__(
        self, generation: Generation, writer: ReplyWriter, leader: ChoiceInWork | None = None
    ) -> None:
        """leader: the choice of the same prompt that begins before this one."""
        self.generation = generation
        self.writer = writer
        self.leader = leader
        self.has_begun = asyncio.Event()
        self.texts: list[str] = []


class ChoicesExchange(Exchange):
    """The reply with all choices, as one JSON object or as events."""

    def __init__(
        self,
        choices: Sequence[ChoiceInWork],
        path: str,
        stream: bool,
        on_close: Callable[[], None],
    ) -> None:
        """choices: in the order of their indices, at least one."""
        super().__init__(choices[0].generation.request.id, on_close)
        self._path = path
        self._choices = choices
        self._streams = stream
        self._tasks: list[asyncio.Task[None]] = []
        self._events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_MOST_EVENTS)
        """Ends with None or an error."""
        loop = asyncio.get_running_loop()
        self._all_begun: asyncio.Future[None] = loop.create_future()
        self._all_ended: asyncio.Future[None] = loop.create_future()
        self._unbegun = self._unended = len(choices)
        self._is_over = False

    @property
    def tokens(self) -> Tokens:
        """See Exchange."""
        return self._usage().total_tokens

    async def begin(self) -> Response | StreamingResponse:
        """See Exchange."""
        self._tasks = [asyncio.create_task(self._drive(it)) for it in self._choices]
        await self._all_begun
        if self._streams:
            return StreamingResponse(self)
        await self._all_ended
        said = [("".join(it.texts), it.generation) for it in self._choices]
        return Response(body=self._choices[0].writer.whole(said, self._usage()))

    def _usage(self) -> Usage:
        """Of all choices; each prompt is counted once."""
        return reduce(Usage.plus, [it.generation.usage() for it in self._choices])

    async def _drive(self, choice: ChoiceInWork) -> None:
        """Bring one choice to its end. A failure ends all of them."""
        try:
            if choice.leader is not None:
                await choice.leader.has_begun.wait()
            while choice.generation.finish_reason is None:
                text = await choice.generation.next_text()
                await self._put(choice, text)
            self._unended -= 1
            if not self._unended:
                self._all_ended.set_result(None)
                await self._events.put(None)
        except Exception as error:  # noqa: BLE001 - a bug too must not leave the client waiting
            for waited in (self._all_begun, self._all_ended):
                if not waited.done():
                    waited.set_exception(error)
                    waited.exception()  # asyncio reports exceptions that nobody has read
            await self._events.put(error)

    def _note_begun(self, choice: ChoiceInWork) -> None:
        choice.has_begun.set()
        self._unbegun -= 1
        if not self._unbegun and not self._all_begun.done():
            self._all_begun.set_result(None)

    async def _put(self, choice: ChoiceInWork, text: str) -> None:
        """Take a piece of a choice's text, for the client or until the end."""
        events = b""
        if not choice.has_begun.is_set():
            self._note_begun(choice)
            events = choice.writer.begin(choice.generation.usage())
        if not self._streams:
            choice.texts.append(text)
            return
        events += choice.writer.piece(text, choice.generation)
        if events:
            await self._events.put(events)

    async def _pour(self, write: Write) -> bool:
        while not self._is_over:
            events = await self._events.get()
            if isinstance(events, Exception):
                raise events
            if events is None:
                self._is_over = True
                events = self._choices[0].writer.end(self._usage())
            if not write(events):
                return self._is_over
        return True

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for choice in self._choices:
            await choice.generation.close()

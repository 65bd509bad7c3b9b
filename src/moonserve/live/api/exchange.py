"""One generation on its way to its client, whatever makes its text.

`Front` asks `begin` for a whole reply, or hands the exchange to the HTTP server as a stream. The
exchanges of `own_text` and `engine_text` are the two kinds. Nothing here knows an instance.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from moonserve.core.errors import MoonserveError
from moonserve.core.units import RequestId
from moonserve.live.http.message import Response, StreamingResponse, error_reply
from moonserve.live.openai.reply import event

log = logging.getLogger(__name__)


class Exchange(ABC):
    """An async iterator of server-sent events, once `begin` has returned a StreamingResponse.

    A failure after the first piece becomes an error event, the last one. `aclose` must be called
    on every path. A class and not an async generator: closing a generator that never started would
    not end the generation.
    """

    def __init__(self, request: RequestId, on_close: Callable[[], None]) -> None:
        """on_close: called once, when the exchange is over."""
        self._request = request
        self._on_close = on_close
        self._first = b""
        self._ended = False
        self._closed = False

    @abstractmethod
    async def begin(self) -> Response | StreamingResponse:
        """The reply, once its first piece is here. Raises what the client is owed."""

    @abstractmethod
    async def _more(self) -> bytes | None:
        """The next events, b"" where there are none yet; None: the stream has ended."""

    @abstractmethod
    async def _close(self) -> None:
        """End what is under way for this client."""

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        events: bytes | None = b""
        while not events:
            if self._ended:
                raise StopAsyncIteration
            try:
                events = await self._more()
            except MoonserveError as error:
                self._ended = True
                log.warning("%s: failed in mid-stream: %s", self._request, error)
                return event(error_reply(error))
            if events is None:
                raise StopAsyncIteration
        return events

    async def aclose(self) -> None:
        """End the exchange; called again, it has no effect."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._close()
        finally:
            self._on_close()

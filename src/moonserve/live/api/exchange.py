"""One generation on its way to its client, for every backend.

`Front` calls `begin`, and gives the HTTP server the exchange as a stream of events, or a whole
reply. `own_text` and `engine_text` have one kind of exchange each. Nothing here knows an instance.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable

from moonserve.core.errors import MoonserveError
from moonserve.core.units import RequestId, Tokens
from moonserve.live.http.message import Poured, Response, StreamingResponse, Write
from moonserve.live.openai.reply import error_event

log = logging.getLogger(__name__)


class Exchange(Poured):
    """A body of server-sent events, once `begin` has returned a StreamingResponse.

    A failure after the first piece becomes an error event, which is the last. Call `aclose` on
    every path.
    """

    def __init__(self, request: RequestId, on_close: Callable[[], None]) -> None:
        """on_close: called once, when the exchange is over."""
        self._path = ""
        """The path that the client called, which gives errors their shape."""
        self._request = request
        self._on_close = on_close
        self._first = b""
        self._failed = False
        self._closed = False

    @property
    @abstractmethod
    def tokens(self) -> Tokens:
        """Tokens of the prompt and of the answer so far, for limits on tokens."""

    @abstractmethod
    async def begin(self) -> Response | StreamingResponse:
        """The reply, once its first piece is here. Raises the error that the client gets."""

    @abstractmethod
    async def _pour(self, write: Write) -> bool:
        """Write the events after the first ones, as `pour` does."""

    @abstractmethod
    async def _close(self) -> None:
        """End the work for this client."""

    async def pour(self, write: Write) -> bool:
        """See Poured."""
        first, self._first = self._first, b""
        if first and not write(first):
            return False
        if self._failed:
            return True
        try:
            return await self._pour(write)
        except MoonserveError as error:
            self._failed = True
            log.warning("%s: the stream ended with an error: %s", self._request, error)
            return write(error_event(self._path, error))

    async def aclose(self) -> None:
        """End the exchange; called again, it has no effect."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._close()
        finally:
            self._on_close()

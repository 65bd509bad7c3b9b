"""ReadyWait: lets new requests wait, in the order they came, until their model can be served.

While the instances of a model restart, its requests need not be refused. Each backend has one
`ReadyWait`. Waiting requests count as requests under way, so their number has a bound. Nothing here
sends anything to an instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonserve.core.errors import MoonserveError, NobodyAlive
from moonserve.core.units import MICROS_PER_SECOND, Micros
from moonserve.live.ports import ModelCard

_POLL_S = 0.05
_Found = ModelCard | MoonserveError


class ReadyWait:
    """See the module. To be used on the event loop."""

    def __init__(self, card: Callable[[str], ModelCard], wait_us: Micros) -> None:
        """card: returns the card of a model, or raises NobodyAlive if it may be served later.
        wait_us: how long a request waits."""
        self._card = card
        self._wait_s = wait_us / MICROS_PER_SECOND
        self._waiting: dict[asyncio.Future[ModelCard], str] = {}
        """In the order they came, each with its model."""
        self._looking: asyncio.Task[None] | None = None
        self._is_over = False

    def stop(self) -> None:
        """This process ends: requests wait no more. Those that wait now end as after their time."""
        self._is_over = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(TimeoutError)

    async def card(self, model: str) -> ModelCard:
        """The card of a model; waits until the model can be served, or has waited long enough.

        Raises ModelNotFound, and after the wait NobodyAlive. If it returns a card that is not
        alive, the Conductor knows why, and refuses the request with that reason.
        """
        if self._is_over:
            return self._card(model)
        if not self._waiting:
            found = self._look(model)
            if found is not None:
                return _returned(found)
        waiter: asyncio.Future[ModelCard] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = model
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_again())
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter
        except TimeoutError:
            return self._card(model)
        finally:
            self._waiting.pop(waiter, None)

    def _look(self, model: str) -> _Found | None:
        """The card of a model that can be served, or why it never will be; None: wait."""
        try:
            card = self._card(model)
        except NobodyAlive:
            return None
        except MoonserveError as error:
            return error
        return card if card.alive else None

    async def _look_again(self) -> None:
        """Let those go whose models can be served, until nobody waits."""
        while self._waiting:
            await asyncio.sleep(_POLL_S)
            found = {model: self._look(model) for model in set(self._waiting.values())}
            for waiter, model in list(self._waiting.items()):
                of_model = found[model]
                if of_model is None:
                    continue
                del self._waiting[waiter]
                if waiter.done():
                    continue
                if isinstance(of_model, MoonserveError):
                    waiter.set_exception(of_model)
                else:
                    waiter.set_result(of_model)
        self._looking = None


def _returned(found: _Found) -> ModelCard:
    if isinstance(found, MoonserveError):
        raise found
    return found

"""Reflector: keeps the objects of one collection as the API server has them, by list and watch.

A watch lasts about a minute and is renewed from the version that it has reached, so that a
connection that died silently is found within that time. If the server no longer has that version
(410), or its bytes make no sense, the reflector lists again. While the server is away the objects
stay as they were. KubernetesEngines runs it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Generic

import msgspec

from moonserve.core.errors import ConfigError, DeadlineExceeded
from moonserve.live.http.client import UpstreamError
from moonserve.live.kubernetes.api import ApiRefused, ApiServer
from moonserve.live.kubernetes.objects import BadAnswer, Expired, Known, T, TooMany

log = logging.getLogger(__name__)

_MAX_PAGES = 1_000


class WatchTimes(msgspec.Struct, frozen=True):
    """How long watches last, and how long a reflector waits for answers and between attempts."""

    watch_s: int = 60
    answer_s: float = 15.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures in a row, 1 or more; jitter takes up to half of it."""
        doubled = self.first_pause_s * 2.0 ** min(failures - 1, 30)
        return min(self.longest_pause_s, doubled)


class Collection(msgspec.Struct, frozen=True):
    """Where objects are listed and watched."""

    path: str
    query: Mapping[str, str] = {}
    """Selects some of them."""


class Reflector(Generic[T]):
    """See the module. `run` never returns: cancel it."""

    def __init__(
        self,
        api: ApiServer,
        collection: Collection,
        shape: type[T],
        changed: Callable[[], None],
        times: WatchTimes,
    ) -> None:
        """changed: called after each change of `objects`, and when they are first known."""
        self.collection = collection
        self.listed = False
        """Whether the objects were ever known."""
        self.problem = ""
        """Why the objects may be behind; empty: they are not."""
        self._api = api
        self._changed = changed
        self._times = times
        self._known = Known(shape)
        self._events = 0
        """Events that were taken in, ever."""

    @property
    def objects(self) -> Mapping[str, T]:
        """The objects as far as they are known, by name."""
        return self._known.objects

    async def run(self) -> None:
        """Keep the objects."""
        loop = asyncio.get_running_loop()
        failures = 0
        is_behind = True
        while True:
            began_s = loop.time()
            events = self._events
            least_s = 0.0
            failed = True
            try:
                if is_behind:
                    await self._list()
                is_behind = False
                await self._watch()
                failed = False
            except (Expired, BadAnswer, TooMany) as error:
                is_behind = True
                self._report("" if isinstance(error, Expired) else str(error))
            except ApiRefused as error:
                self._report(str(error))
                least_s = min(error.retry_after_s, self._times.longest_pause_s)
            except (ConfigError, DeadlineExceeded, UpstreamError) as error:
                self._report(str(error))
            is_lasting = loop.time() - began_s >= self._times.watch_s / 2
            if self._events > events or is_lasting:
                failures = 0
                if not failed:
                    continue
            failures += 1  # a server that ends each watch at once is no better than an error
            pause_s = self._times.pause_s(failures) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(pause_s, least_s))

    async def _list(self) -> None:
        self._known.begin()
        more = ""
        for _ in range(_MAX_PAGES):
            path, query = self.collection.path, self.collection.query
            body = await self._api.page(path, query, more, self._times.answer_s)
            more = self._known.page(body)
            if not more:
                self.listed = True
                self._report("")
                self._changed()
                return
        raise BadAnswer(f"a list of more than {_MAX_PAGES} pages")

    async def _watch(self) -> None:
        watch_s = max(1, round(self._times.watch_s * random.uniform(0.8, 1.2)))
        async with self._api.watch(
            self.collection.path,
            self.collection.query,
            self._known.version,
            watch_s,
            self._times.answer_s,
        ) as lines:
            self._report("")
            async for line in lines:
                if line.strip() and self._known.line(line):
                    self._events += 1
                    self._changed()

    def _report(self, problem: str) -> None:
        """Note whether the server can be read, and log a change of that."""
        if problem and not self.problem:
            log.warning("Kubernetes: %s; trying again, and going on with what is known", problem)
        if self.problem and not problem:
            log.warning("Kubernetes: %s can be read again", self.collection.path)
        self.problem = problem

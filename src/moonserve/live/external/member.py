"""Member: the address, API key and connector identity of one external engine.

Fleet makes and keeps it. The driver reads it, and may have its bootstrap server asked again. The
object stays the same when its engine restarts, and then describes the newest start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import InstanceId
from moonserve.live.external.pages import Page, read_page
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient

ASK_S = 5.0


class Mismatch(MoonserveError):
    """The engine differs from its description, or does not fit the others of its model."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class _Rank(msgspec.Struct):
    """The bootstrap server's answer about one data-parallel rank."""

    engine_id: str


class Member:
    """An engine behind one address, with an instance per data-parallel rank."""

    def __init__(self, spec: InstanceSpec, http: HttpClient, api_key: str = "") -> None:
        self.spec = spec
        self.url = spec.url.rstrip("/")
        self.headers: Mapping[str, str] = bearer(api_key)
        """Headers of every call."""
        self.bootstrap = spec.bootstrap_url()
        """Address that Mooncake's decode side gets; empty: there is none."""
        self.infos: dict[InstanceId, InstanceInfo] = {}
        """Its instances as they joined; empty while the engine is not used."""
        self.changed = False
        """Whether the bootstrap server named other engine ids than before: it is a new process."""
        self._http = http
        self._engine_ids: dict[int, str] = {}
        self._loading: asyncio.Task[Page] | None = None
        self._asking: asyncio.Task[dict[int, str]] | None = None

    async def ask(self, path: str, body: Any = None, timeout_s: float = ASK_S) -> ClientResponse:
        """GET a path of the engine, or POST `body` there as JSON. Raises UpstreamError,
        DeadlineExceeded."""
        url = self.url + path
        if body is None:
            return await self._http.request("GET", url, headers=self.headers, timeout_s=timeout_s)
        headers = {"content-type": "application/json", **self.headers}
        data = msgspec.json.encode(body)
        return await self._http.request(
            "POST", url, headers=headers, body=data, timeout_s=timeout_s
        )

    def engine_id(self, dp_rank: int | None) -> str:
        """Mooncake's id of that rank's engine. Raises EngineFailed: the bootstrap named none."""
        found = self._engine_ids.get(dp_rank or 0)
        if found is None:
            raise EngineFailed(f"{self.bootstrap}/query names no engine of rank {dp_rank or 0}")
        return found

    async def requery(self) -> bool:
        """Ask the bootstrap server for its engine ids. Returns whether they have changed.

        Concurrent callers share one call. Raises EngineFailed: there is no answer.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._query())
            self._asking.add_done_callback(self._answered)
        before = self._engine_ids
        changed = await asyncio.shield(self._asking) != before
        self.changed = self.changed or (changed and bool(before))
        return changed

    async def load(self) -> Page:
        """The engine's metrics now. Concurrent callers share one call. Raises as HttpClient, and
        EngineFailed if the engine gives none."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(self._loaded)
        return await asyncio.shield(self._loading)

    def _loaded(self, task: asyncio.Task[Page]) -> None:
        self._loading = None
        if not task.cancelled():
            task.exception()  # callers get it; mark it as seen if there are none

    async def _load(self) -> Page:
        reply = await self.ask("/metrics")
        if reply.status != 200:
            raise EngineFailed(f"GET {self.url}/metrics answered {reply.status}")
        return read_page(reply.body.decode("utf-8", "replace"))

    def _answered(self, task: asyncio.Task[dict[int, str]]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # callers get it; mark it as seen if there are none

    async def _query(self) -> dict[int, str]:
        url = f"{self.bootstrap}/query"
        try:
            reply = await self._http.request("GET", url, timeout_s=ASK_S)
            if reply.status != 200:
                raise EngineFailed(f"GET {url} answered {reply.status}")
            said = msgspec.json.decode(reply.body, type=dict[str, _Rank])
            self._engine_ids = {int(rank): entry.engine_id for rank, entry in said.items()}
        except (msgspec.MsgspecError, ValueError) as error:
            raise EngineFailed(f"GET {url} gave no engine ids by rank: {error}") from None
        except EngineFailed:
            raise
        except MoonserveError as error:
            raise EngineFailed(str(error)) from None
        return self._engine_ids

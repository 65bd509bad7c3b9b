"""Member: one external engine's address, API key and connector identity, and its /metrics page.

Fleet makes and keeps it. The driver reads it, and may have its bootstrap server asked again. The
object stays the same when its engine restarts, and then describes the newest start.

EngineMonitor reads a page per engine every second, so only a few lines of it are parsed. The names
are those of vLLM 0.6 to 0.32 and of SGLang. A page without them is empty, and no error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE, EngineFailed, MoonserveError
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import InstanceId
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient

T = TypeVar("T")

ASK_S = 5.0
_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_REPORTS_IDS = (0, 10, 2)
"""The first vLLM whose streams have the ids of tokens."""
_OURS = "moonserve "
"""How the version of a worker of ours begins. Streams of those that report it have the ids."""
_STARTED = "process_start_time_seconds"
_CACHE = "vllm:cache_config_info"
_FINISHED = "vllm:request_success_total"
_BY_REASON = "vllm:num_requests_waiting_by_reason"
_FIELDS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",
    "vllm:inter_token_latency_seconds_sum": "gaps_s",
    "vllm:inter_token_latency_seconds_count": "gaps",
    "vllm:time_per_output_token_seconds_sum": "gaps_s",
    "vllm:time_per_output_token_seconds_count": "gaps",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "usage",
}
_WANTED = (_STARTED, _CACHE, _BY_REASON, _FINISHED, *_FIELDS)
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)[ \t]*"
    r'(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(?P<value>\S+)'
)
"""A line of a page up to its value; a timestamp and an exemplar may follow."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RankPage(msgspec.Struct):
    """Load of one data-parallel rank."""

    running: int = 0
    waiting: int = 0
    """Includes requests that wait for KV from elsewhere, not for a pass."""
    deferred: int = 0
    """Waiting requests that wait for KV from elsewhere."""
    usage: float = 0.0
    """Part of its KV cache that running requests use, from 0 to 1."""
    finished: int = 0
    """Requests that have ended so far, with any outcome."""
    gaps: int = 0
    """Gaps between two tokens of a request so far, of all requests."""
    gaps_s: float = 0.0
    """The sum of these gaps, in seconds."""


class Page(msgspec.Struct):
    """What a /metrics page reports."""

    started_s: float | None = None
    """When the server process started, by its own clock; None: unknown."""
    ranks: dict[str, RankPage] = {}
    """Load by the name of each rank; empty: the page has no load."""
    cache: dict[str, str] = {}
    """The cache's configuration, by vLLM's names; empty: unknown."""

    def rank(self, number: int) -> RankPage | None:
        """The load of rank `number`, in the order of the ranks' names; None: it has none."""
        names = sorted(self.ranks, key=lambda name: (len(name), name))
        return self.ranks[names[number]] if number < len(names) else None


def read_page(text: str) -> Page:
    """Read a page in Prometheus's text format. Other lines are skipped."""
    page = Page()
    for name, labels, value in _lines(text):
        if name == _STARTED:
            page.started_s = value
        elif name == _CACHE:
            page.cache = page.cache or labels
        elif name != _BY_REASON or labels.get("reason") == "deferred":
            rank = page.ranks.setdefault(
                labels.get("engine", labels.get("dp_rank", "0")), RankPage()
            )
            if name == _FINISHED:
                rank.finished += int(value)
                continue
            field = _FIELDS.get(name, "deferred")
            setattr(rank, field, value if field in ("usage", "gaps_s") else int(value))
    return page


def _lines(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        sample = _SAMPLE.match(line)
        if sample is None or sample["name"] not in _WANTED:
            continue  # a longer name
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if value == value and abs(value) < 1e15:
            yield sample["name"], dict(_LABEL.findall(sample["labels"] or "")), value


class Mismatch(MoonserveError):
    """The engine differs from its description, or does not fit the others of its model."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class _Rank(msgspec.Struct):
    """The bootstrap server's answer about one data-parallel rank."""

    engine_id: str


class _Shared(Generic[T]):
    """A call that all callers share who come while it runs."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._task: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """The result of the call that runs; if none runs, of a new one."""
        if self._task is None:
            self._task = asyncio.create_task(self._call())
            self._task.add_done_callback(self._ended)
        return await asyncio.shield(self._task)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # callers get it; mark it as seen if there are none


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
        self.version = ""
        """As it reported at its last handshake; empty: it did not."""
        self.changed = False
        """Whether the bootstrap server named other engine ids than before: it is a new process."""
        self._http = http
        self._engine_ids: dict[int, str] = {}
        self._loading = _Shared(self.page)
        self._asking = _Shared(self._query)

    @property
    def reports_ids(self) -> bool:
        """Whether its streams can have the ids of their tokens."""
        if self.version.startswith(_OURS):
            return True
        numbers = _VERSION.match(self.version)
        if self.spec.engine != "vllm" or numbers is None:
            return False
        return tuple(map(int, numbers.groups("0"))) >= _REPORTS_IDS

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
        before = self._engine_ids
        changed = await self._asking.result() != before
        self.changed = self.changed or (changed and bool(before))
        return changed

    async def load(self) -> Page:
        """As `page`; concurrent callers share one call."""
        return await self._loading.result()

    async def page(self, timeout_s: float = ASK_S) -> Page:
        """The engine's metrics now. Raises as `ask`, and EngineFailed if it gives none."""
        reply = await self.ask("/metrics", timeout_s=timeout_s)
        if reply.status != 200:
            raise EngineFailed(f"GET {self.url}/metrics answered {reply.status}")
        return read_page(reply.body.decode("utf-8", "replace"))

    async def _query(self) -> dict[int, str]:
        url = f"{self.bootstrap}/query"
        try:
            reply = await self._http.request("GET", url, timeout_s=ASK_S)
        except MoonserveError as error:
            raise EngineFailed(str(error)) from None
        if reply.status != 200:
            raise EngineFailed(f"GET {url} answered {reply.status}")
        try:
            found = msgspec.json.decode(reply.body, type=dict[str, _Rank])
            self._engine_ids = {int(rank): entry.engine_id for rank, entry in found.items()}
        except (*UNREADABLE, ValueError) as error:
            raise EngineFailed(f"GET {url} gave no engine ids by rank: {error}") from None
        return self._engine_ids

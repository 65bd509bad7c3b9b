"""KubernetesEngines: the external engines of all sources of the setting `kubernetes`.

It runs a Reflector for each collection of objects, and gives the fleet the engines that the sources
make of them. Part of the process that has the Conductor (live.process.external); a standby has its
own. While the API server is away, the fleet keeps its engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol

from moonserve.core.errors import ConfigError
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.listed import ListedEngines
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.kubernetes.api import ApiServer, ServiceAccount
from moonserve.live.kubernetes.objects import EndpointSlice, InferencePool, Pod, T
from moonserve.live.kubernetes.reflector import Collection, Reflector, WatchTimes
from moonserve.live.kubernetes.sources import Found, Source, Unusable, by_family
from moonserve.live.tasks import keep_doing

SOURCE = "Kubernetes"
_GATHER_S = 0.05  # changes come in bursts, which are taken together


class Followed(Protocol):
    """One source while it is followed."""

    def start(self) -> None:
        """Begin to follow it."""

    def listed(self) -> bool:
        """Whether its objects were known once."""

    def found(self) -> Mapping[str, Found]:
        """Its engines now, by name."""

    def problem(self) -> str:
        """Why they may be behind; empty: they are not."""

    async def stop(self) -> None:
        """Follow it no more."""


class Made(Generic[T]):
    """The engines made of objects. What was made of an object is kept until the object changes."""

    def __init__(self, make: Callable[[T], Mapping[str, Found]]) -> None:
        self._make = make
        self._kept: dict[str, tuple[T, Mapping[str, Found]]] = {}

    def of(self, objects: Iterable[T]) -> dict[str, Found]:
        """The engines of these objects by name; if two have one name, the earlier counts."""
        old = self._kept
        kept: dict[str, tuple[T, Mapping[str, Found]]] = {}
        for it in objects:
            name = it.metadata.name
            is_same = name in old and old[name][0] is it
            kept[name] = old[name] if is_same else (it, self._make(it))
        self._kept = kept
        return _merged(made for _, made in kept.values())


class FollowedService:
    """A Service, by its EndpointSlices."""

    def __init__(
        self,
        api: ApiServer,
        source: Source,
        namespace: str,
        changed: Callable[[], None],
        times: WatchTimes,
    ) -> None:
        collection = Collection(
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            {"labelSelector": f"kubernetes.io/service-name={source.service}"},
        )
        self._source = source
        self._made = Made(source.of_slice)
        self._slices = Reflector(api, collection, EndpointSlice, changed, times)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """See Followed."""
        self._task = keep_doing(f"following service {self._source.service}", self._slices.run)

    def listed(self) -> bool:
        """See Followed."""
        return self._slices.listed

    def found(self) -> Mapping[str, Found]:
        """See Followed."""
        return self._made.of(sorted(self._slices.objects.values(), key=by_family))

    def problem(self) -> str:
        """See Followed."""
        return self._slices.problem

    async def stop(self) -> None:
        """See Followed."""
        await _end(self._task)


class FollowedPool:
    """An InferencePool, and the pods that it selects now."""

    def __init__(
        self,
        api: ApiServer,
        source: Source,
        namespace: str,
        changed: Callable[[], None],
        times: WatchTimes,
    ) -> None:
        collection = Collection(
            f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools",
            {"fieldSelector": f"metadata.name={source.pool}"},
        )
        self._api = api
        self._source = source
        self._namespace = namespace
        self._changed = changed
        self._times = times
        self._pools = Reflector(api, collection, InferencePool, self._pool_changed, times)
        self._pods: Reflector[Pod] | None = None
        """None: the pool does not exist, as far as is known."""
        self._made = Made[Pod](lambda pod: {})
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        """Follows `_pods`."""
        self._found: Mapping[str, Found] = {}

    def start(self) -> None:
        """See Followed."""
        self._tasks.add(keep_doing(f"following pool {self._source.pool}", self._pools.run))

    def _pool_changed(self) -> None:
        pool = self._pools.objects.get(self._source.pool)
        wanted = None if pool is None else self._collection(pool)
        if pool is not None:
            self._made = Made(partial(self._source.of_pod, pool=pool))
        if wanted != (None if self._pods is None else self._pods.collection):
            self._follow_pods(wanted)
        self._changed()

    def _follow_pods(self, wanted: Collection | None) -> None:
        """Follow these pods in place of others."""
        if self._following is not None:
            self._following.cancel()
            self._following.add_done_callback(self._tasks.discard)
        self._following = self._pods = None
        if wanted is not None:
            self._pods = Reflector(self._api, wanted, Pod, self._changed, self._times)
            what = f"following the pods of pool {self._source.pool}"
            self._following = keep_doing(what, self._pods.run)
            self._tasks.add(self._following)

    def _collection(self, pool: InferencePool) -> Collection:
        labels = sorted(pool.spec.selector.match_labels.items())
        selector = ",".join(f"{name}={value}" for name, value in labels)
        return Collection(f"/api/v1/namespaces/{self._namespace}/pods", {"labelSelector": selector})

    def listed(self) -> bool:
        """See Followed."""
        return self._pools.listed and (self._pods is None or self._pods.listed)

    def found(self) -> Mapping[str, Found]:
        """See Followed. While the pods of a new selector are not known yet, those of the old one
        count."""
        if self._pods is None:
            self._found = {}
        elif self._pods.listed:
            self._found = self._made.of(self._pods.objects.values())
        return self._found

    def problem(self) -> str:
        """See Followed."""
        if self._pools.problem:
            return self._pools.problem
        if self._pods is not None:
            return self._pods.problem
        if not self._pools.listed:
            return ""
        return f"no InferencePool {self._source.pool} is in namespace {self._namespace}"

    async def stop(self) -> None:
        """See Followed."""
        for task in list(self._tasks):
            await _end(task)


class KubernetesEngines:
    """See the module. Call `start`, then `stop`."""

    def __init__(
        self,
        account: ServiceAccount,
        sources: Sequence[Source],
        fleet: Fleet,
        times: WatchTimes | None = None,
    ) -> None:
        """Raises ConfigError: a source lacks its namespace, and this pod's is not known."""
        self._api = ApiServer(account)
        self._news = asyncio.Event()
        self.read = asyncio.Event()
        """Whether all sources have been read once."""
        kinds = [FollowedService if it.service else FollowedPool for it in sources]
        namespaces = [it.namespace or account.namespace() for it in sources]
        self._followed: list[Followed] = [
            kind(self._api, source, namespace, self._news.set, times or WatchTimes())
            for kind, source, namespace in zip(kinds, sources, namespaces, strict=True)
        ]
        self._listed = ListedEngines[Found](
            fleet, SOURCE, _described, lambda name: f"Kubernetes: {name}"
        )
        self._task: asyncio.Task[None] | None = None

    def alarms(self) -> list[str]:
        """Which sources cannot be read, and which endpoints cannot be used."""
        problems = [f"Kubernetes: {why}" for it in self._followed if (why := it.problem())]
        return [*problems, *self._listed.alarms()]

    def start(self) -> None:
        """Begin to follow all sources."""
        for one in self._followed:
            one.start()
        self._task = keep_doing("following Kubernetes", self._follow)

    async def _follow(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(_GATHER_S)
            self._news.clear()
            await self._listed.take(_merged(it.found() for it in self._followed))
            if all(it.listed() for it in self._followed):
                self.read.set()

    async def stop(self) -> None:
        """Follow nothing any more; the fleet keeps its engines."""
        await _end(self._task)
        for one in self._followed:
            await one.stop()
        await self._api.close()


def _merged(found: Iterable[Mapping[str, Found]]) -> dict[str, Found]:
    """The engines of all sources; if two have one name, the earlier source has it."""
    merged: dict[str, Found] = {}
    for one in found:
        for name, value in one.items():
            merged.setdefault(name, value)
    return merged


def _described(name: str, found: Found) -> InstanceSpec:
    """Raises ConfigError."""
    if isinstance(found, Unusable):
        raise ConfigError(found.why, found.field)
    return found


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})

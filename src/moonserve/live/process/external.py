"""The external engines of a gateway as a part of its process: the fleet, its API and its sources.

Listed by `gateway.Deciding`. Needs no model files but the tokenizers that engine descriptions name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client.registry import Collector

from moonserve.live.control.engines_api import EnginesApi, fleet_metrics
from moonserve.live.control.views import Figures
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.listed import settled
from moonserve.live.external.monitor import Times
from moonserve.live.external.registry_engines import RegistryEngines
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.kubernetes.api import ACCOUNT, account_of
from moonserve.live.kubernetes.engines import KubernetesEngines
from moonserve.live.kubernetes.sources import Source
from moonserve.live.kvevents.follower import Follow
from moonserve.live.ports import ClusterFeed, Registry
from moonserve.live.tasks import keep_doing
from moonserve.live.text.tools import TextTools

FILE = "the cluster file"
"""The source of engines that are given at the start."""


class ExternalSettings(msgspec.Struct, frozen=True):
    """The external engines of one gateway."""

    specs: Sequence[InstanceSpec]
    """Those that the cluster file and flags describe; others may be described later."""
    times: Times
    kept: Path | None = None
    """A file that keeps what is described over HTTP for the next start; None: it is forgotten."""
    sources: Sequence[Source] = ()
    """Where Kubernetes lists more of them."""


class ExternalEngines(ProcessPart):
    """See the module."""

    def __init__(
        self,
        settings: ExternalSettings,
        conductor: ClusterFeed,
        http: HttpClient,
        health: Health,
        registry: Registry | None,
        load_text: Callable[[str], TextTools],
        follow: Follow,
    ) -> None:
        """http: for calls to engines; `stop` closes it. load_text, follow: see Fleet."""
        self._http = http
        self.fleet = fleet = Fleet(
            conductor, http, load_text, os.environ, follow=follow, times=settings.times
        )
        self._conductor = conductor
        self._settings = settings
        self._registered = None if registry is None else RegistryEngines(registry, fleet)
        self._following: asyncio.Task[None] | None = None
        self._kubernetes: KubernetesEngines | None = None
        """There from `prepare` on, if the settings have sources."""
        self._health = health
        self._api = EnginesApi(fleet, conductor, health, self._registered)
        if self._registered is not None:
            health.report_alarms(self._registered.alarms)
        health.report_alarms(fleet.alarms)

    def routes(self) -> Routes:
        """Those of the fleet's API."""
        return self._api.routes()

    def prefixes(self) -> Routes:
        """Those of the fleet's API."""
        return self._api.prefixes()

    def collectors(self) -> list[Collector]:
        """What the fleet counts."""
        return [Figures(partial(fleet_metrics, self.fleet, self._conductor))]

    async def prepare(self) -> None:
        """Read the tokenizers of the engines, which join as they answer. Raises ConfigError, also
        if Kubernetes is to list engines and this process does not run there."""
        await self.fleet.described(FILE, self._settings.specs)
        if self._settings.kept is not None:
            await self._api.keep(self._settings.kept)
        if self._settings.sources:
            account = account_of(os.environ, ACCOUNT)
            self._kubernetes = KubernetesEngines(account, self._settings.sources, self.fleet)
            self._health.report_alarms(self._kubernetes.alarms)
            self._health.report_unready(self._unlisted)

    def _unlisted(self) -> str:
        """Why clients should wait for the first list of engines; empty: they need not."""
        if self._kubernetes is None or self._kubernetes.read.is_set() or self.fleet.monitors():
            return ""
        return "Kubernetes has not listed the engines yet"

    async def start(self, port: int) -> None:
        """Follow the engines in the registry and in Kubernetes."""
        if self._kubernetes is not None:
            self._kubernetes.start()
        if self._registered is not None:
            self._following = keep_doing(
                "following engines in the registry", self._registered.follow
            )

    async def settled(self) -> None:
        """Return once the engines that others list have reported what they hold."""
        lists = [self._registered, self._kubernetes]
        await settled(self.fleet, [it.read for it in lists if it is not None])

    async def stop(self) -> None:
        """Follow nothing any more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        if self._kubernetes is not None:
            await self._kubernetes.stop()
        await self.fleet.close()
        await self._http.close()

"""A worker's side of the control plane: join the gateway, beat, leave.

While the gateway is away the worker keeps serving and keeps trying.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import ConfigError, MoonserveError, StoreError
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_CALL_S = 5.0
_BEAT_CALL_S = 2.0  # a beat that takes longer is better sent anew: the gateway waits 5 s for one
_MAX_UNTOLD = 256
_BACKOFF_S = (0.2, 0.4, 0.8, 1.6, 3.0)
_encode = msgspec.msgpack.Encoder().encode


class Control:
    """Calls to one gateway's /internal."""

    def __init__(self, http: HttpClient, gateway: str, token: str) -> None:
        self._http = http
        self.gateway = gateway.rstrip("/")
        self._headers = {"content-type": "application/msgpack"} | bearer(token)

    async def call(self, path: str, body: bytes, timeout_s: float = _CALL_S) -> ClientResponse:
        """POST to /internal/<path>. Raises UpstreamError, DeadlineExceeded, ConfigError on 401."""
        url = f"{self.gateway}/internal/{path}"
        reply = await self._http.request(
            "POST", url, headers=self._headers, body=body, timeout_s=timeout_s
        )
        if reply.status == 401:
            raise ConfigError(f"{self.gateway} does not accept this worker's token", "token")
        return reply

    async def ping(self) -> None:
        """Return if the gateway answers at all. Raises UpstreamError, DeadlineExceeded."""
        await self._http.request("GET", f"{self.gateway}/health", timeout_s=_CALL_S)

    async def blocks(self, events: Sequence[BlockEvent]) -> None:
        """What this worker saw of a pool whose master does not tell. Raises StoreError too."""
        reply = await self.call("blocks", _encode({"events": events}))
        if reply.status != 200:
            raise StoreError(f"blocks: {_message(reply)}")


class Membership:
    """Keeps one instance known to the gateway."""

    def __init__(
        self, control: Control, info: InstanceInfo, load: Callable[[], InstanceLoad]
    ) -> None:
        """`load` gives each beat its content; the samples in it are given once and kept here
        until the gateway has them.
        """
        self._control = control
        self._info = info
        self._load = load
        self._joined = False
        self._untold = InstanceLoad()
        self.wanted = True
        """Whether to go on once the gateway does not answer any more."""

    async def run(self, joined: Callable[[], None]) -> None:
        """Join and beat for ever, or as long as it is wanted; `joined` is called at every join.

        Raises ConfigError where the gateway refuses this worker as it is, and whatever `load` does.
        """
        failures = 0
        while True:
            self._gather()
            try:
                if self._joined:
                    await self._beat()
                else:
                    await self._join()
                    joined()
                failures = 0
                pause_s = _BEAT_S
            except ConfigError:
                raise
            except MoonserveError as error:
                if not self.wanted:
                    return
                if failures == 0:
                    log.warning("gateway %s: %s; still trying", self._control.gateway, error)
                pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
            await asyncio.sleep(pause_s)

    def _gather(self) -> None:
        """The load now, with the newest samples that the gateway has not got yet."""
        self._untold = with_untold(self._load(), self._untold)

    async def leave(self) -> None:
        """Say goodbye; a gateway that is away will find out by itself."""
        if self._joined:
            self._joined = False
            try:
                await self._control.call("leave", self._body())
            except MoonserveError as error:
                log.debug("gateway %s: no goodbye: %s", self._control.gateway, error)

    async def _join(self) -> None:
        reply = await self._control.call("join", _encode(self._info))
        if 400 <= reply.status < 500:
            raise ConfigError(f"the gateway refuses this worker: {_message(reply)}", "worker")
        if reply.status != 200:
            raise MoonserveError(f"join: {_message(reply)}")
        self._joined = True

    async def _beat(self) -> None:
        reply = await self._control.call("beat", self._body(load=self._untold), _BEAT_CALL_S)
        if reply.status == 404:
            log.warning("gateway %s does not know us: joining again", self._control.gateway)
            self._joined = False
        elif reply.status != 200:
            raise MoonserveError(f"beat: {_message(reply)}")
        else:
            self._untold = InstanceLoad()

    def _body(self, **more: object) -> bytes:
        return _encode({"id": self._info.id, "epoch": self._info.epoch, **more})


def with_untold(load: InstanceLoad, old: InstanceLoad) -> InstanceLoad:
    """`load`, with the newest samples of it and of an older one that was not told."""
    return msgspec.structs.replace(
        load,
        passes=(*old.passes, *load.passes)[-_MAX_UNTOLD:],
        transfers=(*old.transfers, *load.transfers)[-_MAX_UNTOLD:],
    )


def _message(reply: ClientResponse) -> str:
    text = reply.body[:300].decode("utf-8", "replace")
    return f"{reply.status} {text}"

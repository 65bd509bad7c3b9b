"""A worker's side of the control plane: join a Conductor, beat, leave.

live.worker.conductors has one ConductorMember for each Conductor, whose process may be a gateway.
While that is away, the worker keeps serving and keeps trying.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError, MoonserveError, StoreError
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad
from moonserve.core.units import whole_number
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.http.message import ErrorReply
from moonserve.live.openai.headers import TERM
from moonserve.live.rpc.joins import CONTENT_TYPE, BeatBody, LeaveBody

log = logging.getLogger(__name__)

_CALL_S = 5.0
_MAX_UNSENT = 256
_REFUSED = (400, 401, 403)
"""Replies that another attempt cannot change: this worker's description or its token is wrong."""
_CONFLICT = 409
_encode = msgspec.msgpack.Encoder().encode


class BeatTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How often a worker beats, and how soon it tries again."""

    beat_s: float = 1.0
    call_s: float = 2.0
    """Longest call of a beat; after it a new beat is better, as the gateway waits 5 s for one."""
    backoff_s: tuple[float, ...] = (0.2, 0.4, 0.8, 1.6, 3.0)
    """Pauses after one, two, ... failures in a row; the last one repeats."""
    conflict_s: float = 30.0
    """How long a worker keeps trying to join while another instance stands against it: an earlier
    start of its own, for example, is given up after 5 s of silence."""


class ConductorClient:
    """Calls to /internal of the process that has one Conductor."""

    def __init__(
        self,
        http: HttpClient,
        url: str,
        token: str,
        heard: Callable[[int], None] = lambda term: None,
    ) -> None:
        """heard: called with the term that the Conductor reports."""
        self._http = http
        self._heard = heard
        self.url = url.rstrip("/")
        self._headers = {"content-type": CONTENT_TYPE} | bearer(token)

    async def call(self, path: str, body: bytes, timeout_s: float = _CALL_S) -> ClientResponse:
        """POST to /internal/<path>. Raises UpstreamError, DeadlineExceeded; ConfigError if the
        token or the certificate is refused."""
        url = f"{self.url}/internal/{path}"
        reply = await self._http.request(
            "POST", url, headers=self._headers, body=body, timeout_s=timeout_s
        )
        if (term := whole_number(reply.headers.get(TERM, ""))) is not None:
            self._heard(term)
        if reply.status == 401:
            raise ConfigError(
                f"{self.url} does not accept this worker's token; set MOONSERVE_TOKEN to that of"
                " the gateway, which printed at its start where its token is",
                "token",
            )
        if reply.status == 403:
            raise ConfigError(f"{self.url} refuses this worker: {_message(reply)}", "gateway")
        return reply

    async def ping(self) -> None:
        """Return if the gateway answers at all. Raises UpstreamError, DeadlineExceeded."""
        await self._http.request("GET", f"{self.url}/health", timeout_s=_CALL_S)

    async def blocks(self, events: Sequence[BlockEvent]) -> None:
        """Report blocks of Mooncake's pool, whose master reports none. Raises StoreError too."""
        reply = await self.call("blocks", _encode({"events": events}))
        if reply.status != 200:
            raise StoreError(f"blocks: {_message(reply)}")


class ConductorMember:
    """Keeps one instance known to one Conductor."""

    def __init__(
        self,
        gateway: ConductorClient,
        info: InstanceInfo,
        load: Callable[[], InstanceLoad],
        times: BeatTimes = BeatTimes(),  # noqa: B008 - frozen
    ) -> None:
        """
        load: returns the content of a beat. It returns each sample once; they are kept here until
        the gateway has them.
        """
        self._gateway = gateway
        self._times = times
        self._info = info
        self._load = load
        self._joined = False
        self._conflict_since_s: float | None = None
        self._unsent = InstanceLoad()
        self._sent = InstanceLoad()
        """The newest samples that the gateway has: one that was restarted gets them again."""
        self.wanted = True
        """Whether to keep trying once the gateway does not answer any more."""

    async def run(self, joined: Callable[[], None]) -> None:
        """Join and beat for ever, or as long as it is wanted; `joined` is called at every join.

        Raises ConfigError where the gateway refuses this worker for ever, and whatever `load` does.
        All other failures are tried again.
        """
        failures = 0
        while True:
            self._gather()
            try:
                if self._joined:
                    await self._beat()
                    pause_s = self._times.beat_s
                else:
                    await self._join()
                    joined()
                    pause_s = 0.0  # what was measured is reported at once
                failures = 0
            except ConfigError:
                raise
            except MoonserveError as error:
                if not self.wanted:
                    return
                if failures == 0:
                    log.warning("gateway %s: %s; still trying", self._gateway.url, error)
                backoff_s = self._times.backoff_s
                pause_s = backoff_s[min(failures, len(backoff_s) - 1)]
                failures += 1
            await asyncio.sleep(pause_s)

    def _gather(self) -> None:
        """Take the load now, and keep the newest samples that the gateway does not have yet."""
        self._unsent = with_unsent(self._load(), self._unsent)

    async def leave(self) -> None:
        """Leave. A gateway that is away notices by the missing beats."""
        if self._joined:
            self._joined = False
            try:
                await self._gateway.call(
                    "leave", _encode(LeaveBody(self._info.id, self._info.epoch))
                )
            except MoonserveError as error:
                log.debug("gateway %s: leave failed: %s", self._gateway.url, error)

    async def _join(self) -> None:
        reply = await self._gateway.call("join", _encode(self._info))
        if reply.status in _REFUSED or (reply.status == _CONFLICT and self._conflict_lasts()):
            what = f"{self._gateway.url} refuses this worker: {_message(reply)}"
            raise ConfigError(what, "worker")
        if reply.status != _CONFLICT:
            self._conflict_since_s = None
        if reply.status != 200:
            raise MoonserveError(f"join: {_message(reply)}")
        self._joined = True
        self._unsent = with_unsent(self._unsent, self._sent)
        self._sent = InstanceLoad()

    def _conflict_lasts(self) -> bool:
        """Whether the gateway has refused this worker for another one's sake for too long."""
        now_s = asyncio.get_running_loop().time()
        if self._conflict_since_s is None:
            self._conflict_since_s = now_s
        return now_s - self._conflict_since_s >= self._times.conflict_s

    async def _beat(self) -> None:
        beat = BeatBody(self._info.id, self._info.epoch, self._unsent)
        reply = await self._gateway.call("beat", _encode(beat), self._times.call_s)
        if reply.status == 404:
            log.warning("gateway %s does not know this worker: joining again", self._gateway.url)
            self._joined = False
        elif reply.status != 200:
            raise MoonserveError(f"beat: {_message(reply)}")
        else:
            self._sent = with_unsent(self._unsent, self._sent)
            self._unsent = InstanceLoad()


def with_unsent(load: InstanceLoad, old: InstanceLoad) -> InstanceLoad:
    """Return `load` with the newest samples of it and of an older load that was not sent."""
    return msgspec.structs.replace(
        load,
        passes=(*old.passes, *load.passes)[-_MAX_UNSENT:],
        transfers=(*old.transfers, *load.transfers)[-_MAX_UNSENT:],
    )


def _message(reply: ClientResponse) -> str:
    try:
        return msgspec.json.decode(reply.body, type=ErrorReply).error.message
    except UNREADABLE:
        text = reply.body[:300].decode("utf-8", "replace")
        return f"{reply.status} {text}"

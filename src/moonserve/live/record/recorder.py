"""The recorder: writes what became of each request to disk, beside the process that decides.

It is a part of the process that has the Conductor. The event loop only puts records into a bounded
queue; a thread makes rows of them and writes (core.schedule.recorded, `files`). Rows that find no
room in the queue, or cannot be written, are counted and dropped. No request waits for it. `recent`
gives the latest rows to the twin, also where nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterable

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.core.errors import BadRequest
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.recorded import (
    RecordedCluster,
    RecordedRequest,
    cluster_of,
    recorded,
)
from moonserve.core.units import Bytes, Micros, Tokens
from moonserve.live.clock import since_1970_us, wall_ms
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.views import Figures
from moonserve.live.health import Health
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.record import recent
from moonserve.live.record.files import RecordingFiles, folder_of, make_folder
from moonserve.live.record.recent import EndedRequest, Recent

log = logging.getLogger(__name__)

PATH = "/api/recording"
_MOST_WAITING = 8_192
_BATCH = 512
_PAUSE_S = 1.0
"""How long rows wait for others, so that they are compressed together."""
_STOP_S = 5.0
_LOOK_US: Micros = 1_000_000
_LEAST_BLOCK: Tokens = 32
"""Blocks of a recording are at least so long: of shorter ones a long prompt has thousands."""
_FIRST_GUESS: Tokens = 128
"""The output of requests that were not served, until one was served."""


class RecordingStatus(msgspec.Struct, frozen=True):
    """What GET /api/recording answers."""

    recording: bool
    folder: str
    """Empty: this process has no folder for recordings."""
    file: str | None
    """The one that is written now."""
    rows: int
    """Written since the process started."""
    dropped: int
    bytes: Bytes
    failure: str
    """Why rows cannot be written now; empty: they can."""


class Recorder(ProcessPart):
    """See the module. Handlers and `_take` run on the event loop, `_work` in a thread."""

    def __init__(
        self, conductor: ConductorLoop, health: Health, folder: str, most_bytes: Bytes
    ) -> None:
        """folder: empty: it cannot record. most_bytes: of all recordings in the folder."""
        self._conductor = conductor
        self._files = RecordingFiles(folder_of(folder), most_bytes) if folder else None
        self._salt = secrets.token_bytes(32)
        self._is_on = False
        self._waiting: deque[EndedRequest] = deque()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._rows = 0
        self._dropped = 0
        self._failure = ""
        self._guess = _OutputGuess()
        self._cluster: RecordedCluster | None = None
        """As it was last when it could serve."""
        self._looks_us: Micros = 0
        """When to look at it again."""
        self._put: RecordedCluster | None = None
        """The one that is on disk."""
        self._recent = Recent(conductor, self._row)
        self._key_tokens: Tokens = 0
        """How many tokens a key stands for; 0: no instance has ever joined."""
        conductor.watch_ended(self._take)
        health.report_alarms(self._alarms)

    def routes(self) -> Routes:
        """Status, start and stop."""
        return {
            ("GET", PATH): self._status,
            ("GET", recent.PATH): self._send_recent,
            ("POST", PATH): self._begin,
            ("DELETE", PATH): self._end,
        }

    def collectors(self) -> list[Collector]:
        """What was recorded."""
        return [Figures(self._metrics)]

    async def prepare(self) -> None:
        """Begin to record if there is a folder. Raises ConfigError."""
        if self._files is not None:
            make_folder(self._files.folder)
            self._is_on = True

    async def stop(self) -> None:
        """Write what is waiting, for some seconds at most."""
        self._is_on = False
        thread = self._thread
        if thread is not None:
            self._ending.set()
            await asyncio.to_thread(thread.join, _STOP_S)

    def _take(self, record: Record) -> None:
        is_wanted = self._recent.is_wanted
        if not (self._is_on or is_wanted):
            return
        if not (self._key_tokens or self._find_key_tokens()):
            self._dropped += self._is_on  # nothing could be served yet
            return
        now_us = self._conductor.now_us()
        ended = EndedRequest(record, record.keys, since_1970_us(now_us))
        if is_wanted:
            self._recent.take(ended)
        if self._is_on:
            if now_us >= self._looks_us:
                self._look(now_us)
            self._write_soon(ended)

    def _write_soon(self, ended: EndedRequest) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.append(ended)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
            self._thread.start()

    def _look(self, now_us: Micros) -> None:
        """Remember the cluster, if it can serve."""
        self._looks_us = now_us + _LOOK_US
        infos = (view.info for view in self._conductor.views().values())
        self._cluster = cluster_of(infos, self._conductor.tuning) or self._cluster

    def _find_key_tokens(self) -> Tokens:
        """The block size of the first instance that joined. All rows of one process have the same,
        so keys of instances with another one are left out."""
        sizes = (info.namespace.block_size for info in self._conductor.instances())
        self._key_tokens = next(sizes, 0)
        return self._key_tokens

    # The thread.

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ending.wait(_PAUSE_S)
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._write(batch)
        if self._files is not None:
            self._files.close()

    def _write(self, batch: list[EndedRequest]) -> None:
        assert self._files is not None, "nothing waits where there is no folder"
        encode = msgspec.json.Encoder().encode
        lines = b"".join(
            encode(self._row(it, self._guess.after(it.record))) + b"\n" for it in batch
        )
        cluster = self._cluster
        try:
            if cluster is not None and cluster != self._put:
                self._files.put_cluster(encode(cluster))
                self._put = cluster
            self._files.append(lines)
        except OSError as error:
            why = error.strerror or str(error)
            if why != self._failure:
                log.warning("requests are not recorded: %s", why)
            self._failure = why
            self._dropped += len(batch)
            return
        self._rows += len(batch)
        self._failure = ""

    def _row(self, it: EndedRequest, guess: Tokens) -> RecordedRequest:
        size = self._key_tokens
        block_size = size * -(-_LEAST_BLOCK // size)
        keys = it.keys if it.record.prompt_tokens // size == len(it.keys) else ()
        clock_ms = wall_ms(it.since_us)
        return recorded(it.record, keys, size, block_size, self._salt, clock_ms, guess)

    # What others read.

    async def _status(self, request: HttpRequest) -> Response:
        return json_response(self._said())

    def _said(self) -> RecordingStatus:
        files = self._files
        path = None if files is None else files.path
        return RecordingStatus(
            recording=self._is_on,
            folder="" if files is None else str(files.folder.absolute()),
            file=None if path is None else path.name,
            rows=self._rows,
            dropped=self._dropped,
            bytes=0 if files is None else files.written_bytes,
            failure=self._failure,
        )

    async def _send_recent(self, request: HttpRequest) -> Response:
        if not self._key_tokens:
            self._find_key_tokens()
        return await self._recent.send(request)

    async def _begin(self, request: HttpRequest) -> Response:
        if self._files is None:
            raise BadRequest(
                "this process has no folder for recordings; start it with --record FOLDER", None
            )
        self._is_on = True
        return json_response(self._said())

    async def _end(self, request: HttpRequest) -> Response:
        self._is_on = False
        return json_response(self._said())

    def _alarms(self) -> list[str]:
        return [f"requests are not recorded: {self._failure}"] if self._failure else []

    def _metrics(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "moonserve_recording", "1 while requests are recorded.", value=float(self._is_on)
        )
        for name, text, value in (
            ("recorded_requests", "Requests written to the recording.", self._rows),
            ("record_dropped_requests", "Requests that could not be recorded.", self._dropped),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=value)


class _OutputGuess:
    """How long the answers of requests are that were not served: the mean of those that were."""

    def __init__(self) -> None:
        self._mean = float(_FIRST_GUESS)
        self._count = 0

    def after(self, record: Record) -> Tokens:
        """Learn from this request if it was served; return the guess."""
        if record.is_good is not None:
            self._count = min(self._count + 1, 1_000)
            self._mean += (record.measured.tokens - self._mean) / self._count
        return round(self._mean)

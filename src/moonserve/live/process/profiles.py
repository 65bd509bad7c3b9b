"""Profiles of a running process: POST /start_profile and POST /stop_profile, as vLLM names them.

A worker records its engine's passes as a Chrome trace (`PassProfiler`). Gateways, fronts and
Conductors sample what their event loop runs (`LoopProfiler`). A profile ends by itself after its
time, and each is a file of its own. While no profile runs, nothing is loaded and nothing is called.
The guard of the process has found the cluster's token, or a key of the scope admin, before.
"""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from moonserve.core.errors import BadRequest, ConfigError, Conflict, EngineFailed, MoonserveError
from moonserve.core.units import MICROS_PER_SECOND
from moonserve.live.http.message import HttpRequest, Response, decode_query, json_response
from moonserve.live.http.server import ProcessPart, Routes
from moonserve.live.ports import Engine
from moonserve.live.record.files import make_folder

if TYPE_CHECKING:
    from pyinstrument import Profiler as Sampler

log = logging.getLogger(__name__)

START, STOP = "/start_profile", "/stop_profile"
_LONGEST_S = 60.0
"""A profile is kept in memory until it ends, and a worker's grows by megabytes in a second."""
_SAMPLE_S = 1_000 / MICROS_PER_SECOND


class Profiler(Protocol):
    """What can measure one kind of process. One profile at a time."""

    suffix: str
    """Of its files."""

    async def start(self) -> None:
        """Begin. Raises BadRequest: this process cannot be profiled, and why."""

    async def stop(self, file: Path) -> None:
        """End, and write the file. Raises OSError."""


class LoopProfiler:
    """Samples the thread of the event loop. The file is a page for any browser."""

    suffix = ".html"

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    async def start(self) -> None:
        """See Profiler."""
        if find_spec("pyinstrument") is None:
            raise BadRequest(
                "a profile of this process needs pyinstrument; install it where the process runs:"
                " pip install 'moonserve[profile]'"
            )
        from pyinstrument import Profiler as Sampler  # only here: it is optional

        # "disabled" samples all tasks of the thread, and not only the one that starts it
        self._sampler = Sampler(interval=_SAMPLE_S, async_mode="disabled")
        self._sampler.start()

    async def stop(self, file: Path) -> None:
        """See Profiler."""
        from pyinstrument.renderers import HTMLRenderer

        sampler, self._sampler = self._sampler, None
        assert sampler is not None, "it was started"
        session = sampler.stop()
        page = await asyncio.to_thread(HTMLRenderer().render, session)
        await asyncio.to_thread(file.write_text, page)


class PassProfiler:
    """Records what a worker's engine does in its passes. The file is a Chrome trace."""

    suffix = ".pt.trace.json.gz"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self) -> None:
        """See Profiler."""
        await self._engine.start_profile()

    async def stop(self, file: Path) -> None:
        """See Profiler."""
        await self._engine.stop_profile(file)


class ProfileAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of POST /start_profile."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_S)] = 10.0
    """After that time it ends by itself."""


class ProfileReply(msgspec.Struct, frozen=True):
    """The reply to both routes."""

    file: str
    """Where the profile is, or will be, on the host of this process."""
    seconds: float
    """After that time it ends by itself."""


class _Running(msgspec.Struct):
    """A profile that has begun, until its file is written."""

    reply: ProfileReply
    timer: asyncio.TimerHandle | None = None
    """Ends it; None: it starts."""
    writing: asyncio.Task[None] | None = None
    """None: it has not ended."""


class Profiles(ProcessPart):
    """See the module."""

    def __init__(self, folder: str, name: str, profiler: Profiler) -> None:
        """folder: for the files; empty: this process cannot be profiled. name: of the process."""
        self._folder = Path(folder).expanduser().absolute() if folder else None
        self._name = name
        self._profiler = profiler
        self._running: _Running | None = None

    def routes(self) -> Routes:
        """Start and stop."""
        return {("POST", START): self._start, ("POST", STOP): self._stop}

    async def prepare(self) -> None:
        """Raises ConfigError if nothing can be written to the folder."""
        if self._folder is not None:
            await asyncio.to_thread(make_folder, self._folder, "profiles", "profile_folder")

    async def stop(self) -> None:
        """End the profile that runs."""
        if self._running is not None and self._running.timer is not None:
            await asyncio.wait({self._end(self._running)})  # a failure is logged

    async def _start(self, request: HttpRequest) -> Response:
        seconds = decode_query(request.query, ProfileAsked).seconds
        if self._folder is None:
            raise BadRequest(
                "this process has no folder for profiles; start it with --profile-folder FOLDER"
            )
        if self._running is not None:
            other = self._running.reply
            raise Conflict(
                f"a profile runs already; it ends by itself within {other.seconds:g} s, or by"
                f" POST {STOP}; its file will be {other.file}"
            )
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        file = self._folder / f"{self._name}-{os.getpid()}-{stamp}{self._profiler.suffix}"
        self._running = running = _Running(ProfileReply(str(file), seconds))
        try:
            await asyncio.to_thread(_make, self._folder)
            await self._profiler.start()
        except BaseException:
            self._running = None
            raise
        running.timer = asyncio.get_running_loop().call_later(seconds, self._end, running)
        log.info("a profile runs for %g s", seconds)
        return json_response(running.reply)

    async def _stop(self, request: HttpRequest) -> Response:
        running = self._running
        if running is None or running.timer is None:
            raise Conflict(f"no profile runs; start one with POST {START}")
        await asyncio.shield(self._end(running))
        return json_response(running.reply)

    def _end(self, running: _Running) -> asyncio.Task[None]:
        """End the profile, unless it has ended; return what writes its file."""
        if running.writing is None:
            assert running.timer is not None, "it has started"
            running.timer.cancel()
            running.writing = asyncio.create_task(self._write(running))
            running.writing.add_done_callback(_note_failure)
        return running.writing

    async def _write(self, running: _Running) -> None:
        try:
            await self._profiler.stop(Path(running.reply.file))
        except OSError as error:
            raise EngineFailed(f"no profile: {error.strerror or error}") from None
        finally:
            self._running = None
        log.info("profile: %s", running.reply.file)


def _note_failure(task: asyncio.Task[None]) -> None:
    """Log why there is no file: if the profile ended by itself, nobody waits for it."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        known = isinstance(error, MoonserveError)
        log.warning("a profile failed: %s", error, exc_info=None if known else error)


def _make(folder: Path) -> None:
    try:
        make_folder(folder, "profiles", "profile_folder")
    except ConfigError as error:
        raise BadRequest(f"{error} with --profile-folder") from None

"""Keep a few processes alive, and leave none behind.

Called by `moonserve up` and `gateway --workers`; the children call `die_with_parent` and
`beat`. Knows nothing of gateways, workers or HTTP: a child is a name, an argv and an
environment. A child never gets the terminal's Ctrl-C (it has a process group of its own): only the
supervisor decides when it ends. A child's stdin is a socket whose other end is the supervisor's:
the child writes a byte each second there, and reads that nobody is there any more.

    stop():  rank by rank: SIGTERM -> grace_s -> SIGKILL      kill(): SIGKILL, all, now
    a death nobody asked for: said, then a restart after a back-off; too many end everything
    a loop that stands still for silence_s: SIGKILL, and then as any death
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from moonserve.core.errors import MoonserveError

_LIFELINE = "MOONSERVE_LIFELINE"
_LINE_LIMIT = 64 << 10
_ORPHAN_GRACE_S = 5.0
_BEAT_S = 1.0


class GaveUp(MoonserveError):
    """A child kept dying, and the supervisor stopped all of them."""


class Child(msgspec.Struct, frozen=True):
    """One process to keep alive."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment; secrets belong here, never in argv."""
    rank: int = 0
    """Children of a lower rank are gone before one of a higher rank is asked to stop."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    silence_s: float = 30.0
    """How long its event loop may stand still before it is killed. One that never beat is not
    watched: it is no program of ours, or has not come so far."""


class Restarts(msgspec.Struct, frozen=True):
    """How often one child may die before all is given up, and how long to wait before each."""

    limit: int = 5
    window_s: float = 60.0
    backoff_s: float = 0.5
    """Doubles with each death in the window."""
    hopeless: tuple[int, ...] = (2,)
    """Exit codes after which a restart cannot help; 2 is our command line's for a wrong setting."""


class Supervisor:
    """Starts children, passes their lines on, restarts the dead. One `run` per object."""

    def __init__(
        self,
        children: Sequence[Child],
        tell: Callable[[str, str], None],
        restarts: Restarts | None = None,
    ) -> None:
        """`tell(name, line)` gets every line a child prints, and what happens to it."""
        self._children = tuple(children)
        self._tell = tell
        self._restarts = restarts or Restarts()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._stopping_task: asyncio.Task[None] | None = None
        """The stop that a signal began."""

    @property
    def pids(self) -> dict[str, int]:
        """The pid of every child that runs now."""
        return {name: process.pid for name, process in self._processes.items()}

    async def run(self) -> None:
        """Keep all children alive until `stop`; whatever ends it, none is left behind.

        Raises GaveUp when a child died too often, OSError when one cannot be started.
        """
        keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
            for keeper in done:
                keeper.result()
        finally:
            await self.stop()
            await asyncio.gather(*keepers, return_exceptions=True)
            if self._stopping_task is not None:
                await self._stopping_task

    async def stop(self) -> None:
        """Ask the children to end, rank by rank; kill what outlives its grace."""
        self._stopping.set()
        for rank in sorted({child.rank for child in self._children}):
            group = [child for child in self._children if child.rank == rank]
            await asyncio.gather(*(self._end(child) for child in group))

    def kill(self) -> None:
        """End every child at once, without grace; `run` and `stop` return soon after."""
        self._stopping.set()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def stop_on_signals(self, stopping: Callable[[], None], killing: Callable[[], None]) -> None:
        """At the first SIGINT, SIGTERM or SIGHUP stop in order; at a second one kill all children.

        `stopping` and `killing` are called before that, to report it.
        """
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if self._stopping_task is None:
                stopping()
                self._stopping_task = loop.create_task(self.stop())
            else:
                killing()
                self.kill()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)

    async def _end(self, child: Child) -> None:
        process = self._processes.get(child.name)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), child.grace_s)
        except TimeoutError:
            self._tell(child.name, f"did not stop within {child.grace_s:g} s: killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep(self, child: Child) -> None:
        """Run one child again and again, until a stop or too many deaths."""
        deaths: deque[float] = deque()
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            how = _how_it_ended(code)
            if code in self._restarts.hopeless:
                raise GaveUp(f"{child.name} {how}, and would again; its lines above say why")
            deaths.append(loop.time())
            while deaths[0] < loop.time() - self._restarts.window_s:
                deaths.popleft()
            if len(deaths) >= self._restarts.limit:
                raise GaveUp(
                    f"{child.name} {how}, {len(deaths)} times within "
                    f"{self._restarts.window_s:g} s; its lines above say why"
                )
            pause_s = self._restarts.backoff_s * 2 ** (len(deaths) - 1)
            self._tell(child.name, f"{how.upper()}; starting it again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_once(self, child: Child) -> int:
        """Start the child, pass its lines on until it ends, return its exit code."""
        ours, theirs = socket.socketpair()  # held open by us alone: end of file = we are gone
        with ours:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *child.argv,
                    env={**child.env, _LIFELINE: "stdin"},
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    process_group=0,
                )
            self._processes[child.name] = process
            if self._stopping.is_set():  # stop() may have looked before we were listed
                process.kill()
            assert process.stdout is not None
            lines = asyncio.create_task(self._pump(child.name, process.stdout))
            beats = asyncio.create_task(self._watch(child, process, ours))
            try:
                code = await process.wait()
                # A grandchild may hold the pipe open: its lines are not worth waiting for.
                await asyncio.wait([lines], timeout=1.0)
            finally:
                lines.cancel()
                beats.cancel()
                del self._processes[child.name]
            return code

    async def _watch(
        self, child: Child, process: asyncio.subprocess.Process, beats: socket.socket
    ) -> None:
        """Kill it when it beat, and then no more.

        Looks are counted, not the clock: of a pause of our own, as of the whole machine's, one is.
        """
        beats.setblocking(False)
        began, missed = False, 0
        while missed * _BEAT_S < child.silence_s:
            await asyncio.sleep(_BEAT_S)
            try:
                if not beats.recv(4096):
                    return  # it closed its end
                began, missed = True, 0
            except BlockingIOError:
                missed += began
            except ConnectionError:
                return
        self._tell(child.name, f"hangs: nothing of it for {child.silence_s:g} s: killed")
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _pump(self, name: str, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(8192):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_LIMIT:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._tell(name, line.decode(errors="replace").rstrip())
        if rest:
            self._tell(name, rest.decode(errors="replace").rstrip())


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"died with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def die_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """In a child: end when the supervisor is gone, even by SIGKILL. Otherwise do nothing.

    The supervisor alone holds the other end of our stdin, so end of file means it is gone. A
    thread waits for that, so that a busy event loop cannot miss it; SIGTERM gives the program
    five seconds to clean up before the process ends.
    """
    if environ.get(_LIFELINE) == "stdin":
        threading.Thread(target=_wait_for_orphanhood, name="lifeline", daemon=True).start()


def _wait_for_orphanhood() -> None:
    with contextlib.suppress(ConnectionError):  # gone with beats of ours unread
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; they do not end the process by themselves any more."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def say(line: str) -> None:
    """Print it for whoever started us; nobody may read that any more, and then there is to stop."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def beat() -> None:
    """In a child: tell the supervisor each second from now on that the event loop goes round.

    To be called once what may block for long, as reading a model may, has been done.
    """
    if os.environ.get(_LIFELINE) == "stdin":
        _beat(socket.socket(fileno=os.dup(0)), asyncio.get_running_loop())


def _beat(parent: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(OSError):  # it stopped, or is gone; the lifeline sees to that
        parent.send(b".", socket.MSG_DONTWAIT)  # nothing here may change how fd 0 blocks
    loop.call_later(_BEAT_S, _beat, parent, loop)

"""Keep a few processes alive, and leave none behind.

Called by `moonserve up` and `gateway --workers`; the children call `die_with_parent` and `beat`. It
knows nothing of gateways, workers or HTTP: a child is a name, an argv and an environment. A child
never gets the terminal's Ctrl-C, since it has its own process group: only the supervisor decides
when it ends. A child's stdin is a socket. The supervisor holds the other end: the child writes a
byte each second, and reads the end of file when the supervisor is gone.

    stop():  rank by rank: stop_signal -> grace_s -> SIGKILL  kill(): SIGKILL, all, now
    unexpected death: reported, then a restart after a pause that doubles from death to death
    before anything is ready: a wrong setting, or too many deaths, ends all children
    an event loop that stands still for silence_s: SIGKILL, then as any unexpected death
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.logs import LINES

ALL_END = signal.SIGUSR1
"""As SIGTERM, for a process that shares its port: the others there end too. A process that has not
prepared for it yet ends at once, as by SIGTERM."""
_LIFELINE = "MOONSERVE_LIFELINE"
_LINE_LIMIT = 64 << 10
_ORPHAN_GRACE_S = 5.0
_BEAT_S = 1.0


class GaveUp(MoonserveError):
    """The start failed, and the supervisor stopped all children."""


class Child(msgspec.Struct, frozen=True):
    """One process to keep alive."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment. Secrets belong here, never in argv."""
    rank: int = 0
    """Children of a lower rank end before the supervisor stops those of a higher rank."""
    grace_s: float = 10.0
    """The time from `stop_signal` to SIGKILL."""
    stop_signal: signal.Signals = signal.SIGTERM
    """What asks it to end, when all children end."""
    silence_s: float = 30.0
    """How long the child's event loop may stand still before the supervisor kills it. A child that
    never beat is not watched: it is another program, or still starts. With its first beat it is
    ready."""


class Restarts(msgspec.Struct, frozen=True):
    """How soon a child that died is started again, and when a start has failed.

    Once a child has been ready, its deaths never end the others: they may be able to serve, and the
    cause, such as one request, may pass.
    """

    backoff_s: float = 0.5
    """The pause after the first death; it doubles with each further one."""
    longest_s: float = 30.0
    """The longest pause."""
    healthy_s: float = 10.0
    """The pauses begin anew for a child that ran for so long."""
    limit: int = 5
    """So many deaths of one child in a row end all, if no child has been ready yet."""
    hopeless: tuple[int, ...] = (2,)
    """Exit codes of a child that was never ready that end all: a restart cannot help. moonserve
    exits with 2 for a wrong setting."""


class Supervisor:
    """Starts children, passes on the lines that they print, restarts dead ones. Use `run` once."""

    def __init__(
        self,
        children: Sequence[Child],
        tell: Callable[[str, str], None],
        restarts: Restarts | None = None,
    ) -> None:
        """tell(name, line): called with every line of a child, and with what happens to it."""
        self._children = tuple(children)
        self._tell = tell
        self._restarts = restarts or Restarts()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ready: set[str] = set()
        """Names of the children that have ever been ready."""
        self._stopping = asyncio.Event()
        self._stopping_task: asyncio.Task[None] | None = None
        """The stop that a signal began."""

    @property
    def pids(self) -> dict[str, int]:
        """The pids of all children that run now, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    async def run(self) -> None:
        """Keep all children alive until `stop`. No child is left behind, however this ends.

        Raises GaveUp when the start fails (see Restarts), OSError when a child cannot be started.
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
        """Ask the children to end, rank by rank; kill those that outlive their grace."""
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
            process.send_signal(child.stop_signal)
        try:
            await asyncio.wait_for(process.wait(), child.grace_s)
        except TimeoutError:
            self._tell(child.name, f"did not stop within {child.grace_s:g} s: killed")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _keep(self, child: Child) -> None:
        """Run one child again and again, until a stop or a failed start."""
        rules = self._restarts
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping.is_set():
            began_s = loop.time()
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            how = _how_it_ended(code)
            if code in rules.hopeless and child.name not in self._ready:
                raise GaveUp(f"{child.name} {how}; a restart cannot help; see its lines above")
            if loop.time() - began_s >= rules.healthy_s:
                deaths = 0
            deaths += 1
            if deaths >= rules.limit and not self._ready:
                raise GaveUp(f"{child.name} {how}, {deaths} times in a row; see its lines above")
            pause_s = min(rules.longest_s, rules.backoff_s * 2 ** min(deaths - 1, 30))
            self._tell(child.name, f"{how.upper()}; starting it again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _run_once(self, child: Child) -> int:
        """Start the child, pass its lines on until it ends, return its exit code."""
        ours, theirs = socket.socketpair()  # only we hold `ours`: end of file means we are gone
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
            if self._stopping.is_set():  # stop() may have run before this process was listed
                process.kill()
            assert process.stdout is not None
            lines = asyncio.create_task(self._pump(child.name, process.stdout))
            beats = asyncio.create_task(self._watch(child, process, ours))
            try:
                code = await process.wait()
                # A grandchild may hold the pipe open; do not wait for its lines.
                await asyncio.wait([lines], timeout=1.0)
            finally:
                lines.cancel()
                beats.cancel()
                self._has_beaten(child, ours)  # it may have beaten and died between two looks
                del self._processes[child.name]
            return code

    async def _watch(
        self, child: Child, process: asyncio.subprocess.Process, beats: socket.socket
    ) -> None:
        """Kill a child that has beaten before and then stopped.

        This counts its own looks rather than the clock: a pause of the supervisor or of the whole
        machine then counts as one missed beat.
        """
        began, missed = False, 0
        while missed * _BEAT_S < child.silence_s:
            await asyncio.sleep(_BEAT_S)
            match self._has_beaten(child, beats):
                case None:
                    return
                case True:
                    began, missed = True, 0
                case False:
                    missed += began
        self._tell(child.name, f"hangs: no sign of life for {child.silence_s:g} s: killed")
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def _has_beaten(self, child: Child, beats: socket.socket) -> bool | None:
        """Whether the child has beaten since the last look; None: it closed its end."""
        try:
            beaten = bool(beats.recv(4096, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        except ConnectionError:
            return None
        if beaten:
            self._ready.add(child.name)
        return beaten or None

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
    if code == 0:
        return "ended with exit code 0"
    if code > 0:
        return f"died with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def die_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """In a child: end this process when the supervisor is gone, even by SIGKILL.

    Without a supervisor, do nothing. The supervisor alone holds the other end of stdin, so end of
    file means that it is gone. A thread waits for that, since an event loop may be busy. SIGTERM
    gives the program five seconds to clean up before the process ends.
    """
    if environ.get(_LIFELINE) == "stdin":
        threading.Thread(target=_wait_for_orphanhood, name="lifeline", daemon=True).start()


def _wait_for_orphanhood() -> None:
    with contextlib.suppress(ConnectionError):  # it ended without reading all beats
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)


class StopEvent(asyncio.Event):
    """Set by SIGTERM, SIGINT and ALL_END, which do not end the process by themselves any more."""

    all_end = False
    """Whether the others at the process's port end too."""

    def end_all(self) -> None:
        """ALL_END has come."""
        self.all_end = not self.is_set()
        self.set()


def stop_event() -> StopEvent:
    """The event of this process. Call it once, on the loop that waits for it."""
    stop = StopEvent()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(ALL_END, stop.end_all)
    return stop


def say(line: str) -> None:
    """Print a line for the supervisor. A closed or full stdout does not stop the process."""
    LINES.put(sys.stdout, line)


def proxy_line(at: str) -> str:
    """The line that says where a picker listens for proxies."""
    return f"listening for proxies (gRPC, ext_proc) at {at}"


def beat() -> None:
    """In a child: report to the supervisor that it is ready, and then each second that the event
    loop runs.

    Call it when the process serves, after everything that may block for long, such as reading a
    model.
    """
    if os.environ.get(_LIFELINE) == "stdin":
        _beat(socket.socket(fileno=os.dup(0)), asyncio.get_running_loop())


def _beat(parent: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone; the lifeline ends us
        parent.send(b".", socket.MSG_DONTWAIT)  # fd 0 itself must stay a blocking one
    loop.call_later(_BEAT_S, _beat, parent, loop)

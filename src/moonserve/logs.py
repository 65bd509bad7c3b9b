"""Lines of a process for people: they never stop the process, and repeated warnings are few.

config.apply_logging, the supervisors of the command line and live.process.supervise.say write by
`LINES`. A thread writes the lines to stdout and stderr. So a reader that pauses (a stopped
terminal, a pager, a slow pipe) and a full disk delay no event loop. Nothing here chooses what is
logged.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

from moonserve.core.units import Bytes

_MAX_WAITING_BYTES: Bytes = 4 << 20
_FLUSH_S = 1.0


class LineQueue:
    """Lines that wait for one writer thread. If the bytes that wait reach a limit, the queue drops
    new lines until the thread has written all, and then reports in one line how many are missing.
    """

    def __init__(self, max_waiting_bytes: Bytes = _MAX_WAITING_BYTES) -> None:
        self.dropped = 0
        """Lines that were not written, since the process began."""
        self._max_waiting_bytes = max_waiting_bytes
        self._lines: SimpleQueue[tuple[TextIO, bytes]] = SimpleQueue()
        self._lock = threading.RLock()
        """Reentrant: the garbage collector may log in the middle of a `put`."""
        self._waiting_bytes = 0
        self._full = False
        self._missing = 0
        """Dropped lines that no line has reported yet."""
        self._idle = threading.Event()
        """Set while no line waits."""
        self._idle.set()
        self._thread: threading.Thread | None = None

    def put(self, stream: TextIO | None, line: str) -> None:
        """Write a line, soon and in order, to a stream that has a file; it never blocks.

        A stream in memory gets its line at once; None (a closed stdout) gets nothing.
        """
        if stream is None:
            return
        if not _has_file(stream):
            with contextlib.suppress(OSError, ValueError):
                stream.write(line + "\n")
                stream.flush()
            return
        data = (line + "\n").encode(stream.encoding or "utf-8", "backslashreplace")
        with self._lock:
            if self._full or self._waiting_bytes + len(data) > self._max_waiting_bytes:
                self._full = True
                self._lose()
                return
            self._waiting_bytes += len(data)
            self._idle.clear()
            self._lines.put((stream, data))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
                self._thread.start()
                atexit.register(self.flush)

    def flush(self, within_s: float = _FLUSH_S) -> None:
        """Wait until all lines are written, but not for a reader that does not read."""
        self._idle.wait(within_s)

    def _lose(self) -> None:
        self.dropped += 1
        self._missing += 1

    def _write(self) -> None:
        while True:
            stream, data = self._lines.get()
            wrote = _written(stream, data)
            with self._lock:
                self._waiting_bytes -= len(data)
                if not wrote:
                    self._lose()
                missing = 0
                if self._waiting_bytes == 0:
                    self._full = False
                    missing = self._missing if wrote else 0
            if missing and _written(stream, _notice(missing)):
                with self._lock:
                    self._missing -= missing
            with self._lock:
                if self._waiting_bytes == 0:
                    self._idle.set()


LINES = LineQueue()
"""The queue of this process, for its stdout and its stderr."""


def _has_file(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError):  # in memory, or closed
        return False
    return True


def _written(stream: TextIO, data: bytes) -> bool:
    """Write past Python's buffer, whose lock would stop the interpreter's exit; False: lost."""
    try:
        while data:
            try:
                data = data[os.write(stream.fileno(), data) :]
            except BlockingIOError:  # another program made the terminal a non-blocking one
                select.select((), (stream.fileno(),), ())
    except (OSError, ValueError):
        return False
    return True


def _notice(missing: int) -> bytes:
    now = time.strftime("%H:%M:%S")
    return (
        f"{now} WARNING logs: {missing} lines are missing here, since they could not be written"
        " in time\n"
    ).encode()


class LineHandler(logging.Handler):
    """A handler of `logging` that puts its lines into the queue."""

    def __init__(self, stream: TextIO, lines: LineQueue = LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """See Handler.emit."""
        try:
            self._lines.put(self._stream, self.format(record))
        except Exception:  # noqa: BLE001 - as the handlers of `logging`: a wrong format ends nobody
            self.handleError(record)

    def flush(self) -> None:
        """Called by `logging.shutdown`."""
        self._lines.flush()


KIND = "kind"
"""A field of `extra`: one of few words, such as the name of an error's type."""


class RepeatLimit(logging.Filter):
    """Limits how often one place in the code warns: an outage gives few lines.

    Warnings of one place, with one kind of error, take tokens from one bucket. The line that takes
    the last token says so, and the next line says how many were left out. The field KIND of a
    record tells kinds apart that one place logs, so that frequent errors do not hide rare ones.
    """

    def __init__(
        self, burst: int = 10, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """burst: lines that may come at once; every_s: then one line in so many seconds."""
        super().__init__()
        self._clock = clock
        self._burst = burst
        self._every_s = every_s
        self._buckets: dict[tuple[object, ...], _Bucket] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See Filter.filter. Adds `remark` to a record: what its line reports of lines left out."""
        if record.levelno < logging.WARNING:
            return True
        now_s = self._clock()
        kind = record.__dict__.get(KIND, "")
        place = (record.pathname, record.lineno, kind, *_error_place(record))
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = _Bucket(self._burst, now_s)
        bucket.tokens = min(self._burst, bucket.tokens + (now_s - bucket.filled_s) / self._every_s)
        bucket.filled_s = now_s
        if bucket.tokens < 1:
            bucket.left_out += 1
            return False
        bucket.tokens -= 1
        if bucket.left_out:
            record.__dict__["remark"] = f"{bucket.left_out} more lines like this were left out"
            bucket.left_out = 0
        elif bucket.tokens < 1:
            record.__dict__["remark"] = f"from now on one line like this in {self._every_s:g} s"
        return True


class _Bucket:
    """The tokens of one place that warns."""

    def __init__(self, tokens: float, now_s: float) -> None:
        self.tokens = tokens
        self.filled_s = now_s
        self.left_out = 0


def _error_place(record: logging.LogRecord) -> tuple[object, ...]:
    """What tells one logged error from another: its type, and the line that raised it."""
    if not record.exc_info or record.exc_info[0] is None:
        return ()
    kind, _, trace = record.exc_info
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (kind, trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else (kind,)

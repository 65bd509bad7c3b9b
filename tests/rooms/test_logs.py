"""Lines that never stop the process that writes them, and warnings that repeat."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moonserve.live.process.metrics import ProcessMetrics
from moonserve.logs import KIND, LineQueue, RepeatLimit

PROGRAM = """
import logging, sys
from moonserve.config import Logging, apply_logging
apply_logging(Logging())
for number in range({lines}):
    logging.getLogger("moonserve.live").info("line %d of a process that ends soon", number)
"""


class Pipe:
    """A pipe whose reader reads only when it is asked to."""

    def __init__(self) -> None:
        self.read_fd, write_fd = os.pipe()
        self.stream: TextIO = os.fdopen(write_fd, "w")
        self.got = b""

    def read_until(self, text: bytes) -> list[str]:
        """All lines so far, once the text has come."""
        end = time.monotonic() + 10
        os.set_blocking(self.read_fd, False)
        while text not in self.got:
            assert time.monotonic() < end, self.got[-500:]
            try:
                self.got += os.read(self.read_fd, 1 << 16)
            except BlockingIOError:
                time.sleep(0.01)
        return self.got.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe."""
    one = Pipe()
    yield one
    os.close(one.read_fd)
    one.stream.close()


def within(work: Callable[[], object], seconds: float = 5) -> None:
    """Do it in a thread, and fail if it takes longer."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it blocks"


def test_a_reader_that_pauses_stops_nobody(pipe: Pipe) -> None:
    """The queue keeps what it may, drops the rest, and reports how many once it is read again."""
    lines = LineQueue(max_waiting_bytes=200_000)
    within(lambda: [lines.put(pipe.stream, f"line {number:6d}") for number in range(50_000)])
    assert 0 < lines.dropped < 50_000
    got = pipe.read_until(b"missing here")
    within(lambda: lines.flush(5))
    lines.put(pipe.stream, "later")
    assert pipe.read_until(b"later")[-1] == "later"
    kept = 50_000 - lines.dropped
    assert got[:kept] == [f"line {number:6d}" for number in range(kept)]
    assert f"WARNING logs: {lines.dropped} lines are missing here" in got[kept]


def test_lines_that_a_full_disk_takes_not_are_counted(pipe: Pipe) -> None:
    """A write that fails loses its line; the next line that is written brings the count."""
    lines = LineQueue()
    with open("/dev/full", "w") as full:
        for _ in range(3):
            lines.put(full, "no room")
        lines.put(pipe.stream, "room again")
        first, second = pipe.read_until(b"missing here")
    assert first == "room again"
    assert "3 lines are missing here" in second
    assert lines.dropped == 3


def test_a_closed_stdout_and_one_in_memory_are_fine() -> None:
    """A stream in memory has its line at once, and a stream that is closed costs nothing."""
    lines, memory, closed = LineQueue(), io.StringIO(), io.StringIO()
    closed.close()
    lines.put(memory, "here")
    lines.put(closed, "lost")
    lines.put(None, "lost")
    assert memory.getvalue() == "here\n"


def test_all_lines_are_written_before_the_process_ends() -> None:
    """A process that logs and ends at once has lost no line."""
    argv = [sys.executable, "-c", PROGRAM.format(lines=5_000)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    said = done.stderr.splitlines()
    assert len(said) == 5_000
    assert said[-1].endswith("live: line 4999 of a process that ends soon")


def test_a_process_ends_although_nobody_reads_its_lines() -> None:
    """At its end a process waits for its reader only for a moment."""
    argv = [sys.executable, "-c", PROGRAM.format(lines=20_000)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        assert process.wait(30) == 0
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETFL, os.O_NONBLOCK)
        assert process.stderr.read(100)


def test_dropped_lines_are_a_metric() -> None:
    """Every page of metrics has their number."""
    registry = CollectorRegistry()
    registry.register(ProcessMetrics("gateway"))
    assert b"\nmoonserve_log_lines_dropped_total 0.0" in generate_latest(registry)


def record(
    line: int, error: Exception | None = None, level: int = logging.WARNING, kind: str = ""
) -> str | None:
    """What a handler with the filter LIMIT would add to a record; None: it is left out."""
    info = (type(error), error, error.__traceback__) if error else None
    one = logging.LogRecord("moonserve.live", level, "x.py", line, "%d", (line,), info)
    one.__dict__[KIND] = kind
    return one.__dict__.get("remark", "") if LIMIT.filter(one) else None


NOW_S = [0.0]
LIMIT = RepeatLimit(burst=3, every_s=10, clock=lambda: NOW_S[0])


def test_an_outage_gives_few_lines() -> None:
    """One place warns a few times, then once in some seconds, with the number left out."""
    assert [record(1) for _ in range(3)] == ["", "", "from now on one line like this in 10 s"]
    assert [record(1) for _ in range(500)] == [None] * 500
    assert record(2) == "", "another place has its own lines"
    assert record(1, kind="StoreError") == "", "and so has another kind"
    assert [record(1, level=logging.INFO) for _ in range(50)] == [""] * 50
    NOW_S[0] += 10
    assert [record(1), record(1)] == ["500 more lines like this were left out", None]
    NOW_S[0] += 1_000
    assert [record(1), record(1)] == ["1 more lines like this were left out", ""]


def test_another_error_at_the_same_place_has_its_own_lines() -> None:
    """A traceback is left out only for errors that the same line raised."""

    def failed(work: Callable[[], object]) -> Exception:
        try:
            work()
        except (ValueError, ZeroDivisionError) as error:
            return error
        raise AssertionError("it did not fail")

    said = [record(3, failed(lambda: int("x"))) for _ in range(5)]
    assert said[3:] == [None, None]
    assert record(3, failed(lambda: 1 // 0)) == ""

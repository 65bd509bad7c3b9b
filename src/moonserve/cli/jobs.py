"""Calls in processes of their own, a few at a time: for sweeps, and for the paper's figures.

Each call has its own process, so one that dies harms no other. Starting a process takes about half
a second, so calls should take longer.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import msgspec

from moonserve.core.errors import MoonserveError

T = TypeVar("T")


class Failed(msgspec.Struct):
    """Why a call gave no result."""

    reason: str


def run_jobs(calls: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T | Failed]]:
    """Yield (index of the call, its result) as calls end. If the caller stops early, running calls
    are ended.

    Calls and their results must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # its start lets Ctrl-C through again
    todo = iter(enumerate(calls))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while True:
            while len(running) < at_once and (item := next(todo, None)) is not None:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(item[1], theirs), daemon=True)
                with _interrupts_later():
                    process.start()
                    running[ours] = (item[0], process)
                theirs.close()
            if not running:
                return
            ready = wait(list(running))
            for ours in [one for one in running if one in ready]:
                at, child = running.pop(ours)
                yield at, _outcome(ours, child)
    finally:
        for _, child in running.values():
            child.terminate()
            child.join()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C raises after the block, so no process is lost halfway through its start.

    A process started in the block never sees Ctrl-C, which reaches all processes of a terminal: its
    parent ends it.
    """
    came: list[int] = []
    # the mask is for the child: here another thread may still take the signal
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _outcome(ours: Connection, process: BaseProcess) -> Any:
    try:
        outcome = ours.recv()
    except EOFError:
        process.join()
        outcome = Failed(f"its process ended with {process.exitcode}")
    ours.close()
    process.join()
    return outcome


def _work(call: Callable[[], object], theirs: Connection) -> None:
    """The work of one process. The traceback of a bug goes to stderr, as from any process."""
    try:
        outcome = call()
    except MoonserveError as err:
        outcome = Failed(str(err))
    with suppress(BrokenPipeError):  # the parent does not wait for the result any more
        theirs.send(outcome)

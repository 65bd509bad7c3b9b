"""How the fuzzing tests draw their cases, and what all of them check.

`make test-fuzz` draws 100,000 cases in all; the gate draws few, always the same. Every case that
once found a fault stands as an `@example` at its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FUZZ_CASES", "50"))
"""Cases of each test."""
LONG = "FUZZ_CASES" in os.environ
HANG_S = 20.0
"""CPU time of a case that only computes, wall time of one that waits. Most take milliseconds."""
Test = TypeVar("Test", bound=Callable[..., None])

_SIZES = (0, 1, 2, 7, 8, 63, 64, 255, 256, 65_535, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)
numbers = st.sampled_from(_SIZES) | st.integers(-(1 << 70), 1 << 70)
"""Numbers at the ends of every width, and beyond."""
words = st.text(max_size=12) | st.sampled_from(
    [
        "",
        "p0",
        "m",
        "\0",
        "é",
        "a" * 300,
        "../x",
        "http://[",
        "http://h:99999",
        "http://[",
        "http://h:99999",
        "\ud7ff",
    ]
)
scalars = st.none() | st.booleans() | numbers | st.floats() | words | st.binary(max_size=12)
trees: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda it: st.lists(it, max_size=4) | st.dictionaries(words, it, max_size=4),
    max_leaves=8,
)
"""Anything that msgpack can say."""


def fuzz(*strategies: st.SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Run the test on CASES draws: fixed ones in the gate, new ones in the long form."""

    def decorate(test: Test) -> Test:
        return settings(
            max_examples=CASES,
            derandomize=not LONG,
            database=None,
            deadline=None,  # `in_time` judges hangs
            suppress_health_check=list(HealthCheck),
        )(given(*strategies)(test))

    return decorate


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A good message with some bytes changed, cut, repeated, or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 8))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + size] = draw(st.binary(max_size=8))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[max(0, at - size) : at] * draw(st.integers(1, 3))
            case _:
                width = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from(_SIZES)) & ((1 << 8 * width) - 1)
                data[at : at + width] = number.to_bytes(
                    width, draw(st.sampled_from(["little", "big"]))
                )
    return bytes(data)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Fail if this took so much CPU time that it must have hung."""
    began_s = time.process_time()
    yield
    assert time.process_time() < began_s + HANG_S, "this hung"


class Bugs(logging.Handler):
    """Collects what is logged as a bug: every record of level ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextlib.contextmanager
def no_bug_logged() -> Iterator[None]:
    """Fail if a bug was logged meanwhile."""
    bugs = Bugs()
    logger = logging.getLogger("moonserve")
    logger.addHandler(bugs)
    logging.getLogger("asyncio").addHandler(bugs)
    try:
        yield
        assert not bugs.found, "\n".join(bugs.found)
    finally:
        logger.removeHandler(bugs)
        logging.getLogger("asyncio").removeHandler(bugs)


class Looped:
    """One event loop for all cases of a test: `run` one case after another on it."""

    def __init__(self, opening: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> None:
        """opening: makes what the cases use; returns what closes it."""
        self._runner = asyncio.Runner()
        self._close = self._runner.run(_awaited(opening()))

    def run(self, case: Awaitable[Any]) -> Any:
        """Run one case, with a deadline."""

        async def bounded() -> Any:
            async with asyncio.timeout(3 * HANG_S):
                return await case

        return self._runner.run(bounded())

    def __enter__(self) -> Looped:
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self._close())
        self._runner.close()


async def _awaited(it: Awaitable[Any]) -> Any:
    return await it

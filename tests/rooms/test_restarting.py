"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from moonserve.live import tasks
from moonserve.live.tasks import keep_doing


def test_what_fails_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each failure is in the log with its traceback; who returns has ended."""
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.0)
    done: list[int] = []

    async def work() -> None:
        done.append(1)
        if len(done) < 3:
            raise RuntimeError(f"a bug, {len(done)}")

    async def test() -> None:
        async with asyncio.timeout(5):
            await keep_doing("looking", work)

    asyncio.run(test())
    assert len(done) == 3
    assert [record.message for record in caplog.records] == [
        "looking failed, and is started again"
    ] * 2
    assert "a bug, 2" in caplog.text


def test_who_is_cancelled_has_let_go_of_everything() -> None:
    """The task ends after its work has, and is not started again."""

    async def test() -> None:
        held: list[str] = []

        async def work() -> None:
            held.append("it")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                held.clear()

        task = keep_doing("holding", work)
        while not held:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
        assert not held

    asyncio.run(test())

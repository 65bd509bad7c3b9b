"""The Conductor's actions while a call is awaited: which of them end the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from moonserve.core.schedule.actions import Abort, Decode, GiveUp, Refuse, Release
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import RequestId
from moonserve.live.drive.inbox import ActionInbox
from moonserve.live.drive.lost import CallLost

R = RequestId("r")


def run(use: Callable[[ActionInbox], Awaitable[None]]) -> None:
    """Run a test in a task that has an inbox."""

    async def main() -> None:
        async with asyncio.timeout(5):
            await use(ActionInbox(asyncio.get_running_loop()))

    asyncio.run(main())


def soon(do: Callable[..., object], *args: object) -> None:
    """Do this at the loop's next turn."""
    asyncio.get_running_loop().call_soon(do, *args)


def test_an_abort_ends_the_wait_for_its_call_only() -> None:
    """An Abort of another number has no effect. Afterwards the task goes on as if nothing was
    cancelled."""

    async def use(inbox: ActionInbox) -> None:
        inbox.out(2)
        soon(inbox.put_nowait, Abort(R, 1, "an older one"))
        await inbox.until_lost(asyncio.sleep(0.01))
        soon(inbox.put_nowait, Abort(R, 2, "gone"))
        with pytest.raises(CallLost, match="gone"):
            await inbox.until_lost(asyncio.sleep(4))
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        with pytest.raises(CallLost, match="gone"):
            await inbox.until_lost(asyncio.sleep(4))  # it stays lost until another call goes out
        inbox.out(3)
        await inbox.until_lost(asyncio.sleep(0))

    run(use)


def test_an_abort_that_comes_with_its_call_ends_it() -> None:
    """Both come in one step of the Conductor: the call must not wait for an instance that is
    gone."""

    async def use(inbox: ActionInbox) -> None:
        decode = Decode(R, 7, cast(InstanceInfo, None))
        inbox.put_nowait(decode)
        inbox.put_nowait(Abort(R, 7, "gone"))
        assert await inbox.get() is decode
        inbox.out(7)
        with pytest.raises(CallLost, match="gone"):
            await inbox.until_lost(asyncio.sleep(4))
        inbox.out(8)
        await inbox.until_lost(asyncio.sleep(0))

    run(use)


def test_an_abort_between_waits_is_not_forgotten() -> None:
    """It came while the client was written to: the next wait does not begin."""

    async def use(inbox: ActionInbox) -> None:
        inbox.out(1)
        inbox.put_nowait(Abort(R, 1, "gone"))
        await asyncio.sleep(0)  # the task waits for no instance, so nothing is cancelled
        with pytest.raises(CallLost):
            await inbox.until_lost(asyncio.sleep(4))

    run(use)


def test_a_client_that_leaves_is_no_lost_call() -> None:
    """A cancel from elsewhere goes through, also if an Abort comes at the same moment."""

    async def use(inbox: ActionInbox) -> None:
        task = asyncio.current_task()
        assert task is not None
        inbox.out(1)
        for abort in (False, True):
            if abort:
                soon(inbox.put_nowait, Abort(R, 1, "gone"))
            soon(task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await inbox.until_lost(asyncio.sleep(4))
            while task.cancelling():
                task.uncancel()

    run(use)


def test_a_refusal_ends_the_wait_and_is_read_then() -> None:
    """So does GiveUp. If no call is out, they are only queued. All other actions are read in
    turn."""

    async def use(inbox: ActionInbox) -> None:
        inbox.put_nowait(Release(R, ()))
        for last in (GiveUp(R, "over"), Refuse(R, "no room")):
            inbox.out(1)
            soon(inbox.put_nowait, last)
            with pytest.raises(CallLost, match=last.why):
                await inbox.until_lost(asyncio.sleep(4))
            inbox.out(0)
        soon(inbox.put_nowait, GiveUp(R, "later"))
        got = [await inbox.get() for _ in range(4)]
        assert [type(action) for action in got] == [Release, GiveUp, Refuse, GiveUp]

    run(use)

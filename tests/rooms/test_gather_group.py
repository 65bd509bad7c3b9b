"""Calls to a group: all replies, or one failure that blames the right member, and no call goes
on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from moonserve.core.units import InstanceId
from moonserve.live.drive.gather_group import gather_group
from moonserve.live.drive.lost import CallLost
from moonserve.live.drive.wire import Prefilled
from moonserve.live.http.client import UpstreamError

A, B, C = (InstanceId(name) for name in "abc")


class Members:
    """Calls that end as the test says, and note when they are cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.ended: list[InstanceId] = []

    async def call(self, name: str, after_s: float, error: Exception | None = None) -> Prefilled:
        """A reply, or an error, after this time."""
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if error is not None:
            raise error
        return Prefilled((ord(name),), "length", 0, {})

    async def run(self, calls: dict[InstanceId, Coroutine[Any, Any, Prefilled]]) -> list[Prefilled]:
        """Gather all of them."""
        return await gather_group(calls, self.ended.append)


def refused(retry: bool = True) -> CallLost:
    """What a worker answers if its neighbour is gone."""
    return CallLost("it broke off", retry=retry)


def test_all_replies_in_order() -> None:
    """Replies come in the order of calls, ends as they happen."""

    async def main() -> None:
        members = Members()
        calls = {A: members.call("a", 0.02), B: members.call("b", 0.0)}
        assert [reply.token_ids for reply in await members.run(calls)] == [(97,), (98,)]
        assert members.ended == [B, A]

    asyncio.run(main())


def test_one_failure_breaks_the_others_off() -> None:
    """The failing member is named, and the other calls are cancelled."""

    async def main() -> None:
        members = Members()
        calls = {
            A: members.call("a", 60),
            B: members.call("b", 0, refused()),
            C: members.call("c", 60),
        }
        with pytest.raises(CallLost) as caught:
            await members.run(calls)
        assert caught.value.member == B
        assert members.cancelled == ["a", "c"]

    asyncio.run(main())


def test_who_is_gone_is_to_blame() -> None:
    """Of several failures, a member that cannot be reached is to blame; otherwise the first in the
    chain."""

    async def main() -> None:
        gone = UpstreamError("connection reset", sent=True)
        for b_error, blamed in ((gone, B), (refused(), A)):
            members = Members()
            calls = {
                A: members.call("a", 0.0, refused()),
                B: members.call("b", 0.01, b_error),
                C: members.call("c", 0.0, refused()),
            }
            with pytest.raises(CallLost) as caught:
                await members.run(calls)
            assert caught.value.member == blamed

    asyncio.run(main())


def test_cancelled_from_outside_all_are() -> None:
    """If the caller is cancelled, all calls are cancelled before that ends."""

    async def main() -> None:
        members = Members()
        calls = {A: members.call("a", 60), B: members.call("b", 60)}
        task = asyncio.create_task(members.run(calls))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert members.cancelled == ["a", "b"]

    asyncio.run(main())

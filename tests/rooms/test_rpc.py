"""The rpc of a cluster's processes over a unix socket; over HTTP it is in test_store_channel."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from moonserve.core.errors import (
    BadRequest,
    DeadlineExceeded,
    MoonserveError,
    RegistryError,
    StoreError,
    UnknownSegment,
)
from moonserve.live.rpc.connection import ConnectionLimits, RpcConnection

PROTOCOL = "moonserve-test/1"


class Word(msgspec.Struct, frozen=True, tag=True):
    """A notice."""

    text: str


class End(RpcConnection):
    """One end that keeps what it receives."""

    def __init__(
        self, accepted: bool, protocol: str = PROTOCOL, limits: ConnectionLimits | None = None
    ) -> None:
        super().__init__(
            "the other end",
            protocol,
            answer=self.answer,
            notices=Word,
            limits=limits or ConnectionLimits(),
            accepted=accepted,
        )
        self.words: list[str] = []
        self.is_ready = asyncio.Event()
        self.is_lost = asyncio.Event()

    def answer(self, op: str, body: bytes) -> bytes:
        """Echo, or fail as asked."""
        errors: dict[str, MoonserveError] = {
            "bad": BadRequest("wrong", "field"),
            "segment": UnknownSegment("no segment"),
            "registry": RegistryError("away"),
        }
        if op in errors:
            raise errors[op]
        return op.encode() + body

    def noticed(self, message: Word) -> None:
        """Keep it."""
        self.words.append(message.text)

    def opened(self) -> None:
        """The hello is here."""
        self.is_ready.set()

    def lost(self) -> None:
        """The end."""
        self.is_lost.set()


def run(
    test: Callable[[End, End], Awaitable[None]],
    path: Path,
    protocol: str = PROTOCOL,
    limits: ConnectionLimits | None = None,
) -> None:
    """Run a test with both ends: the one that connected, and the one that accepted."""

    async def body() -> None:
        accepted: list[End] = []

        def accept() -> End:
            accepted.append(End(True, limits=limits))
            return accepted[0]

        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(accept, str(path / "rpc"))
        make = lambda: End(False, protocol)  # noqa: E731
        _, here = await loop.create_unix_connection(make, str(path / "rpc"))
        while not accepted:
            await asyncio.sleep(0)
        try:
            await test(here, accepted[0])
        finally:
            here.close()
            server.close()
            await asyncio.gather(here.is_lost.wait(), accepted[0].is_lost.wait())

    asyncio.run(asyncio.wait_for(body(), 20))


def test_both_ends_call_and_notify(tmp_path: Path) -> None:
    """Calls before the hello of the other end is here are answered, too."""

    async def test(here: End, there: End) -> None:
        assert await here.call("a", b"1", math.inf) == b"a1"
        await there.is_ready.wait()
        assert await there.call("b", b"2", math.inf) == b"b2"
        here.notify(Word("x"), Word("y"))
        there.notify(Word("z"))
        await here.call("after", b"", math.inf)
        await there.call("after", b"", math.inf)
        assert (there.words, here.words) == (["x", "y"], ["z"])
        assert (here.calls, there.calls) == (0, 0)

    run(test, tmp_path)


def test_errors_keep_their_class(tmp_path: Path) -> None:
    """A class that does not travel arrives as its nearest base that does."""

    async def test(here: End, there: End) -> None:
        expected = (
            ("bad", BadRequest, "wrong"),
            ("segment", UnknownSegment, "no segment"),
            ("registry", MoonserveError, "away"),
        )
        for op, kind, text in expected:
            with pytest.raises(MoonserveError, match=text) as caught:
                await here.call(op, b"", math.inf)
            assert type(caught.value) is kind
        assert issubclass(UnknownSegment, StoreError)

    run(test, tmp_path)


def test_a_call_ends_at_its_deadline(tmp_path: Path) -> None:
    """Here the peer has stopped reading."""

    async def test(here: End, there: End) -> None:
        await there.is_ready.wait()
        there.transport.pause_reading()
        with pytest.raises(DeadlineExceeded, match="the other end did not answer in time"):
            await here.call("a", b"", asyncio.get_running_loop().time() + 0.01)
        assert here.calls == 0
        there.transport.resume_reading()

    run(test, tmp_path)


def test_another_version_is_dropped_with_both_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end that accepted drops the connection; nothing of it is run."""

    async def test(here: End, there: End) -> None:
        here.notify(Word("x"))
        await here.is_lost.wait()
        assert there.words == []
        assert not here.is_open

    run(test, tmp_path, "moonserve-test/2")
    assert "it speaks 'moonserve-test/2', not 'moonserve-test/1'" in caplog.text


def test_a_peer_that_does_not_read_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits for it is bounded."""

    async def test(here: End, there: End) -> None:
        await there.is_ready.wait()
        here.transport.pause_reading()
        while not there.is_lost.is_set():
            there.notify(Word("x" * 10_000))
            await asyncio.sleep(0)

    run(test, tmp_path, limits=ConnectionLimits(unread_bytes=100_000))
    assert "peer does not read; write buffer over limit" in caplog.text

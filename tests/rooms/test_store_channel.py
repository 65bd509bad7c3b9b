"""Calls between the store's master and its members, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from moonserve.core.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    MoonserveError,
    StoreError,
)
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.live.access.guard import Guard
from moonserve.live.http.client import Connection, HttpClient, UpstreamError
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.http.switch import Switch
from moonserve.live.rpc.connection import CALL, DONE, HEAD, HELLO, NOTICES, ConnectionLimits
from moonserve.live.store import operations, wire
from moonserve.live.store.link import MasterEnded, MasterLink
from moonserve.live.store.local import LocalPool, MemberConnection
from moonserve.live.store.remote import HttpRpc, RemotePool
from moonserve.live.store.server import MasterService
from moonserve.live.store.wire import PATH, PROTOCOL
from tests.support.loops import both_loops  # noqa: F401 - autouse

GREETING = HEAD.pack(len(PROTOCOL), 0, HELLO) + PROTOCOL.encode()
UPGRADE = f"GET {PATH} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: {PROTOCOL}\r\n\r\n"


class Site:
    """A master that echoes, and a member that calls it."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.http = HttpClient()
        self.go = asyncio.Event()
        self.ran: list[str] = []
        self.waiting = 0
        self.service: MasterService | None = None
        """What answers other operations; None: an echo."""
        self.server: Server | None = None

    def answer(self, op: str, body: bytes) -> bytes | Coroutine[Any, Any, bytes]:
        """Run the operation that a test needs."""
        self.ran.append(op)
        match op:
            case "wait":
                return self._wait(body)
            case "refuse":
                raise BadRequest("never", "field")
            case "fail":
                raise StoreError("not now")
            case "bug":
                raise KeyError("bug")
            case "all":
                return bytes(ConnectionLimits().frame_bytes + 1)
            case "late bug":
                return self._break()
        return body if self.service is None else self.service.handle(op, body)

    async def _wait(self, body: bytes) -> bytes:
        self.waiting += 1
        try:
            await self.go.wait()
        finally:
            self.waiting -= 1
        return body

    async def _break(self) -> bytes:
        raise KeyError("bug")

    async def _switch(self, request: HttpRequest) -> Switch:
        return Switch(PROTOCOL, MemberConnection(self.answer, set(), limits=self.limits))

    async def start(self, port: int = 0) -> None:
        self.server = await serve(App({("GET", PATH): self._switch}), "127.0.0.1", port)
        self.rpc = HttpRpc(self.http, f"http://127.0.0.1:{self.server.port}", "")

    async def stop(self) -> None:
        await self.http.close()
        if self.server is not None:
            await self.server.stop(0)

    async def call(self, op: str, body: bytes = b"", most_s: float = 5.0) -> bytes:
        """Make one call as the member."""
        return await self.rpc(op, body, asyncio.get_running_loop().time() + most_s)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that was switched by hand."""
        assert self.server is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(UPGRADE.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        return reader, writer


def run(
    test: Callable[[Site], Awaitable[None]],
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
) -> None:
    """Run a test with a site."""

    async def body() -> None:
        site = Site(limits)
        await site.start()
        try:
            await test(site)
        finally:
            await site.stop()

    asyncio.run(asyncio.wait_for(body(), 20))


async def until(true: Callable[[], bool]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.001)


def test_a_master_that_ends_in_order_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It says so while it still serves. The loss of another start that did not say so warns."""

    async def main() -> None:
        pool = LocalPool(MasterService(Master(Terms(), 1), lambda: 0), lambda events: None)
        server = await serve(App(pool.routes()), "127.0.0.1", 0)
        http = HttpClient()
        rpc = HttpRpc(http, f"http://127.0.0.1:{server.port}", "")
        link = MasterLink(rpc, 1.0)
        call = wire.PutAbortCall([])
        await link.call(operations.PUT_ABORT, call)
        pool.ends()
        await link.call(operations.PUT_ABORT, call)
        await server.stop(0)
        with pytest.raises(MasterEnded, match=r"cannot connect|connection lost"):
            await link.call(operations.PUT_ABORT, call)
        await link.attempt(operations.PUT_ABORT, call)
        assert not caplog.records
        server = await serve(App(pool.routes()), "127.0.0.1", server.port)
        await link.call(operations.PUT_ABORT, call)
        await server.stop(0)
        await link.attempt(operations.PUT_ABORT, call)
        [warning] = caplog.records
        assert warning.getMessage().startswith("store master: put_abort failed: ")
        await http.close()

    caplog.set_level(logging.WARNING)
    asyncio.run(asyncio.wait_for(main(), 20))


def test_many_calls_at_once_share_one_connection() -> None:
    """Each call gets its own answer, whatever the sizes; one that waits delays no other."""

    async def test(it: Site) -> None:
        slow = asyncio.create_task(it.call("wait", b"slow"))
        bodies = [bytes([n % 251]) * (n * 997 % 70_000) for n in range(500)]
        assert await asyncio.gather(*(it.call("echo", body) for body in bodies)) == bodies
        assert not slow.done()
        it.go.set()
        assert await slow == b"slow"
        assert len(it.http._open) == 1

    run(test)


def test_a_large_frame_arrives_whole() -> None:
    """It takes many reads of the socket; the next frame arrives as well."""

    async def test(it: Site) -> None:
        body = bytes(range(256)) * (5 << 12)
        assert await asyncio.gather(it.call("a", body), it.call("b", b"x")) == [body, b"x"]

    run(test)


def test_a_reply_may_list_a_very_large_pool() -> None:
    """The size of calls is limited; a gateway receives all blocks of a pool in one reply."""

    async def test(it: Site) -> None:
        assert len(await it.call("all")) == ConnectionLimits().frame_bytes + 1

    run(test)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system's own times hold")
def test_a_peer_whose_machine_is_gone_is_soon_noticed() -> None:
    """After two times 5 s of silence, when the second probe is due."""

    async def test(it: Site) -> None:
        sock = (await it.rpc.connect()).transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            assert sock.getsockopt(socket.IPPROTO_TCP, option) == 5

    run(test)


def test_errors_keep_their_kinds() -> None:
    """What can never work is a BadRequest, other failures are StoreErrors; the connection stays."""

    async def test(it: Site) -> None:
        with pytest.raises(BadRequest, match="never"):
            await it.call("refuse")
        with pytest.raises(StoreError, match="not now"):
            await it.call("fail")
        assert await it.call("echo", b"1") == b"1"
        assert len(it.http._open) == 1

    run(test)


@pytest.mark.parametrize("body", [b"\x91\xa2\xff\xfe", b"\x91" * 100_000, b"\xc1"])
def test_a_body_that_cannot_be_decoded_fails_its_call_only(body: bytes) -> None:
    """The connection stays, with all other calls that are under way on it."""

    async def test(it: Site) -> None:
        it.service = MasterService(Master(Terms(), 1), lambda: 0)
        other = asyncio.create_task(it.call("wait", b"1"))
        await until(lambda: it.waiting == 1)
        for op in ("drain", "beat", "put_start", "scan"):
            with pytest.raises(BadRequest, match=op):
                await it.call(op, body)
        it.go.set()
        assert await other == b"1"
        assert len(it.http._open) == 1

    run(test)


@pytest.mark.parametrize("op", ["bug", "late bug"])
def test_a_bug_of_the_master_costs_the_connection_and_no_more(op: str) -> None:
    """Its calls fail, also those that waited; the next call uses another connection."""

    async def test(it: Site) -> None:
        with pytest.raises(UpstreamError, match="connection lost amid a call"):
            await it.call(op)
        assert await it.call("echo", b"1") == b"1"

    run(test)


def test_a_lost_connection_fails_what_is_under_way() -> None:
    """Calls fail at once, not at the deadline; the master stops waiting; then all works again."""

    async def test(it: Site) -> None:
        assert it.server is not None
        calls = [asyncio.create_task(it.call("wait")) for _ in range(3)]
        await until(lambda: it.waiting == 3)
        port = it.server.port
        await it.server.stop(0)
        for call in calls:
            with pytest.raises(UpstreamError, match="connection lost amid a call"):
                await call
        assert it.waiting == 0
        with pytest.raises(UpstreamError, match="cannot connect"):
            await it.call("echo")
        rpc = it.rpc
        await it.start(port)
        it.rpc = rpc
        assert await it.call("echo", b"again") == b"again"

    run(test)


def test_a_late_reply_is_dropped() -> None:
    """Each call ends at its own deadline, also the earlier one of a later call."""

    async def test(it: Site) -> None:
        loop = asyncio.get_running_loop()
        assert await it.call("echo", b"0") == b"0"
        began_s = loop.time()
        late = asyncio.create_task(it.call("wait", b"1", most_s=1.0))
        with pytest.raises(DeadlineExceeded, match="did not answer in time"):
            await it.call("wait", b"2", most_s=0.05)
        assert not late.done()
        with pytest.raises(DeadlineExceeded):
            await late
        assert loop.time() >= began_s + 1.0
        it.go.set()
        assert await it.call("wait", b"3") == b"3"
        assert await it.call("echo", b"4") == b"4"

    run(test)


def test_closing_ends_calls_under_way() -> None:
    """When the member's client is closed, no call hangs, and none can be made any more."""

    async def test(it: Site) -> None:
        call = asyncio.create_task(it.call("wait"))
        await until(lambda: it.waiting == 1)
        await it.http.close()
        with pytest.raises(UpstreamError):
            await call
        await until(lambda: it.waiting == 0)
        with pytest.raises(UpstreamError, match="closed"):
            await it.call("echo")

    run(test)


def test_a_cancelled_call_leaves_nothing() -> None:
    """Its reply is dropped, and other calls get theirs."""

    async def test(it: Site) -> None:
        call = asyncio.create_task(it.call("wait"))
        await until(lambda: it.waiting == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        it.go.set()
        assert await it.call("echo", b"1") == b"1"
        assert (await it.rpc.connect()).calls == 0

    run(test)


def test_a_cancel_just_after_the_switch_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reply of 101 has arrived, but its caller was cancelled."""
    wake = Connection._wake

    async def test(it: Site) -> None:
        call = asyncio.create_task(it.call("echo"))
        monkeypatch.setattr(Connection, "_wake", lambda it: (wake(it), call.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await call
        monkeypatch.setattr(Connection, "_wake", wake)
        await until(lambda: not it.http._open)
        assert await it.call("echo", b"1") == b"1"

    run(test)


def test_a_master_that_hangs_is_late_whatever_the_call_waits_for() -> None:
    """For a connection, for its turn to send, or for the reply: DeadlineExceeded in all cases."""

    async def test(it: Site) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            hung = HttpRpc(it.http, f"http://127.0.0.1:{silent.getsockname()[1]}", "")
            with pytest.raises(DeadlineExceeded, match="accepted no connection in time"):
                await hung("echo", b"", asyncio.get_running_loop().time() + 0.05)
        (await it.rpc.connect()).pause_writing()
        with pytest.raises(DeadlineExceeded, match="took no calls in time"):
            await it.call("echo", most_s=0.05)

    run(test)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "is over the limit"),
        (
            GREETING + HEAD.pack(ConnectionLimits().frame_bytes + 1, 1, CALL | 1),
            "is over the limit",
        ),
        (GREETING + HEAD.pack(3, 1, CALL) + b"abc", "a call without an operation"),
        (GREETING + HEAD.pack(3, 1, CALL | 9) + b"abc", "a call without an operation"),
        (GREETING + HEAD.pack(1, 0, NOTICES) + b"\x91", "it sends notices"),
        (GREETING + HEAD.pack(1, 0, 9) + b"a", "a frame of unknown kind 9"),
        (HEAD.pack(7, 5, CALL | 4) + b"echoone", "its first frame is no hello"),
        (
            HEAD.pack(17, 0, HELLO) + b"moonserve-store/9",
            "it speaks 'moonserve-store/9', not 'moonserve-store/3'",
        ),
    ],
)
def test_garbage_is_cut_off(caplog: pytest.LogCaptureFixture, frame: bytes, why: str) -> None:
    """The connection is dropped, a log line says why, and nothing is run."""

    async def test(it: Site) -> None:
        reader, writer = await it.raw()
        writer.write(frame)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(len(GREETING) + 1)
        writer.close()
        assert it.ran == []
        assert [why in line.getMessage() for line in caplog.records] == [True]

    with caplog.at_level(logging.WARNING):
        run(test)


def test_frames_in_pieces() -> None:
    """A frame may come byte by byte, and two in one piece."""

    async def test(it: Site) -> None:
        reader, writer = await it.raw()
        one = HEAD.pack(7, 5, CALL | 4) + b"echoone"
        writer.write(GREETING)
        assert await reader.readexactly(len(GREETING)) == GREETING
        for at in range(len(one)):
            writer.write(one[at : at + 1])
            await asyncio.sleep(0)
        writer.write(one + one)
        reply = HEAD.pack(3, 5, DONE) + b"one"
        assert await reader.readexactly(3 * len(reply)) == 3 * reply
        writer.close()

    run(test)


def test_calls_that_wait_are_bounded() -> None:
    """One connection can hold a limited number of calls at the master; other calls are answered."""

    async def test(it: Site) -> None:
        calls = [asyncio.create_task(it.call("wait", b"x")) for _ in range(6)]
        await until(lambda: sum(call.done() for call in calls) == 2)
        assert await it.call("echo", b"1") == b"1"
        it.go.set()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(it) for it in ended] == [bytes] * 4 + [MoonserveError] * 2

    run(test, ConnectionLimits(waiting_calls=4))


def test_calls_of_a_member_that_reads_no_replies_are_not_read() -> None:
    """The master holds a limited number of replies for a member that does not read them."""

    async def test(it: Site) -> None:
        reader, writer = await it.raw()
        writer.write(GREETING)
        frame = HEAD.pack(4 + 100_000, 1, CALL | 4) + b"echo" + bytes(100_000)
        sent = 0
        while sent < 1_000:
            writer.write(frame)
            try:
                async with asyncio.timeout(0.3):
                    await writer.drain()
            except TimeoutError:
                break
            sent += 1
        assert sent < 1_000
        assert len(it.ran) < sent + 2
        size = len(GREETING) + 50 * 100_013
        got = asyncio.create_task(reader.readexactly(size))
        await writer.drain()
        assert len(await got) == size
        writer.close()

    run(test)


async def refusal(app: App, token: str = "") -> MoonserveError:
    """The error with which a member is refused."""
    server = await serve(app, "127.0.0.1", 0)
    http = HttpClient()
    try:
        with pytest.raises(MoonserveError) as caught:
            await HttpRpc(http, f"http://127.0.0.1:{server.port}", token)("exists", b"", math.inf)
        await until(lambda: not http._open)
    finally:
        await http.close()
        await server.stop(0)
    return caught.value


def master() -> LocalPool:
    """A real master."""
    return LocalPool(MasterService(Master(Terms(), 1), lambda: 0), lambda events: None)


def test_a_wrong_token_is_a_config_error() -> None:
    """Trying again cannot help, and the error names the setting."""

    async def body() -> None:
        for token in ("", "guess"):
            error = await refusal(App(master().routes(), gate=Guard("secret")), token)
            assert isinstance(error, ConfigError)
            assert error.field == "token"

    asyncio.run(body())


@pytest.mark.parametrize("status", [200, 400, 404, 503])
def test_a_url_without_a_master_is_a_config_error(status: int) -> None:
    """Another server at that URL is an error of store_url; a 503 may pass."""

    async def body() -> None:
        async def page(request: HttpRequest) -> Response:
            return Response(status, b"<html>", content_type="text/html")

        error = await refusal(App({("GET", PATH): page}))
        assert isinstance(error, StoreError if status == 503 else ConfigError)
        if isinstance(error, ConfigError):
            assert error.field == "store_url"
            assert "is no store's master" in str(error)

    asyncio.run(body())


def test_a_gateway_without_the_master_says_where_it_is() -> None:
    """Its reply has the master's address and the setting."""

    async def body() -> None:
        http = HttpClient()
        pool = RemotePool(http, "http://127.0.0.1:1", "secret", lambda events: None)
        error = await refusal(App(pool.routes()))
        assert isinstance(error, ConfigError)
        assert error.field == "store_url"
        assert "http://127.0.0.1:1" in str(error)
        await pool.close()
        await http.close()

    asyncio.run(body())


@pytest.mark.parametrize("speaks_first", [True, False])
def test_a_port_that_speaks_no_http_is_a_config_error(speaks_first: bool) -> None:
    """Such as a segment's own port, which sends a greeting first."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not speaks_first:
            await reader.readuntil(b"\r\n\r\n")
        writer.write(b"moonserve-transfer")
        await reader.read()
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        http = HttpClient()
        with pytest.raises(ConfigError, match=r"store_url.* is no store's master"):
            await HttpRpc(http, f"http://127.0.0.1:{port}", "")("exists", b"", math.inf)
        await http.close()
        server.close()

    asyncio.run(body())


def test_an_unknown_operation_is_refused() -> None:
    """A real master answers BadRequest: an unknown one with a list, a malformed one with the
    reason."""

    async def body() -> None:
        server = await serve(App(master().routes()), "127.0.0.1", 0)
        http = HttpClient()
        rpc = HttpRpc(http, f"http://127.0.0.1:{server.port}", "secret")
        for op in ("steal", "events", "exists", "beat"):
            with pytest.raises(BadRequest, match=op):
                await rpc(op, b"\xc1", math.inf)
        await http.close()
        await server.stop(0)

    asyncio.run(body())

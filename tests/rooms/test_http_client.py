"""The HTTP client against a raw peer that behaves as badly as it is told to."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from moonserve.core.errors import ConfigError, DeadlineExceeded
from moonserve.live.http import client as http_client
from moonserve.live.http.client import HttpClient, UpstreamError, sse_events
from tests.support.loops import both_loops  # noqa: F401 - autouse

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request's head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            head += await reader.readexactly(int(line.split(b":")[1]))
    return head


@asynccontextmanager
async def peer(behave: Peer) -> AsyncIterator[str]:
    """A raw server; each connection runs `behave`, then closes."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behave(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def always(*pieces: bytes, gap_s: float = 0.0, close: bool = True) -> Peer:
    """A peer that answers one request with these pieces of bytes."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(gap_s)
        if not close:
            await reader.read()

    return behave


def run(behave: Peer, use: Callable[[HttpClient, str], Awaitable[None]]) -> None:
    """Run `use` against a peer that behaves so."""

    async def main() -> None:
        async with asyncio.timeout(20), peer(behave) as url:
            client = HttpClient()
            try:
                await use(client, url)
            finally:
                await client.close()

    asyncio.run(main())


def test_whole_reply_and_request_bytes() -> None:
    """A request goes out as written, and its reply comes back whole."""
    seen = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(b"HTTP/1.1 404 Not Found\r\nX-Name: v\r\ncontent-length: 4\r\n\r\nbody")

    async def use(client: HttpClient, url: str) -> None:
        reply = await client.request(
            "POST", url + "/p?q=1", headers={"x-a": "b"}, body=b"data", timeout_s=5
        )
        assert (reply.status, reply.headers["x-name"], reply.body) == (404, "v", b"body")
        head = seen[0]
        assert head.startswith(b"POST /p?q=1 HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"x-a: b\r\n" in head
        assert head.endswith(b"content-length: 4\r\n\r\ndata")

    run(behave, use)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\nconte",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",),
        (CHUNKED + b"4\r\nhalf\r\n",),
        (b"no http at all\r\n\r\n",),
        (b"",),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 70_000,),
    ],
    ids=["half head", "half body", "half chunks", "no http", "nothing", "endless head"],
)
def test_broken_replies_are_upstream_errors(pieces: tuple[bytes, ...]) -> None:
    """A reply that is not whole raises UpstreamError that says the request may have arrived."""

    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(UpstreamError) as caught:
            await client.request("POST", url, timeout_s=5)
        assert caught.value.sent

    run(always(*pieces), use)


def test_refused_connection_was_not_sent() -> None:
    """A refused connection raises UpstreamError that says nothing was sent."""

    async def use(client: HttpClient, url: str) -> None:
        free = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = free.sockets[0].getsockname()[1]
        free.close()
        await free.wait_closed()
        with pytest.raises(UpstreamError) as caught:
            await client.request("GET", f"http://127.0.0.1:{port}", timeout_s=5)
        assert not caught.value.sent

    run(always(OK), use)


def test_reset_mid_reply() -> None:
    """A reset in mid-reply raises UpstreamError."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await asyncio.sleep(0.02)
        writer.transport.abort()

    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(UpstreamError):
            await client.request("GET", url, timeout_s=5)

    run(behave, use)


def test_deadlines() -> None:
    """A silent peer ends a request at timeout_s and a stream at idle_timeout_s."""

    async def silent(client: HttpClient, url: str) -> None:
        with pytest.raises(DeadlineExceeded):
            await client.request("GET", url, timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            async with client.stream("GET", url, timeout_s=0.05, idle_timeout_s=9):
                pass

    async def half(client: HttpClient, url: str) -> None:
        got = []
        with pytest.raises(DeadlineExceeded):
            async with client.stream("GET", url, timeout_s=5, idle_timeout_s=0.05) as reply:
                got = [chunk async for chunk in reply]
        assert got == []

    run(always(close=False), silent)
    run(always(CHUNKED + b"1\r\nx\r\n", close=False), half)


def test_slow_trickle_is_no_timeout() -> None:
    """A reply that keeps coming outlives idle_timeout_s, byte by byte through the parser."""
    wire = CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"

    async def use(client: HttpClient, url: str) -> None:
        async with client.stream("GET", url, timeout_s=5, idle_timeout_s=0.3) as reply:
            assert reply.status == 200
            assert await reply.read() == b"abcde"

    run(always(*(bytes([b]) for b in wire), gap_s=0.006), use)


def test_reply_until_close() -> None:
    """A reply without length ends where the connection does."""

    async def use(client: HttpClient, url: str) -> None:
        reply = await client.request("GET", url, timeout_s=5)
        assert reply.body == b"all of it"

    run(always(b"HTTP/1.1 200 OK\r\n\r\nall ", b"of it", gap_s=0.01), use)


def test_interim_heads_are_skipped() -> None:
    """1xx heads before the reply are dropped."""

    async def use(client: HttpClient, url: str) -> None:
        reply = await client.request("POST", url, body=b"x", timeout_s=5)
        assert (reply.status, reply.body) == (200, b"hi")

    run(always(b"HTTP/1.1 100 Continue\r\n\r\n", OK, gap_s=0.01), use)


@pytest.mark.parametrize(
    ("method", "reply", "kept"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", True),
        ("HEAD", CHUNKED, True),
        ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n", False),
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong", False),
        ("HEAD", b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", True),
        ("HEAD", b"HTTP/1.1 404 No\r\ncontent-length: 5\r\n\r\n", True),
        ("GET", b"HTTP/1.1 204 None\r\n\r\n", True),
        ("GET", b"HTTP/1.1 304 Same\r\ncontent-length: 5\r\n\r\n", True),
        ("GET", b"HTTP/1.1 304 Same\r\ntransfer-encoding: chunked\r\n\r\n", True),
    ],
)
def test_replies_without_a_body_end_with_their_head(method: str, reply: bytes, kept: bool) -> None:
    """Whatever their headers say of a length; the connection is used again unless more came."""
    connections = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            assert b"content-length" not in await read_request(reader)
            writer.write(reply)

    async def use(client: HttpClient, url: str) -> None:
        for _ in range(3):
            whole = await client.request(method, url, timeout_s=2)
            assert whole.body == b""
            assert whole.status >= 200
            async with client.stream(method, url, timeout_s=2, idle_timeout_s=2) as pieces:
                assert await pieces.read() == b""
        assert connections == (1 if kept else 6)

    run(behave, use)


def test_connections_are_reused_one_after_another() -> None:
    """Requests in sequence share one connection; `connection: close` ends it."""
    connections = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            closing = b"GET /close" in await read_request(reader)
            writer.write(
                OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") if closing else OK
            )
            if closing:
                return

    async def use(client: HttpClient, url: str) -> None:
        for _ in range(3):
            await client.request("GET", url, timeout_s=5)
        async with client.stream("GET", url, timeout_s=5, idle_timeout_s=5) as reply:
            assert await reply.read() == b"hi"
        assert connections == 1
        await client.request("GET", url + "/close", timeout_s=5)
        await client.request("GET", url, timeout_s=5)
        assert connections == 2

    run(behave, use)


def test_stale_pooled_connection_is_retried_once() -> None:
    """A request that finds its pooled connection closed before any reply byte is sent afresh."""
    requests: list[int] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        requests.append(1)
        writer.write(OK)
        await read_request(reader)
        requests.append(2)  # the second request on a connection dies without a byte

    async def use(client: HttpClient, url: str) -> None:
        await client.request("POST", url, timeout_s=5)
        await client.request("POST", url, timeout_s=5)
        assert requests == [1, 2, 1]

    run(behave, use)


def test_a_peer_that_dies_with_a_request_may_have_had_it() -> None:
    """Also if its address refuses the connection of the second attempt."""

    async def main() -> None:
        async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK)
            await read_request(reader)
            server.close()
            writer.transport.abort()

        server = await asyncio.start_server(behave, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        client = HttpClient()
        await client.request("POST", url, timeout_s=5)
        assert not await client.refuses(url)
        for sent in (True, False):
            with pytest.raises(UpstreamError, match="cannot connect") as caught:
                await client.request("POST", url, timeout_s=5)
            assert caught.value.sent is sent
        assert await client.refuses(url)
        await client.close()

    asyncio.run(main())


def test_what_must_not_reach_a_peer_twice_is_not_sent_twice() -> None:
    """Such as where a prefill's KV is: used again, it names blocks of others."""
    requests: list[int] = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        requests.append(1)
        writer.write(OK)
        await read_request(reader)
        requests.append(2)

    async def use(client: HttpClient, url: str) -> None:
        await client.request("POST", url, timeout_s=5)
        with pytest.raises(UpstreamError, match="closed before a reply"):
            await client.request("POST", url, timeout_s=5, again=False)
        await client.request("POST", url, timeout_s=5)
        with pytest.raises(UpstreamError, match="closed before a reply"):
            async with client.stream("POST", url, timeout_s=5, idle_timeout_s=5, again=False):
                pass
        assert requests == [1, 2, 1, 2]

    run(behave, use)


def test_no_retry_once_reply_began() -> None:
    """A pooled connection that breaks after the first reply byte is not retried."""
    requests = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        requests += 1
        writer.write(b"HTTP/1.1 2")
        await asyncio.sleep(0.02)

    async def use(client: HttpClient, url: str) -> None:
        await client.request("POST", url, timeout_s=5)
        with pytest.raises(UpstreamError):
            await client.request("POST", url, timeout_s=5)
        assert requests == 1

    run(behave, use)


def test_unasked_bytes_poison_a_pooled_connection() -> None:
    """A connection that received bytes nobody asked for is not used again."""
    connections = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(OK)
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await reader.read()

    async def use(client: HttpClient, url: str) -> None:
        assert (await client.request("GET", url, timeout_s=5)).body == b"hi"
        while client._open:
            await asyncio.sleep(0.01)
        assert (await client.request("GET", url, timeout_s=5)).body == b"hi"
        assert connections == 2

    run(behave, use)


def test_idle_connections_are_closed() -> None:
    """An unused connection is closed after idle_s."""

    async def main() -> None:
        closed = asyncio.Event()

        async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await read_request(reader)
            closed.set()

        async with asyncio.timeout(5), peer(behave) as url:
            client = HttpClient(idle_s=0.05)
            await client.request("GET", url, timeout_s=5)
            await closed.wait()
            await client.close()

    asyncio.run(main())


def test_hosts_that_nobody_uses_are_forgotten() -> None:
    """Those that nobody listens at, or whose connections were kept for long enough; not one that is
    in use. Workers come and go, each on a port of its own."""

    async def main() -> None:
        async with asyncio.timeout(10), peer(always(OK, close=False)) as url:
            client = HttpClient(idle_s=0.05)
            for port in range(1, 9):
                with pytest.raises(UpstreamError):
                    await client.request("GET", f"http://127.0.0.1:{port}", timeout_s=5)
            with pytest.raises(ConfigError):
                await client.request("GET", url, headers={"a": "\n"}, timeout_s=5)
            assert not client._hosts
            async with client.stream("GET", url, timeout_s=5, idle_timeout_s=5) as reply:
                await asyncio.sleep(0.15)
                assert len(client._hosts) == 1
                await reply.read()
            assert len(client._hosts) == 1
            while client._hosts:
                await asyncio.sleep(0.01)
            await client.close()

    asyncio.run(main())


def test_what_clients_wrote_into_an_address_is_not_kept() -> None:
    """Nothing long and nothing with a query stays in memory; an engine's own addresses do."""
    http_client._kept.cache_clear()
    long = "http://h:1/api/decisions/" + "x" * 200
    for url, path in (
        ("http://h:1/v1/completions", "/v1/completions"),
        ("http://h:1/v1/models?key=s3cret#part", "/v1/models?key=s3cret"),
        ("http://h:1?key=s3cret", "/?key=s3cret"),
        ("http://h:1", "/"),
        (long, long.removeprefix("http://h:1")),
    ):
        for _ in range(2):
            assert http_client.parse(url) == http_client.Target("h", 1, "h:1", path, False)
    assert http_client._kept.cache_info().currsize == 2
    kept = repr(gc.get_referents(http_client._kept, http_client._origin, urlsplit))
    assert "s3cret" not in kept
    assert "xxxx" not in kept


def test_hundred_at_once_within_the_bound() -> None:
    """A hundred requests at once all get their own reply, on no more connections than allowed."""
    now = most = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            while True:
                body = (await read_request(reader)).split(b"\r\n\r\n", 1)[1]
                await asyncio.sleep(0.002)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        finally:
            now -= 1

    async def main() -> None:
        async with asyncio.timeout(20), peer(behave) as url:
            client = HttpClient(max_per_host=16)

            async def one(i: int) -> bool:
                body = b"%d" % i
                reply = await client.request("POST", url, body=body, timeout_s=10)
                return reply.body == body

            assert all(await asyncio.gather(*(one(i) for i in range(100))))
            assert most == 16
            await client.close()

    asyncio.run(main())


def test_leaving_a_stream_disconnects_the_peer() -> None:
    """Leaving a stream before its end closes the connection and frees its place."""

    async def main() -> None:
        gone = asyncio.Event()

        async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(CHUNKED + b"1\r\nx\r\n")
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
            gone.set()

        async with asyncio.timeout(5), peer(behave) as url:
            client = HttpClient(max_per_host=1)
            async with client.stream("GET", url, timeout_s=5, idle_timeout_s=5) as reply:
                assert await anext(reply) == b"x"
            await gone.wait()
            async with client.stream("GET", url, timeout_s=5, idle_timeout_s=5) as reply:
                assert await anext(reply) == b"x"
            await client.close()

    asyncio.run(main())


def test_slow_consumer_holds_the_sender_back() -> None:
    """What a slow consumer has not taken stays with the sender, and arrives whole later."""
    total = 64 << 20
    sent = 0

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1 << 20

    async def use(client: HttpClient, url: str) -> None:
        async with client.stream("GET", url, timeout_s=5, idle_timeout_s=0.2) as reply:
            await anext(reply)
            await asyncio.sleep(0.4)  # longer than idle_timeout_s: our own slowness is no silence
            assert sent < total / 2
            got = 0
            async for chunk in reply:
                got += len(chunk)
            assert got > total - (1 << 20)

    run(behave, use)


def test_a_poured_body_is_taken_as_it_comes() -> None:
    """`pour` gives all bytes in order. It returns False as soon as the sink takes no more, and a
    later `pour` goes on where it stopped."""
    pieces = [b"%x\r\n%b\r\n" % (len(text), text) for text in (b"a", b"bc", b"def", b"g")]

    async def use(client: HttpClient, url: str) -> None:
        async with client.stream("GET", url, timeout_s=5, idle_timeout_s=5) as reply:
            got: list[bytes] = []

            def sink(piece: bytes) -> bool:
                got.append(piece)
                return len(got) != 2

            assert not await reply.pour(sink)
            assert len(got) == 2
            await asyncio.sleep(0.1)  # what comes meanwhile is kept
            assert len(got) == 2
            assert await reply.pour(sink)
            assert b"".join(got) == b"abcdefg"
            assert await reply.pour(sink), "the body has ended"

    run(always(CHUNKED, *pieces, b"0\r\n\r\n", gap_s=0.02), use)


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
def test_what_a_sink_raises_ends_the_pour(gap_s: float) -> None:
    """An error in the sink is raised by `pour`, also if the sink was called as bytes came."""

    async def use(client: HttpClient, url: str) -> None:
        async with client.stream("GET", url, timeout_s=5, idle_timeout_s=5) as reply:

            def sink(piece: bytes) -> bool:
                if b"2" in piece:
                    raise ValueError("no 2")
                return True

            with pytest.raises(ValueError, match="no 2"):
                await reply.pour(sink)

    run(always(CHUNKED, b"1\r\n1\r\n", b"1\r\n2\r\n", gap_s=gap_s, close=False), use)


def test_a_silent_peer_ends_a_pour() -> None:
    """A peer that is silent for idle_timeout_s ends the pour, counted from the last bytes."""

    async def use(client: HttpClient, url: str) -> None:
        got: list[bytes] = []
        async with client.stream("GET", url, timeout_s=5, idle_timeout_s=1) as reply:
            with pytest.raises(DeadlineExceeded):
                await reply.pour(lambda piece: not got.append(piece))
        assert b"".join(got) == b"12345"

    pieces = [b"1\r\n%d\r\n" % digit for digit in range(1, 6)]
    run(always(CHUNKED, *pieces, gap_s=0.3, close=False), use)


def test_reply_over_the_limit() -> None:
    """A whole reply over max_reply_bytes raises UpstreamError."""

    async def main() -> None:
        async with asyncio.timeout(5), peer(always(OK)) as url:
            client = HttpClient(max_reply_bytes=1)
            with pytest.raises(UpstreamError, match="over 1 bytes"):
                await client.request("GET", url, timeout_s=5)
            await client.close()

    asyncio.run(main())


def test_cancelled_request_leaves_nothing_behind() -> None:
    """A cancelled request closes its connection, so that no later one reads its reply."""

    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.request("GET", url, timeout_s=9), 0.05)
        await asyncio.sleep(0.02)
        assert not client._open

    run(always(b"HTTP/1.1 200 OK\r\n", close=False), use)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a/",
        "a:80/",
        "http://",
        "x",
        "http://h:99999/",
        "http://h/a b",
        "http://a..b/",
        "http://[::1",
    ],
)
def test_bad_urls_name_the_field(url: str) -> None:
    """An address the client cannot use raises ConfigError that names the field."""

    async def use(client: HttpClient, good: str) -> None:
        with pytest.raises(ConfigError, match=r"^url: "):
            await client.request("GET", url, timeout_s=5)

    run(always(OK), use)


@pytest.mark.parametrize("value", ["b\r\nc: d", "key\n", "sk\N{EN DASH}1"])
def test_headers_cannot_smuggle(value: str) -> None:
    """A line break in a header value is refused, as is what no header can have."""

    async def use(client: HttpClient, url: str) -> None:
        with pytest.raises(ConfigError, match="headers"):
            await client.request("GET", url, headers={"a": value}, timeout_s=5)

    run(always(OK), use)


def test_closed_client_refuses() -> None:
    """After close, calls raise UpstreamError instead of connecting."""

    async def use(client: HttpClient, url: str) -> None:
        waiting = asyncio.create_task(client.request("GET", url, timeout_s=5))
        await asyncio.sleep(0.03)
        await client.close()
        with pytest.raises(UpstreamError):
            await waiting
        with pytest.raises(UpstreamError):
            await client.request("GET", url, timeout_s=5)

    run(always(close=False), use)


def test_taking_gives_all_that_is_here() -> None:
    """Pieces that came together are one, the end is None, and the connection can be used again."""

    async def use(client: HttpClient, url: str) -> None:
        stream = client.stream("GET", url, timeout_s=5, idle_timeout_s=5)
        await stream.__aenter__()
        assert await stream.take() == b"abcde"
        stream.idle(0.05)
        with pytest.raises(DeadlineExceeded):
            await stream.take()
        stream.leave()
        stream = client.stream("GET", url, timeout_s=5, idle_timeout_s=5)
        await stream.__aenter__()
        assert [await stream.take(), await stream.take()] == [b"hi", None]
        stream.leave()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = behaved.pop(0)
        await read_request(reader)
        writer.write(whole)
        await reader.read()

    behaved = [CHUNKED + b"2\r\nab\r\n3\r\ncde\r\n", OK]
    run(behave, use)


async def _each(data: bytes, step: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), step):
        yield data[at : at + step]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_sse_events_whatever_the_chunks(step: int) -> None:
    """Events come out whole however the bytes were cut, and nothing after [DONE] does."""
    wire = (
        b": hello\n\ndata: one\n\ndata:two\r\n\r\nevent: x\nid: 3\ndata: a\ndata: b\n\n"
        b"data: \xe4\xbd\xa0\n\ndata: [DONE]\n\ndata: late\n\n"
    )

    async def main() -> list[bytes]:
        return [event async for event in sse_events(_each(wire, step))]

    assert asyncio.run(main()) == [b"one", b"two", b"a\nb", "你".encode()]

"""A TCP proxy between two processes: it can cut, delay, stall and half-open its connections."""

from __future__ import annotations

import asyncio
import contextlib

_PIECE_BYTES = 64 << 10


class Link:
    """All connections to one process. Bytes pass unchanged until a fault is set; see `heal`."""

    def __init__(self, to_host: str = "127.0.0.1") -> None:
        self._to_host = to_host
        self._servers: dict[int, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._cut = False
        self._half_open = False
        self._delay_s = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def ports(self) -> set[int]:
        """The ports that are forwarded."""
        return set(self._servers)

    async def listen(self, host: str, port: int, to_port: int | None = None) -> int:
        """Forward this address to `to_port`, or to the same port; return the port."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError):
                await self._connected(reader, writer, to_port or bound)

        server = await asyncio.start_server(accept, host, port)
        bound = int(server.sockets[0].getsockname()[1])
        self._servers[bound] = server
        return bound

    def forget(self, ports: set[int]) -> None:
        """Forward these ports no more."""
        for port in ports & self.ports:
            self._servers.pop(port).close()

    # Faults. Several may hold at once.

    def cut(self) -> None:
        """Reset every connection, and every new one."""
        self._cut = True
        self._abort()

    def delay(self, delay_s: float) -> None:
        """Hold every piece of bytes back for so long."""
        self._delay_s = delay_s

    def stall(self) -> None:
        """Forward nothing, in both directions; connections stay open."""
        self._flowing.clear()

    def half_open(self) -> None:
        """The callers' connections stay open, but nobody is at their other end any more."""
        self._half_open = True
        for _, onward in self._pairs:
            onward.transport.abort()

    def heal(self) -> None:
        """End all faults. Half-open connections are reset then."""
        if self._half_open:
            self._abort()
        self._cut = self._half_open = False
        self._delay_s = 0.0
        self._flowing.set()

    async def close(self) -> None:
        """End the proxy."""
        self.cut()
        self.forget(self.ports)
        self._flowing.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort(self) -> None:
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_port: int
    ) -> None:
        if self._cut:
            writer.transport.abort()
            return
        try:
            there, onward = await asyncio.open_connection(self._to_host, to_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, onward)
        self._pairs.append(pair)
        if self._half_open:
            onward.transport.abort()
        try:
            await asyncio.gather(self._pump(reader, onward), self._pump(there, writer))
        finally:
            self._pairs.remove(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until it ends; then end it at the other side as well."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        while self._half_open:  # this end is not announced
            await asyncio.sleep(0.05)
        with contextlib.suppress(OSError, RuntimeError):
            await self._flowing.wait()
            if writer.can_write_eof():
                writer.write_eof()

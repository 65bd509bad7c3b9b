"""EventFeed: follows the KV events of one engine rank and hands them on in order.

Used by the gateway, one per rank of each engine that tells events. A SUB socket receives, a monitor
tells of every new connection, and a DEALER fetches what is missing; core.kv.order decides. At the
start all that the engine still keeps is replayed, so that who comes late knows what is there.

What never happens here: an unbounded queue, a wait without deadline but for what engines publish,
an exception for what others send, a socket or task that outlives `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from moonserve.core.errors import ConfigError
from moonserve.core.kv.events import KvBatch
from moonserve.core.kv.order import Order, Reset, Step
from moonserve.live.kvevents.wire import BadFrame, read_live, read_replayed, replay_request

log = logging.getLogger(__name__)

_HWM = 10_000  # messages; beyond, batches are dropped, and that is seen as a gap
_AT_ONCE = 8  # batches between turns of the loop: about a millisecond
_LARGEST_BYTES = 64 << 20
_HEARTBEAT_MS = 5_000  # a peer that is silently gone is noticed
_LONGEST_REPLAY_S = 120.0  # then it counts as broken off: what is known is not all
_MAX_SOCKETS = 1 << 15  # a feed has up to four; by default a process gets 1,023


class Sink(Protocol):
    """Who is told. Called on the event loop; must not block or raise."""

    def batch(self, batch: KvBatch) -> None:
        """The next batch; none is missing between it and the one before, but for a `reset`."""

    def reset(self, why: str, restarted: bool) -> None:
        """Nothing that was told before counts any more; what follows is true, if perhaps not all.

        restarted: the engine is a new process; else batches were lost.
        """


class EventFeed:
    """See the module. `start` it inside a running loop, and `close` it."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        sink: Sink,
        *,
        context: zmq.asyncio.Context | None = None,
        replay_s: float = 5.0,
    ) -> None:
        """`endpoint`: where the engine publishes, such as tcp://10.0.0.7:5557 (rank N: port + N);
        `replay_endpoint`: where it replays, None: nowhere; `topic`: a prefix, "" for all;
        `context`: shared by many feeds, by default the process's; `replay_s`: the longest silence
        in a replay."""
        self.endpoint = endpoint
        self.order = Order(replays=replay_endpoint is not None)
        """With the counts of what happened, and whether all is known."""
        self.connected = False
        self.malformed = 0
        """Messages that were no batch."""
        self.unknown = 0
        """Events of types unknown here."""
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._sink = sink
        self._context = context or zmq.asyncio.Context.instance()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._replay_s = replay_s
        self._wanted = asyncio.Event()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect, in the background from here on. Raises ConfigError: no such kind of address, or
        no socket is left."""
        try:
            sub = self._socket(zmq.SUB)
            self._sockets = [sub]
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._sockets.append(monitor)
            sub.subscribe(self._topic)
            if self._replay_endpoint is not None:
                self._dealer(self._replay_endpoint).close()
            _connect(sub, self.endpoint)
        except ConfigError:
            await self.close()
            raise
        loops = [self._receive(sub), self._watch(monitor), self._replay_wanted()]
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Let go of all sockets; nothing is told after."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._sockets:
            self._sockets[0].disable_monitor()
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        self.connected = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        """By a bug, if not by `close`: what this engine has is not known, and said not to be."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s: not followed any more", self.endpoint, exc_info=error)
        for other in self._tasks:
            other.cancel()
        self.connected = False
        self._sink.reset("following it failed", False)

    async def _receive(self, sub: zmq.asyncio.Socket) -> None:
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(sub)
        while True:
            await sub.poll()
            for _ in range(_AT_ONCE):
                try:
                    frames = plain.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._arrived(frames)
            await asyncio.sleep(0)

    def _arrived(self, frames: Sequence[bytes]) -> None:
        try:
            seq, batch = read_live(frames)
        except BadFrame as error:
            self._malformed(error)
            return
        self._do(self.order.arrived(seq, batch))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            log.debug("%s: %s", self.endpoint, "connected" if self.connected else "disconnected")
            if self.connected:
                self._do(self.order.connected())

    async def _replay_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while (since := self.order.want) is not None:
                done = await self._replay(since)
                self._do(self.order.replay_ended(done))

    async def _replay(self, since: int) -> bool:
        """Bring batches from number `since` on; whether the engine said that these were all."""
        assert self._replay_endpoint is not None, "Order asks for none then"
        try:
            dealer = self._dealer(self._replay_endpoint)
        except ConfigError as error:
            log.warning("no replay: %s", error)
            await asyncio.sleep(self._replay_s)  # as if nobody answered
            return False
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _LONGEST_REPLAY_S
        try:
            await dealer.send_multipart(replay_request(since))
            count = 0
            while True:
                async with asyncio.timeout_at(min(until_s, loop.time() + self._replay_s)):
                    frames = await dealer.recv_multipart()
                try:
                    answer = read_replayed(frames)
                except BadFrame as error:
                    self._malformed(error)
                    continue
                if answer is None:
                    return True
                self._do(self.order.replayed(*answer))
                count += 1
                if count % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        except TimeoutError:
            why = "does not answer" if loop.time() < until_s else "replays without end"
            log.warning("%s: %s %s", self.endpoint, self._replay_endpoint, why)
            return False
        finally:
            dealer.close()

    def _dealer(self, endpoint: str) -> zmq.asyncio.Socket:
        dealer = self._socket(zmq.DEALER)
        try:
            _connect(dealer, endpoint)
        except ConfigError:
            dealer.close()
            raise
        return dealer

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        """Raises ConfigError where there are too many."""
        try:
            return self._context.socket(kind)
        except zmq.ZMQError as error:
            raise ConfigError(f"{self.endpoint}: {error.strerror}", "events") from None

    def _malformed(self, error: BadFrame) -> None:
        self.malformed += 1
        if self.malformed.bit_count() == 1:  # the first, and fewer and fewer of many
            log.warning("%s: message %d of this kind: %s", self.endpoint, self.malformed, error)

    def _do(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Reset):
                log.warning("%s: %s: forgetting what it told", self.endpoint, step.why)
                self._sink.reset(step.why, step.restarted)
            else:
                self.unknown += step.unknown
                self._sink.batch(step)
        if self.order.want is not None:
            self._wanted.set()


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """With the bounds that all sockets here have. Raises ConfigError: no address."""
    socket.linger = 0
    socket.rcvhwm = _HWM
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint}: {error.strerror}", "events") from None

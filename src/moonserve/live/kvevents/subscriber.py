"""EventFeed: follows the KV events of one engine rank and passes them on in order.

Called by live.kvevents.follower, once per engine rank and index. A Subscription receives what the
engine publishes, once for all feeds that follow the same address. Each feed puts the batches into
order by itself (core.kv.order) and fetches missing ones over a DEALER socket. So a feed that starts
later than another still has everything replayed that the engine keeps.

What never happens here: an unbounded queue; a wait without a deadline, except for what engines
publish; an exception because of what others send; a socket or task that outlives `close`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from moonserve.core.errors import ConfigError
from moonserve.core.kv.events import KvBatch
from moonserve.core.kv.order import Order, Reset, Step
from moonserve.live.kvevents.curve import CurveKeys, keys_of
from moonserve.live.kvevents.wire import (
    BadFrame,
    EventAddress,
    read_live,
    read_replayed,
    replay_request,
)

log = logging.getLogger(__name__)

_HWM = 10_000  # messages; ZMQ drops batches beyond these, and the feed sees a gap
_AT_ONCE = 8  # batches between turns of the loop: about a millisecond
_LARGEST_BYTES = 64 << 20
_HEARTBEAT_MS = 5_000  # so that a peer that is silently gone is noticed
_LONGEST_REPLAY_S = 120.0  # a longer replay counts as broken off
_MAX_SOCKETS = 1 << 15  # a feed may need four; ZMQ's default for a process is 1,023


class Sink(Protocol):
    """What receives the batches of a feed. Called on the event loop; must not block."""

    def batch(self, batch: KvBatch) -> None:
        """The next batch. No batch is missing since the one before, unless `reset` was called."""

    def reset(self, why: str, restarted: bool) -> None:
        """All batches so far no longer count; those that follow are true, but may not be all.

        `restarted`: the engine is a new process; otherwise batches were lost.
        """


class Subscriptions:
    """The subscriptions of one event loop, by address. Feeds that share it share their sockets."""

    def __init__(self, context: zmq.asyncio.Context | None = None, curve: str = "") -> None:
        """`context`: by default the one of the process. `curve`: the folder with keys for encrypted
        addresses; empty: there is none."""
        self._curve = curve
        self.context = context or zmq.asyncio.Context.instance()
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._open: dict[tuple[str, str, bool], Subscription] = {}

    @property
    def count(self) -> int:
        """How many addresses are subscribed to, whatever the number of their feeds."""
        return len(self._open)

    def join(self, feed: EventFeed) -> Subscription:
        """Give what the feed's engine publishes to the feed. Raises ConfigError: the address is
        invalid, or no socket is left."""
        key = self._key(feed.address)
        found = self._open.get(key)
        if found is None:
            address = feed.address
            found = Subscription(
                address.endpoint, address.topic, self.context, self.keys_for(address)
            )
            found.open()
            self._open[key] = found
        found.feeds.append(feed)
        return found

    async def leave(self, feed: EventFeed, subscription: Subscription) -> None:
        """Give the feed nothing more. The last feed that leaves closes the subscription."""
        subscription.feeds.remove(feed)
        if subscription.feeds:
            return
        key = self._key(feed.address)
        if self._open.get(key) is subscription:
            del self._open[key]
        await subscription.close()

    def keys_for(self, address: EventAddress) -> CurveKeys | None:
        """Return the keys for this address; None: it is not encrypted. Raises ConfigError."""
        if not address.curve:
            return None
        if not self._curve:
            why = f"{address.endpoint} is encrypted: set --kv-events-curve or --tls-dir"
            raise ConfigError(why, "events_curve")
        return keys_of(self._curve, "subscriber")

    @staticmethod
    def _key(address: EventAddress) -> tuple[str, str, bool]:
        return address.endpoint, address.topic, address.curve


class Subscription:
    """A SUB socket at one address, and a monitor that reports its connections."""

    def __init__(
        self,
        endpoint: str,
        topic: str,
        context: zmq.asyncio.Context,
        curve: CurveKeys | None = None,
    ) -> None:
        """curve: its keys, if the address is encrypted."""
        self.endpoint = endpoint
        self._curve = curve
        self.connected = False
        self.feeds: list[EventFeed] = []
        self._topic = topic.encode()
        self._context = context
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Connect, in the background from here on. Raises ConfigError, as Subscriptions.join."""
        sub = open_socket(self._context, zmq.SUB, self.endpoint)
        self._sockets = [sub]
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        try:
            with _in_words(self.endpoint):
                self._sockets.append(monitor := sub.get_monitor_socket(wanted))
            sub.subscribe(self._topic)
            connect(sub, self.endpoint, self._curve)
        except ConfigError:
            self._close_sockets()
            raise
        loops = [self._receive(sub), self._watch(monitor)]
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Close the sockets; no feed receives anything afterwards."""
        self.connected = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._sockets:
            self._sockets[0].disable_monitor()
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Only a bug ends a task without `close`: then no feed knows what its engine holds."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.connected = False
        for other in self._tasks:
            other.cancel()
        log.error("%s: its KV events are no longer received", self.endpoint, exc_info=error)
        for feed in self.feeds:
            feed.fail()

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
            number, batch = read_live(frames)
        except BadFrame as error:
            for feed in self.feeds:
                feed.malform(error)
            return
        for feed in self.feeds:
            feed.arrived(number, batch)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            log.debug("%s: %s", self.endpoint, "connected" if self.connected else "disconnected")
            if self.connected:
                for feed in self.feeds:
                    feed.reached()


class EventFeed:
    """See the module. `start` it inside a running loop, and `close` it."""

    def __init__(
        self,
        address: EventAddress,
        sink: Sink,
        subscriptions: Subscriptions | None = None,
        *,
        replay_s: float = 5.0,
    ) -> None:
        """`subscriptions`: None: the feed has sockets of its own; `replay_s`: the longest silence
        during a replay, in seconds."""
        self.address = address
        self.order = Order(replays=bool(address.replay))
        """With counts, and whether all batches are known."""
        self.malformed = 0
        """Messages that were no batch."""
        self.unknown = 0
        """Events of unknown types."""
        self._sink = sink
        self._subscriptions = subscriptions or Subscriptions()
        self._subscription: Subscription | None = None
        self._replay_s = replay_s
        self._wanted = asyncio.Event()
        self._replaying: asyncio.Task[None] | None = None
        self._failed = False

    @property
    def connected(self) -> bool:
        """Whether the engine is connected now."""
        return self._subscription is not None and self._subscription.connected and not self._failed

    async def start(self) -> None:
        """Connect, in the background from here on. Raises ConfigError: an address is invalid, or
        no socket is left."""
        if self.address.replay:
            self._dealer().close()
        self._subscription = self._subscriptions.join(self)
        self._replaying = asyncio.create_task(self._replay_wanted())
        self._replaying.add_done_callback(self._ended)
        if self._subscription.connected:  # for another feed: it reports no new connection
            self.reached()

    async def close(self) -> None:
        """Release all sockets; the sink receives nothing afterwards."""
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._subscriptions.leave(self, subscription)

    # For the subscription.

    def arrived(self, number: int, batch: KvBatch) -> None:
        """A batch was published."""
        self._take(self.order.arrived, number, batch)

    def reached(self) -> None:
        """The engine is connected, perhaps again."""
        self._take(self.order.connected)

    def malform(self, error: BadFrame) -> None:
        """A message was no batch."""
        self.malformed += 1
        if self.malformed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th and so on
            endpoint = self.address.endpoint
            log.warning("%s: malformed message, number %d: %s", endpoint, self.malformed, error)

    def fail(self) -> None:
        """A bug ends the feed. The sink must not go on with what it has."""
        if self._failed:
            return
        self._failed = True
        if self._replaying is not None:
            self._replaying.cancel()
        self._sink.reset("following it failed", False)

    # Replay.

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: bug during a replay", self.address.endpoint, exc_info=error)
            self.fail()

    async def _replay_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while (since := self.order.want) is not None:
                done = await self._replay(since)
                self._do(self.order.replay_ended(done))

    async def _replay(self, since: int) -> bool:
        """Fetch batches from number `since` on. Returns whether the engine sent all of them."""
        replay = self.address.replay
        assert replay, "Order asks for no replay without an address"
        try:
            dealer = self._dealer()
        except ConfigError as error:
            log.warning("no replay: %s", error)
            await asyncio.sleep(self._replay_s)  # as if the engine did not answer
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
                    self.malform(error)
                    continue
                if answer is None:
                    return True
                self._do(self.order.replayed(*answer))
                count += 1
                if count % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        except TimeoutError:
            why = "does not answer" if loop.time() < until_s else "replays without end"
            log.warning("%s: the replay at %s %s", self.address.endpoint, replay, why)
            return False
        finally:
            dealer.close()

    def _dealer(self) -> zmq.asyncio.Socket:
        """Raises ConfigError."""
        dealer = open_socket(self._subscriptions.context, zmq.DEALER, self.address.endpoint)
        try:
            curve = self._subscriptions.keys_for(self.address)
            connect(dealer, self.address.replay, curve)
        except ConfigError:
            dealer.close()
            raise
        return dealer

    def _take(self, step: Callable[..., Sequence[Step]], *of: object) -> None:
        if self._failed:
            return
        try:
            self._do(step(*of))
        except Exception:
            # A bug in one index must not stop the feeds that share the subscription.
            log.exception("%s: bug while taking a batch of KV events", self.address.endpoint)
            self.fail()

    def _do(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Reset):
                log.warning("%s: %s: forgetting its blocks", self.address.endpoint, step.why)
                self._sink.reset(step.why, step.restarted)
            else:
                self.unknown += step.unknown
                self._sink.batch(step)
        if self.order.want is not None:
            self._wanted.set()


def open_socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    """A socket for this endpoint, not yet connected. Raises ConfigError: there are too many."""
    with _in_words(endpoint):
        return context.socket(kind)


def connect(socket: zmq.asyncio.Socket, endpoint: str, curve: CurveKeys | None = None) -> None:
    """Connect with the bounds that all sockets here have. Raises ConfigError: invalid address.

    curve: the keys, if the address is encrypted.
    """
    if curve is not None:
        curve.call(socket)
    socket.linger = 0
    socket.rcvhwm = _HWM
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    with _in_words(endpoint):
        socket.connect(endpoint)


@contextmanager
def _in_words(endpoint: str) -> Iterator[None]:
    """Turn an error of ZMQ about this endpoint into a ConfigError."""
    try:
        yield
    except zmq.ZMQError as error:
        raise ConfigError(f"{endpoint}: {error.strerror}", "events") from None

"""Publisher and SegmentEvents: the KV events of our own workers, with vLLM's sockets and frames.

Publisher has the sockets: a PUB that numbers batches from 0, and a ROUTER that replays the latest.
SegmentEvents decides what to publish: the blocks in the worker's segments of the pool. It names
them as vLLM does, so a router that recomputes vLLM's hashes recognises them. live.process.worker
makes both if KV events are switched on.

What never happens here: waiting for a subscriber; more batches kept, or queued for a peer, than the
bounds; events in clear beyond this machine unless the operator allows it; an event about a block
whose tokens this worker does not know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from moonserve.core.errors import ConfigError
from moonserve.core.kv.events import EngineHash, KvEvent, RemovedEvent, StoredEvent
from moonserve.core.kv.vllm_hash import Algorithm, block_hash, event_hash, root_hash
from moonserve.core.units import BlockKey, Tokens
from moonserve.live.http.auth import is_loopback
from moonserve.live.kvevents.curve import CurveKeys
from moonserve.live.kvevents.wire import batch_frames, encode_batch, replay_answer, replay_since

log = logging.getLogger(__name__)

_HWM = 10_000
_QUEUED = 1_000  # messages of a replay that wait for one peer
_REPLAYS = 64
_REPLAY_S = 60.0
_FULL_S = 0.01  # between looks whether a peer's queue has room
_AT_ONCE = 64  # batches of a replay between turns of the loop
_KEPT_BYTES = 64 << 20
_REQUEST_BYTES = 4 << 10  # a subscription's topic, or a request for a replay
_ALGORITHM: Algorithm = "sha256_cbor"
_MAX_DIGESTS = 1 << 16
_MAX_WAITING = 1 << 12
_MEDIUM = {"dram": "CPU", "disk": "STORAGE"}


class Publisher:
    """See the module. Made inside a running loop; `close` it."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str = "",
        kept: int = 10_000,
        *,
        curve: CurveKeys | None = None,
    ) -> None:
        """Listen on both addresses, such as tcp://*:5557. `kept`: batches kept for
        replays. `curve`: encrypt, and accept only known subscribers. Raises ConfigError: it cannot
        listen there."""
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._kept_bytes = 0
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._curve = curve
        self._access = None if curve is None else curve.listen(self._context)
        self._listening: asyncio.Task[None] | None = None
        self._replays: dict[bytes, asyncio.Task[None]] = {}
        """The replays under way, by peer."""
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = _HWM
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._pub)
        """The same socket, for sending without waiting."""
        self._router: zmq.asyncio.Socket | None = None
        try:
            self.endpoint = self._bind(self._pub, endpoint)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._router = router = self._context.socket(zmq.ROUTER)
                router.sndhwm = _QUEUED
                router.router_mandatory = True  # a full queue is an error, and drops nothing
                self.replay_endpoint = self._bind(router, replay_endpoint)
                self._listening = asyncio.create_task(self._listen(router))
        except ConfigError:
            self._close()
            raise

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch to all subscribers. Never waits."""
        payload = encode_batch(time.time(), events, 0)
        if len(self._kept) == self._kept.maxlen:
            self._forget()
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > _KEPT_BYTES:
            self._forget()
        self._plain.send_multipart(batch_frames(self._topic, self._next, payload), zmq.NOBLOCK)
        self._next += 1

    def _forget(self) -> None:
        """Keep the oldest batch no longer."""
        self._kept_bytes -= len(self._kept.popleft()[1])

    async def close(self) -> None:
        """Release both addresses."""
        tasks = [*self._replays.values()]
        if self._listening is not None:
            tasks.append(self._listening)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._close()

    def _close(self) -> None:
        self._pub.close(0)
        if self._router is not None:
            self._router.close(0)
        if self._access is not None:
            self._access.stop()
        self._context.term()

    def _bind(self, socket: zmq.asyncio.Socket, endpoint: str) -> str:
        """Listen, and return the address; port 0 takes any free port. Raises ConfigError."""
        socket.linger = 0
        socket.maxmsgsize = _REQUEST_BYTES
        if self._curve is not None:
            self._curve.serve(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            why = f"cannot listen on {endpoint}: {error.strerror}"
            raise ConfigError(why, "kv_events") from None
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes), "the socket is bound"
        return bound.decode()

    async def _listen(self, router: zmq.asyncio.Socket) -> None:
        """Answer requests for replays, for ever; one at a time for each peer."""
        while True:
            peer, *request = await router.recv_multipart()
            since = replay_since(request)
            if since is None:
                log.warning(
                    "%s: malformed replay request of %d frames", self.endpoint, len(request)
                )
            elif peer in self._replays or len(self._replays) >= _REPLAYS:
                log.warning("%s: too many replays at once; one is not answered", self.endpoint)
            else:
                replay = asyncio.create_task(self._replay(router, peer, since))
                self._replays[peer] = replay
                replay.add_done_callback(partial(self._replayed, peer))

    def _replayed(self, peer: bytes, task: asyncio.Task[None]) -> None:
        del self._replays[peer]
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("%s: bug during a replay", self.endpoint, exc_info=bug)

    async def _replay(self, router: zmq.asyncio.Socket, peer: bytes, since: int) -> None:
        """Send a peer the batches that are kept, from a number on; give up if it does not read."""
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(router)
        kept = [it for it in self._kept if it[0] >= since]
        answers = [replay_answer(self._topic, number, payload) for number, payload in kept]
        answers.append(replay_answer(b"", None, b""))
        try:
            async with asyncio.timeout(_REPLAY_S):
                for count, answer in enumerate(answers, 1):
                    while not _sent(plain, [peer, *answer]):  # noqa: ASYNC110 - ZMQ has no event
                        await asyncio.sleep(_FULL_S)
                    if count % _AT_ONCE == 0:
                        await asyncio.sleep(0)
        except TimeoutError:
            log.warning("%s: a peer did not read its replay for too long", self.endpoint)
        except zmq.ZMQError as error:
            log.debug("%s: the peer of a replay is gone: %s", self.endpoint, error)


def _sent(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    """Send now; False: the peer's queue is full. Raises ZMQError: the peer is gone."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def check_readers(endpoints: Sequence[str], encrypted: bool, open_to_all: bool) -> None:
    """Raise ConfigError if other machines could read the events of these addresses in clear.

    open_to_all: the operator has allowed it.
    """
    for endpoint in endpoints:
        host = endpoint.partition("://")[2].rpartition(":")[0]
        here = endpoint.startswith("ipc://") or is_loopback(host.strip("[]"))
        if not (encrypted or open_to_all or here):
            raise ConfigError(
                f"{endpoint} can be reached from other machines, and events contain the tokens of"
                " prompts and cache salts: listen on 127.0.0.1, encrypt them with --tls-dir or"
                " --kv-events-curve, or allow everybody to read them with --kv-events-open",
                "kv_events",
            )


class SegmentEvents:
    """The blocks in a worker's segments, as events; `publish` gets them in batches.

    The worker reports the blocks that it puts, with their tokens (`learned`). The owners of its
    segments report keys that came or went (`segment`). A block that another worker copied here is
    published once this worker computes the same tokens. All events of one turn of the event loop
    are one batch.
    """

    def __init__(self, block_size: Tokens, publish: Callable[[Sequence[KvEvent]], None]) -> None:
        self._size = block_size
        self._publish = publish
        self._digests: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._waiting: OrderedDict[BlockKey, tuple[EngineHash | None, list[int], str]] = (
            OrderedDict()
        )
        """Known blocks: (hash of the block before, tokens, salt of a chain's first block)."""
        self._segments: dict[str, Callable[[BlockKey], bool]] = {}
        """Medium -> whether it holds a block."""
        self._published: dict[tuple[str, BlockKey], int] = {}
        self._events: list[KvEvent] = []

    def segment(
        self, tier: str, holds: Callable[[BlockKey], bool]
    ) -> Callable[[Sequence[bytes]], None]:
        """Add a segment on tier dram or disk. Returns what its owner calls with changed keys."""
        medium = _MEDIUM[tier]
        self._segments[medium] = holds

        def changed(keys: Sequence[bytes]) -> None:
            for key in keys:
                self._look(medium, BlockKey(key))

        return changed

    def learned(self, keys: Sequence[BlockKey], tokens: Sequence[int], salt: str = "") -> None:
        """The worker is about to put the chain `keys`, from its first block, made of `tokens`.

        salt: the cache salt of its requests. As vLLM's, it is in the first block's hash and event.
        """
        parent, before = root_hash(_ALGORITHM), None
        for at, key in enumerate(keys):
            run = list(tokens[at * self._size : (at + 1) * self._size])
            digest = self._digests.get(key)
            if digest is None:
                digest = block_hash(
                    _ALGORITHM, parent, run, (("cache_salt", salt),) if salt else None
                )
                self._digests[key] = digest
                _bound(self._digests, _MAX_DIGESTS)
            self._waiting[key] = (before, run, salt)
            _bound(self._waiting, _MAX_WAITING)
            parent = digest
            before = event_hash(digest)
            salt = ""
            for medium in self._segments:
                self._look(medium, key)

    def _look(self, medium: str, key: BlockKey) -> None:
        """Add an event if a block came to a segment or left it."""
        here = self._segments[medium](key)
        published = self._published.get((medium, key))
        if here and published is None and key in self._waiting and key in self._digests:
            before, tokens, salt = self._waiting[key]
            hash = self._published[medium, key] = event_hash(self._digests[key])
            self._add(self._stored(medium, hash, before, tokens, salt))
        elif not here and published is not None:
            del self._published[medium, key]
            self._add(RemovedEvent([published], medium))

    def _stored(
        self, medium: str, hash: int, before: EngineHash | None, tokens: list[int], salt: str
    ) -> StoredEvent:
        """The event of one block, joined with the last event if that ends with the block before."""
        last = self._events[-1] if self._events else None
        follows = isinstance(last, StoredEvent) and last.block_hashes[-1] == before
        if isinstance(last, StoredEvent) and follows and last.medium == medium:
            self._events.pop()
            hashes, run = [*last.block_hashes, hash], [*last.token_ids, *tokens]
            extras = last.extra_keys and [*last.extra_keys, None]
            return StoredEvent(
                hashes, last.parent_block_hash, run, self._size, None, medium, extra_keys=extras
            )
        extras = [[salt]] if salt else None
        return StoredEvent([hash], before, tokens, self._size, None, medium, extra_keys=extras)

    def _add(self, event: KvEvent) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._publish(events)


def _bound(kept: OrderedDict[BlockKey, Any], most: int) -> None:
    if len(kept) > most:
        kept.popitem(last=False)

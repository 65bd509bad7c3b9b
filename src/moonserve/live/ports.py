"""The seams of the live shell, each with its contract in words.

Rooms talk to each other through these protocols; each has one contract suite in tests/contract
that runs over every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.request import Request
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    InstanceInfo,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.schedule.view import InstanceView, Promised
from moonserve.core.store.words import Found as Found
from moonserve.core.store.words import Replica as Replica
from moonserve.core.units import (
    BlockKey,
    Bytes,
    InstanceId,
    LeaseId,
    Micros,
    RequestId,
    SegmentId,
    Tokens,
)


class Clock(Protocol):
    """Time as the event loop sees it; a virtual loop gives virtual time."""

    def now_us(self) -> Micros:
        """Microseconds, monotonic, never going back within a process."""

    async def sleep_us(self, us: Micros) -> None:
        """Return after `us` microseconds (0: after one turn of the loop)."""


class EngineShape(msgspec.Struct, frozen=True):
    """What an engine's pool looks like; fixed for its life."""

    block_size: Tokens
    num_blocks: int
    block_bytes: Bytes
    vocab_size: int
    max_len: Tokens
    layout: str
    """Goes into the KV namespace: equal layouts mean exchangeable block bytes."""
    revision: str
    """Hash of the weights; goes into the KV namespace."""
    eos_token_ids: tuple[int, ...]
    layers: int = 1
    """A block's bytes are so many equal parts, one after the other, each of one layer's KV; with
    1, the layers cannot be told apart."""


class Layers(Protocol):
    """Who goes along with a pass from layer to layer: see core.pipeline."""

    async def reached(self, layer: int) -> None:
        """`block` shows this layer's KV of the pass's own tokens; return when the pool has that of
        the tokens before them too, by a deadline.

        Awaited on the event loop. Raises MoonserveError where it will not come: so ends the pass.
        """


class Engine(Protocol):
    """Runs passes over paged KV blocks. One pass at a time; knows no requests beyond a pass."""

    @property
    def shape(self) -> EngineShape:
        """The pool's shape."""

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Run one pass off the event loop and return the sampled tokens.

        layers: told of each layer in order, and waited for, in a pass of one chunk; what it takes
        counts as the pass's time. Never called again before it returned. A raised exception means
        the pass had no defined result: the caller fails every request in it.
        """

    def block(self, index: int) -> memoryview:
        """The writable bytes of one pool block (format "B", block_bytes long, C-contiguous).

        Valid for the engine's life. The caller may read a block whose tokens a finished pass has
        computed, and write a block that no running or later pass has written yet.
        """

    async def close(self) -> None:
        """Free threads and memory; `run` is not called after."""


class KVStore(Protocol):
    """The shared pool of KV blocks, as a worker sees it. Exists means complete and readable."""

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        """The leading run of `keys` that exist, each now kept from eviction under `lease`.

        Stops at the first missing key. A lease ends by `release` or after its time to live.
        """

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        """Copy each object into its buffer (size bytes each); nearest replica first, then others.

        Returns how many leading objects arrived whole and verified by checksum; short when a
        replica was lost and no other could serve. Never raises for lost data.
        """

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        """Store objects; those that exist already are kept and leased. Returns how many exist now.

        The items are a piece of a chain; `parent` comes before it, None where it heads the chain.
        near: where they should lie, if that can be chosen and is there; None: at the caller's own.
        All or nothing per object: a reader never sees a half-written one. Less than len(items)
        means the pool was full of leased objects; the caller goes on without them.
        """

    async def release(self, lease: LeaseId) -> None:
        """End a lease; an unknown one is no error."""

    async def close(self) -> None:
        """Leave: unmount the segment, close sockets and shared memory."""


class Registration(Protocol):
    """An entry of a registry, or a candidacy there, that is kept up until it is closed."""

    async def close(self) -> None:
        """Withdraw it: gone for others at once, or by its time to live where nobody can be told.

        Never raises for a registry that is away; called twice it is no error.
        """


class Registry(Protocol):
    """Who is there: small values by key, and who has a duty that one at a time may have.

    What a process registers is kept up in the background and goes with it, at most `ttl_s` after
    it died. While the registry is away everybody knows what they knew, except that nobody keeps a
    duty beyond its time; when it is back, all is registered again. Keys are like a/b.
    """

    @property
    def ttl_s(self) -> float:
        """For how long the entries of a dead process stay."""

    async def register(self, key: str, value: bytes) -> Registration:
        """Put a value for as long as this process lives; there when it returns.

        What another process has put there is replaced. Raises RegistryError within some seconds
        when it cannot be put now; then it is not tried again.
        """

    async def put(self, key: str, value: bytes) -> None:
        """Put a value that stays until it is removed. Raises RegistryError."""

    async def remove(self, key: str) -> bool:
        """Remove an entry; whether there was one. Raises RegistryError."""

    async def read(self, prefix: str) -> dict[str, bytes]:
        """The entries whose keys begin like this, now, in the order of their keys.

        Raises RegistryError.
        """

    def watch(self, prefix: str) -> AsyncIterator[Mapping[str, bytes]]:
        """What `read` gives, at once and then whenever it has changed; never twice the same.

        Changes in quick succession are told together. Goes on for ever; while the registry is away
        it tells nothing, and when it is back, it waits with removals until owners had time to
        register again. What was `put` stays in it when the registry has lost all it knew, and is
        put there again.
        """

    def alarms(self) -> list[str]:
        """What is wrong with it now, in words: it is away, it has lost what it knew."""

    async def elect(self, duty: str, who: str, changed: Callable[[bool], None]) -> Registration:
        """Stand for a duty. `changed(True)` when it is ours; `changed(False)` when it is no more.

        The latter before anybody else may have it, whether or not the registry can be reached:
        after `ttl_s` without an answer from it. Raises RegistryError as `register` does.
        """

    async def close(self) -> None:
        """Withdraw everything and let go of the registry."""


class Output(msgspec.Struct, frozen=True):
    """A piece of a generation, in order. The last piece has a finish_reason."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """"stop" (EOS, stop token or stop string) or "length"; None while it goes on."""
    cached_tokens: Tokens | None = None
    """Prompt tokens reused by prefill; set on the first piece."""


class ModelCard(msgspec.Struct, frozen=True):
    """A served model, as the gateway needs to know it."""

    name: str
    max_len: Tokens
    alive: bool
    """Whether some prefill and some decode instance can serve it now."""


class Serving(Protocol):
    """The cluster behind a gateway."""

    def models(self) -> list[ModelCard]:
        """The models that instances have joined with."""

    def generate(self, request: Request) -> AsyncIterator[Output]:
        """Serve one request. Closing the iterator early cancels it everywhere and frees all.

        Raises Overloaded, NobodyAlive, EngineFailed, DeadlineExceeded, ModelNotFound; the first
        two only before the first piece.
        """


Told: TypeAlias = PrefillEnded | StageEnded | DecodeEnded | CallFailed | ClientGone | BlockEvent
"""What those who serve requests know: all facts about a request but its arrival, and what an engine
that tells nothing must have by now."""


class Inbox(Protocol):
    """Where the Conductor's actions for one request go; an asyncio.Queue is one."""

    def put_nowait(self, item: Any, /) -> None:
        """Take one action; never full."""


class ClusterRead(Protocol):
    """What the Conductor knows of the cluster, for parts of its own process that only read.

    Callers change nothing in what they get; it is valid until the event loop's next turn.
    """

    def now_us(self) -> Micros:
        """The clock by which the times in the views are counted."""

    def views(self) -> Mapping[InstanceId, InstanceView]:
        """The instances that have joined, by id."""

    def promised(self) -> Promised:
        """The ledger: what is promised to requests that are under way."""

    def index_blocks(self) -> int:
        """How many blocks the prefix index knows."""

    @property
    def placed(self) -> int:
        """How many requests were placed, ever."""


class ClusterFeed(ClusterRead, Protocol):
    """The Conductor for parts of its own process that watch instances: they read and report."""

    def tell(self, *facts: Fact) -> None:
        """Report facts; those of one turn of the event loop are taken together."""


class Conducting(Protocol):
    """The Conductor as those see it who serve requests: in this process, or in another.

    Nothing here waits. What it wants of a request comes into that request's inbox.
    """

    def now_us(self) -> Micros:
        """The clock by which its times are told."""

    def instances(self) -> Sequence[InstanceInfo]:
        """Those that have joined, in order of id."""

    def known(self, request: RequestId) -> bool:
        """Whether a request of this id was opened here and not closed."""

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: Inbox) -> None:
        """A request arrives, under an id that is not `known`; the actions for it go to `inbox`.

        Where another process serves one of this id it is refused, as `duplicate_request_id`.
        """

    def tell(self, *facts: Told) -> None:
        """Facts about requests that are open; those of one turn of the loop are taken together."""

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """Prefill gave its token: for the record, beside what was predicted. None: not said."""

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """An instance has loaded these from others: its own segment is to have them as well."""

    def close(
        self,
        request: RequestId,
        outcome: str,
        tbt_us: Micros | None = None,
        cached_tokens: Tokens | None = None,
    ) -> None:
        """The request's task has ended; what is still said of it is dropped. An open life ends by
        ClientGone, told before. tbt_us: the mean of its gaps, if it had any; cached_tokens: where
        that was said after the first token."""

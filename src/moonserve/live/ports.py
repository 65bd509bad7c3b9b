"""The ports of live: protocols between rooms, each with its contract in words.

Rooms use each other through these protocols. Each has one suite of contract tests in tests/contract
that runs over every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.kv.facts import BlockEvent
from moonserve.core.request import Request, TokenLogprobs
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    InstanceInfo,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.schedule.observed import Part
from moonserve.core.schedule.record import Measured
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
    """A block's bytes are so many equal parts in sequence, each the KV of one layer. 1: the layers
    cannot be separated."""


class Layers(Protocol):
    """Follows a pass from layer to layer; see core.schedule.pipeline."""

    async def reached(self, layer: int) -> None:
        """Called when `block` shows this layer's KV of the pass's own tokens.

        Returns when the pool also has this layer's KV of the tokens before them. Awaited on the
        event loop. Raises MoonserveError at a deadline, or where that KV will not come; then the
        pass ends.
        """


class Engine(Protocol):
    """Runs passes over paged KV blocks. One pass at a time; knows no requests beyond a pass."""

    @property
    def shape(self) -> EngineShape:
        """The pool's shape."""

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Run one pass off the event loop and return the sampled tokens.

        layers: called and awaited for each layer in order, in a pass of one chunk; its time counts
        as the pass's time. The caller never starts a second pass before this one returned. An
        exception means that the pass has no defined result: the caller fails every request in it.
        """

    def block(self, index: int) -> memoryview:
        """The writable bytes of one pool block (format "B", block_bytes long, C-contiguous).

        Valid for the engine's life. The caller may read a block whose tokens a finished pass has
        computed, and write a block that no running or later pass has written yet.
        """

    async def start_profile(self) -> None:
        """Record what passes do, until `stop_profile`. Raises BadRequest: it cannot, and why."""

    async def stop_profile(self, file: Path) -> None:
        """End the recording, between two passes, and write it as a Chrome trace. Raises OSError."""

    async def close(self) -> None:
        """Free threads and memory; `run` is not called afterwards."""


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
        near: the preferred segment, if the store can choose it; None: the caller's own segment.
        Each object is written whole or not at all: a reader never sees half of one. Less than
        len(items) means that the pool was full of leased objects; the caller goes on without them.
        """

    async def release(self, lease: LeaseId) -> None:
        """End a lease; an unknown one is no error."""

    async def close(self) -> None:
        """Leave: unmount the segment, close sockets and shared memory."""


class Registration(Protocol):
    """An entry of a registry, or a candidacy there, that is kept up until it is closed."""

    async def close(self) -> None:
        """Withdraw it. Others see that at once, or after its time to live if the registry is away.

        Never raises for a registry that is away. A second call is no error.
        """


class Candidacy(Registration, Protocol):
    """A process that stands for a duty."""

    async def depose(self, term: int) -> None:
        """Take the duty from its holder of this term, or take it at once if it is free.

        To be called if that holder is lost. It is safe if it is not: see Registry. Raises
        RegistryError.
        """

    def give_way(self, term: int) -> None:
        """Another process has the duty, in this higher term: give up a lower one."""


class Registry(Protocol):
    """Small values by key, which processes publish about themselves, and duties, each of one
    process in one term.

    The entries of a process are renewed in the background, and end at most `ttl_s` after the
    process died. While the registry is away, every process keeps what it knew, and its duties. When
    the registry is back, all entries are registered again. Keys are like a/b.

    Each holder of a duty has a higher term than the holders before. A holder may learn late that
    another one has the duty. So whoever takes orders from holders must remember the highest term
    that it has seen, and refuse orders of a lower one. Then two holders never both decide.
    """

    @property
    def ttl_s(self) -> float:
        """How long the entries of a dead process stay."""

    async def register(self, key: str, value: bytes) -> Registration:
        """Put a value for as long as this process lives; others can read it when this returns.

        It replaces the value of another process. Raises RegistryError within some seconds when it
        cannot be put now; then there is no further attempt.
        """

    async def put(self, key: str, value: bytes) -> None:
        """Put a value that stays until somebody removes it. Raises RegistryError."""

    async def remove(self, key: str) -> bool:
        """Remove an entry; return whether there was one. Raises RegistryError."""

    async def read(self, prefix: str) -> dict[str, bytes]:
        """The entries whose keys begin with `prefix` now, in the order of their keys.

        Raises RegistryError.
        """

    def watch(self, prefix: str) -> AsyncIterator[Mapping[str, bytes]]:
        """Yield what `read` returns, at once and then after each change; never twice the same.

        Changes in quick succession are yielded together. It goes on for ever. While the registry is
        away it yields nothing; when the registry is back, it delays removals until owners had time
        to register again. If the registry has lost its data, values from `put` stay and are put
        there again.
        """

    def alarms(self) -> list[str]:
        """What is wrong with the registry now, in words: it is away, or it has lost its data."""

    async def elect(
        self, duty: str, who: str, changed: Callable[[int], None], patience_s: float = 0.0
    ) -> Candidacy:
        """Stand for a duty as `who`. `changed(term)`: this process has the duty from now on;
        `changed(0)`: it has the duty no more.

        patience_s: how long the duty must be free before this process takes it. Raises
        RegistryError as `register` does.
        """

    async def close(self) -> None:
        """Withdraw all entries and duties, and disconnect."""


class Output(msgspec.Struct, frozen=True):
    """A piece of a generation, in order. The last piece has a finish_reason."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """"stop" (EOS, stop token or stop string) or "length"; None while it goes on."""
    cached_tokens: Tokens | None = None
    """Prompt tokens reused by prefill; set on the first piece."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each token, if the request wants them."""


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

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Serve one request. Closing the iterator early cancels it everywhere and frees all.

        Raises Overloaded, NobodyAlive, EngineFailed, DeadlineExceeded, ModelNotFound; the first
        two only before the first piece.
        """


DriverFact: TypeAlias = (
    PrefillEnded | StageEnded | DecodeEnded | CallFailed | ClientGone | BlockEvent
)
"""Facts that a driver of requests reports: all about a request except its arrival, and which blocks
an engine without KV events must hold by now."""


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
    """The Conductor as a driver of requests sees it, in the same process or in another one.

    Nothing here waits. The Conductor's actions for a request come into that request's inbox.
    """

    @property
    def has_page(self) -> bool:
        """Whether the Conductor's process serves the page for operators, which shows requests."""

    def now_us(self) -> Micros:
        """The clock of all times that the Conductor uses."""

    def instances(self) -> Sequence[InstanceInfo]:
        """The instances that have joined and get new work, in order of id."""

    def drained(self) -> Sequence[InstanceInfo]:
        """The instances that have joined and get no new work, in order of id."""

    def known(self, request: RequestId) -> bool:
        """Whether a request of this id was opened here and not closed."""

    def open(self, request: Request, keys: Sequence[BlockKey], inbox: Inbox) -> None:
        """A request arrives with an id that is not `known`; the actions for it go to `inbox`.

        If another process serves a request with this id, this one is refused with the reason
        `duplicate_request_id`.
        """

    def end_all(self, why: str) -> None:
        """End all open requests; a client whose reply is not whole gets an error that says why."""

    def tell(self, *facts: DriverFact) -> None:
        """Report facts about open requests; those of one turn of the event loop make one step."""

    def first_token(self, request: RequestId, cached_tokens: Tokens | None) -> None:
        """Record that prefill returned its token; cached_tokens None: no engine reported it."""

    def keep(self, keys: Sequence[BlockKey], to: SegmentId, source: SegmentId | None) -> None:
        """Copy blocks that an instance has loaded from other segments into its own segment too."""

    def close(
        self,
        request: RequestId,
        outcome: str,
        measured: Measured = Measured(),  # noqa: B008 - frozen
    ) -> None:
        """The request's task has ended; later actions for it are dropped.

        If the request has not ended for the Conductor, report ClientGone first.
        """


class OutgoingCall(Protocol):
    """One call to an external engine that was sent and has not ended."""

    count: Tokens
    """Tokens that have arrived; the caller raises it."""

    def answered(self, cached: Tokens | None) -> None:
        """The first token has arrived.

        cached: prompt tokens that the engine says it reused; None: it has not said it yet. If usage
        comes at the end of the reply, pass it to `ended`. If all tokens come at once, set `count`
        first.
        """

    def ended(self, cached: Tokens | None = None) -> None:
        """The call has ended, with or without success. A second call changes nothing."""


class Observer(Protocol):
    """What learns from calls to external engines: the Fleet.

    The driver calls `began` when it sends a call. On the OutgoingCall that it gets, it calls
    `answered` at the first byte of the reply, raises `count` with every token, and calls `ended` in
    any case.
    """

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """An engine did not find these blocks in the shared store, although it was expected to."""

    def began(
        self,
        instance: InstanceId,
        part: Part,
        prompt: Tokens,
        predicted: Tokens,
        streams: bool = True,
    ) -> OutgoingCall:
        """A call is sent now.

        prompt: its length; predicted: how much of it should be cached there
        (Decision.reused_tokens); streams: whether its tokens come one by one.
        """

"""What the wire asks of the runner and gets back, and what the runner keeps of one job.

Data only; `serving` and `kv` do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.keys import chain_keys, tail_key
from moonserve.core.request import Finish, Sampling, Stopping
from moonserve.core.units import BlockKey, LeaseId, Micros, RequestId, SegmentId, Tokens

if TYPE_CHECKING:
    from moonserve.live.worker.chain import Chain

DecodeKV: TypeAlias = Literal["off", "end"] | Annotated[int, msgspec.Meta(ge=1)]
"""When the KV of generated tokens is stored: never, at the generation's end, or every so many
blocks and at the end."""


class Part(msgspec.Struct, frozen=True):
    """Of a prompt that several workers prefill: one computes from `start` to its prompt's end.

    The job's prompt ends with the part; its lease is that of all the prompt's parts.
    """

    start: Annotated[Tokens, msgspec.Meta(ge=0)]
    """A multiple of the block size. Of no effect where there is no source."""
    source: str | None = None
    """URL of the worker of the part before; None: this is the first, and the store has the rest."""
    followed: bool = False
    """Whether another part follows: the token sampled here has no meaning."""


class Job(msgspec.Struct, frozen=True):
    """One generation on this worker. `request` is unique here, also where clients repeat ids."""

    request: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    lease: LeaseId
    """What keeps this request's KV in the store between prefill and decode."""
    send_kv: bool = False
    """Leave all of the prompt's KV in the store under `lease` (vLLM: do_remote_decode)."""
    take_kv: bool = False
    """All of the prompt's KV should be in the store (vLLM: do_remote_prefill)."""
    reuse: Tokens | None = None
    """At most so many tokens are loaded for a prefill; None: all there are."""
    first_token: int | None = None
    """With take_kv: what prefill sampled; given again as the first piece."""
    near: SegmentId | None = None
    """The segment that its prompt was published to."""
    part: Part | None = None
    """With send_kv: its prompt is prefilled by several workers."""
    salt: str = ""
    """Only jobs of the same share KV."""


class Piece(msgspec.Struct, frozen=True):
    """One token of a generation; the last one has a finish."""

    token: int
    finish: Finish | None = None
    cached_tokens: Tokens = 0
    """Prompt tokens whose KV came from the store; the same on every piece."""


class KeyPlan(msgspec.Struct, frozen=True):
    """The store keys of one prompt: its full blocks, its tail if it has one."""

    root: bytes
    """Of the chain."""
    full: tuple[BlockKey, ...]
    tail: BlockKey | None

    @staticmethod
    def of(root: bytes, prompt: Sequence[int], block_size: Tokens) -> KeyPlan:
        """Hash the prompt; `root` is the namespace's with the job's salt."""
        full = chain_keys(root, prompt, block_size)
        rest = prompt[len(full) * block_size :]
        return KeyPlan(root, tuple(full), tail_key(root, full, rest) if rest else None)

    def wanted(self, job: Job, block_size: Tokens) -> tuple[BlockKey, ...]:
        """What to look for before computing: prefill must compute its last token itself."""
        if job.take_kv:
            return self.full if self.tail is None else (*self.full, self.tail)
        most = len(job.prompt) - 1
        return self.full[: (most if job.reuse is None else min(most, job.reuse)) // block_size]


class KVDeadlines(msgspec.Struct, frozen=True):
    """How long the worker waits for the store before it goes on without."""

    load_s: float = 20.0
    put_s: float = 20.0
    flush_s: float = 30.0
    """For all puts of a hand-over, before its reply."""
    release_s: float = 5.0
    ahead_s: float = 300.0
    """For KV that came ahead of its request to be claimed by it."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one worker."""

    chunk_tokens: int = 512
    max_seqs: int = 16
    max_waiting: int = 256
    """Jobs that have not entered the batch; more are refused with 429."""
    pass_s: float = 300.0
    """A pass that takes longer means a hung engine: the worker is dead."""
    piece_s: float = 600.0
    """The longest wait for a request's next token, its queueing included."""
    chain_s: float = 200.0
    """The longest wait of a part of a prompt for the other parts, and in its pass altogether."""
    room_s: float = 10.0
    """The longest wait for blocks of a part before which there is another."""
    decode_kv: DecodeKV = "end"
    kv: KVDeadlines = KVDeadlines()


class Ledger(msgspec.Struct, frozen=True):
    """What the worker holds for requests; all zero when it is idle."""

    running: int
    waiting: int
    streams: int
    blocks_used: int
    pending_puts: int
    held_leases: int
    ahead: int = 0
    """Prompts whose KV is pulled before their decode was asked for."""


class Stage(msgspec.Struct, frozen=True):
    """What happened to a request's KV here, and when; for who measures the hand-over."""

    what: Literal["put", "read", "ahead", "handed_over", "loaded", "chained", "computed"]
    """ahead: read before the request came. handed_over: from prefill's last pass until all its KV
    was in the store. loaded: from the request's admission until its KV was here. Of a part of a
    prompt, chained: from its having blocks until all KV of earlier parts was in them; computed: its
    pass, with its turn waited for."""
    lease: LeaseId
    began_us: Micros
    """On this machine's monotonic clock."""
    ended_us: Micros
    blocks: int = 0


class Ahead:
    """One prompt's KV on its way here before its decode was asked for."""

    __slots__ = ("blocks", "closed", "idle", "keys", "lease", "loaded", "unwanted")

    def __init__(self, lease: LeaseId, keys: tuple[BlockKey, ...]) -> None:
        self.lease = lease
        self.keys = keys
        self.blocks: list[int] = []
        """Held for the leading keys; the last of them may be being written."""
        self.loaded = 0
        """How many leading blocks have their KV."""
        self.closed = asyncio.Event()
        """Claimed or dropped: no more blocks come."""
        self.idle = asyncio.Event()
        """Nobody writes to the blocks any more."""
        self.unwanted = False


class Live:
    """One job from submission to its end."""

    __slots__ = (
        "ahead", "arrived_us", "blocks", "cached", "chain", "ended", "grown", "job", "keys",
        "last_us", "loading", "made", "pieces", "published", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        keys: KeyPlan | None,
        wanted: tuple[BlockKey, ...],
        now_us: Micros,
    ) -> None:
        self.job = job
        self.keys = keys
        self.wanted = wanted
        self.ahead: Ahead | None = None
        """What came before it did; its blocks are the first of `blocks`."""
        self.chain: Chain | None = None
        """Of a part of a prompt."""
        self.grown = list(keys.full) if keys is not None else []
        """Keys of its full blocks; those of generated tokens follow when they are stored."""
        self.made = [] if job.first_token is None else [job.first_token]
        """Tokens generated, the first one included."""
        self.published = 0
        """How many leading blocks the store has, or has been given."""
        self.blocks: tuple[int, ...] = ()
        self.loading = False
        self.cached = 0
        self.ended = False
        self.arrived_us = now_us
        self.last_us: Micros | None = None
        # Bounded by max_tokens: the batch makes no more.
        self.pieces: asyncio.Queue[Piece | MoonserveError] = asyncio.Queue()

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens it enters the batch with."""
        first = self.job.first_token
        return self.job.prompt if first is None else (*self.job.prompt, first)

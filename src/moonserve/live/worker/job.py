"""One generation on this worker: what the wire asks for, what it gets back, what is kept meanwhile.

Data only; every other file of the worker uses it. `runner`, `intake`, `kv` and `parts` do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.keys import chain_keys, tail_key
from moonserve.core.request import Finish, Sampling, Stopping, TokenLogprobs
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes
from moonserve.core.shares import Party
from moonserve.core.units import BlockKey, LeaseId, Micros, RequestId, SegmentId, Tokens
from moonserve.live.text.grammar import Grammar
from moonserve.live.worker.counts import Counts

DecodeKV: TypeAlias = Literal["off", "end"] | Annotated[int, msgspec.Meta(ge=1)]
"""When the worker stores the KV of generated tokens: never, at the generation's end, or every so
many blocks and at the end."""


class PromptPart(msgspec.Struct, frozen=True):
    """One part of a prompt that several workers prefill.

    The part begins at `start` and ends with the prompt of its job. All parts of one prompt share
    one lease.
    """

    start: Annotated[Tokens, msgspec.Meta(ge=0)]
    """A multiple of the block size. It has no effect where there is no source."""
    source: str | None = None
    """URL of the worker of the part before. None: this is the first part."""
    followed: bool = False
    """Whether another part follows. If so, the token sampled here has no meaning."""


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
    """A prefill loads at most so many tokens; None: all that the store has."""
    first_token: int | None = None
    """With take_kv: the token that prefill sampled; it is the first piece here too."""
    generated: Tokens = 0
    """How many of the prompt's last tokens other calls have generated."""
    near: SegmentId | None = None
    """The segment that prefill published its prompt to."""
    part: PromptPart | None = None
    """With send_kv: several workers prefill its prompt."""
    salt: str = ""
    """Only jobs with the same salt share KV."""
    party: Party = Party()
    """Whose it is: clients share the places of a worker."""

    @property
    def text_before(self) -> tuple[int, ...]:
        """The tokens that other calls have generated."""
        before = self.prompt[len(self.prompt) - self.generated :]
        return before if self.first_token is None else (*before, self.first_token)


class Piece(msgspec.Struct, frozen=True):
    """One token of a generation; the last one has a finish."""

    token: int
    finish: Finish | None = None
    cached_tokens: Tokens = 0
    """Prompt tokens whose KV came from the store; the same on every piece."""
    times: PrefillTimes | None = None
    """On the last piece of a prefill that leaves its KV in the store."""
    entry: DecodeTimes | UnsetType = UNSET
    """On the first token that a decode which takes KV has made itself."""
    logprobs: TokenLogprobs | None = None
    """If the job wants them, and the token was sampled here."""


class PromptKeys(msgspec.Struct, frozen=True):
    """The store keys of one prompt: its full blocks, and its tail if it has one."""

    root: bytes
    """The key before the first block's."""
    full: tuple[BlockKey, ...]
    tail: BlockKey | None

    @staticmethod
    def of(root: bytes, prompt: Sequence[int], block_size: Tokens) -> PromptKeys:
        """Hash the prompt; `root` is the namespace's with the job's salt."""
        full = chain_keys(root, prompt, block_size)
        rest = prompt[len(full) * block_size :]
        return PromptKeys(root, tuple(full), tail_key(root, full, rest) if rest else None)

    def wanted(self, job: Job, block_size: Tokens) -> tuple[BlockKey, ...]:
        """The blocks to look for before computing. Prefill must compute its last token itself."""
        if job.take_kv:
            return self.full if self.tail is None else (*self.full, self.tail)
        most = len(job.prompt) - 1
        return self.full[: (most if job.reuse is None else min(most, job.reuse)) // block_size]


def _counts(job: Job) -> Counts | None:
    """What the penalties of a job count before its first token; None: it has none."""
    shaping = job.sampling.shaping
    if shaping is None or shaping.penalties is None:
        return None
    prompt = job.prompt if shaping.penalties.repetition != 1 else ()
    return Counts(prompt, job.text_before)


class KVDeadlines(msgspec.Struct, frozen=True):
    """How long the worker waits for the store before it continues without."""

    load_s: float = 20.0
    put_s: float = 20.0
    flush_s: float = 30.0
    """For all puts of a hand-over, before its reply."""
    release_s: float = 5.0
    ahead_s: float = 300.0
    """For a decode call to come for the KV that was prefetched for it."""


class WorkerLimits(msgspec.Struct, frozen=True):
    """Bounds of one worker."""

    chunk_tokens: int = 512
    max_seqs: int = 16
    max_waiting: int = 256
    """Jobs that have not entered the batch; the worker refuses more with 429."""
    pass_s: float = 300.0
    """A pass that takes longer means a hung engine: the worker is dead."""
    piece_s: float = 600.0
    """The longest wait for a request's next token, its queueing included."""
    chain_s: float = 200.0
    """The longest wait of a part of a prompt for the other parts, and in its pass altogether."""
    room_s: float = 10.0
    """The longest wait for its blocks of a part that follows another."""
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
    """Prompts whose KV is prefetched before their decode call."""


class Prefetch:
    """One prompt's KV that the worker fetches before its decode call comes."""

    __slots__ = ("blocks", "closed", "idle", "keys", "lease", "loaded", "unwanted")

    def __init__(self, lease: LeaseId, keys: tuple[BlockKey, ...]) -> None:
        self.lease = lease
        self.keys = keys
        self.blocks: list[int] = []
        """Held for the leading keys; the store may still write to the last of them."""
        self.loaded = 0
        """How many leading blocks have their KV."""
        self.closed = asyncio.Event()
        """It was claimed or dropped: no more blocks come."""
        self.idle = asyncio.Event()
        """The store writes to none of the blocks any more."""
        self.unwanted = False


class ActiveJob:
    """One job from its submission to its end."""

    __slots__ = (
        "admitted_us", "arrived_us", "blocks", "cached", "computed_us", "counts", "ended",
        "entered_us", "grammar", "grown", "job", "keys", "last_us", "loading", "made",
        "passed_us", "pieces", "prefetch", "published", "timed", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        keys: PromptKeys | None,
        wanted: tuple[BlockKey, ...],
        now_us: Micros,
        grammar: Grammar | None = None,
    ) -> None:
        """keys: None where there is no store; wanted: the blocks to load before it runs. grammar:
        what its text must be; None: the text is free."""
        self.job = job
        self.grammar = grammar
        self.counts = _counts(job)
        """What its penalties count; None: it has none."""
        self.keys = keys
        self.wanted = wanted
        self.prefetch: Prefetch | None = None
        """What was fetched before the job came; its blocks are the first of `blocks`."""
        self.grown = list(keys.full) if keys is not None else []
        """Keys of its full blocks; those of generated tokens are added when they are stored."""
        self.made = [] if job.first_token is None else [job.first_token]
        """Generated tokens, the first one included."""
        self.published = 0
        """How many leading blocks the store has, or has been given."""
        self.blocks: tuple[int, ...] = ()
        """Blocks it holds before it enters the batch; a part of a prompt never enters."""
        self.loading = False
        """Whether its KV is loaded or, for a part of a prompt, computed outside the batch."""
        self.cached = 0
        self.ended = False
        self.arrived_us = now_us
        self.admitted_us = now_us
        """When it had its blocks, and its KV began to come."""
        self.entered_us = now_us
        """When it had its KV, and entered the batch."""
        self.computed_us: Micros = 0
        """How long the passes took while `timed`."""
        self.passed_us = now_us
        """When the last of them ended."""
        self.timed = job.send_kv or job.take_kv
        """Whether its passes are timed: those of a prefill, and of a decode until its first
        token."""
        self.last_us: Micros | None = None
        """When its last piece came."""
        self.pieces: asyncio.Queue[Piece | MoonserveError] = asyncio.Queue()
        """Bounded by max_tokens: the batch makes no more."""

    @property
    def shapes_each(self) -> bool:
        """Whether the logits of each of its tokens are changed by the tokens before it."""
        return self.grammar is not None or self.counts is not None

    def next_sampling(self) -> Sampling:
        """How to sample its next token, with what its grammar allows and its penalties count.
        Raises BadRequest if its grammar cannot be followed further."""
        how = self.job.sampling
        if how.shaping is None or not self.shapes_each:
            return how
        shaping = msgspec.structs.replace(
            how.shaping,
            allowed=b"" if self.grammar is None else self.grammar.allowed(),
            counts=None if self.counts is None else self.counts.taken(),
        )
        return msgspec.structs.replace(how, shaping=shaping)

    def take(self, token: int) -> None:
        """A pass has given it this token. Raises EngineFailed if its grammar does not allow it,
        and BadRequest if its grammar cannot be followed further."""
        if self.grammar is not None:
            self.grammar.take([token])
        if self.counts is not None:
            self.counts.add(token)
        self.made.append(token)

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens it enters the batch with."""
        first = self.job.first_token
        return self.job.prompt if first is None else (*self.job.prompt, first)

    def times(self, now_us: Micros) -> PrefillTimes:
        """How this prefill spent its time, if its KV is in the store by now."""
        load_us = self.entered_us - self.admitted_us
        until_passed_us = self.passed_us - self.arrived_us
        return PrefillTimes(
            queue_us=max(0, until_passed_us - load_us - self.computed_us),
            load_us=load_us,
            compute_us=self.computed_us,
            publish_us=now_us - self.passed_us,
        )

    def entry(self) -> DecodeTimes:
        """How this decode spent its time until its first token, which the last pass gave."""
        load_us = self.entered_us - self.admitted_us
        until_passed_us = self.passed_us - self.arrived_us
        return DecodeTimes(
            queue_us=max(0, until_passed_us - load_us - self.computed_us),
            load_us=load_us,
            compute_us=self.computed_us,
        )

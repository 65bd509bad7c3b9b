"""The vocabulary between machines and drivers: what instances are and what they report.

Plain frozen structs; the same ones travel as msgpack on the control plane. The first half is what
instances report of themselves. The second half are the Conductor's facts. Each has a rank: the
order in which the Conductor takes the facts of one instant.
"""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar, Literal, TypeAlias

import msgspec

from moonserve.core.kv.facts import BlocksCleared, BlocksRemoved, BlocksStored
from moonserve.core.kv.keys import Namespace
from moonserve.core.request import Request
from moonserve.core.units import (
    BlockKey,
    Bytes,
    InstanceId,
    Micros,
    RequestId,
    SegmentId,
    Tokens,
)

Role = Literal["prefill", "decode", "both"]
Connector: TypeAlias = Literal["embedded", "none", "nixl", "mooncake", "sglang"]
"""How KV gets from an instance that prefills to one that decodes. `embedded`: through our store;
`none`: it does not, such an instance serves whole requests; the others: vLLM's or SGLang's own."""
SELF_HELP: tuple[Connector, ...] = ("nixl", "mooncake")
"""Connectors whose decode engines can compute a prompt without a prefill; SGLang's cannot."""


class InstanceInfo(msgspec.Struct, frozen=True):
    """What an engine instance reports of itself when it joins; fixed for one epoch."""

    id: InstanceId
    epoch: int
    """Differs at every start of the process; facts of an older epoch are ignored."""
    role: Role
    url: str
    """Base URL of its vLLM-wire HTTP server, such as http://127.0.0.1:8101."""
    model: str
    namespace: Namespace
    kv_blocks: int
    """Size of the engine's block pool."""
    block_bytes: Bytes
    max_seqs: int
    chunk_tokens: Tokens
    """The most prompt tokens one pass computes."""
    max_len: Tokens
    """Prompt plus output may not exceed this."""
    max_requests: int = 1_024
    """Requests that it accepts at once, waiting ones included; the Conductor promises no more."""
    segment: SegmentId | None = None
    segment_bytes: Bytes = 0
    """Size of that segment in memory; 0: it has none, or no bound."""
    rack: str = ""
    """Instances of one rack reach each other faster; empty: unknown."""
    layers: int = 0
    """Of its model, where it can prefill as a stage of core.schedule.pipeline and hand KV on after
    each of them; 0: it cannot."""
    connector: Connector = "embedded"
    bootstrap: str = ""
    """URL at which mooncake's or sglang's prefill side identifies itself; else empty."""
    dp_rank: int | None = None
    """The data-parallel rank of the engine at `url`, sent in a header; None: there is only one."""
    fetches: bool = True
    """Whether its prefill can load KV of other instances from a pool; else it reuses its own."""


class PassSample(msgspec.Struct, frozen=True):
    """One measured engine pass, or several together, as cost features and the time it took."""

    prefill_new: Tokens
    """Prompt tokens computed in this pass, over all chunks."""
    prefill_square: int
    """Sum over chunks of end^2 - start^2: the attention term."""
    prefill_past: Tokens
    """Sum over chunks of start: tokens attended to that were there before."""
    decode_seqs: int
    decode_context: Tokens
    """Sum of the decoding requests' context lengths."""
    elapsed_us: Micros
    prefills: int = 1
    """Passes with a prefill in them, where there are any."""
    decodes: int = 1
    """Passes without a prefill, where requests decode."""


class TransferSample(msgspec.Struct, frozen=True):
    """One measured load of KV from the store."""

    size_bytes: Bytes
    elapsed_us: Micros


class HitSample(msgspec.Struct, frozen=True):
    """How much a request should find cached at an instance, and how much it found."""

    claimed: Tokens
    found: Tokens


class InstanceLoad(msgspec.Struct, frozen=True):
    """What an instance reports at each heartbeat."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    passes: tuple[PassSample, ...] = ()
    """Passes measured since the last heartbeat, newest last; bounded by the sender."""
    transfers: tuple[TransferSample, ...] = ()
    hits: tuple[HitSample, ...] = ()
    """For each request: the prefix that was expected to be cached there, and the one found."""
    everybody: bool = False
    """Whether `running` and `waiting` also count requests that others sent."""
    kv_tokens: Tokens = 0
    """KV in use by requests that run; counted if `everybody`."""


class _OfInstance(msgspec.Struct, frozen=True):
    """A fact about one instance; ties within a rank go by its id."""

    instance: InstanceId

    @property
    def subject(self) -> str:
        """What ties within a rank are ordered by."""
        return self.instance


class _OfRequest(msgspec.Struct, frozen=True):
    """A fact about one request; ties within a rank go by its id."""

    request: RequestId

    @property
    def subject(self) -> str:
        """What ties within a rank are ordered by."""
        return self.request


class Joined(msgspec.Struct, frozen=True, tag=True):
    """An instance came up, or came back with a new epoch."""

    rank: ClassVar[int] = 0
    info: InstanceInfo

    @property
    def subject(self) -> str:
        """What ties within a rank are ordered by."""
        return self.info.id


class Beat(_OfInstance, frozen=True, tag=True):
    """An instance's heartbeat; of no effect when the epoch is not the one that joined."""

    rank: ClassVar[int] = 1
    epoch: int
    load: InstanceLoad


class Left(_OfInstance, frozen=True, tag=True):
    """An instance left, or was given up."""

    rank: ClassVar[int] = 2
    epoch: int
    lost: str | None = None
    """Why its calls are aborted; None: it still finishes them."""


class Draining(_OfInstance, frozen=True, tag=True):
    """An operator wants an instance to get no new work, or to get work again.

    It is of effect while this start of the instance is there, or once it joins.
    """

    rank: ClassVar[int] = 3
    epoch: int
    drains: bool = True


class Selected(_OfInstance, frozen=True, tag=True):
    """Another gateway asked where to send a request, and got this answer. Nothing is promised.

    Of equal instances, the next answer has another one.
    """

    rank: ClassVar[int] = 3
    decode: InstanceId


class Leading(msgspec.Struct, frozen=True, tag=True):
    """Whether this Conductor, of several, has the duties that one at a time may have."""

    rank: ClassVar[int] = 3
    subject: ClassVar[str] = ""
    leads: bool


class SpreadUpTo(msgspec.Struct, frozen=True, tag=True):
    """Of copy `number` only the first `blocks` of the missing ones will arrive; 0: no more.

    The driver reports it if fewer blocks come than were ordered, after the events of those that
    came.
    """

    rank: ClassVar[int] = 4
    subject: ClassVar[str] = ""
    number: int
    blocks: int


class PrefillEnded(_OfRequest, frozen=True, tag=True):
    """Prefill returned the next token. `final`: that was the last token.

    Of our own workers, no put of its KV is left; some may have failed or been dropped. External
    engines hand the KV on themselves.
    """

    rank: ClassVar[int] = 4
    number: int
    final: bool


class StageEnded(_OfRequest, frozen=True, tag=True):
    """An instance of a group has done its part of prefill call `number`.

    The driver reports it of all but the last. The instance is free for other requests; without this
    fact it becomes free when the call ends.
    """

    rank: ClassVar[int] = 4
    number: int
    instance: InstanceId


class DecodeEnded(_OfRequest, frozen=True, tag=True):
    """Decode gave its last token. `tokens`: length of the whole output."""

    rank: ClassVar[int] = 4
    number: int
    tokens: Tokens = 0


class CallFailed(_OfRequest, frozen=True, tag=True):
    """A prefill or decode call ended without its result.

    `length` and `keys` describe what is known by now: the prompt and every token already sent, so
    that another instance can go on from there. `retry` is False if a retry cannot help;
    `unreachable`: the instance's address refuses connections, so it never received the call.
    """

    rank: ClassVar[int] = 4
    number: int
    why: str
    retry: bool
    length: Tokens
    keys: tuple[BlockKey, ...]
    unreachable: bool = False
    member: InstanceId | None = None
    """The instance of a group that failed; None: the instance that the call went to."""
    died: int = 0
    """The epoch of that instance if it had the call, and nothing listens at its address any more;
    0: that is not known."""
    said: str = ""
    """What the instance itself said, for operators."""


class ClientGone(_OfRequest, frozen=True, tag=True):
    """The client of this request has disconnected."""

    rank: ClassVar[int] = 5


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """A new request, with the key chain of its prompt."""

    rank: ClassVar[int] = 6
    request: Request
    keys: tuple[BlockKey, ...]

    @property
    def subject(self) -> str:
        """What ties within a rank are ordered by."""
        return self.request.id


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed: look for instances without a heartbeat."""

    rank: ClassVar[int] = 7
    subject: ClassVar[str] = ""


ORDER = attrgetter("rank", "subject")
"""The order in which facts of one instant are taken."""
Fact: TypeAlias = (
    Joined
    | Beat
    | Leading
    | Left
    | Draining
    | Selected
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | SpreadUpTo
    | PrefillEnded
    | StageEnded
    | DecodeEnded
    | CallFailed
    | ClientGone
    | Arrived
    | Tick
)

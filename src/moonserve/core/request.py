"""A generation request as everything behind the gateway sees it: token ids, never text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from moonserve.core.shares import Party
from moonserve.core.units import InstanceId, Micros, RequestId, Tokens


class Penalties(msgspec.Struct, frozen=True):
    """How much less likely tokens become that the text has already; as in vLLM."""

    presence: float = 0.0
    """Taken from the logit of each generated token."""
    frequency: float = 0.0
    """Taken from it for each time that the token was generated."""
    repetition: float = 1.0
    """Divides the logit of each token of prompt and text, or multiplies one below 0."""


class TokenCounts(msgspec.Struct, frozen=True):
    """How often each token was generated: 64-bit integers, as this machine writes them."""

    ids: bytes = b""
    """Each token once."""
    counts: bytes = b""
    """In the same order; 0: only the prompt has it."""


class Shaping(msgspec.Struct, frozen=True):
    """What changes the logits of a request, or reports them. Most requests have none."""

    bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each with what is added to its logit."""
    barred: tuple[int, ...] = ()
    """Tokens that are not sampled before the position `barred_until`."""
    barred_until: Tokens = 0
    logprobs: int | None = None
    """How many of the likeliest tokens are reported with each token; None: nothing is reported."""
    schema: str = ""
    """JSON schema that the text follows; empty: the text is free."""
    allowed: bytes = b""
    """For one pass: a bit for each token that may be sampled, the lowest id first; empty: all."""
    penalties: Penalties | None = None
    """None: tokens that the text has are as likely as others."""
    counts: TokenCounts | None = None
    """For one pass: what the penalties count."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one position, of the model's logits as they are."""

    logprob: float
    """Of the token that was sampled."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, the likeliest first."""


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen. Temperature 0 means greedy (argmax, lowest id on a tie).

    The random number for the token at sequence position `i` is a function of (seed, i) alone, so
    that prefill, decode and a resumed decode draw what one process would have drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or below: no limit."""
    seed: int = 0
    """If the client gives none, the gateway draws one."""
    shaping: Shaping | None = None


class Stopping(msgspec.Struct, frozen=True):
    """When a request ends, whichever comes first."""

    max_tokens: Tokens = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: Tokens = 0
    """Before so many tokens nothing but max_tokens ends it."""


class Finish(msgspec.Struct, frozen=True):
    """Why a generation ended; `stop_token` is set when one of stop_token_ids did it."""

    reason: Literal["stop", "length"]
    stop_token: int | None = None


def finish_of(
    token: int, generated: Tokens, stopping: Stopping, eos_token_ids: Sequence[int]
) -> Finish | None:
    """Whether `token`, the `generated`-th of its request, ends it (vLLM's order of reasons).

    Stop strings need text and are the server's business, not the batch's.
    """
    if token in eos_token_ids and not stopping.ignore_eos:
        return Finish("stop")
    if token in stopping.stop_token_ids:
        return Finish("stop", token)
    if generated >= stopping.max_tokens:
        return Finish("length")
    return None


class Slo(msgspec.Struct, frozen=True):
    """Service level objectives; None: no objective."""

    ttft_us: Micros | None = None
    """Time to first token."""
    tbt_us: Micros | None = None
    """Time between tokens."""

    def over(self, other: Slo) -> Slo:
        """These objectives, and for each missing one the other's."""
        if self.ttft_us is None and self.tbt_us is None:
            return other
        return Slo(
            other.ttft_us if self.ttft_us is None else self.ttft_us,
            other.tbt_us if self.tbt_us is None else self.tbt_us,
        )


class EffectiveSlo(msgspec.Struct, frozen=True):
    """The objectives that a request is held to."""

    slo: Slo = Slo()
    why: str | None = None
    """What made them tighter than its own; None: nothing did."""


class TraceContext(msgspec.Struct, frozen=True):
    """Where the spans of a request belong, by W3C's Trace Context; all ids are in hex."""

    trace_id: str
    span_id: str
    """Of the span of the whole request: engines get it as the parent of theirs."""
    parent_id: str = ""
    """The client's span; empty: the trace begins here."""


class Request(msgspec.Struct, frozen=True):
    """One request: what the client asked for, and what the Conductor needs to know of it."""

    id: RequestId
    model: str
    length: Tokens
    """Of its prompt."""
    prompt: tuple[int, ...] = ()
    """Token ids, where the gateway has them: for our own workers. The Conductor reads none."""
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    slo: Slo = Slo()
    priority: int = 0
    """If requests wait at the Conductor, a higher priority goes first."""
    arrived_us: Micros | None = None
    """When the gateway received its headers, by the Conductor's clock; None: when the Conductor
    receives it."""
    whole: bool = False
    """Whether one call to an external engine must prefill and decode it. KV that an engine hands on
    is for one reader; a request for several choices has several."""
    cache_salt: str = ""
    """Its KV is shared with requests of the same salt only; see core.kv.keys.Namespace."""
    tenant: str = ""
    """The tenant that it belongs to. In overload every tenant gets an equal share."""
    address: str = ""
    """The address of its client, which shares places with others as a tenant does; see
    core.shares."""
    trace: TraceContext | None = None
    """Where its spans belong; None: it has none."""
    among: tuple[InstanceId, ...] = ()
    """The only instances that may serve it, as a proxy before this cluster says; empty: all."""

    @property
    def party(self) -> Party:
        """Whose request it is."""
        return Party(self.tenant, self.address)

    def since_us(self, now_us: Micros) -> Micros:
        """Since when its client waits, if the Conductor receives it now."""
        return now_us if self.arrived_us is None else min(now_us, self.arrived_us)

"""What is simulated: how many instances of which kind, and the rules by which they work."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.kv.keys import Namespace
from moonserve.core.request import Slo, Stopping
from moonserve.core.schedule.facts import Connector, InstanceInfo, Role
from moonserve.core.schedule.policies import policy_of
from moonserve.core.schedule.profiles import PROFILES, Profile
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.store.evict import EVICTIONS
from moonserve.core.units import MICROS_PER_SECOND, InstanceId, Micros, SegmentId, Tokens

MODEL = "simulated"
POOL = "pool"
"""The segment of a global pool."""
ALONE = 0.95
"""`tuning.tbt_share` if decode streams the first token: no client sees a joining request wait
between two tokens."""
UNTOLD = Stopping(max_tokens=100_000)
"""Traces do not say which limits clients set, and the Conductor must not know lengths beforehand.
"""
MOST_INSTANCES = 10_000
_NO_LIMIT = 1 << 40
_BOUNDS = (
    *((field, 0, 1) for field in ("held_share", "due_share", "low_share")),
    *((field, 0, 100) for field in ("deviations", "overtaken", "join_passes")),
    *((field, 0, math.inf) for field in ("prefill", "decode", "mixed", "ahead", "racks")),
    *((field, 1, math.inf) for field in ("prefill_seqs", "chunk_tokens", "decode_seqs", "cpp")),
    ("sample_us", 1, math.inf),
    ("spread_bytes", 0, math.inf),
    ("kvcache_balancing_threshold", 1, 1e9),
)
"""Fields of Setup and Tuning, with their least and greatest values."""


class Breakdown(msgspec.Struct, frozen=True):
    """A fault: `kill` (the instance dies), `join` (it comes back, empty), or `slow`."""

    what: str
    instance: str
    at_us: Micros
    factor: float = 1.0
    """slow: how many times longer its passes take from then on."""


class Pace(msgspec.Struct, frozen=True):
    """How fast the machine is from some time on, until the next one."""

    at_us: Micros
    factor: float
    """How many times as long as the profile says all work takes."""


class Setup(msgspec.Struct, frozen=True):
    """One simulation, apart from its trace."""

    prefill: int = 8
    decode: int = 8
    mixed: int = 0
    """Instances that prefill and decode: a coupled cluster."""
    profile: Profile = PROFILES["a800-loaded"]
    tuning: Tuning = Tuning()
    goal: Slo = Slo(30 * MICROS_PER_SECOND, 200_000)
    """Attainment is measured by it; the Conductor works for `tuning.slo`."""
    seed: int = 0
    cache_blocks: int | None = 5_859
    """Blocks that each prefill (or mixed) instance's segment holds; None: any number."""
    eviction: str = "lru"
    pooled: bool = False
    """One global cache of all the instances' blocks, from which every instance loads."""
    one_copy: bool = False
    """Each block is in one segment only, as in the embedded store: a block that one segment holds
    is neither stored again nor copied, and every instance finds it there."""
    embedded_store: bool = False
    """Segments are filled and emptied as in the embedded store: the last, partial block of a prompt
    and the blocks of its output take room as well, and a full segment evicts several at a time."""
    keep_output: bool = False
    """Whether decode instances keep the KV of their output, for the next turn."""
    connector: Connector = "embedded"
    """How KV gets from prefill to decode. All but embedded are of external engines: they load no KV
    of other instances to prefill. With keep_output their decode instances also keep the KV of
    prompts."""
    prefill_seqs: int = 1
    """Prompts that a prefill instance computes at a time; in the papers, one."""
    chunk_tokens: Tokens = _NO_LIMIT
    """The most tokens of one pass: chunked prefill."""
    decode_seqs: int = 512
    ahead: int = 1
    """Calls, beyond those that run, that already load their KV."""
    first_token: Literal["prefill", "decode"] = "prefill"
    """Which instance streams the first token. prefill: as in the paper. decode: it makes the token
    again, as behind vLLM's and SGLang's connectors, so that no wait comes between it and the
    second."""
    overlap: bool = True
    """Whether KV moves to the decode instance while prefill computes, layer by layer."""
    racks: int = 0
    """Instances stand in this many racks, in turn; 0: racks are unknown."""
    breakdowns: tuple[Breakdown, ...] = ()
    paces: tuple[Pace, ...] = ()
    """In order of time; before the first one the factor is 1. See sim.fitted."""
    sample_us: Micros = 10 * MICROS_PER_SECOND
    """The time between two samples of queues and loads."""

    def check(self) -> None:
        """Check all fields. Raises ConfigError that names the first field that makes no sense."""
        policy_of(self.tuning.policy)
        if not self.mixed and not (self.prefill and self.decode):
            raise ConfigError("needs 1 or more, or mixed instances", "prefill and decode")
        for field, least, most in _BOUNDS:
            owner = self if hasattr(self, field) else self.tuning
            value = getattr(owner, field)
            if not least <= value <= most:
                bounds = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
                raise ConfigError(f"{value} must be {bounds}", field)
        if self.prefill + self.decode + self.mixed > MOST_INSTANCES:
            raise ConfigError(f"at most {MOST_INSTANCES} instances", "prefill, decode or mixed")
        cross_rack, tbt_share = self.tuning.cross_rack, self.tuning.tbt_share
        if not 0 < cross_rack <= 1_000:
            raise ConfigError(f"{cross_rack} must be above 0, up to 1000", "cross_rack")
        if not 0 < tbt_share < math.inf:
            raise ConfigError(f"{tbt_share} must be a number above 0", "tbt_share")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"{self.eviction} is none of {', '.join(EVICTIONS)}", "eviction")
        if self.cache_blocks is not None and self.cache_blocks < 0:
            raise ConfigError("must be 0 or more, or infinite", "cache_blocks")
        for slo in (self.goal, self.tuning.slo):
            for field, us in (("ttft_slo", slo.ttft_us), ("tbt_slo", slo.tbt_us)):
                if us is not None and us <= 0:
                    raise ConfigError("an objective must be 1us or more", field)
        if self.mixed and (self.prefill or self.decode):
            raise ConfigError("a cluster is either mixed or disaggregated", "mixed")
        known = {str(info.id) for info in self.instances(1)}
        for breakdown in self.breakdowns:
            if breakdown.instance not in known:
                raise ConfigError(
                    f"{breakdown.instance} is none of {', '.join(sorted(known))}", "fault"
                )

    def instances(self, block_size: Tokens) -> list[InstanceInfo]:
        """All instances, in the order of their ids."""
        roles: list[tuple[str, Role]] = [(f"d{i:03}", "decode") for i in range(self.decode)]
        roles += [(f"m{i:03}", "both") for i in range(self.mixed)]
        roles += [(f"p{i:03}", "prefill") for i in range(self.prefill)]
        return [self._info(name, role, block_size, at) for at, (name, role) in enumerate(roles)]

    def _info(self, name: str, role: Role, block_size: Tokens, at: int) -> InstanceInfo:
        size = block_size * self.profile.kv_bytes_per_token
        external = self.connector != "embedded"
        stores = not (self.pooled or external) and (role != "decode" or self.keep_output)
        return InstanceInfo(
            id=InstanceId(name),
            epoch=1,
            role=role,
            url=f"sim://{name}",
            model=MODEL,
            namespace=Namespace(MODEL, "", self.profile.name, block_size),
            kv_blocks=max(1, self.profile.kv_tokens // block_size),
            block_bytes=size,
            max_seqs=self.prefill_seqs if role == "prefill" else self.decode_seqs,
            chunk_tokens=self.chunk_tokens,
            max_len=_NO_LIMIT,
            max_requests=_NO_LIMIT,
            segment=SegmentId(POOL if self.pooled else name),
            segment_bytes=size * self.cache_blocks if stores and self.cache_blocks else 0,
            rack=f"rack{at % self.racks}" if self.racks else "",
            layers=self.profile.layers,
            connector=self.connector,
            fetches=not external,
        )

"""Settings of the gateway process."""

from __future__ import annotations

from typing import Literal

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.policies import Admission
from moonserve.core.schedule.residency import PredictorName
from moonserve.core.units import Bytes, Tokens


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway with its Conductor and, unless it is elsewhere, the store's master."""

    model: str
    """Catalog name, Hugging Face folder or GGUF file: for tokens and the chat template."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    token: str = ""
    """Workers must present it on /internal; empty only when bound to loopback."""
    registry: str = ""
    """Where workers, other gateways and the store's master are found, such as
    etcd://127.0.0.1:2379; empty: workers join by themselves, and there is no other gateway."""
    advertise_host: str | None = None
    """Where others reach it, if not at `host`; said in the registry."""
    store_url: str = ""
    """Where the store's master is; empty: in this process, or where the registry says."""
    follows_master: bool = False
    """Whether `store_url` is what the registry said, so that it may say another one later."""
    store: Literal["embedded", "mooncake", "none"] = "embedded"
    """Whose pool the workers use; Mooncake's has a master of its own; none: foreign engines keep
    their KV themselves."""
    eviction: str = "lru"
    """What its segments evict first: one of core.store.evict.EVICTIONS; for a master in this
    process."""
    drain_s: float = 30.0
    """How long running requests may take to finish after a stop was asked for."""
    threshold: float = 1.0
    """kvcache_balancing_threshold of Algorithm 1."""
    policy: str = "kvcache_centric"
    """One of core.schedule.policies.POLICIES."""
    slo: Slo = Slo()
    """Objectives of requests whose headers bring none."""
    admission: Admission = "predictive"
    """What refuses a request."""
    admission_low: Admission | None = None
    admission_high: Admission | None = None
    """The same for a priority below, and above, 0; None: as for the others."""
    predictor: PredictorName = "survival"
    """How it is predicted who still decodes when a prefill ends; not oracle."""
    spread_bytes: Bytes = 8 << 30
    """Of hot prefixes, so much is copied to other segments at a time; 0: none."""
    alone_tokens: Tokens = 256
    """Tuning.alone_tokens."""
    cpp: int = 8
    """The most prefill instances that may share one prompt."""
    max_body_bytes: Bytes = 8 << 20
    workers: int = 1
    """Processes that serve clients; several share one Conductor, in a process of its own."""
    max_in_flight: int = 1_024
    """Requests served at once; more are answered 429."""
    prefill_timeout_s: float = 300.0
    """A prefill call, its wait on the instance included, may take this long."""
    token_timeout_s: float = 60.0
    """Longest silence between two tokens of a decode before it is taken for lost."""
    dead_after_s: float = 5.0
    """Instances not heard of for this long are taken for dead."""

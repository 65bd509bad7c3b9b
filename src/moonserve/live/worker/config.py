"""Settings of one worker process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from moonserve.core.schedule.facts import Role
from moonserve.core.store.words import Card
from moonserve.core.units import Bytes, Tokens
from moonserve.live.store.settings import MooncakeProtocol, TransportName
from moonserve.live.worker.job import DecodeKV


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill or decode worker with its segment of the KV store."""

    name: str
    """Unique in the cluster; also the name of its segment."""
    role: Role
    model: str
    """Catalog name, Hugging Face folder or GGUF file."""
    engine: Literal["torch", "fake"] = "torch"
    pass_us: tuple[float, ...] | None = None
    """How long the fake engine's passes take, see Cost.pass_us; None: next to nothing."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    advertise_host: str | None = None
    """Where the gateway and other workers reach it; None: `host`."""
    cards: tuple[Card, ...] = ()
    """All addresses that bytes are to reach it at, where there are several."""
    rack: str = ""
    """Where it stands; empty: not said."""
    gateway: str = "http://127.0.0.1:8000"
    token: str = ""
    """The cluster's shared secret."""
    block_size: Tokens = 32
    kv_blocks: int | None = None
    """Size of the engine's KV pool; None: what kv_memory_bytes or the engine's default gives."""
    kv_memory_bytes: Bytes | None = None
    segment_bytes: Bytes = 512 << 20
    """Its share of the KV store."""
    disk_dir: Path | None = None
    """Where its segment on disk lies; None: it has none."""
    disk_bytes: Bytes = 0
    replicas: int = 1
    """Copies of each block it puts, on different nodes."""
    node: str = ""
    """What fails together with this worker; empty: it alone."""
    store_url: str = ""
    """Where the store's master is; empty: in the gateway, or where the registry says."""
    registry: str = ""
    """Where all gateways are found, such as etcd://127.0.0.1:2379; empty: there is `gateway`."""
    store: Literal["embedded", "mooncake"] = "embedded"
    mooncake_master: str = ""
    """host:port; for mooncake."""
    transport: TransportName = "tcp"
    shared_memory: bool = True
    mooncake_protocol: MooncakeProtocol = "tcp"
    mooncake_device: str = ""
    """These four as of StoreSettings."""
    max_seqs: int = 16
    """Requests in one pass."""
    chunk_tokens: Tokens = 512
    """Tokens in one pass."""
    decode_kv: DecodeKV = "end"
    """When the KV of generated tokens is stored."""
    kv_events: str = "off"
    """Where it publishes what lies in its segments, and where it replays that: two addresses of
    ZMQ with a comma between, the second may be left out."""
    threads: int | None = None
    """For the engine; None: OMP_NUM_THREADS, else every CPU this process may use."""
    drain_s: float = 5.0
    """How long running requests may take to finish after a stop was asked for."""

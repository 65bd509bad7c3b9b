"""Settings of one worker process; the command line fills them in, the process reads them."""

from __future__ import annotations

from typing import Literal

import msgspec

from moonserve.core.schedule.facts import Role
from moonserve.core.units import Bytes, Tokens
from moonserve.live.tls.contexts import Tls
from moonserve.live.worker.job import DecodeKV


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill or decode worker. Its share of the KV store is in StoreSettings."""

    name: str
    """Unique in the cluster; also the name of its segment."""
    role: Role
    model: str
    """Catalog name, Hugging Face folder or GGUF file."""
    engine: Literal["torch", "fake"] = "torch"
    pass_us: tuple[float, ...] | None = None
    """How long the fake engine's passes take, see Cost.pass_us; None: almost no time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: Literal["auto", "native", "torch"] = "auto"
    """Whether quantised weights are multiplied by compiled kernels in float32."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    advertise_host: str | None = None
    """The address at which the gateway and other workers reach this worker; None: `host`."""
    rack: str = ""
    """The name of its rack; empty: unknown."""
    gateway: str = "http://127.0.0.1:8000"
    token: str = ""
    """The cluster's shared secret."""
    tls: Tls | None = None
    """For its listener and its calls; None: without TLS."""
    block_size: Tokens = 32
    kv_blocks: int | None = None
    """Size of the engine's KV pool; None: from kv_memory_bytes, or the engine's default."""
    kv_memory_bytes: Bytes | None = None
    store_url: str = ""
    """URL of the store's master; empty: the gateway's, or the one in the registry."""
    registry: str = ""
    """Where the Conductor registers, such as etcd://127.0.0.1:2379; empty: it is at `gateway`."""
    store: Literal["embedded", "mooncake"] = "embedded"
    mooncake_master: str = ""
    """host:port; for mooncake."""
    max_seqs: int = 16
    """Requests in one pass."""
    chunk_tokens: Tokens = 512
    """Tokens in one pass."""
    decode_kv: DecodeKV = "end"
    """When the KV of generated tokens is stored."""
    kv_events: str = "off"
    """ZMQ addresses, with a comma between, where it publishes and replays events of the blocks in
    its segments. The second may be left out; "off": it publishes none."""
    kv_events_curve: str = ""
    """Folder with keys that encrypt them; empty: they are in clear."""
    kv_events_open: bool = False
    """Whether other machines may read them in clear."""
    threads: int | None = None
    """For the engine; None: OMP_NUM_THREADS, else every CPU this process may use."""
    profile_folder: str = ""
    """Folder for profiles of the engine's passes; empty: it cannot be profiled."""
    drain_s: float = 5.0
    """How long running requests may take to finish after SIGTERM or SIGINT."""

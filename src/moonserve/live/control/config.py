"""Settings of a gateway: its Conductor, its limits, and where it listens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal

import msgspec

from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import Bytes, Micros
from moonserve.live.kubernetes.sources import Source
from moonserve.live.tls.contexts import ClientAuth, Tls

LIVE = Tuning(cpp=8, bind_ahead_us=20_000)
"""Tuning of a gateway without settings. Late binding binds 20 ms before an instance is free: the
next call travels there and its KV is looked up and loaded in some milliseconds each, and the
predicted end is some milliseconds off. A longer time binds too early."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway with its Conductor and, unless another process has it, the store's master."""

    model: str
    """Catalog name, Hugging Face folder or GGUF file: for tokens and the chat template."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    token: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(32))
    """Workers and operators must send it. Without one, a token is drawn that nobody else knows."""
    allowed_hosts: str = ""
    """Names, with commas between, under which clients may call it besides its own addresses."""
    tls: Tls | None = None
    """For its listener, and for calls to other processes of the cluster; None: without TLS."""
    tls_client_auth: ClientAuth = "none"
    """Whether its listener asks clients for certificates. optional: /internal/ needs one."""
    kv_events_curve: str = ""
    """Folder with keys for encrypted KV events; empty: none can be followed."""
    engine_ca: str = ""
    """File of the authorities of external engines; empty: those that the system trusts."""
    keys: str = ""
    """File with the API keys of clients, or "registry"; empty: clients need no key."""
    open: bool = False
    """Whether it serves clients without keys beyond loopback."""
    metrics_access: Literal["key", "all"] = "key"
    """With keys: whether /metrics needs one."""
    cors_origins: str = ""
    """Origins of web pages that may use models, with commas between; "*": all."""
    no_ui: bool = False
    """Whether to leave out the page for operators at /ui."""
    salt_by: Literal["auto", "tenant", "none"] = "auto"
    """Whether tenants share KV; auto: they do unless there are keys."""
    registry: str = ""
    """Where workers, the Conductor and the store's master are found, such as
    etcd://127.0.0.1:2379; empty: workers join by themselves."""
    advertise_host: str | None = None
    """Where others reach the gateway, if not at `host`; the registry contains it."""
    store_url: str = ""
    """URL of the store's master; "": in this process, or as the registry has it."""
    follows_master: bool = False
    """Whether `store_url` comes from the registry, which may contain another one later."""
    store: Literal["embedded", "mooncake", "none"] = "embedded"
    """The pool that workers use. Mooncake's pool has its own master. none: there is no pool, since
    external engines keep their KV themselves."""
    eviction: str = "lru"
    """What its segments evict first: one of core.store.evict.EVICTIONS; for a master in this
    process."""
    ready_instances: int | None = None
    """How many instances must have joined before /ready answers 200; None: all external engines of
    the cluster file, or one pair of workers."""
    ready_s: float = 60.0
    """After this time it answers 200 with those that have joined, if they can serve."""
    wait_ready: Micros = 30_000_000
    """How long new requests wait while no instances that serve their model are up."""
    no_resume: bool = False
    """Whether streams end with an error if their external engine is lost."""
    drain_s: float = 30.0
    """How long running requests may take to finish after a signal to stop."""
    record: str = ""
    """Folder in which the process that decides records its requests; empty: it records none."""
    record_bytes: Bytes = 1 << 30
    """Most bytes of all recordings in that folder; the oldest are deleted."""
    profile_folder: str = ""
    """Folder for profiles of this process; empty: it cannot be profiled."""
    otlp_traces_endpoint: str = ""
    """Where the process that decides exports spans; empty: OpenTelemetry's environment variables
    say it, or none are exported."""
    tuning: Tuning = LIVE
    """How the Conductor places and admits requests."""
    max_body_bytes: Bytes = 8 << 20
    keep_alive_s: float = 120.0
    """How long a client's connection may be idle."""
    max_connections: int = 0
    """Of clients, in each process; 0: as many as its limit of open files allows."""
    address_connections: int = 0
    """0: half of all."""
    kubernetes: tuple[Source, ...] = ()
    """Where Kubernetes lists external engines."""
    conductor: str = ""
    """Where a front reaches its Conductor: a unix socket, host:port or a registry; empty: this
    process has the Conductor."""
    conductor_s: float = 30.0
    """How long a front waits for it at the start."""
    picker_port: int | None = None
    """Port of the endpoint picker, which then takes the place of the clients' API; None: none."""
    objectives: Mapping[str, int] = {}
    """Priorities by the name that a proxy's request may give: see live.picker."""
    socket: str = ""
    """Unix socket at which a Conductor accepts the fronts of this host too; empty: none."""
    max_in_flight: int = 1_024
    """Requests served at once by this process; more are answered 429."""
    prefill_timeout_s: float = 300.0
    """A prefill call, its wait on the instance included, may take this long."""
    token_timeout_s: float = 60.0
    """Longest silence between two tokens of a decode before it is taken for lost."""

"""Every setting, written once: its flag, environment variable, YAML key, help and checks.

The command line calls `load`, which merges one YAML file, the environment and the flags, in rising
order. Every error is a ConfigError that names the field, the source of the value and the remedy.
Nothing here starts or opens anything but the file. `apply_logging` is the only place that
configures logging.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.units import LEAST_MOONCAKE_BYTES, MAX_BYTES, Bytes, Micros, Tokens
from moonserve.invalid import in_words, nearest
from moonserve.logs import LineHandler, RepeatLimit
from moonserve.quantity import MAX_US, parse_bytes, parse_duration_us, parse_seconds

ENV_PREFIX = "MOONSERVE_"
IN_ETCD = ("etcd://", "etcds://")
"""How the address of a registry begins."""
Level: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_Admission: TypeAlias = Literal["none", "ttft", "early", "predictive"]
_Processes: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Duration: TypeAlias = Annotated[Micros, msgspec.Meta(ge=1, le=MAX_US)]
"""A time that is written with its unit, such as 30s; see moonserve.quantity."""
_Size: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES)]
_SizeOrNone: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class Flag(msgspec.Struct, frozen=True):
    """How one setting looks on the command line."""

    metavar: str
    """What stands for its value in --help. A value of SIZE or SECONDS may have a unit, such as
    512MiB or 1m; a value of TIME must have one, such as 30s, and is kept in microseconds."""
    text: str
    """The help text; without the default, which is appended."""
    commands: frozenset[str]
    """Which commands have the flag; a command that has it also reads the setting. `front` is a
    gateway with --conductor: it refuses the other flags of `gateway`."""


def _flag(commands: str, metavar: str, text: str) -> Flag:
    return Flag(metavar, text, frozenset(commands.split()))


class Logging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is logged on stderr: `{level: INFO, modules: {live.control.loop: DEBUG}}`."""

    level: Level = "INFO"
    modules: dict[str, Level] = {}
    """Level by module, named below `moonserve.`; it also applies to all modules below that one."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting there is. A field's name is its YAML key and, in capitals after MOONSERVE_,
    its environment variable; with dashes it is its flag. `moonserve COMMAND --help` lists them in
    this order. A field without `_flag` can be set in the YAML file only.
    """

    model: Annotated[
        str,
        _flag(
            "up gateway front conductor worker",
            "REF",
            "model to serve: a name (see `moonserve model list`), a Hugging Face folder or a .gguf"
            " file; for external engines, the name that they must serve",
        ),
    ] = "smollm2-135m-instruct"
    prefill: Annotated[_Processes, _flag("up", "N", "number of prefill workers")] = 1
    decode: Annotated[_Processes, _flag("up", "M", "number of decode workers")] = 1
    engine: Annotated[
        Literal["torch", "fake"],
        _flag("up worker", "NAME", "torch, or fake, which needs no torch and invents its tokens"),
    ] = "torch"
    profile: Annotated[
        str,
        _flag(
            "up worker",
            "NAME",
            "how long a pass of the fake engine takes: a profile of the simulator, or a file with"
            " one; none: almost no time",
        ),
    ] = ""
    host: Annotated[
        str,
        _flag("up gateway front conductor worker serve segment", "ADDRESS", "address to listen on"),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        msgspec.Meta(ge=0, le=65535),
        _flag("up gateway front conductor", "PORT", "port of the process; 0 takes a free one"),
    ] = 8000
    workers: Annotated[
        _Processes,
        _flag(
            "up gateway front",
            "N",
            "number of processes that serve clients, or pick endpoints; several share one"
            " Conductor, which then has its own process",
        ),
    ] = 1
    picker_port: Annotated[
        int,
        msgspec.Meta(ge=0, le=65535),
        _flag(
            "picker",
            "PORT",
            "port at which the endpoint picker speaks gRPC with proxies such as Envoy; 0 takes a"
            " free one",
        ),
    ] = 9002
    conductor: Annotated[
        str,
        _flag(
            "gateway front",
            "ADDRESS",
            "be a front only, for the Conductor at this address: host:port, the path of its"
            " --socket, or a registry such as etcd://host:port, whose leader it is; none: the"
            " Conductor runs in the gateway",
        ),
    ] = ""
    conductor_s: Annotated[
        _Seconds,
        _flag(
            "gateway front",
            "SECONDS",
            "longest wait at the start until the Conductor accepts a front",
        ),
    ] = 30.0
    socket: Annotated[
        str,
        _flag(
            "conductor",
            "PATH",
            "unix socket at which the Conductor accepts the fronts of this machine too; none: they"
            " use its port",
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        _flag(
            "up worker",
            "TYPE",
            "float32, bfloat16, or auto, which takes bfloat16 if the CPU can multiply it",
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        _flag(
            "up worker",
            "WHICH",
            "what multiplies 4-bit and 8-bit weights in float32: native, compiled here by the C"
            " compiler; torch; or auto, which takes native if there is a compiler",
        ),
    ] = "auto"
    block_size: Annotated[
        Tokens, msgspec.Meta(ge=1, le=1024), _flag("up worker", "TOKENS", "tokens in one KV block")
    ] = 32
    registry: Annotated[
        str,
        _flag(
            "gateway front conductor worker register unregister serve segment key instances",
            "URL",
            "registry in which all processes find each other, such as etcd://host:port, or"
            " etcds://host:port for TLS; none: each process gets the addresses by flags",
        ),
    ] = ""
    store_url: Annotated[
        str,
        _flag(
            "gateway conductor worker segment",
            "URL",
            "URL of the KV store's master; none: the master runs in the process that has the"
            " Conductor",
        ),
    ] = ""
    segment_bytes: Annotated[
        _Size,
        _flag(
            "up worker segment", "SIZE", "memory that each worker or segment gives to the KV store"
        ),
    ] = 256 << 20
    disk_bytes: Annotated[
        _SizeOrNone,
        _flag(
            "up worker segment",
            "SIZE",
            "disk space that each worker or segment gives to the KV store",
        ),
    ] = 0
    disk_dir: Annotated[
        str,
        _flag(
            "up worker segment",
            "FOLDER",
            "folder for that disk space; each worker or segment makes its own folder there",
        ),
    ] = ""
    replicas: Annotated[
        int,
        msgspec.Meta(ge=1, le=8),
        _flag("up worker", "N", "copies of each block in the KV store, on different nodes"),
    ] = 1
    node: Annotated[
        str,
        _flag(
            "worker segment",
            "NAME",
            "failure domain, such as the name of the host; copies of a block are on different"
            " nodes; none: each process is its own node",
        ),
    ] = ""
    eviction: Annotated[
        str,
        _flag(
            "up gateway conductor serve",
            "NAME",
            "which blocks the KV store evicts first; a wrong name prints all names",
        ),
    ] = "lru"
    store: Annotated[
        Literal["embedded", "mooncake"],
        _flag(
            "up gateway conductor worker",
            "NAME",
            "KV store: embedded (our own) or mooncake (needs the package of Mooncake)",
        ),
    ] = "embedded"
    mooncake_master: Annotated[
        str,
        _flag(
            "up worker",
            "ADDRESS",
            "host:port of Mooncake's master; none: `moonserve up` starts one",
        ),
    ] = ""
    transport: Annotated[
        Literal["tcp", "mooncake"],
        _flag(
            "up worker segment",
            "NAME",
            "how the embedded KV store moves bytes: tcp, or mooncake for Mooncake's Transfer"
            " Engine (needs the package of Mooncake)",
        ),
    ] = "tcp"
    shared_memory: Annotated[
        Literal["auto", "never"],
        _flag(
            "up worker segment",
            "WHEN",
            "auto: processes on one host exchange bytes by shared memory; never: for measurements",
        ),
    ] = "auto"
    mooncake_protocol: Annotated[
        Literal["tcp", "rdma"],
        _flag("up worker segment", "NAME", "protocol of Mooncake's Transfer Engine: tcp or rdma"),
    ] = "tcp"
    mooncake_device: Annotated[
        str,
        _flag(
            "up worker segment",
            "NAME",
            "RDMA device of Mooncake's Transfer Engine; none: all devices that it finds",
        ),
    ] = ""
    max_seqs: Annotated[
        int,
        msgspec.Meta(ge=1, le=4096),
        _flag("up worker", "N", "most requests in one pass of a worker"),
    ] = 16
    kv_memory_bytes: Annotated[
        _Size,
        _flag("up worker", "SIZE", "memory of each torch worker for the KV of running requests"),
    ] = 384 << 20
    decode_kv: Annotated[
        Literal["off", "end"] | Annotated[int, msgspec.Meta(ge=1)],
        _flag(
            "up worker",
            "WHEN",
            "when workers store the KV of generated tokens: off, end (of the request), or a number:"
            " after so many blocks",
        ),
    ] = "end"
    policy: Annotated[
        str,
        _flag(
            "up gateway conductor",
            "NAME",
            "policy that picks the instances for a request; a wrong name prints all names",
        ),
    ] = "kvcache_centric"
    ttft_slo: Annotated[
        _Duration | None,
        _flag(
            "up gateway conductor",
            "TIME",
            "default SLO for the time to the first token (TTFT), such as 2s",
        ),
    ] = None
    tbt_slo: Annotated[
        _Duration | None,
        _flag(
            "up gateway conductor",
            "TIME",
            "default SLO for the time between tokens (TBT), such as 100ms",
        ),
    ] = None
    admission: Annotated[
        _Admission,
        _flag(
            "up gateway conductor",
            "MODE",
            "which requests the Conductor refuses because they would miss their SLO: none; ttft;"
            " early (also looks at the decode load now); predictive (at the decode load when"
            " prefill will have ended)",
        ),
    ] = "predictive"
    admission_low: Annotated[
        _Admission | None,
        _flag("up gateway conductor", "MODE", "--admission for requests of a priority below 0"),
    ] = None
    admission_high: Annotated[
        _Admission | None,
        _flag("up gateway conductor", "MODE", "--admission for requests of a priority above 0"),
    ] = None
    predictor: Annotated[
        Literal["uniform", "survival"],
        _flag(
            "up gateway conductor",
            "NAME",
            "how predictive admission estimates the remaining decode time of running requests:"
            " uniform or survival",
        ),
    ] = "survival"
    cpp: Annotated[
        _Processes,
        _flag(
            "up gateway conductor",
            "N",
            "most prefill workers that may share one prompt; they share it if one worker alone"
            " would miss the TTFT SLO; 1: never",
        ),
    ] = 8
    threshold: Annotated[
        float,
        msgspec.Meta(ge=1, le=1e9),
        _flag(
            "up gateway conductor",
            "RATIO",
            "kvcache_balancing_threshold of Algorithm 1: an instance fetches a prefix that is more"
            " than so many times longer than its own, and else computes it",
        ),
    ] = 1.0
    spread_bytes: Annotated[
        _SizeOrNone,
        _flag(
            "up gateway conductor",
            "SIZE",
            "most bytes of frequently used prefixes that are being copied to less loaded workers"
            " at one time; 0: no copies",
        ),
    ] = 8 << 30
    max_indexed_blocks: Annotated[
        int,
        msgspec.Meta(ge=1, le=1 << 30),
        _flag(
            "up gateway conductor",
            "N",
            "most KV blocks that the Conductor's index knows, each counted once for each holder; a"
            " full index forgets blocks that were not used for long, about 150 bytes each",
        ),
    ] = 4_000_000
    alone_tokens: Annotated[
        Tokens,
        msgspec.Meta(ge=0, le=1 << 20),
        _flag(
            "gateway conductor",
            "N",
            "an external decode engine prefills the rest of a prompt itself if it lacks at most so"
            " many tokens; 0: never",
        ),
    ] = 256
    max_body_bytes: Annotated[
        _Size,
        _flag(
            "up gateway front conductor", "SIZE", "largest request body that this process accepts"
        ),
    ] = 8 << 20
    keys: Annotated[
        str,
        _flag(
            "up gateway front conductor key",
            "FILE",
            "file with the API keys of clients, which `moonserve key` writes; registry: they are in"
            " --registry; none: clients on this machine need no key",
        ),
    ] = ""
    open: Annotated[
        bool,
        _flag("up gateway front", "", "serve clients of other machines without API keys"),
    ] = False
    no_ui: Annotated[
        bool,
        _flag("up gateway conductor", "", "do not serve the page for operators at /ui"),
    ] = False
    metrics_access: Annotated[
        Literal["key", "all"],
        _flag(
            "up gateway front conductor",
            "WHO",
            "with API keys: who may read /metrics: key (the scope metrics is needed), or all",
        ),
    ] = "key"
    salt_by: Annotated[
        Literal["auto", "tenant", "none"],
        _flag(
            "up gateway front",
            "WHAT",
            "tenant: tenants share no KV, so that no tenant learns what others have asked; none:"
            " they share it; auto: tenant with API keys, none without",
        ),
    ] = "auto"
    cors_origins: Annotated[
        str,
        _flag(
            "up gateway front",
            "ORIGIN,ORIGIN",
            "web pages that may use models from a browser, such as https://app.example; *: all",
        ),
    ] = ""
    allowed_hosts: Annotated[
        str,
        _flag(
            "up gateway front conductor",
            "NAME,NAME",
            "names in DNS under which others call this process; with them, and on loopback always,"
            " admin requests under other names are refused",
        ),
    ] = ""
    keep_alive_s: Annotated[
        float,
        msgspec.Meta(ge=65, le=3600),
        _flag(
            "up gateway front",
            "SECONDS",
            "how long a client's connection may be idle; more than the clients' pools and load"
            " balancers before the gateway keep one, and at least 65",
        ),
    ] = 120.0
    max_connections: Annotated[
        int,
        msgspec.Meta(ge=0, le=1 << 20),
        _flag(
            "up gateway front",
            "N",
            "most clients' connections of each gateway process; 0: by its limit of open files, at"
            " most 16384",
        ),
    ] = 0
    address_connections: Annotated[
        int,
        msgspec.Meta(ge=0, le=1 << 20),
        _flag(
            "up gateway front",
            "N",
            "most connections from one address, other than loopback, to each gateway process; 0:"
            " half of all",
        ),
    ] = 0
    max_in_flight: Annotated[
        int,
        msgspec.Meta(ge=1, le=1 << 20),
        _flag(
            "up gateway front",
            "N",
            "most requests that each of these processes has under way; more are answered 429",
        ),
    ] = 1_024
    rack: Annotated[
        str,
        _flag(
            "worker segment",
            "NAME",
            "rack of this process; a transfer between racks is expected to take longer",
        ),
    ] = ""
    start_s: Annotated[
        _Seconds, _flag("up", "SECONDS", "longest wait until all processes are ready")
    ] = 180.0
    ready_instances: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None,
        _flag(
            "gateway front",
            "N",
            "how many instances must have joined before GET /ready answers 200; none: all external"
            " engines of the file, or one pair of workers",
        ),
    ] = None
    ready_s: Annotated[
        _Seconds,
        _flag(
            "gateway front",
            "SECONDS",
            "longest wait for these; then GET /ready answers 200 if those that have joined can"
            " serve",
        ),
    ] = 60.0
    wait_ready: Annotated[
        _Duration,
        _flag(
            "up gateway front",
            "TIME",
            "longest wait of a new request while no instances that can serve its model are up; then"
            " it is answered 503. 1us: hardly at all",
        ),
    ] = 30_000_000
    record: Annotated[
        str,
        _flag(
            "up gateway conductor",
            "FOLDER",
            "folder in which to record each request as a row of a trace, with its decision and"
            " times, and without text; none: nothing is recorded",
        ),
    ] = ""
    record_bytes: Annotated[
        Bytes,
        msgspec.Meta(ge=1 << 20, le=MAX_BYTES),
        _flag(
            "up gateway conductor",
            "SIZE",
            "most space of all recordings in that folder; the oldest are deleted",
        ),
    ] = 1 << 30
    profile_folder: Annotated[
        str,
        _flag(
            "up gateway front conductor worker",
            "FOLDER",
            "folder for profiles of this process, which POST /start_profile and /stop_profile make;"
            " none: it cannot be profiled",
        ),
    ] = ""
    otlp_traces_endpoint: Annotated[
        str,
        _flag(
            "up gateway conductor",
            "URL",
            "where to export a span of each stage of each request, by OpenTelemetry's OTLP over"
            " HTTP, such as http://127.0.0.1:4318/v1/traces (needs the extra moonserve[otel]);"
            " none: OpenTelemetry's own environment variables decide",
        ),
    ] = ""
    advise: Annotated[
        bool,
        _flag(
            "up",
            "",
            "also run `moonserve twin`: it simulates the last minutes under alternatives, with low"
            " priority, and advises; needs --ttft-slo or --tbt-slo",
        ),
    ] = False
    no_resume: Annotated[
        bool,
        _flag(
            "up gateway front",
            "",
            "end a stream with an error if its external engine is lost, instead of going on with it"
            " at another one",
        ),
    ] = False
    drain_s: Annotated[
        _Seconds,
        _flag(
            "up gateway front segment",
            "SECONDS",
            "longest wait for running requests at the end",
        ),
    ] = 30.0
    tls_dir: Annotated[
        str,
        _flag(
            "up gateway front conductor worker register unregister serve segment key instances",
            "FOLDER",
            "folder of `moonserve tls init`; it sets --tls-cert, --tls-key and --tls-ca to the"
            " files of this process's role",
        ),
    ] = ""
    tls_cert: Annotated[
        str,
        _flag(
            "up gateway front conductor worker register unregister serve segment key instances",
            "FILE",
            "certificate of this process, in PEM, with its chain; with it the process speaks TLS"
            " only",
        ),
    ] = ""
    tls_key: Annotated[
        str,
        _flag(
            "up gateway front conductor worker register unregister serve segment key instances",
            "FILE",
            "key of that certificate, in PEM, without a password",
        ),
    ] = ""
    tls_ca: Annotated[
        str,
        _flag(
            "up gateway front conductor worker register unregister serve segment key instances",
            "FILE",
            "certificate of the cluster's private authority, in PEM; processes of the cluster"
            " accept each other only by certificates that it has signed",
        ),
    ] = ""
    tls_client_auth: Annotated[
        Literal["none", "optional", "required"],
        _flag(
            "up gateway front",
            "WHEN",
            "whether clients of the gateway need a certificate of --tls-ca: none; optional (only"
            " workers and other processes of the cluster); required (all clients)",
        ),
    ] = "none"
    kv_events_curve: Annotated[
        str,
        _flag(
            "gateway conductor worker",
            "FOLDER",
            "folder with the keys of encrypted KV events, made by `moonserve tls init`; none:"
            " events/ in --tls-dir, if that is set",
        ),
    ] = ""
    engine_ca: Annotated[
        str,
        _flag(
            "gateway front conductor",
            "FILE",
            "certificates of the authorities of external engines with https:// URLs, in PEM; none:"
            " those that the system trusts",
        ),
    ] = ""
    instances: tuple[dict[str, object], ...] | None = None
    """External engines that a gateway serves with; docs/reference/external-engines.md has their
    fields. Empty: they are described later, over HTTP or in a registry. None: the gateway serves
    with workers."""
    kubernetes: tuple[dict[str, object], ...] | None = None
    """Where Kubernetes lists more of them: Services and InferencePools; docs/how-to/kubernetes.md
    has the fields."""
    objectives: dict[str, Annotated[int, msgspec.Meta(ge=-100, le=100)]] = {}
    """Priorities of the objectives that requests before a picker may name, by their names."""
    logging: Logging = Logging()


FIELDS: tuple[str, ...] = Settings.__struct_fields__
_NOT_OF_PICKER = {
    *("store_url", "eviction", "store", "cpp", "spread_bytes", "open", "cors_origins"),
    *("keep_alive_s", "max_connections", "address_connections"),
}
"""Flags of `gateway` that `picker` lacks: clients have no connection to it, and it has no workers
of ours."""
_Filled = TypeVar("_Filled", bound=msgspec.Struct)


@cache
def all_flags() -> dict[str, Flag]:
    """The settings that flags and environment variables set, in the order of `Settings`."""
    hints = get_type_hints(Settings, include_extras=True)
    return {
        name: _with_picker(name, marked)
        for name in FIELDS
        for marked in getattr(hints[name], "__metadata__", ())
        if isinstance(marked, Flag)
    }


def _with_picker(name: str, flag: Flag) -> Flag:
    """A picker is a gateway without clients of its own."""
    if "gateway" not in flag.commands or name in _NOT_OF_PICKER:
        return flag
    return msgspec.structs.replace(flag, commands=flag.commands | {"picker"})


def filled(kind: type[_Filled], settings: Settings, command: str, /, **others: Any) -> _Filled:
    """Make a `kind` from the settings of one command that its fields are named after.

    `others`: the values of its other fields; they win over settings of the same name.
    """
    own = {
        name: getattr(settings, name)
        for name, flag in all_flags().items()
        if command in flag.commands and name in kind.__struct_fields__
    }
    return kind(**{**own, **others})


_LEAST_SEGMENT: Bytes = 1 << 20


def load(
    file: Path | None, env: Mapping[str, str], by_flags: Mapping[str, object | None]
) -> Settings:
    """Merge the three layers over the defaults; a flag of None was not given.

    Without `file`, MOONSERVE_CONFIG may name one. Raises ConfigError.
    """
    if file is None and (named := env.get(ENV_PREFIX + "CONFIG")):
        file = Path(named)
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    given = {name: value for name, value in by_flags.items() if value is not None}
    layers = [(_from_env(env), "the environment"), (given, "the command line")]
    if file is not None:
        layers.insert(0, (_from_file(file), str(file)))
    for values, source in layers:
        for name, value in values.items():
            old = merged.get(name)
            both_maps = isinstance(old, dict) and isinstance(value, dict)
            merged[name] = {**old, **value} if both_maps else value  # type: ignore[dict-item]
            origin[name] = source
    return _convert(merged, origin)


class NotYaml(ValueError):
    """A text is not YAML; the message says where and why."""


def read_yaml(text: str) -> object:
    """The value of a YAML text. Raises NotYaml, also for a key that a map has twice: PyYAML would
    silently take the last one."""
    import yaml

    try:
        twice = _key_there_twice(yaml.compose(text, yaml.SafeLoader))
        if twice is None:
            return yaml.safe_load(text)
    except Exception as err:  # for a value such as 2001-13-45 PyYAML raises errors of many types
        raise NotYaml(" ".join(str(err).split())) from err
    key, line, first = twice
    raise NotYaml(f"line {line}: the key {key} is in line {first} already; remove one of the two")


def _key_there_twice(root: Any) -> tuple[str, int, int] | None:
    """A key that a map in PyYAML's tree has twice, and the lines of both, counted from 1. None:
    there is none."""
    left: list[Any] = [root]
    seen: set[int] = set()
    while left:
        node = left.pop()
        if node is None or id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))  # a node may contain itself by its name
        if node.id == "sequence":
            left += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            left += [key, value]
            line = key.start_mark.line + 1
            name = key.tag, str(key.value)
            if name in lines:
                return name[1], line, lines[name]
            lines[name] = line
    return None


def _from_file(file: Path) -> dict[str, object]:
    try:
        raw = read_yaml(file.read_text())
    except OSError as err:
        raise ConfigError(f"cannot read {file}: {err.strerror}", "config") from err
    except (NotYaml, UnicodeDecodeError) as err:
        raise ConfigError(f"{file} is not YAML: {err}", "config") from err
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must be a map of settings, such as `port: 8000`", "config")
    for name in raw:
        if name not in FIELDS:
            raise _unknown(str(name), FIELDS, str(file))
    return {str(name): value for name, value in raw.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, object]:
    """MOONSERVE_PORT=8001, MOONSERVE_LOGGING__LEVEL=DEBUG, MOONSERVE_LOGGING__MODULES={a: DEBUG}.

    A name that only resembles a setting is an error. Other names belong to other programs: for
    example, Kubernetes puts MOONSERVE_SERVICE_HOST into every pod for a service named moonserve.
    """
    names = {ENV_PREFIX + name.upper(): name for name in all_flags()}
    of_file = {ENV_PREFIX + name.upper() for name in FIELDS} - names.keys()
    out: dict[str, object] = {}
    nested: dict[str, object] = {}
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX):
            continue
        if name in names:
            out[names[name]] = text
        elif name == ENV_PREFIX + "LOGGING__LEVEL":
            nested["level"] = text
        elif name == ENV_PREFIX + "LOGGING__MODULES":
            try:
                nested["modules"] = read_yaml(text)
            except NotYaml as err:
                raise ConfigError("write it like {live.control.loop: DEBUG}", name) from err
        elif name in of_file:
            raise ConfigError("is read from the YAML file only (see --config)", name)
        elif difflib.get_close_matches(name, names, 1, 0.9):
            raise _unknown(name, names, "the environment")
    return {**out, **({"logging": nested} if nested else {})}


def _unknown(name: str, known: Iterable[str], source: str) -> ConfigError:
    return ConfigError(f"unknown setting in {source}; {nearest(name, sorted(known))}", name)


def _convert(merged: dict[str, object], origin: Mapping[str, str]) -> Settings:
    for name, flag in all_flags().items():
        value = merged.get(name)
        try:
            if flag.metavar == "SIZE" and isinstance(value, str):
                merged[name] = parse_bytes(value)
            elif flag.metavar == "TIME" and value is not None:
                merged[name] = parse_duration_us(value)
            elif flag.metavar == "SECONDS" and value is not None:
                merged[name] = parse_seconds(value)
        except ValueError as err:
            raise ConfigError(f"{err} (from {origin[name]})", name) from err
    try:
        settings = msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as err:
        raise _named(err, merged, origin) from err
    _check_policy(settings.policy, origin)
    _check_eviction(settings.eviction, origin)
    _check_registry(settings.registry, origin)
    _check_conductor(settings.conductor, origin)
    _check_segment(settings, origin)
    _check_master(settings.mooncake_master, origin)
    _check_mooncake(settings, origin)
    _check_tls(settings)
    for field in ("node", "rack"):
        if name := getattr(settings, field):
            check_name(name, field)
    return settings


def check_name(name: str, field: str = "name") -> str:
    """Check and return the name of a worker, segment, node or rack; it may become a folder's name.

    Raises ConfigError.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            "must be 1 to 64 letters, digits, dots, dashes or underscores, and begin with a letter "
            f"or digit, not {name!r}",
            field,
        )
    return name


def _check_segment(settings: Settings, origin: Mapping[str, str]) -> None:
    for name in ("segment_bytes", "disk_bytes"):
        size = getattr(settings, name)
        if 0 < size < _LEAST_SEGMENT:
            raise ConfigError(f"must be 1MiB or more ({size} from {origin[name]})", name)
    if settings.disk_bytes and not settings.disk_dir:
        raise ConfigError("needs a folder: set disk_dir too", "disk_bytes")
    if settings.disk_dir and not settings.disk_bytes:
        raise ConfigError("needs a size: set disk_bytes too", "disk_dir")


def _check_tls(settings: Settings) -> None:
    if settings.tls_cert and not settings.tls_key:
        raise ConfigError("needs its key: set tls_key too", "tls_cert")
    if settings.tls_key and not settings.tls_cert:
        raise ConfigError("needs its certificate: set tls_cert too", "tls_key")
    if settings.tls_client_auth != "none" and not (settings.tls_dir or settings.tls_ca):
        raise ConfigError("needs an authority: set tls_dir or tls_ca too", "tls_client_auth")


def _check_policy(name: str, origin: Mapping[str, str]) -> None:
    from moonserve.core.schedule.policies import POLICIES

    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        known = f"{hint}must be one of {', '.join(POLICIES)}"
        raise ConfigError(f"{known} ({name!r} from {origin['policy']})", "policy")


def _check_eviction(name: str, origin: Mapping[str, str]) -> None:
    from moonserve.core.store.evict import EVICTIONS

    if name not in EVICTIONS:
        known = f"must be one of {', '.join(EVICTIONS)}"
        raise ConfigError(f"{known} ({name!r} from {origin['eviction']})", "eviction")


def _check_registry(url: str, origin: Mapping[str, str]) -> None:
    if url and not url.startswith(IN_ETCD):
        remedy = "write it like etcd://127.0.0.1:2379 or etcd://a:2379,b:2379/prefix"
        raise ConfigError(f"{remedy} ({url!r} from {origin['registry']})", "registry")


def _check_conductor(where: str, origin: Mapping[str, str]) -> None:
    is_address = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/]+):\d{1,5}", where)
    is_url = where.startswith(("http://", "https://", *IN_ETCD))
    is_path = "/" in where and "://" not in where
    if where and not (is_address or is_url or is_path):
        raise ConfigError(
            "write it like 10.0.0.4:8000, /run/moonserve.sock or etcd://10.0.0.2:2379"
            f" ({where!r} from {origin['conductor']})",
            "conductor",
        )


def _check_mooncake(settings: Settings, origin: Mapping[str, str]) -> None:
    """Refuse what Mooncake would ignore. Raises ConfigError."""
    if settings.mooncake_protocol != "rdma" and settings.mooncake_device:
        why = "is for rdma only: set mooncake_protocol to rdma, or leave it out"
        raise ConfigError(f"{why} (from {origin['mooncake_device']})", "mooncake_device")
    if settings.store != "mooncake":
        if settings.mooncake_protocol != "tcp" and settings.transport != "mooncake":
            why = "is for Mooncake's engine only: needs transport mooncake, or store mooncake"
            raise ConfigError(f"{why} (from {origin['mooncake_protocol']})", "mooncake_protocol")
        return
    ours = "only the embedded store has"
    instead = {
        "replicas": f"{ours} copies; leave it at 1 with store mooncake",
        "eviction": "Mooncake's master evicts by its own rule, set by its --eviction_* flags; start"
        " one and name it with mooncake_master",
        "disk_bytes": f"{ours} a share on disk; leave it out with store mooncake",
        "node": f"{ours} nodes that copies avoid; leave it out with store mooncake",
        "transport": f"{ours} transports; Mooncake's pool has its own: leave it out",
        "shared_memory": f"{ours} this choice; leave it out with store mooncake",
        "store_url": "is for the embedded store; name Mooncake's master with mooncake_master",
    }
    for name, remedy in instead.items():
        value = getattr(settings, name)
        if value != getattr(Settings(), name):
            raise ConfigError(f"{remedy} ({value!r} from {origin[name]})", name)
    if settings.segment_bytes < LEAST_MOONCAKE_BYTES:
        value = settings.segment_bytes
        raise ConfigError(
            f"Mooncake takes segments of 16MiB and more ({value} from {origin['segment_bytes']})",
            "segment_bytes",
        )


def _check_master(address: str, origin: Mapping[str, str]) -> None:
    if address and not re.fullmatch(r"[^\s:]+:\d{1,5}", address):
        raise ConfigError(
            f"write it like 127.0.0.1:50051 ({address!r} from {origin['mooncake_master']})",
            "mooncake_master",
        )


def _named(
    err: msgspec.ValidationError, merged: Mapping[str, object], origin: Mapping[str, str]
) -> ConfigError:
    """Turn an error of msgspec into one that names the field, the value and its source."""
    path, remedy = in_words(err, Settings)
    field = path.replace("[...]", "")
    top = re.split(r"[.\[]", field)[0]
    source = origin.get(top, "the defaults")
    if remedy.startswith("there is no such field"):
        return ConfigError(f"unknown setting in {source}; {remedy.partition('; ')[2]}", field)
    remedy = {
        "predictor": "must be uniform or survival (oracle: in simulation only)",
        "decode_kv": "must be off, end or a number of blocks, 1 or more",
        "kubernetes": "must be a list of sources, each a map such as {service: vllm}",
        "instances": "must be a list of engines, each a map such as {name: e0, url: http://10.0.0.5:8000}",
    }.get(field, remedy)
    value = f"{merged[top]!r} from" if field == top and top in merged else "from"
    return ConfigError(f"{remedy} ({value} {source})", field)


class _Line(logging.Formatter):
    """One record, one line: time, level, module below moonserve, message, error if any, and the
    remark of RepeatLimit."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("moonserve.")
        text = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d} "
        text += f"{record.levelname:<7} {name}: {record.getMessage()}"
        if remark := record.__dict__.get("remark"):
            text += f" ({remark})"
        if record.exc_info:
            text += " | " + self.formatException(record.exc_info).replace("\n", " | ")
        return text.replace("\n", " ")


def apply_logging(settings: Logging) -> None:
    """Log to stderr, one line per record, at these levels; replaces earlier handlers.

    A reader of stderr that pauses delays no caller, and repeated warnings are limited: see logs.
    Raises ConfigError where a module does not exist. Modules of core never log.
    """
    handler = LineHandler(sys.stderr)
    handler.addFilter(RepeatLimit())
    handler.setFormatter(_Line())
    logging.basicConfig(level="WARNING", handlers=[handler], force=True)
    logging.getLogger("moonserve").setLevel(settings.level)
    here = Path(__file__).parent
    for module, level in settings.modules.items():
        name = module.removeprefix("moonserve.")
        place = here.joinpath(*name.split("."))
        if not place.is_dir() and not place.with_suffix(".py").is_file():
            raise ConfigError(
                f"there is no module {module!r}; write it like live.control.loop", "logging.modules"
            )
        logging.getLogger(f"moonserve.{name}").setLevel(level)

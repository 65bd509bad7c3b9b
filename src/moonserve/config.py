"""Settings: one YAML file, environment MOONSERVE_…, flags, in rising order.

Called by the CLI only; rooms below it are given plain values. Every error is a ConfigError that
names its field, where the value came from, and the remedy. Nothing here starts or opens anything
but the file; `apply_logging` is the one place that configures logging.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.units import LEAST_MOONCAKE_BYTES, MAX_BYTES, Bytes, Tokens
from moonserve.invalid import in_words, nearest

ENV_PREFIX = "MOONSERVE_"
_Admission: TypeAlias = Literal["none", "ttft", "early", "predictive"]
Level: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Objective: TypeAlias = Annotated[float, msgspec.Meta(ge=0.001, le=1e9)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES)]


class Logging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is said on stderr: `{level: INFO, modules: {core.schedule.conductor: DEBUG}}`."""

    level: Level = "INFO"
    modules: dict[str, Level] = {}
    """Level by module, named below `moonserve.`; a module stands for all under it."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting there is; a field's name is its key in the file and in MOONSERVE_<NAME>."""

    model: str = "smollm2-135m-instruct"
    host: str = "127.0.0.1"
    port: _Port = 8000
    """The gateway's; 0 takes a free one."""
    workers: _Count = 1
    """Processes of the gateway that serve clients."""
    prefill: _Count = 1
    decode: _Count = 1
    engine: Literal["torch", "fake"] = "torch"
    profile: str = ""
    """How long the fake engine's passes take: a profile's name or file; empty: next to nothing."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    block_size: Annotated[Tokens, msgspec.Meta(ge=1, le=1024)] = 32
    segment_bytes: _Size = 512 << 20
    """Each worker's share of the KV store."""
    disk_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)] = 0
    """Each worker's share of it on disk; 0: none."""
    disk_dir: str = ""
    """The folder for that; each worker makes one of its own in it."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    """Copies of each block, on different nodes."""
    node: str = ""
    """What fails together with a worker or segment; empty: it alone."""
    store_url: str = ""
    """Where the store's master is; empty: in the gateway."""
    registry: str = ""
    """Where gateways, workers and the store's master find each other; empty: they are told."""
    eviction: str = "lru"
    """One of core.store.evict.EVICTIONS, for the store's master."""
    store: Literal["embedded", "mooncake"] = "embedded"
    """Whose KV store; mooncake: the real one, by its wheel."""
    mooncake_master: str = ""
    """host:port of its master; empty: `up` starts one."""
    transport: Literal["tcp", "mooncake"] = "tcp"
    """How bytes of the embedded store travel; mooncake: its Transfer Engine, by its wheel."""
    shared_memory: Literal["auto", "never"] = "auto"
    """Whether they go by memory on one host."""
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    mooncake_device: str = ""
    """Of Mooncake's Transfer Engine; the device for rdma, empty: all that are found."""
    max_seqs: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    """Requests in one pass of a worker."""
    kv_memory_bytes: _Size = 1 << 30
    """Each torch worker's own pool for the KV of running requests."""
    decode_kv: Literal["off", "end"] | Annotated[int, msgspec.Meta(ge=1)] = "end"
    """When workers store the KV of generated tokens: never, at the end, or every so many blocks."""
    max_body_bytes: _Size = 8 << 20
    threshold: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 1.0
    """Algorithm 1's kvcache_balancing_threshold: how much longer than an instance's own prefix
    the best one must be before it is fetched rather than computed."""
    policy: str = "kvcache_centric"
    """One of core.schedule.policies.POLICIES."""
    ttft_slo_ms: _Objective | None = None
    """Objectives of requests whose headers bring none; None: none."""
    tbt_slo_ms: _Objective | None = None
    admission: _Admission = "predictive"
    """What refuses a request; see core.schedule.policies.Admission."""
    admission_low: _Admission | None = None
    admission_high: _Admission | None = None
    """The same for requests of a priority below, and above, 0."""
    predictor: Literal["uniform", "survival"] = "survival"
    """How admission predicts who still decodes when a prefill ends; see core.predict."""
    spread_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)] = 8 << 30
    """Of hot prefixes, so much is copied to other segments at a time; 0: none."""
    cpp: _Count = 8
    """The most prefill workers that may share one prompt, where one alone would miss its TTFT
    objective; 1: none does."""
    alone_tokens: Annotated[Tokens, msgspec.Meta(ge=0, le=1 << 20)] = 256
    """A foreign engine that decodes, and has all but so many tokens of a prompt, gets it without a
    prefill elsewhere; 0: never."""
    rack: str = ""
    """Where a worker stands; transfers between racks are taken to last longer."""
    instances: tuple[dict[str, object], ...] | None = None
    """Foreign engines that a gateway serves with; see cli.instances. In the file only. Empty: those
    that are named later; None: a gateway has workers of ours."""
    start_s: _Seconds = 180.0
    drain_s: _Seconds = 30.0
    logging: Logging = Logging()


FIELDS: tuple[str, ...] = Settings.__struct_fields__
FILE_ONLY = ("logging", "instances")
"""Settings of parts, which the environment has no one variable for."""
_LEAST_SEGMENT: Bytes = 1 << 20
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_bytes(text: str | int) -> Bytes:
    """Read a size such as "512MiB", "2GiB" or "4096"; units are powers of 1,024.

    Raises ValueError with the remedy.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like 512MiB or 2GiB")
    size = float(match[1]) * (1 << _UNITS[match[2].upper()])
    if size > MAX_BYTES:
        raise ValueError(f"{text!r} is more than any size can be: {MAX_BYTES >> 40}TiB")
    return int(size)


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[str, object | None]) -> Settings:
    """Merge the three layers over the defaults; a flag of None was not given.

    Without `file`, MOONSERVE_CONFIG may name one. Raises ConfigError.
    """
    if file is None and (named := env.get(ENV_PREFIX + "CONFIG")):
        file = Path(named)
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    given = {name: value for name, value in flags.items() if value is not None}
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


def _from_file(file: Path) -> dict[str, object]:
    import yaml

    try:
        raw = yaml.safe_load(file.read_text())
    except OSError as err:
        raise ConfigError(f"cannot read {file}: {err.strerror}", "config") from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(err).split())}", "config") from err
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

    A name that only resembles a setting is an error; others are someone else's (a Kubernetes
    service named moonserve, say, puts MOONSERVE_SERVICE_HOST into every pod).
    """
    import yaml

    names = {ENV_PREFIX + field.upper(): field for field in FIELDS}
    out: dict[str, object] = {}
    nested: dict[str, object] = {}
    for name, text in env.items():
        if not name.startswith(ENV_PREFIX):
            continue
        if name in names and names[name] not in FILE_ONLY:
            out[names[name]] = text
        elif name == ENV_PREFIX + "LOGGING__LEVEL":
            nested["level"] = text
        elif name == ENV_PREFIX + "LOGGING__MODULES":
            try:
                nested["modules"] = yaml.safe_load(text)
            except yaml.YAMLError as err:
                raise ConfigError("write it like {core.schedule.conductor: DEBUG}", name) from err
        elif difflib.get_close_matches(name, names, 1, 0.9):
            raise _unknown(name, names, "the environment")
    return {**out, **({"logging": nested} if nested else {})}


def _unknown(name: str, known: Iterable[str], source: str) -> ConfigError:
    return ConfigError(f"unknown setting in {source}; {nearest(name, sorted(known))}", name)


def _convert(merged: dict[str, object], origin: Mapping[str, str]) -> Settings:
    for name in (
        "segment_bytes",
        "disk_bytes",
        "kv_memory_bytes",
        "max_body_bytes",
        "spread_bytes",
    ):
        if isinstance(value := merged.get(name), str):
            try:
                merged[name] = parse_bytes(value)
            except ValueError as err:
                raise ConfigError(f"{err} (from {origin[name]})", name) from err
    try:
        settings = msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as err:
        raise _named(err, merged, origin) from err
    _check_policy(settings.policy, origin)
    _check_eviction(settings.eviction, origin)
    _check_registry(settings.registry, origin)
    _check_segment(settings, origin)
    _check_master(settings.mooncake_master, origin)
    _check_mooncake(settings, origin)
    for field in ("node", "rack"):
        if name := getattr(settings, field):
            check_name(name, field)
    return settings


def check_name(name: str, field: str = "name") -> str:
    """The name of a worker or a segment, which is also a folder's, of a node or a rack. Raises
    ConfigError.
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
        raise ConfigError("say in which folder, with disk_dir", "disk_bytes")
    if settings.disk_dir and not settings.disk_bytes:
        raise ConfigError("say how much of it, with disk_bytes", "disk_dir")


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
    if url and not url.startswith("etcd://"):
        remedy = "write it like etcd://127.0.0.1:2379 or etcd://a:2379,b:2379/prefix"
        raise ConfigError(f"{remedy} ({url!r} from {origin['registry']})", "registry")


def _check_mooncake(settings: Settings, origin: Mapping[str, str]) -> None:
    """What Mooncake would not heed is refused rather than ignored."""
    if settings.mooncake_protocol != "rdma" and settings.mooncake_device:
        why = "is of rdma; say so with mooncake_protocol, or leave it out"
        raise ConfigError(f"{why} (from {origin['mooncake_device']})", "mooncake_device")
    if settings.store != "mooncake":
        if settings.mooncake_protocol != "tcp" and settings.transport != "mooncake":
            why = "is of Mooncake's engine: needs transport mooncake, or store mooncake"
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
        "shared_memory": f"{ours} a choice; leave it out with store mooncake",
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
    """Turn what msgspec says into an error that names field, value, source."""
    path, remedy = in_words(err, Settings)
    field = path.replace("[...]", "")
    top = re.split(r"[.\[]", field)[0]
    source = origin.get(top, "the defaults")
    if remedy.startswith("there is no such field"):
        return ConfigError(f"unknown setting in {source}; {remedy.partition('; ')[2]}", field)
    remedy = {
        "predictor": "must be uniform or survival (oracle: in simulation only)",
        "decode_kv": "must be off, end or a number of blocks, 1 or more",
        "instances": "must be a list of engines, each a map such as {name: e0, url: http://10.0.0.5:8000}",
    }.get(field, remedy)
    value = f"{merged[top]!r} from" if field == top and top in merged else "from"
    return ConfigError(f"{remedy} ({value} {source})", field)


class _Line(logging.Formatter):
    """One record, one line: time, level, module below moonserve, message, error if any."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("moonserve.")
        text = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d} "
        text += f"{record.levelname:<7} {name}: {record.getMessage()}"
        if record.exc_info:
            text += " | " + self.formatException(record.exc_info).replace("\n", " | ")
        return text.replace("\n", " ")


def apply_logging(settings: Logging) -> None:
    """Log to stderr, one line a record, at the levels asked for; replaces earlier handlers.

    Raises ConfigError on a module that does not exist. Core modules exist and never log.
    """
    handler = logging.StreamHandler(sys.stderr)
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

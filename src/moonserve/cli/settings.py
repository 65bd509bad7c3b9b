"""The flags that are settings: one table, so that every command names and explains them alike."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from moonserve.config import (
    ENV_PREFIX,
    FIELDS,
    FILE_ONLY,
    Settings,
    apply_logging,
    load,
    parse_bytes,
)
from moonserve.core.errors import ConfigError
from moonserve.core.units import Bytes
from moonserve.invalid import nearest

if TYPE_CHECKING:
    from moonserve.core.schedule.profiles import Profile
    from moonserve.core.store.words import Card

log = logging.getLogger(__name__)
_KEYS = ENV_PREFIX + "KEY_"
"""Of variables with the API keys of engines."""
_OTHERS = (
    "CONFIG", "LOGGING__LEVEL", "LOGGING__MODULES", "TOKEN", "CACHE", "LIFELINE", "TRACES", "SEED",
    "PEERS", "ROUTERS", "DYNAMO", "VLLM_PYTHON",
)  # fmt: skip
"""Variables that are no settings: secrets, places, and what tests and benchmarks read."""
_OF_KUBERNETES = re.compile("_SERVICE_(HOST|PORT)|_PORT_[0-9]+_")
TOKEN = ENV_PREFIX + "TOKEN"
"""The cluster's shared secret, by environment only: it is no setting, so that no file has it."""
advertise_host_option = click.option(
    "--advertise-host",
    metavar="ADDRESS",
    help="Where others reach it, if not at --host; needed with 0.0.0.0.",
)
"""Of every role that others connect to; by role, so it is no setting."""
cards_option = click.option(
    "--card",
    "cards",
    metavar="ADDRESS[@RAIL]",
    multiple=True,
    callback=lambda context, option, given: tuple(map(_card, given)),
    help="One of several addresses of this machine that bytes are to travel by; repeatable."
    " They go by all of them, and by those of one rail first.",
)


def read_token() -> str:
    """The shared secret; empty: there is none. Raises ConfigError: it fits into no HTTP header."""
    token = os.environ.get(TOKEN, "")
    if not token.isprintable() or any(ord(it) > 255 for it in token):
        raise ConfigError(f"{TOKEN} has characters beyond Latin-1 or unprintable ones", "token")
    return token


_Command = TypeVar("_Command", bound=Callable[..., object])

# Setting: (metavar, help). Flags carry no default of their own: a flag not given is None, and
# config.load fills it from the environment, the file or the defaults.
_HELP: dict[str, tuple[str, str]] = {
    "model": (
        "REF",
        "a name (moonserve model list), a Hugging Face folder, or a .gguf file; with engines of "
        "others, the name that they must serve",
    ),
    "host": ("ADDRESS", "address to listen on"),
    "port": ("PORT", "the gateway's port; 0 takes a free one"),
    "workers": (
        "N",
        "processes that serve clients; several share one Conductor, in a process of its own",
    ),
    "prefill": ("N", "how many prefill workers"),
    "decode": ("M", "how many decode workers"),
    "engine": ("NAME", "torch, or fake: needs no torch, makes up its tokens"),
    "profile": ("NAME", "how slow the fake engine is: a simulator's profile, or a file of one"),
    "dtype": ("TYPE", "float32, bfloat16, or auto: bfloat16 where the CPU multiplies it"),
    "block_size": ("TOKENS", "tokens in one KV block"),
    "segment_bytes": ("SIZE", "each worker's share of the KV store"),
    "disk_bytes": ("SIZE", "each one's share of the KV store on disk; none: no disk"),
    "disk_dir": ("FOLDER", "where the share on disk lies"),
    "replicas": ("N", "copies of each block in the KV store, on different nodes"),
    "node": ("NAME", "what fails together with it, such as a host; none: it alone"),
    "store_url": ("URL", "where the KV store's master is; none: in the gateway"),
    "registry": ("URL", "etcd://host:port, where all find each other; none: they are told"),
    "eviction": ("NAME", "what the KV store evicts first; a wrong name is answered with all"),
    "store": ("NAME", "whose KV store: embedded, or mooncake (needs its wheel)"),
    "mooncake_master": ("ADDRESS", "host:port of Mooncake's master; none: up starts one"),
    "transport": (
        "NAME",
        "how bytes of the KV store travel: tcp, or mooncake: its Transfer Engine (needs its wheel)",
    ),
    "shared_memory": ("WHEN", "auto: on one host, before all others; never: for measuring"),
    "mooncake_protocol": ("NAME", "tcp or rdma, of Mooncake's Transfer Engine"),
    "mooncake_device": ("NAME", "its RDMA device; none: all that are found"),
    "max_seqs": ("N", "requests in one pass of a worker"),
    "kv_memory_bytes": ("SIZE", "each torch worker's pool for the KV of running requests"),
    "decode_kv": ("WHEN", "store the KV of answers: off, end, or every so many blocks"),
    "max_body_bytes": ("SIZE", "largest request body"),
    "threshold": ("RATIO", "fetch a prefix this much longer than one's own, rather than compute"),
    "policy": ("NAME", "who serves a request; a wrong name is answered with all there are"),
    "ttft_slo_ms": ("MS", "objective for the time to the first token"),
    "tbt_slo_ms": ("MS", "objective for the time between tokens"),
    "admission": (
        "MODE",
        "what refuses what would miss an objective: none, ttft, early (load of "
        "decode now) or predictive (when prefill will have ended)",
    ),
    "admission_low": ("MODE", "the same for requests of a priority below 0"),
    "admission_high": ("MODE", "the same for requests of a priority above 0"),
    "predictor": ("NAME", "predictive: how long others decode: uniform or survival"),
    "spread_bytes": (
        "SIZE",
        "prefixes that many ask for are copied to workers with less to do, so much at a time; 0: "
        "none",
    ),
    "cpp": ("N", "how many workers may share a prompt that is late with one, at most"),
    "alone_tokens": (
        "N",
        "a decode engine that lacks at most so many tokens of a prompt prefills them; 0: never",
    ),
    "rack": ("NAME", "where the worker stands; racks are taken to be far from each other"),
    "start_s": ("SECONDS", "longest wait until all are ready"),
    "drain_s": ("SECONDS", "longest wait for running requests at the end"),
}


def settings_options(*names: str) -> Callable[[_Command], _Command]:
    """Give a command the flags of these settings, and --config."""

    def decorate(command: _Command) -> _Command:
        command = click.option(
            "--config",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="YAML file of settings; environment and flags win over it.",
        )(command)
        for name in reversed(names):
            metavar, text = _HELP[name]
            flag = "--" + name.replace("_", "-")
            default = _shown(getattr(Settings(), name), name)
            shown = f"{text} [default: {default}]"
            command = click.option(flag, name, metavar=metavar, help=shown)(command)
        return command

    return decorate


def size_of(text: str, field: str) -> Bytes:
    """A size as people write it, such as 512MiB. Raises ConfigError."""
    try:
        return parse_bytes(text)
    except ValueError as err:
        raise ConfigError(str(err), field) from None


def unheeded(env: Mapping[str, str]) -> list[str]:
    """What to say of MOONSERVE_… variables that nobody reads: a mistyped one must not pass in
    silence. Those that Kubernetes makes for a service named moonserve are not ours."""
    settings = {ENV_PREFIX + field.upper() for field in FIELDS}
    known = sorted(settings | {ENV_PREFIX + name for name in _OTHERS})
    return [
        f"environment: {name} is no setting and is ignored; {nearest(name, known, 0.0)}"
        for name in sorted(env)
        if name.startswith(ENV_PREFIX)
        and name not in known
        and not name.startswith(_KEYS)
        and not _OF_KUBERNETES.search(name)
    ]


def read_settings(config: Path | None, flags: dict[str, str | None]) -> Settings:
    """Merge file, environment and flags, and set up logging. Raises ConfigError."""
    settings = load(config, os.environ, flags)
    apply_logging(settings.logging)
    if ENV_PREFIX + "LIFELINE" not in os.environ:  # else who started us has said it
        for text in unheeded(os.environ):
            log.warning("%s", text)
    return settings


def read_profile(name: str) -> Profile:
    """A built-in profile, or one in a file. Raises ConfigError."""
    from moonserve.core.schedule.profiles import PROFILES, profile_from_json, profile_of

    path = Path(name)
    if name in PROFILES or not path.is_file():
        return profile_of(name)
    try:
        return profile_from_json(path.read_bytes(), name)
    except OSError as err:
        raise ConfigError(f"{name} cannot be read: {err.strerror}", "profile") from err


def child_env(settings: Settings, **extra: str) -> dict[str, str]:
    """The environment that gives a child process these settings, whatever file or flags they
    came from.
    """
    own = {ENV_PREFIX + "CONFIG", *(ENV_PREFIX + name.upper() for name in FIELDS)}
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith(ENV_PREFIX + "LOGGING__")
    }
    for name in FIELDS:
        value = getattr(settings, name)
        if name not in FILE_ONLY and value is not None:
            env[ENV_PREFIX + name.upper()] = str(value)
    env[ENV_PREFIX + "LOGGING__LEVEL"] = settings.logging.level
    env[ENV_PREFIX + "LOGGING__MODULES"] = msgspec.json.encode(settings.logging.modules).decode()
    return {**env, **extra}


def _card(text: str) -> Card:
    from moonserve.core.store.words import Card

    host, at, rail = text.partition("@")
    if not host or (at and not rail):
        raise ConfigError(f"write it like 10.0.0.5 or 10.0.0.5@rail0, not {text!r}", "card")
    return Card(host, rail)


def _shown(value: object, name: str) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value >> 20}MiB" if value else "none"
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""The flags of all commands that read settings, and how commands read settings and secrets.

Called by the commands that start processes. The settings themselves stand in moonserve.config.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from moonserve.cli.tls import member_tls
from moonserve.config import (
    ENV_PREFIX,
    FIELDS,
    Flag,
    Settings,
    all_flags,
    apply_logging,
    filled,
    load,
)
from moonserve.core.errors import ConfigError
from moonserve.core.units import Bytes
from moonserve.invalid import nearest
from moonserve.quantity import parse_bytes, parse_seconds, shown_duration

if TYPE_CHECKING:
    from moonserve.core.store.words import Card
    from moonserve.live.store.settings import StoreSettings

_Command = TypeVar("_Command", bound=Callable[..., object])
log = logging.getLogger(__name__)
_KEYS = ENV_PREFIX + "KEY_"
"""Variables with the API keys of external engines begin so."""
_OTHERS = (
    "CONFIG", "LOGGING__LEVEL", "LOGGING__MODULES", "TOKEN", "API_KEY", "URL", "CACHE", "LIFELINE",
    "TRACES", "SEED", "PEERS", "ROUTERS", "DYNAMO", "VLLM_PYTHON", "CORE", "COMPILE",
)  # fmt: skip
"""Variables that are no settings: secrets, folders, and what tests and benchmarks read."""
_OF_KUBERNETES = re.compile("_SERVICE_(HOST|PORT)|_PORT_[0-9]+_")
advertise_host_option = click.option(
    "--advertise-host",
    metavar="ADDRESS",
    help="Address at which other processes reach this one, if not --host; needed with 0.0.0.0.",
)
"""For every role that others connect to. Each process has its own, so it is no setting."""
cards_option = click.option(
    "--card",
    "cards",
    metavar="ADDRESS[@RAIL]",
    multiple=True,
    callback=lambda context, option, given: tuple(map(_card, given)),
    help="Address of one network card of this machine; repeatable. The KV store sends bytes over"
    " all cards, and prefers cards of the same rail.",
)


class Seconds(click.FloatRange):
    """The value of a flag whose name ends with its unit, such as --wait-s: 60, 60s or 1m."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See ParamType. Raises BadParameter."""
        try:
            return super().convert(parse_seconds(value), param, ctx)
        except ValueError as err:
            self.fail(str(err), param, ctx)


def listen_option(whose: str, default: int = 0) -> Callable[[_Command], _Command]:
    """The port of a process."""
    return click.option(
        "--listen",
        type=click.IntRange(0, 65535),
        default=default,
        show_default=True,
        help=f"Port of {whose}; 0 takes a free one.",
    )


def settings_options(command: str) -> Callable[[_Command], _Command]:
    """Give a command the flags of its settings, and --config.

    A flag has no default of its own: a flag that was not given is None, and `config.load` then
    takes the value from the environment, the file or the default of the setting.
    """

    def decorate(function: _Command) -> _Command:
        function = click.option(
            "--config",
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="YAML file with settings; environment variables and flags override it",
        )(function)
        for name, flag in reversed(all_flags().items()):
            if command in flag.commands:
                function = _option(name, flag)(function)
        return function

    return decorate


def _option(name: str, flag: Flag) -> Callable[[_Command], _Command]:
    default = getattr(Settings(), name)
    flag_name = "--" + name.replace("_", "-")
    if default is False:
        return click.option(flag_name, name, flag_value="true", help=flag.text)
    help_text = f"{flag.text} [default: {_shown(default, flag)}]"
    return click.option(flag_name, name, metavar=flag.metavar, help=help_text)


def size_of(text: str, field: str) -> Bytes:
    """A size as people write it, such as 512MiB. Raises ConfigError."""
    try:
        return parse_bytes(text)
    except ValueError as err:
        raise ConfigError(str(err), field) from None


def unheeded(env: Mapping[str, str]) -> list[str]:
    """One warning for each MOONSERVE_… variable that the program does not read; it may be mistyped.

    Variables that Kubernetes makes for a service named moonserve give no warning.
    """
    settings = {ENV_PREFIX + name.upper() for name in FIELDS}
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
    if ENV_PREFIX + "LIFELINE" not in os.environ:  # else our supervisor has logged it
        for text in unheeded(os.environ):
            log.warning("%s", text)
    return settings


def store_share(
    settings: Settings, command: str, name: str, token: str, **own: Any
) -> StoreSettings:
    """The share of the KV store of a worker or a segment that starts now. own: other fields."""
    from moonserve.core.store.words import PutOptions
    from moonserve.core.units import SegmentId
    from moonserve.live.store.settings import StoreSettings

    return filled(
        StoreSettings,
        settings,
        command,
        segment=SegmentId(name),
        epoch=time.time_ns() // 1_000,
        token=token.encode(),
        capacity_bytes=settings.segment_bytes,
        disk_dir=Path(settings.disk_dir) / name if settings.disk_bytes else None,
        shared_memory=settings.shared_memory == "auto",
        tls=member_tls(settings, "worker" if command == "worker" else "store"),
        options=filled(PutOptions, settings, command),
        **own,
    )


def child_env(settings: Settings, **extra: str) -> dict[str, str]:
    """The environment that gives a child process these settings, from whatever source they are."""
    own = {ENV_PREFIX + "CONFIG", *(ENV_PREFIX + name.upper() for name in FIELDS)}
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.startswith(ENV_PREFIX + "LOGGING__")
    }
    for name, flag in all_flags().items():
        value = getattr(settings, name)
        if value is not None:
            text = shown_duration(value) if flag.metavar == "TIME" else str(value)
            env[ENV_PREFIX + name.upper()] = text
    env[ENV_PREFIX + "LOGGING__LEVEL"] = settings.logging.level
    env[ENV_PREFIX + "LOGGING__MODULES"] = msgspec.json.encode(settings.logging.modules).decode()
    return {**env, **extra}


def _card(text: str) -> Card:
    from moonserve.core.store.words import Card

    host, at, rail = text.partition("@")
    if not host or (at and not rail):
        raise ConfigError(f"write it like 10.0.0.5 or 10.0.0.5@rail0, not {text!r}", "card")
    return Card(host, rail)


def _shown(value: object, flag: Flag) -> str:
    if flag.metavar == "SIZE" and isinstance(value, int):
        return f"{value >> 20}MiB" if value else "none"
    if flag.metavar == "TIME" and isinstance(value, int):
        return shown_duration(value)
    if value is None or value == "":
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Who may use a gateway: its guard, its API keys and their limits, and CORS, by its settings.

`gateway` and `fronts` make one `Access` per process that serves clients. Nothing else decides
whether a client needs a key.
"""

from __future__ import annotations

import logging
from pathlib import Path

from moonserve.core.errors import ConfigError
from moonserve.live.access.cors import Cors
from moonserve.live.access.guard import Guard, own_names, split_names
from moonserve.live.access.keys import Keys
from moonserve.live.access.meter import Meter
from moonserve.live.access.scopes import Scope
from moonserve.live.access.sources import FileSource, KeySource, RegistrySource
from moonserve.live.control.config import GatewayConfig
from moonserve.live.health import Health
from moonserve.live.http.auth import is_loopback
from moonserve.live.http.server import ProcessPart
from moonserve.live.ports import Registry

log = logging.getLogger(__name__)

IN_REGISTRY = "registry"
"""The value of `keys` if the keys are in the registry."""


def check_clients(host: str, keys: str, registry: str, is_open: bool) -> None:
    """Raise ConfigError unless it is certain who may send requests to this gateway."""
    if keys and is_open:
        raise ConfigError("contradicts `keys`: leave one of them out", "open")
    check_source(keys, registry)
    if not (keys or is_open or is_loopback(host)):
        raise ConfigError(
            f"bound to {host}, so clients need API keys: make one with `moonserve key create` and"
            " name its file with --keys, or serve everybody with --open",
            "keys",
        )


def check_source(keys: str, registry: str) -> None:
    """Raise ConfigError if the keys are in a registry, and there is none."""
    if keys == IN_REGISTRY and not registry:
        raise ConfigError("is `registry`, so set `registry` too", "keys")


class Access:
    """See the module."""

    def __init__(
        self, config: GatewayConfig, registry: Registry | None, health: Health, meter: Meter
    ) -> None:
        """registry: has the keys if `config.keys` says so. meter: counts the requests of keys.
        Raises ConfigError.
        """
        if config.picker_port is None:
            check_clients(config.host, config.keys, config.registry, config.open)
        else:  # a picker serves a proxy, which may know its clients
            check_source(config.keys, config.registry)
        if config.open and not is_loopback(config.host):
            log.warning(
                "OPEN TO ALL: whoever reaches %s may use this gateway without an API key",
                config.host,
            )
        self.meter = meter
        self.salted = config.salt_by == "tenant" or (config.salt_by == "auto" and bool(config.keys))
        origins = split_names(config.cors_origins)
        self.cors = Cors(origins) if origins else None
        keys, self.parts = None, list[ProcessPart]()
        if config.keys:
            keys = Keys()
            source = _source(config.keys, keys, registry)
            health.report_alarms(source.alarms)
            self.parts.append(source)
        self.guard = Guard(config.token, _names(config), _open(config), keys, self.cors)


def watched_keys(
    config: GatewayConfig, registry: Registry | None, health: Health
) -> list[ProcessPart]:
    """The source of keys in a process that has no clients: it only reports alarms in `health`."""
    if not config.keys:
        return []
    source = _source(config.keys, Keys(), registry)
    health.report_alarms(source.alarms)
    return [source]


def conductor_guard(config: GatewayConfig) -> Guard:
    """The guard of the Conductor's own process. Its fronts send the token for what they admitted;
    config: with the host at which it listens."""
    return Guard(config.token, _names(config), set(_open(config)) - {"infer"})


def _names(config: GatewayConfig) -> frozenset[str] | None:
    return own_names(config.host, config.advertise_host, split_names(config.allowed_hosts))


def _open(config: GatewayConfig) -> tuple[Scope, ...]:
    """The scopes that need no key."""
    if not config.keys:
        return "infer", "metrics"
    return ("metrics",) if config.metrics_access == "all" else ()


def _source(where: str, keys: Keys, registry: Registry | None) -> KeySource:
    if where != IN_REGISTRY:
        return FileSource(keys, Path(where).expanduser())
    assert registry is not None, "checked"
    return RegistrySource(keys, registry)

"""The address of a registry as users write it: etcd://host:port[,host:port][/prefix]."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import ConfigError

_FORM = "write it like etcd://127.0.0.1:2379 or etcd://a:2379,b:2379/prefix"
_PORT = 2379


class Address(msgspec.Struct, frozen=True):
    """The members of one etcd, and the root of moonserve's keys, which ends with a slash."""

    hosts: tuple[tuple[str, int], ...]
    root: str

    def __str__(self) -> str:
        return ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)


def parse(text: str) -> Address:
    """Parse `text`. Raises ConfigError."""
    scheme, at, rest = text.partition("://")
    members, _, prefix = rest.partition("/")
    if scheme != "etcd" or not at or not members:
        raise ConfigError(f"{text!r} is no registry address; {_FORM}", "registry")
    hosts = []
    for member in members.split(","):
        try:
            parts = urlsplit(f"//{member}")
            host = parts.hostname
            port = parts.port or _PORT
        except ValueError:
            host = None
        if not host or "@" in member:
            raise ConfigError(f"{member!r} is no address of etcd; {_FORM}", "registry")
        hosts.append((host, port))
    return Address(tuple(hosts), f"/{prefix.strip('/') or 'moonserve'}/")

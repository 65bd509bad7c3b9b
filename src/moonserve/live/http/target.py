"""Addresses and request heads, for `client`: from a URL to the bytes that ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import ConfigError


class Target(msgspec.Struct, frozen=True):
    """Where a URL leads."""

    host: str
    port: int
    netloc: str
    path: str


@lru_cache(maxsize=4096)
def parse(url: str) -> Target:
    """Raises ConfigError: the client cannot use this address."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is no address; write it like http://10.0.0.5:8100", "url")
        port = parts.port or 80
        parts.hostname.encode("idna")  # as it is looked up; a UnicodeError is a ValueError
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}", "url") from None
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    if not (path + parts.netloc).isascii() or any(c <= " " for c in path + parts.netloc):
        raise ConfigError(f"{url!r} has characters that must be percent-encoded", "url")
    return Target(parts.hostname, port, parts.netloc, path)


def check_url(url: str, setting: str) -> None:
    """Raises ConfigError that names the setting: the client cannot use this address."""
    try:
        parse(url)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("url: "), setting) from None


def head_of(method: str, target: Target, headers: Mapping[str, str], length: int) -> bytes:
    """A request's head; `length` of its body. Raises ConfigError on what headers cannot have."""
    lines = [f"{method} {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if length or method not in ("GET", "DELETE"):
        lines.append(f"content-length: {length}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1:
        raise ConfigError("a header name or value has a line break in it", "headers")
    try:
        return f"{text}\r\n".encode("latin-1")
    except UnicodeEncodeError:
        raise ConfigError("a header has a character beyond latin-1 in it", "headers") from None

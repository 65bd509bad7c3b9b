"""Addresses and request heads for `client`: from a URL to the bytes of a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import ConfigError

_SHORT = 128


class Target(msgspec.Struct, frozen=True):
    """The address and the path of a URL."""

    host: str
    port: int
    netloc: str
    path: str


def parse(url: str) -> Target:
    """Return the target of a URL. Raises ConfigError if the client cannot use it."""
    return _kept(url) if len(url) <= _SHORT and "?" not in url else _parse(url)


def _parse(url: str) -> Target:
    end = len(url)
    for mark in "/?#":
        at = url.find(mark, len("http://"), end)
        end = at if at >= 0 else end
    host, port, netloc = _origin(url[:end])
    path = url[end:].partition("#")[0]
    path = path if path[:1] == "/" else "/" + path
    if not (path.isascii() and path.isprintable()) or " " in path:
        raise ConfigError(f"{url!r} has characters that must be percent-encoded", "url")
    return Target(host, port, netloc, path)


_kept = lru_cache(maxsize=1024)(_parse)
"""Keeps the targets of repeated URLs. Long URLs and URLs with a query come from clients, and would
fill it."""


@lru_cache(maxsize=1024)
def _origin(url: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is no address; write it like http://10.0.0.5:8100", "url")
        port = parts.port or 80
        parts.hostname.encode("idna")  # the form for DNS; a UnicodeError is a ValueError
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}", "url") from None
    if not parts.netloc.isascii() or not parts.netloc.isprintable() or " " in parts.netloc:
        raise ConfigError(f"{url!r} has characters that must be percent-encoded", "url")
    return parts.hostname, port, parts.netloc


def check_url(url: str, setting: str) -> None:
    """Raise ConfigError with the setting's name if the client cannot use this URL."""
    try:
        parse(url)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("url: "), setting) from None


def head_of(method: str, target: Target, headers: Mapping[str, str], length: int) -> bytes:
    """Return a request's head; `length`: of its body. Raises ConfigError for invalid headers."""
    lines = [f"{method} {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if length or method not in ("GET", "DELETE"):
        lines.append(f"content-length: {length}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1:
        raise ConfigError("a header name or value has a line break", "headers")
    try:
        return f"{text}\r\n".encode("latin-1")
    except UnicodeEncodeError:
        raise ConfigError("a header has a character that is not in latin-1", "headers") from None

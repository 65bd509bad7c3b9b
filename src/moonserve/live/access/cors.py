"""CORS: which web pages may use models from a browser, and what browsers are told about it.

`Guard` adds the headers to every reply below /v1/, and the gateway's API answers preflights. Keys
travel in headers and never in cookies, so no page is allowed to send credentials.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from moonserve.core.errors import ConfigError
from moonserve.live.http.message import HttpRequest, Response

_ANY = "*"
_EXPOSED = "retry-after, x-request-id, x-moonserve-reject-reason"
_METHODS = "GET, POST, OPTIONS"
_ALWAYS = "authorization, content-type, x-api-key"
_KEPT_S = "600"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*")


class Cors:
    """See the module."""

    def __init__(self, origins: Sequence[str]) -> None:
        """origins: such as https://app.example; "*" is every page. Raises ConfigError."""
        for origin in origins:
            if origin != _ANY and not _is_origin(origin):
                raise ConfigError(
                    f"{origin!r} is no origin; write it like https://app.example:8443, or * for"
                    " all",
                    "cors_origins",
                )
        self._all = _ANY in origins
        self._origins = frozenset(origin.lower() for origin in origins)

    def headers(self, request: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers of a reply to a request with these headers."""
        origin = request.get("origin")
        if self._all:
            allowed = {"access-control-allow-origin": _ANY} if origin is not None else {}
        else:
            allowed = {"vary": "origin"}
            if origin is not None and origin.lower() in self._origins:
                allowed["access-control-allow-origin"] = origin
        if "access-control-allow-origin" in allowed:
            allowed["access-control-expose-headers"] = _EXPOSED
        return allowed

    async def preflight(self, request: HttpRequest) -> Response:
        """Answer OPTIONS: what the page may send. Guard adds which page may."""
        asked = request.headers.get("access-control-request-headers", "").strip()
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else _ALWAYS,
            "access-control-max-age": _KEPT_S,
        }
        return Response(204, headers=headers)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}"

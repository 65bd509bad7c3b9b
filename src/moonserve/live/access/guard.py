"""The guard of a process: it decides by the head of a request whether the process serves it.

Each process that listens gives one `Guard` to its App, so that no route can be forgotten: a path
that no rule names needs the cluster's token, or an API key with the scope admin. No body is read
before the guard has decided, and no secret is logged or repeated in an error.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit

from moonserve.core.errors import Forbidden, Unauthorized
from moonserve.live.access.cors import Cors
from moonserve.live.access.keys import ApiKey, Keys
from moonserve.live.access.refusals import KeyRefusals
from moonserve.live.access.scopes import Scope, scope_of
from moonserve.live.http.auth import is_loopback

_NO_HEADERS: Mapping[str, str] = {}
_SAME_SITE = ("", "none", "same-origin")
"""Values of sec-fetch-site that browsers send for a page of this server, or for no page at all."""


class RequestHead(Protocol):
    """What a guard reads of a request: HttpRequest has it, and what a proxy reports."""

    @property
    def method(self) -> str:
        """In capitals."""

    @property
    def path(self) -> str:
        """Percent-decoded, without the query."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""


class Guard:
    """See the module. App calls `admit` for each request, and `headers` for each reply."""

    def __init__(
        self,
        token: str,
        names: frozenset[str] | None = None,
        open_to_all: Iterable[Scope] = ("metrics",),
        keys: Keys | None = None,
        cors: Cors | None = None,
    ) -> None:
        """token: the cluster's; if it is empty, no request has it. names: see `own_names`.
        open_to_all: scopes that need neither token nor key. keys: of clients; None: there are none.
        cors: which web pages may use models; None: none of another site.
        """
        self._token = token.encode()
        self._names = names
        self._open = frozenset(open_to_all)
        self._keys = keys
        self._cors = cors
        self.refusals = KeyRefusals()
        """What was refused for the sake of a key."""

    def admit(self, request: RequestHead) -> None:
        """Raise Unauthorized or Forbidden unless this request may be served."""
        scope = scope_of(request.path)
        if scope is None or scope in self._open:
            return
        if scope == "admin":
            check_origin(request.headers)
            check_host(request.headers, self._names)
        elif self._cors is not None and request.method == "OPTIONS":
            return  # browsers send no key with it
        if self._has_token(request):
            return
        if self._keys is None:
            raise Unauthorized(
                "the cluster's token is missing or wrong; send it as `Authorization: Bearer TOKEN`"
                " (commands of moonserve read it from MOONSERVE_TOKEN)",
                "authorization",
            )
        key = self._found(self._keys, request)
        if not key.may(scope):
            self.refusals.count(key.name, "scope")
            raise Forbidden(
                f"key {key.name} has no scope {scope}; it has {', '.join(key.scopes)}",
                "authorization",
            )

    def key_of(self, request: RequestHead) -> ApiKey | None:
        """Return the key of a request that was admitted; None: it needs none, or has the token.

        Raises Unauthorized if the key was revoked meanwhile.
        """
        if self._keys is None or self._has_token(request):
            return None
        return self._found(self._keys, request)

    def headers(self, request: RequestHead) -> Mapping[str, str]:
        """Return what to add to the headers of a reply, for web pages that may read it."""
        if self._cors is None or scope_of(request.path) != "infer":
            return _NO_HEADERS
        return self._cors.headers(request.headers)

    def _found(self, keys: Keys, request: RequestHead) -> ApiKey:
        secret = _secret(request.headers)
        key = keys.find(secret)
        if key is None:
            self.refusals.count("", "unknown")
            what = "the API key is unknown or was revoked" if secret else "no API key was sent"
            raise Unauthorized(
                f"{what}; send yours as `Authorization: Bearer KEY`, or as `x-api-key: KEY`",
                "authorization",
                "invalid_api_key",
            )
        return key

    def _has_token(self, request: RequestHead) -> bool:
        if not self._token:
            return False
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(given.strip().encode(), self._token) and (
            scheme.lower() == "bearer"
        )


def _secret(headers: Mapping[str, str]) -> str:
    """The API key that a request has; "": none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def own_names(
    host: str, advertised: str | None = None, allowed: Iterable[str] = ()
) -> frozenset[str] | None:
    """Return the names under which a process that listens on `host` may be called.

    None: any name. That is so beyond loopback unless names are allowed explicitly, because names in
    DNS are usual there. On loopback a foreign name is that of a web page whose DNS entry was
    changed to this machine ("DNS rebinding").
    """
    allowed = [*allowed]
    if not allowed and not is_loopback(host):
        return None
    given = ["localhost", host, *allowed, *([] if advertised is None else [advertised])]
    return frozenset(name.lower() for name in given)


def split_names(text: str) -> list[str]:
    """Return the names of a setting that has commas between them."""
    return [name for name in map(str.strip, text.split(",")) if name]


def check_host(headers: Mapping[str, str], names: frozenset[str] | None) -> None:
    """Raise Forbidden if the Host header has a name that is not one of `names`.

    An address in numbers is never refused: only a name can be changed to another machine.
    """
    given = headers.get("host", "")
    if names is None or not given:
        return
    name = _hostname(given)
    if name in names or name.endswith(".localhost") or _is_address(name):
        return
    raise Forbidden(
        f"host: {given[:80]!r} is no name of this process; call it by its address, or add the name"
        " to --allowed-hosts",
        "host",
    )


def check_origin(headers: Mapping[str, str]) -> None:
    """Raise Forbidden if a browser sent the request for a page of another server."""
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != headers.get("host", "").lower():
        raise Forbidden(
            f"origin: a page of {origin[:80]!r} may not use this path; call it from a program,"
            " without this header",
            "origin",
        )
    site = headers.get("sec-fetch-site", "")
    if site not in _SAME_SITE:
        raise Forbidden(
            f"sec-fetch-site: a page of another site ({site[:40]!r}) may not use this path; call it"
            " from a program, without this header",
            "sec-fetch-site",
        )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _hostname(given: str) -> str:
    try:
        return urlsplit(f"//{given}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True

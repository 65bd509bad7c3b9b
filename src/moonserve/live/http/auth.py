"""The cluster's shared token: where it is required, and how it is sent and checked.

The gateway's control plane, the workers and the store's master use one rule, so that none of them
is open while another is closed.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from moonserve.core.errors import ConfigError, Unauthorized
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def require_token_beyond_loopback(host: str, token: str, callers: str) -> None:
    """Raise ConfigError if another machine could call this process without a token."""
    if not token and host not in _LOOPBACK:
        raise ConfigError(
            f"bound to {host}, so {callers} must send a token: set MOONSERVE_TOKEN", "token"
        )


def check_token(request: HttpRequest, token: str) -> None:
    """Raise Unauthorized unless the request has `token`; an empty token allows every request."""
    given = request.headers.get("authorization", "").encode()
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Unauthorized(
            "the cluster's token is missing or wrong; send it as `Authorization: Bearer TOKEN`",
            "authorization",
        )


def bearer(token: str) -> dict[str, str]:
    """Return the header that sends `token`; no header for an empty token."""
    return {"authorization": f"Bearer {token}"} if token else {}


def guarded(
    handler: Callable[[HttpRequest], Awaitable[Response | StreamingResponse]], token: str
) -> Callable[[HttpRequest], Awaitable[Response | StreamingResponse]]:
    """Return the handler, for requests with the cluster's token only."""

    async def checked(request: HttpRequest) -> Response | StreamingResponse:
        check_token(request, token)
        return await handler(request)

    return checked

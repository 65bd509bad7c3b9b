"""The cluster's shared token: who must have one, and who has shown it.

For the gateway's control plane and the workers' wire. One rule for both, so that neither is open
where the other is closed.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from moonserve.core.errors import ConfigError, Unauthorized
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def require_token_beyond_loopback(host: str, token: str, callers: str) -> None:
    """Raises ConfigError where others than this machine could call without a token."""
    if not token and host not in _LOOPBACK:
        raise ConfigError(
            f"bound to {host}, {callers} must present a token: set MOONSERVE_TOKEN", "token"
        )


def check_token(request: HttpRequest, token: str) -> None:
    """Raises Unauthorized unless the request bears `token`; "" lets everyone in."""
    given = request.headers.get("authorization", "").encode()
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise Unauthorized("cluster token missing or wrong", "authorization")


def bearer(token: str) -> dict[str, str]:
    """The header by which a caller presents `token`; none for ""."""
    return {"authorization": f"Bearer {token}"} if token else {}


def guarded(
    handler: Callable[[HttpRequest], Awaitable[Response | StreamingResponse]], token: str
) -> Callable[[HttpRequest], Awaitable[Response | StreamingResponse]]:
    """The same for who has the cluster's token."""

    async def checked(request: HttpRequest) -> Response | StreamingResponse:
        check_token(request, token)
        return await handler(request)

    return checked

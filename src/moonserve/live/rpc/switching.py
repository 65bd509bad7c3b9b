"""Makes an RpcConnection out of an HTTP connection to a process of the cluster.

Members of the store call its master so, and fronts their Conductor: one port, one check of the
token and of certificates, and one way to say why there is no connection. Nothing here tries again.
"""

from __future__ import annotations

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError, MoonserveError
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import BadReply, ClientResponse, HttpClient
from moonserve.live.http.message import ErrorReply
from moonserve.live.rpc.connection import RpcConnection

_FOR_NOW = (408, 409, 425, 429)
"""Statuses below 500 of a server that may answer otherwise soon."""


class Callee(msgspec.Struct, frozen=True):
    """What is called, for the errors."""

    what: str
    """Such as "store's master"."""
    field: str
    """The setting that has its address."""
    away: type[MoonserveError]
    """The error if it is there, and cannot answer now."""
    remedy: str = ""
    """What to do if something else is there."""


async def switched(
    http: HttpClient,
    url: str,
    path: str,
    connection: RpcConnection,
    token: str,
    callee: Callee,
    timeout_s: float,
    shown: str = "",
) -> None:
    """Connect to the process at `url`, and hand the connection to `connection`. shown: what errors
    call the URL, if it says little.

    Raises ConfigError: trying again cannot help, since the token is wrong, or another program or
    another version is there; `callee.away`, UpstreamError, DeadlineExceeded: it may help.
    """
    try:
        reply = await http.upgrade(
            url + path, connection.protocol, connection, headers=bearer(token), timeout_s=timeout_s
        )
    except BadReply as error:
        what = f"{shown or url} is no {callee.what}: {error}"
        raise ConfigError(what, callee.field) from None
    if reply is not None:
        raise _refusal(reply, shown or url, callee)


def _refusal(reply: ClientResponse, url: str, callee: Callee) -> MoonserveError:
    try:
        said = msgspec.json.decode(reply.body, type=ErrorReply).error.message
    except UNREADABLE:
        said = f"it answers {reply.status}"
    if reply.status == 401:
        return ConfigError(
            f"{url} does not accept it; set MOONSERVE_TOKEN to that of the process there", "token"
        )
    if reply.status >= 500 or reply.status in _FOR_NOW:
        return callee.away(f"the {callee.what} {url} cannot answer: {said}")
    remedy = f"; {callee.remedy}" if callee.remedy and reply.status == 404 else ""
    return ConfigError(f"{url} is no {callee.what}: {said}{remedy}", callee.field)

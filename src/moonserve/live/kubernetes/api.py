"""ApiServer: calls to Kubernetes' API server from within a pod, by our own HTTP client.

The pod's service account says where the server is and who calls: its token, which the kubelet
replaces from time to time, and the server's authority. Both files are read again for each call or
connection. Reflector calls it; nothing here is retried.

What never happens here: a call without TLS and without a check of the server's certificate; a token
in a log or in an error; a call that changes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError, MoonserveError
from moonserve.core.units import Bytes
from moonserve.live.http.client import ClientStream, HttpClient
from moonserve.live.kubernetes.objects import BadAnswer, Expired, Status, said
from moonserve.live.tls.contexts import ServerTrust

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts the files of a pod's service account."""
_MAX_TOKEN_BYTES: Bytes = 64 << 10
_MAX_PAGE_BYTES: Bytes = 32 << 20
_MAX_LINE_BYTES: Bytes = 4 << 20
"""Of one event. etcd keeps no object of more than 1.5 MiB."""
_PAGE_OBJECTS = 250
_REMEDIES: Mapping[int, str] = {
    401: "; the service account's token is not accepted",
    403: "; bind a role to the service account that may list and watch these objects",
    404: "; the server does not have this kind of object: install its definition",
}


class ApiRefused(MoonserveError):
    """The server answered with an error."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceAccount(msgspec.Struct, frozen=True):
    """Where the API server is, and the files of this pod's service account."""

    url: str
    folder: Path

    def token(self) -> str:
        """The token as it is now. Raises ConfigError."""
        try:
            with (self.folder / "token").open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise self._unusable("token", why) from None
        if not token or not token.isprintable() or " " in token:
            raise self._unusable("token", "it is no token")
        return token

    def namespace(self) -> str:
        """The namespace of this pod. Raises ConfigError."""
        try:
            return (self.folder / "namespace").read_text().strip()
        except (OSError, UnicodeDecodeError):
            remedy = "; set `namespace` of each entry"
            raise self._unusable("namespace", "it cannot be read" + remedy) from None

    def context(self) -> ssl.SSLContext:
        """What trusts the server's authority only. Raises ConfigError."""
        try:
            return ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        except (OSError, ssl.SSLError):
            raise self._unusable("ca.crt", "it is no certificate") from None

    def _unusable(self, file: str, why: str) -> ConfigError:
        what = f"cannot use {self.folder / file}: {why}; the pod needs a service account"
        return ConfigError(f"{what} with automountServiceAccountToken", "kubernetes")


def account_of(environ: Mapping[str, str], folder: Path) -> ServiceAccount:
    """The service account of the pod that has this environment. Raises ConfigError."""
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host and not port.isdigit():
        raise ConfigError(
            f"KUBERNETES_SERVICE_PORT is {port[:80]!r}, which is no port; leave it as Kubernetes"
            " sets it in each pod",
            "kubernetes",
        )
    if not host:
        raise ConfigError(
            "this process does not run in a pod: KUBERNETES_SERVICE_HOST is not set; leave the"
            " setting out, or describe the engines in `instances`",
            "kubernetes",
        )
    found = ServiceAccount(
        f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder
    )
    found.token()
    found.context()
    return found


class ApiServer:
    """See the module. To be used on the event loop; `close` it."""

    def __init__(self, account: ServiceAccount) -> None:
        self.account = account
        remedy = f"the API server must have a certificate of {account.folder / 'ca.crt'}"
        trust = ServerTrust(account.context, remedy, plain=False)
        self._http = HttpClient(trust, max_per_host=64, max_reply_bytes=_MAX_PAGE_BYTES)

    async def page(self, path: str, query: Mapping[str, str], more: str, timeout_s: float) -> bytes:
        """One page of a list; more: what the page before has said, empty for the first. Raises
        Expired, ApiRefused, ConfigError, UpstreamError, DeadlineExceeded."""
        asked = {**query, "limit": str(_PAGE_OBJECTS), **({"continue": more} if more else {})}
        url, headers = self._call(path, asked)
        reply = await self._http.request("GET", url, headers=headers, timeout_s=timeout_s)
        _check(reply.status, reply.headers, reply.body, path)
        return reply.body

    @contextlib.asynccontextmanager
    async def watch(
        self, path: str, query: Mapping[str, str], version: str, watch_s: int, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the lines of a watch from this version on, which ends after about `watch_s`.

        timeout_s: the longest wait for its head, and for its end after that time. Raises as `page`,
        and BadAnswer for a line that is too long.
        """
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(watch_s),
        }
        url, headers = self._call(path, asked)
        end_s = watch_s + timeout_s
        async with self._http.stream(
            "GET", url, headers=headers, timeout_s=timeout_s, idle_timeout_s=end_s
        ) as reply:
            if reply.status != 200:
                _check(reply.status, reply.headers, await _beginning(reply), path)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(end_s):
                    yield _lines(reply)

    async def close(self) -> None:
        """Cut all calls."""
        await self._http.close()

    def _call(self, path: str, query: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        headers = {"authorization": f"Bearer {self.account.token()}", "accept": "application/json"}
        return f"{self.account.url}{path}?{urlencode(query)}", headers


async def _lines(reply: ClientStream) -> AsyncIterator[bytes]:
    """The lines of a reply; what follows the last line feed is none."""
    pieces: list[bytes] = []
    size = 0
    while (chunk := await reply.take()) is not None:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            pieces.append(end)
            yield b"".join(pieces)
            pieces = []
            size = 0
        pieces.append(rest)
        size += len(rest)
        if size > _MAX_LINE_BYTES:
            raise BadAnswer(f"an event has more than {_MAX_LINE_BYTES} bytes")


async def _beginning(reply: ClientStream) -> bytes:
    """The first piece of an error's body: it is short."""
    return await reply.take() or b""


def _check(status: int, headers: Mapping[str, str], body: bytes, path: str) -> None:
    """Raise Expired or ApiRefused unless the call succeeded."""
    if status == 200:
        return
    try:
        found = msgspec.json.decode(body, type=Status)
    except UNREADABLE:
        found = Status()
    why = said(Status(status, found.message))
    if status == 410:
        raise Expired(why)
    after = headers.get("retry-after", "")
    seconds = float(after) if after.isdigit() and len(after) < 6 else 0.0
    raise ApiRefused(f"GET {path}: {why}{_REMEDIES.get(status, '')}", seconds)

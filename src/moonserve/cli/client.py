"""A client of a running gateway, for commands, and the option that names the gateway.

It needs no module of ours that is slow to import. It sends the cluster's token if it finds one for
that gateway; see cli.token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from moonserve.cli.tls import client_trust
from moonserve.cli.token import TOKEN, credential_for
from moonserve.config import ENV_PREFIX
from moonserve.core.errors import (
    UNREADABLE,
    ConfigError,
    EngineFailed,
    Forbidden,
    NobodyAlive,
    Unauthorized,
)
from moonserve.invalid import shortened, without_password

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.parse import SplitResult

T = TypeVar("T")

_Command = TypeVar("_Command", bound=Callable[..., object])
_URL = "http://127.0.0.1:8000"
_VARIABLE = ENV_PREFIX + "URL"
_VERSION = re.compile(r"(?<=[^/])/v1/*\Z")
"""The /v1 at the end of a URL, but not a host of that name."""
_HOST = re.compile(r"[\w.-]+|[\da-f:.]+(%[\w.-]+)?")
"""A name, an IPv4 address, or an IPv6 address without its brackets."""


def url_option(whose: str) -> Callable[[_Command], _Command]:
    """The address of the gateway that a command asks. whose: what may have that address.

    A /v1 at its end is dropped: OpenAI's clients want it there, so people have such URLs.
    """
    return click.option(
        "--url",
        metavar="URL",
        default=_URL,
        show_default=True,
        envvar=_VARIABLE,
        show_envvar=True,
        callback=lambda _ctx, _param, url: _VERSION.sub("", url),
        help=whose,
    )


class Client:
    """Calls one gateway; every failure is an error that a user can act on."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 120.0,
        token: str | None = None,
        context: SSLContext | None = None,
    ) -> None:
        """token: None looks for the cluster's token, or an API key; "" sends none. context: for
        https:// URLs; None: by the environment, see `client_trust`."""
        parts = _checked(url)
        self._port = parts.port
        self._timeout_s = timeout_s
        self._host = parts.hostname or ""
        self._context = context
        if context is None and parts.scheme == "https":
            self._context = client_trust(url).context()
        self._url = url
        self._headers = {"content-type": "application/json"}
        if token := credential_for(url) if token is None else token:
            self._headers["authorization"] = f"Bearer {token}"

    def first_model(self) -> str:
        """The name of a model that the gateway serves."""
        models = self.get("/v1/models").get("data") or []
        if not models:
            raise NobodyAlive(f"{self._url} serves no model yet; are its workers up?")
        return str(models[0]["id"])

    def decision(self, request_id: str) -> dict[str, Any]:
        """What the Conductor decided for a request. Raises EngineFailed if the gateway has
        forgotten it."""
        from urllib.parse import quote

        return self.get(f"/api/decisions/{quote(request_id, safe='')}")

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path."""
        return self.get_as(path, dict[str, Any])

    def get_as(self, path: str, shape: type[T]) -> T:
        """The JSON at a path, which has this shape."""
        return self.send("GET", path, shape)

    def send(self, method: str, path: str, shape: type[T], body: object = None) -> T:
        """The JSON with which a request is answered; it has this shape. body: None: none."""
        with self._open(method, path, body) as reply:
            try:
                return msgspec.json.decode(reply.read(), type=shape)
            except UNREADABLE:
                raise EngineFailed(f"{self._url} answers, but is no moonserve") from None

    def text(self, path: str) -> str:
        """The text at a path."""
        with self._open("GET", path, None) as reply:
            return reply.read().decode()

    @contextmanager
    def events(
        self, path: str, body: dict[str, Any]
    ) -> Iterator[tuple[str | None, Iterator[dict[str, Any]]]]:
        """Post a request for a stream: return its id, and its events as they come."""
        with self._open("POST", path, body) as reply:
            yield reply.getheader("x-request-id"), self._events(reply)

    def _events(self, reply: HTTPResponse) -> Iterator[dict[str, Any]]:
        from http.client import HTTPException

        try:
            for raw in reply:
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = msgspec.json.decode(line[6:], type=dict[str, Any])
                    if "error" in event:
                        raise EngineFailed(_message(event))
                    yield event
        except UNREADABLE as err:
            raise EngineFailed(f"{self._url} sent an event that is no JSON: {err}") from err
        except (OSError, HTTPException) as err:
            raise EngineFailed(f"{self._url} stopped in the middle of the answer: {err}") from err
        raise EngineFailed(f"{self._url} stopped in the middle of the answer")

    def _said(self, text: bytes) -> str:
        """The message of an error reply."""
        try:
            return _message(msgspec.json.decode(text))
        except UNREADABLE:
            return f"from {self._url}, which is no moonserve"

    @contextmanager
    def _open(self, method: str, path: str, body: object) -> Iterator[HTTPResponse]:
        from http.client import (
            HTTPConnection,
            HTTPException,
            HTTPSConnection,
            RemoteDisconnected,
        )

        where = (self._host, self._port)
        if self._context is None:
            connection = HTTPConnection(*where, timeout=self._timeout_s)
        else:
            connection = HTTPSConnection(*where, timeout=self._timeout_s, context=self._context)
        raw = None if body is None else msgspec.json.encode(body)
        try:
            try:
                connection.request(method, path, raw, self._headers)
                reply = connection.getresponse()
                text = b"" if reply.status == 200 else reply.read()
            except ConnectionRefusedError as err:
                raise NobodyAlive(
                    f"nothing listens at {self._url}; start one with: moonserve up"
                ) from err
            except RemoteDisconnected as err:
                if self._context is not None:
                    raise NobodyAlive(client_trust(self._url).refused(self._host)) from err
                raise NobodyAlive(
                    f"{self._url} closed the connection before a reply; if it speaks TLS, write"
                    " https://"
                ) from err
            except SSLError as err:
                raise NobodyAlive(client_trust(self._url).refusal(self._host, err)) from err
            except (OSError, HTTPException) as err:
                raise NobodyAlive(
                    f"{self._url} does not answer: {getattr(err, 'strerror', None) or err!r}"
                ) from err
            if reply.status != 200:
                said = f"{method} {shortened(path)}: {reply.status} {self._said(text)}"
                if reply.status == 401:
                    if TOKEN not in said:
                        said += f"; for commands, set {TOKEN} to the cluster's token or a key"
                    raise Unauthorized(said)
                if reply.status == 403:
                    raise Forbidden(said)
                raise EngineFailed(said)
            yield reply
        finally:
            connection.close()


def _checked(url: str) -> SplitResult:
    """The parts of a gateway's URL; without a scheme it is http. Raises ConfigError."""
    from urllib.parse import urlsplit

    shown = repr(without_password(url))
    remedy = f"write --url or {_VARIABLE} like {_URL}"
    # urlsplit would drop line breaks and tabs
    if not url.isprintable() or " " in url:
        raise ConfigError(f"{shown} has a space or a line break; {remedy}", "url")
    try:
        parts = urlsplit(url if "//" in url else "//" + url, scheme="http")
        host = parts.hostname or ""
        _ = parts.port  # raises ValueError
        if ":" not in host:
            host.encode("idna")
    except UnicodeError:
        raise ConfigError(f"{shown} has a host that is no name; {remedy}", "url") from None
    except ValueError as err:
        raise ConfigError(f"{shown} is no address: {err}; {remedy}", "url") from err
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise ConfigError(f"{shown} is no address; {remedy}", "url")
    if "@" in parts.netloc:
        what = f"{shown} has a name or a password"
        raise ConfigError(f"{what}; leave them out, and set MOONSERVE_TOKEN", "url")
    if parts.path.strip("/"):
        raise ConfigError(f"{shown} has a path; leave it out, as in {_URL}", "url")
    if "?" in url or "#" in url:
        raise ConfigError(f"{shown} has a query or a fragment; {remedy}", "url")
    return parts


def _message(event: Any) -> str:
    error = event.get("error") if isinstance(event, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(error or event)

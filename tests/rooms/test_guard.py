"""The guard: which requests a process serves, by path, token, Host and Origin."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moonserve.core.errors import MoonserveError
from moonserve.live.access.guard import Guard, own_names
from moonserve.live.control.config import GatewayConfig
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.http.message import HttpRequest
from moonserve.live.process.gateway import Gateway
from tests.support.fake_vllm import FakeVllm

TOKEN = "the-secret-of-this-test"
ADMIN = (
    ("GET", "/api/instances"),
    ("POST", "/api/instances"),
    ("DELETE", "/api/instances/e"),
    ("GET", "/api/decisions/r"),
    ("GET", "/api/segments"),
    ("GET", "/api/stats"),
    ("POST", "/api/select"),
    ("POST", "/api/reserve"),
    ("POST", "/api/release"),
    ("POST", "/register"),
    ("POST", "/unregister"),
    ("POST", "/query"),
    ("POST", "/query_by_hash"),
    ("GET", "/services"),
    ("POST", "/internal/join"),
    ("POST", "/internal/beat"),
    ("POST", "/internal/leave"),
    ("POST", "/internal/blocks"),
)


class Nowhere:
    """A request's connection that is never read."""

    def pause(self) -> None:
        raise AssertionError

    def resume(self) -> None:
        raise AssertionError

    def go_on(self) -> None:
        raise AssertionError


def request(path: str, **headers: str) -> HttpRequest:
    """A request's head; underscores in names of headers stand for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest("POST", path, path, b"", named, Nowhere())


def refused(guard: Guard, path: str, **headers: str) -> tuple[int, str]:
    """Status and field with which the guard refuses; (200, ""): it admits the request."""
    try:
        guard.admit(request(path, **headers))
    except MoonserveError as error:
        return error.status, getattr(error, "param", "") or ""
    return 200, ""


def test_a_path_that_no_rule_names_needs_the_token() -> None:
    """Also one of tomorrow, and one that resembles an open path."""
    guard = Guard(TOKEN, None, ("infer", "metrics"))
    opened = ("/health", "/ready", "/api/health", "/metrics", "/v1/models", "/v1/x/y")
    for path in ("/", "/openapi.json", *opened):
        assert refused(guard, path) == (200, "")
    for path in (
        "//",
        "/new",
        "/openapi.json/",
        "/health/",
        "/api/health/x",
        "/v1",
        "/metrics/",
        "/V1/x",
        "//v1/x",
    ):
        assert refused(guard, path) == (401, "authorization")
        assert refused(guard, path, authorization=f"Bearer {TOKEN}") == (200, "")


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer", f"Basic {TOKEN}", TOKEN, "Bearer é"])
def test_no_other_header_is_the_token(given: str) -> None:
    """Of an empty token there is no right form at all."""
    for token in (TOKEN, ""):
        assert refused(Guard(token), "/api/stats", authorization=given)[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": "http://[bad"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "[bad"},
    ],
)
def test_a_web_page_of_another_site_is_refused(headers: dict[str, str]) -> None:
    """The error names the header, also if the token is right."""
    guard = Guard(TOKEN, own_names("127.0.0.1"))
    head = {"host": "127.0.0.1:8000", "authorization": f"Bearer {TOKEN}"} | headers
    (name,) = headers
    assert refused(guard, "/api/instances", **head) == (403, name.replace("_", "-"))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "localhost:8000", "sec_fetch_site": "same-origin"},
        {"host": "[::1]:8000", "sec_fetch_site": "none"},
        {"host": "10.1.2.3"},
        {"host": "gw.example", "origin": "https://gw.example"},
        {"host": "GW.example:8000"},
        {"host": "me.localhost:8000"},
    ],
)
def test_its_own_addresses_and_names_are_served(headers: dict[str, str]) -> None:
    """Addresses in numbers, loopback's names, and the names that are allowed."""
    guard = Guard(TOKEN, own_names("127.0.0.1", allowed=["gw.example"]))
    head = {"authorization": f"Bearer {TOKEN}"} | headers
    assert refused(guard, "/api/instances", **head) == (200, "")


def test_beyond_loopback_names_are_checked_if_any_are_allowed() -> None:
    """DNS names are usual there, and the token is needed anyway."""
    assert own_names("0.0.0.0") is None
    assert own_names("10.0.0.4", "gw") is None
    assert own_names("0.0.0.0", "gw", ["a.b"]) == {"localhost", "0.0.0.0", "gw", "a.b"}


def test_nobody_without_the_token_reaches_an_admin_route_of_a_gateway() -> None:
    """Not even where no token was set; a forged page registers no engine, with a token or not."""

    async def test() -> None:
        engine = await FakeVllm("e").start()
        http = HttpClient()
        spec = msgspec.json.encode({"name": "e", "url": engine.url, "events": "off"})
        for config in (
            GatewayConfig(model="", port=0),
            GatewayConfig(model="", port=0, token=TOKEN),
        ):
            gateway = await Gateway.start(config, [])

            async def call(method: str, path: str, **headers: str) -> ClientResponse:
                url = f"http://127.0.0.1:{gateway.port}{path}"  # noqa: B023 - called in this turn
                return await http.request(method, url, headers=headers, body=spec, timeout_s=5)

            try:
                for method, path in ADMIN:
                    assert (path, (await call(method, path)).status) == (path, 401)
                forged = {
                    "origin": "http://evil.example",
                    "content-type": "text/plain",
                }
                for more in ({}, bearer(config.token)):
                    reply = await call("POST", "/api/instances", **forged, **more)
                    assert reply.status == 403
                    assert b"origin" in reply.body
                assert gateway.fleet is not None
                assert list(gateway.fleet.monitors()) == []
                reply = await call("POST", "/api/instances", **bearer(config.token))
                assert reply.status == 200
            finally:
                await gateway.stop(0)
        await http.close()
        await engine.stop()

    asyncio.run(test())

"""API keys of clients: who they are, what they may do, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.errors import ConfigError, Forbidden, Overloaded, Unauthorized
from moonserve.core.shares import Party
from moonserve.live.access.cors import Cors
from moonserve.live.access.guard import Guard
from moonserve.live.access.keys import ApiKey, KeyLimits, Keys, drawn, hash_of
from moonserve.live.access.meter import LocalMeter
from moonserve.live.access.sources import FileSource, RegistrySource, changed_file, read_file
from moonserve.live.access.terms import ClientTerms, terms_of
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.http.message import HttpRequest
from moonserve.live.process.access import check_clients
from moonserve.live.process.gateway import Gateway
from tests.support.fake_vllm import FakeVllm
from tests.support.registry import MemoryRegistry

TOKEN = "the-secret-of-this-test"
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}


def made(name: str, secret: str = "", **more: Any) -> ApiKey:
    """A key; its limits stand beside its other fields."""
    limits = {it: more.pop(it) for it in KeyLimits.__struct_fields__ if it in more}
    fields = {"tenant": name, "hash": hash_of(secret or name)} | more
    return ApiKey(name=name, limits=KeyLimits(**limits), **fields).checked()


def write(path: Path, *keys: ApiKey) -> None:
    """Make these the keys of the file."""
    with changed_file(path) as now:
        now[:] = keys


def test_a_key_is_256_random_bits_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    """`moonserve key`: made once, listed without secrets, revoked; the file is of mode 600."""
    file = tmp_path / "keys"

    def key(*argv: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli, ["key", *argv, "--keys", str(file)])
        assert done.exit_code == code, done.output
        return done.output.strip()

    secret = key("create", "alice", "--tenant", "team-a", "--scope", "infer", "--under-way", "3")
    assert secret.startswith("ms-")
    assert len(secret) == len(drawn()) == 3 + 43
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    listed = json.loads(key("list", "--json"))
    assert [(it["name"], it["tenant"], it["scopes"]) for it in listed] == [
        ("alice", "team-a", ["infer"])
    ]
    assert listed[0]["limits"]["under_way"] == 3
    assert "there is a key 'alice' already" in key("create", "alice", code=2)
    assert "under_way=3" in key("list")
    assert key("revoke", "alice") == "revoked: alice"
    assert "there is no key 'alice'" in key("revoke", "alice", code=2)
    assert "name: must be 1 to 64" in key("create", "a/b", code=2)
    assert read_file(file) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: keys: is not JSON"),
        ('{"name":"b","hash":"x","tenant":"t"}', "line 2: hash: must be a SHA-256"),
        ('{"name":"b","tenant":"t"}', "line 2: hash"),
        ('{"name":"b","hash":"%s","tenant":""}' % ("0" * 64), "line 2: tenant: must be"),
        ('{"name":"a","hash":"%s","tenant":"t"}' % ("0" * 64), "two keys have the name a"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """The error has the line and the field."""
    file = tmp_path / "keys"
    file.write_bytes(msgspec.json.encode(made("a")) + b"\n" + line.encode())
    with pytest.raises(ConfigError, match=message):
        read_file(file)


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    """Others could add a key with the scope admin."""
    file = tmp_path / "keys"
    write(file, made("a"))
    file.chmod(0o664)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_file(file)
    file.chmod(0o644)  # hashes may be read
    assert read_file(file) == [made("a")]


def test_a_wait_that_clients_would_not_obey_is_cut() -> None:
    """OpenAI's clients obey 60 s at most; the message has the whole time."""

    async def test() -> None:
        meter = LocalMeter(lambda: 0)
        key = made("a", tokens_per_minute=50)
        (await meter.enter(key)).spent(6_000)
        with pytest.raises(Overloaded, match="room again in 71") as caught:
            await meter.enter(key)
        assert caught.value.retry_after_s == 60.0

    asyncio.run(test())


def test_the_scheme_of_a_token_has_no_case() -> None:
    """RFC 9110, 11.1; another scheme or token is refused."""
    guard = Guard(TOKEN)

    def admitted(authorization: str) -> bool:
        headers = {"host": "localhost", "authorization": authorization}
        request = HttpRequest("GET", "/api/stats", "/api/stats", b"", headers, NoSource())
        try:
            guard.admit(request)
        except Unauthorized:
            return False
        return True

    assert admitted(f"bearer {TOKEN}")
    assert admitted(f"Bearer {TOKEN}")
    assert not admitted(f"Basic {TOKEN}")
    assert not admitted(f"Bearer {TOKEN}x")
    assert not admitted("")


class NoSource:
    """The connection of a request that nobody reads."""

    def pause(self) -> None:
        """See BodySource."""

    def resume(self) -> None:
        """See BodySource."""

    def go_on(self) -> None:
        """See BodySource."""


def test_keys_change_while_the_gateway_runs(tmp_path: Path) -> None:
    """A revoked key is forgotten; a file that became wrong changes nothing and is an alarm."""

    async def test() -> None:
        file, keys = tmp_path / "keys", Keys()
        source = FileSource(keys, file)
        with pytest.raises(ConfigError, match="moonserve key create"):
            await source.prepare()
        write(file, made("a"), made("b"))
        await source.prepare()
        await source.start(0)
        assert keys.find("a") == made("a")
        write(file, made("b"))
        async with asyncio.timeout(5):
            while keys.find("a") is not None:
                await asyncio.sleep(0.05)
        file.write_text("nonsense")
        async with asyncio.timeout(5):
            while not source.alarms():
                await asyncio.sleep(0.05)
        assert str(file.parent) not in source.alarms()[0], "clients can read it"
        assert keys.find("b") is not None
        file.unlink()
        write(file, made("c"))
        async with asyncio.timeout(5):
            while keys.find("c") is None:
                await asyncio.sleep(0.05)
        assert source.alarms() == []
        write(file)
        async with asyncio.timeout(5):
            while keys.find("c") is not None:
                await asyncio.sleep(0.05)
        assert "no client is served" in source.alarms()[0]
        await source.stop()

    asyncio.run(test())


def test_a_key_limits_what_headers_ask_for() -> None:
    """The tenant is the key's; another one, and priorities and objectives beyond, are a 403."""
    key = made("a", least_priority=-50, highest_priority=-10, least_ttft_slo_ms=500)
    assert terms_of({}, key, salted=True).tenant == "a"
    assert terms_of({}, key, salted=True).priority == -10
    inside = {"x-moonserve-tenant": "a", "x-moonserve-priority": "-20"}
    assert terms_of(inside, key, salted=True).priority == -20
    assert terms_of({"x-moonserve-tenant": "b"}, None, False).tenant == "b"
    for name, value in (
        ("x-moonserve-tenant", "b"),
        ("x-moonserve-priority", "0"),
        ("x-moonserve-priority", "-51"),
        ("x-moonserve-ttft-slo-ms", "499"),
    ):
        with pytest.raises(Forbidden) as caught:
            terms_of({name: value}, key, salted=True)
        assert caught.value.param == name
        assert value != "b" or "'a'" not in str(caught.value)


def test_no_two_pairs_of_tenant_and_salt_share_kv() -> None:
    """Not even where their texts run together; without keys the client's salt is used as it is."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("1", "1:a"), ("11", ":a")]
    salts = {ClientTerms(Party(tenant), salted=True).salt(salt) for tenant, salt in pairs}
    assert len(salts) == len(pairs)
    assert {len(salt) for salt in salts} == {64}
    assert ClientTerms(Party("a")).salt("x") == "x"
    assert ClientTerms(Party("a")).salt(None) == ""


def test_the_meter_refuses_what_is_over_a_limit() -> None:
    """Requests and tokens a minute, and requests at one time; a Retry-After says when."""
    now_us = 0
    meter = LocalMeter(lambda: now_us)
    limits = KeyLimits(requests_per_minute=3, tokens_per_minute=100, under_way=2)
    first, second = meter.let_in("a", limits), meter.let_in("a", limits)
    with pytest.raises(Overloaded, match="2 requests are under way") as caught:
        meter.let_in("a", limits)
    assert (caught.value.reason, caught.value.retry_after_s) == ("key_limit", 1.0)
    meter.let_in("b", limits).over()
    first.over()
    first.over()
    third = meter.let_in("a", limits)
    second.over()
    with pytest.raises(Overloaded, match="3 requests a minute") as caught:
        meter.let_in("a", limits)
    assert caught.value.retry_after_s == 20.0
    third.spent(60)
    third.spent(160)
    third.over()
    now_us = 20_000_000
    with pytest.raises(Overloaded, match="100 tokens a minute") as caught:
        meter.let_in("a", limits)
    assert caught.value.retry_after_s == pytest.approx(16.6)
    now_us = 37_000_000
    meter.let_in("a", limits).over()


@pytest.mark.parametrize(
    ("host", "keys", "registry", "is_open", "why"),
    [
        ("0.0.0.0", "", "", False, "bound to 0.0.0.0, so clients need API keys"),
        ("127.0.0.1", "f", "", True, "open: contradicts"),
        ("127.0.0.1", "registry", "", False, "set `registry` too"),
        ("127.0.0.1", "", "", False, ""),
        ("0.0.0.0", "", "", True, ""),
        ("0.0.0.0", "f", "", False, ""),
    ],
)
def test_beyond_loopback_keys_are_required(
    host: str, keys: str, registry: str, is_open: bool, why: str
) -> None:
    """Unless the operator says that the gateway is open."""
    if not why:
        check_clients(host, keys, registry, is_open)
        return
    with pytest.raises(ConfigError, match=why):
        check_clients(host, keys, registry, is_open)


class Site:
    """A gateway with keys before one external engine."""

    def __init__(self, gateway: Gateway, engine: FakeVllm, http: HttpClient) -> None:
        self.engine = engine
        self._gateway = gateway
        self._http = http

    async def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> ClientResponse:
        """Call the gateway; underscores in names of headers stand for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self._http.request(
            method,
            f"http://127.0.0.1:{self._gateway.port}{path}",
            headers={"content-type": "application/json"} | named,
            body=b"" if body is None else msgspec.json.encode(body),
            timeout_s=10,
        )

    async def complete(self, secret: str, **headers: str) -> ClientResponse:
        """A completion with this key."""
        return await self.call("POST", "/v1/completions", BODY, **bearer(secret), **headers)


@contextlib.asynccontextmanager
async def site(file: Path, *keys: ApiKey, **config: Any) -> AsyncIterator[Site]:
    """Start all of it; `config`: further fields of GatewayConfig."""
    write(file, *keys)
    async with contextlib.AsyncExitStack() as stack:
        engine = await FakeVllm("e").start()
        stack.push_async_callback(engine.stop)
        spec = InstanceSpec(name="e", url=engine.url, events="off")
        settings = GatewayConfig(model="", port=0, token=TOKEN, keys=str(file), **config)
        gateway = await Gateway.start(settings, [spec])
        stack.push_async_callback(gateway.stop, 0)
        http = HttpClient()
        stack.push_async_callback(http.close)
        async with asyncio.timeout(10):
            while not gateway.conductor.instances():
                await asyncio.sleep(0.01)
        yield Site(gateway, engine, http)


def fault(reply: ClientResponse) -> tuple[int, str | None, str | None]:
    """Status, param and code."""
    error = msgspec.json.decode(reply.body)["error"]
    return reply.status, error["param"], error["code"]


def test_who_may_call_what(tmp_path: Path) -> None:
    """No key: 401 in OpenAI's shape. A missing scope: 403. The token, and admin keys: all."""

    async def test() -> None:
        keys = (
            made("ai"),
            made("ops", scopes=("admin",)),
            made("prom", scopes=("metrics",)),
        )
        async with site(tmp_path / "keys", *keys) as it:
            for secret in ("", "nobody", "ai ", "ms-x"):
                reply = await it.complete(secret.strip() + "?" if secret else "")
                assert fault(reply) == (401, "authorization", "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
                assert b"nobody" not in reply.body
            assert (await it.call("GET", "/v1/models")).status == 401
            for path in ("/health", "/ready", "/api/health"):
                assert (await it.call("GET", path)).status == 200
            assert (await it.call("GET", "/v1/models", x_api_key="ai")).status == 200
            for path, secret, status in (
                ("/v1/models", "ai", 200),
                ("/v1/models", "prom", 403),
                ("/v1/models", "ops", 200),
                ("/v1/models", TOKEN, 200),
                ("/metrics", "", 401),
                ("/metrics", "ai", 403),
                ("/metrics", "prom", 200),
                ("/metrics", "ops", 200),
                ("/metrics", TOKEN, 200),
                ("/api/instances", "ai", 403),
                ("/api/instances", "ops", 200),
                ("/api/instances", TOKEN, 200),
            ):
                got = (await it.call("GET", path, **bearer(secret))).status
                assert (path, secret, got) == (path, secret, status)
            assert (await it.complete("ai")).status == 200
            assert fault(await it.complete("ai", x_moonserve_tenant="ops")) == (
                403,
                "x-moonserve-tenant",
                None,
            )
            (call,) = it.engine.calls
            assert "authorization" not in call.headers
            assert "x-api-key" not in call.headers

    asyncio.run(test())


def test_limits_hold_and_are_counted(tmp_path: Path) -> None:
    """A 429 with the reason key_limit and a Retry-After; other keys and failed requests do not
    count."""

    async def test() -> None:
        keys = (made("a", requests_per_minute=2), made("b", tokens_per_minute=4, under_way=1))
        async with site(tmp_path / "keys", *keys, metrics_access="all") as it:
            assert [(await it.complete("a")).status for _ in range(2)] == [200, 200]
            reply = await it.complete("a")
            assert fault(reply) == (429, None, "key_limit")
            assert reply.headers["x-moonserve-reject-reason"] == "key_limit"
            assert 20 <= int(reply.headers["retry-after"]) <= 30
            assert (await it.complete("b")).status == 200
            assert fault(await it.complete("b"))[0] == 429
            assert (await it.complete("a", **{"x-moonserve-tenant": "other"})).status == 403
            assert (await it.call("GET", "/api/instances", **bearer("a"))).status == 403
            assert (await it.complete("nobody's")).status == 401
            page = (await it.call("GET", "/metrics")).body.decode()
            refused = 'moonserve_key_refusals_total{key="%s",reason="%s"} %.1f'
            reasons = ("a key_limit", "b key_limit", "a terms", "a scope", " unknown")
            for key, reason in (it.split(" ") for it in reasons):
                assert refused % (key, reason, 1) in page
            assert 'moonserve_rejected_requests_total{reason="key_limit"} 2.0' in page

    asyncio.run(test())


def test_every_api_needs_a_key_and_counts_for_its_limits(tmp_path: Path) -> None:
    """Tokenizers need the scope infer, and use no tokens; embeddings and Messages use those of
    their prompts. Refusals of Messages have Anthropic's shape."""

    async def test() -> None:
        keys = (
            made("a", tokens_per_minute=4),
            made("b", tokens_per_minute=4, requests_per_minute=9),
            made("prom", scopes=("metrics",)),
        )
        text, vectors = {"model": "m", "prompt": "sea"}, {"model": "m", "input": "some text"}
        chat = {"role": "user", "content": "hi"}
        talk = {"model": "m", "max_tokens": 2, "messages": [chat]}
        asked = {"/tokenize": text, "/v1/embeddings": vectors, "/v1/messages": talk}
        async with site(tmp_path / "keys", *keys) as it:
            for path, body in asked.items():
                assert (await it.call("POST", path, body)).status == 401
                assert (await it.call("POST", path, body, **bearer("prom"))).status == 403
            for _ in range(3):
                assert (await it.call("POST", "/tokenize", text, **bearer("a"))).status == 200
            assert (await it.call("POST", "/v1/embeddings", vectors, **bearer("a"))).status == 200
            refused = await it.call("POST", "/v1/messages", talk, **bearer("a"))
            assert fault(refused) == (429, None, "key_limit")
            assert int(refused.headers["retry-after"]) >= 1
            body = msgspec.json.decode(refused.body)
            assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")
            assert (await it.call("POST", "/v1/messages", talk, x_api_key="b")).status == 200
            assert (await it.call("POST", "/v1/messages", talk, x_api_key="b")).status == 429

    asyncio.run(test())


def test_tenants_share_no_kv_and_engines_see_a_salt(tmp_path: Path) -> None:
    """An external engine gets a cache_salt of each tenant, also in place of the client's own."""

    async def test() -> None:
        async with site(tmp_path / "keys", made("a"), made("b")) as it:
            for secret, more in (
                ("a", {}),
                ("b", {}),
                ("a", {"cache_salt": "s"}),
                ("a", {"cache_salt": None}),
            ):
                reply = await it.call("POST", "/v1/completions", BODY | more, **bearer(secret))
                assert reply.status == 200
            salts = [call.body["cache_salt"] for call in it.engine.calls]
            wanted = [("a", ""), ("b", ""), ("a", "s"), ("a", "")]
            assert salts == [
                ClientTerms(Party(who), salted=True).salt(salt) for who, salt in wanted
            ]
            assert len({*salts}) == 3
        async with site(tmp_path / "none", made("a"), salt_by="none") as it:
            assert (await it.complete("a")).status == 200
            (call,) = it.engine.calls
            assert "cache_salt" not in call.body

    asyncio.run(test())


def test_browsers_may_use_models_where_that_is_set(tmp_path: Path) -> None:
    """A preflight needs no key; replies and errors can be read; another page gets no leave."""

    async def test() -> None:
        app = "https://app.example"
        async with site(tmp_path / "keys", made("a"), cors_origins=f"{app}, http://x:1") as it:
            asks = {
                "origin": app,
                "access_control_request_method": "POST",
                "access_control_request_headers": "authorization,content-type,x-stainless-os",
            }
            reply = await it.call("OPTIONS", "/v1/chat/completions", **asks)
            assert reply.status == 204
            assert reply.headers["access-control-allow-origin"] == app
            assert reply.headers["access-control-allow-headers"].endswith("x-stainless-os")
            assert "POST" in reply.headers["access-control-allow-methods"]
            for reply in (await it.complete("a", origin=app), await it.complete("?", origin=app)):
                assert reply.headers["access-control-allow-origin"] == app
                assert "x-request-id" in reply.headers["access-control-expose-headers"]
                assert reply.headers["vary"] == "origin"
            reply = await it.complete("a", origin="https://evil.example")
            assert "access-control-allow-origin" not in reply.headers
            reply = await it.call("OPTIONS", "/api/instances", origin=app)
            assert reply.status == 405
            reply = await it.call("GET", "/api/instances", **bearer(TOKEN), origin=app)
            assert reply.status == 403
        async with site(tmp_path / "off", made("a")) as it:
            assert (await it.call("OPTIONS", "/v1/chat/completions", **asks)).status == 405
            reply = await it.complete("a", origin=app)
            assert "access-control-allow-origin" not in reply.headers

    asyncio.run(test())


def test_a_setting_of_origins_is_checked() -> None:
    """A path or a name alone is no origin."""
    for wrong in ("app.example", "https://app.example/", "https://", "null"):
        with pytest.raises(ConfigError, match="cors_origins"):
            Cors([wrong])
    assert dict(Cors(["*"]).headers({"origin": "http://any"}))["access-control-allow-origin"] == "*"
    assert dict(Cors(["*"]).headers({})) == {}


def test_keys_of_the_registry_are_used_by_all_gateways(caplog: pytest.LogCaptureFixture) -> None:
    """A change is noticed at once; if an entry cannot be read, only its own client is refused."""

    async def test() -> None:
        registry, keys = MemoryRegistry(), Keys()
        source = RegistrySource(keys, registry)
        await registry.put("keys/a", msgspec.json.encode(made("a")))
        await source.prepare()
        assert keys.find("a") == made("a")
        await source.start(0)
        await registry.put("keys/b", msgspec.json.encode(made("b")))
        await registry.put("keys/c", b"nonsense")
        async with asyncio.timeout(5):
            while keys.find("b") is None or not source.alarms():
                await asyncio.sleep(0.01)
        assert "keys/c is not used" in caplog.text
        assert "keys/c" not in source.alarms()[0], "clients can read it"
        await registry.remove("keys/a")
        async with asyncio.timeout(5):
            while keys.find("a") is not None:
                await asyncio.sleep(0.01)
        await source.stop()

    asyncio.run(test())

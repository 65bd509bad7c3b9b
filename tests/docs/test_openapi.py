"""What processes say of themselves at / and /openapi.json is what they serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import BadRequest
from moonserve.live.control import control
from moonserve.live.control.config import GatewayConfig
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.http.server import App
from moonserve.live.openai import external, messages, request, responses, unserved
from moonserve.live.process import gateway
from moonserve.live.process.fronts import ConductorProcess, FrontProcess
from moonserve.live.process.gateway import Gateway
from moonserve.live.process.openapi import OPERATIONS, Document, joined, mounted
from moonserve.live.process.parts import Process
from tests.support.registry import MemoryRegistry
from tests.support.serving import ByteText

TOKEN = "the-secret-of-this-test"
WRONG: Any = [[{}]]
"""No field of a body that has a type takes it."""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
MESSAGES = {**CHAT, "max_tokens": 1}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": COMPLETION,
    "/detokenize": {"model": "m", "tokens": [1]},
}
KINDS = ("workers", "engines", "conductor", "registry", "front")


class Served:
    """A process that listens, and a client for it."""

    def __init__(self, process: Process, http: HttpClient, conductor: Served | None = None) -> None:
        """conductor: serves what this one passes on."""
        server = process._server
        assert server is not None
        self.app: App = server._connections.app
        self._http = http
        self._url = f"http://127.0.0.1:{process.port}"
        self._conductor = conductor

    async def call(
        self, method: str, path: str, body: Any = None, token: str = TOKEN, **headers: str
    ) -> ClientResponse:
        """Call it with the cluster's token."""
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        data = b"" if body is None else json.dumps(body).encode()
        return await self._http.request(
            method, self._url + path, headers=headers, body=data, timeout_s=10
        )

    async def document(self) -> Document:
        """Its /openapi.json."""
        reply = await self.call("GET", "/openapi.json", token="")
        assert reply.status == 200
        return msgspec.json.decode(reply.body, type=Document)

    def routes(self) -> set[tuple[str, str]]:
        """Every route and path prefix that the process, or its Conductor, has."""
        own = {*self.app.routes, *self.app.prefixes}
        return own if self._conductor is None else own | self._conductor.routes()


@contextlib.asynccontextmanager
async def served(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """One of the processes that KINDS names."""
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        http = HttpClient()
        stack.push_async_callback(http.close)

        async def run(process: Process, conductor: Served | None = None) -> Served:
            stack.push_async_callback(process.stop, 0)
            return Served(process, http, conductor)

        config = GatewayConfig(model="", port=0, token=TOKEN, cors_origins="*")
        if kind == "workers":
            text: Any = ByteText()
            monkeypatch.setattr(gateway, "read_text", lambda ref: gateway.Text("m", 100, text))
            yield await run(await Gateway.start(config))
        elif kind == "engines":
            yield await run(await Gateway.start(config, []))
        elif kind == "registry":

            async def opened(*given: Any) -> MemoryRegistry:
                return MemoryRegistry()

            monkeypatch.setattr(control, "open_registry", opened)
            config = msgspec.structs.replace(config, registry="etcd://127.0.0.1:1")
            yield await run(await ConductorProcess.start(config, []))
        else:
            leader = await ConductorProcess.start(config, [])
            conductor = await run(leader)
            if kind == "conductor":
                yield conductor
                return
            at = f"127.0.0.1:{leader.port}"
            front = await FrontProcess.start(msgspec.structs.replace(config, conductor=at))
            yield await run(front, conductor)


@pytest.mark.parametrize("kind", KINDS)
def test_every_route_is_described_and_every_described_route_exists(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document of a process has its routes and no others; a described path answers."""

    async def body() -> None:
        async with served(kind, monkeypatch) as it:
            paths = (await it.document())["paths"]
            described = {
                (m.upper(), path) for path, operations in paths.items() for m in operations
            }
            there = {mounted(*route) for route in described}
            missing = it.routes() - there
            assert not missing, f"describe it in live/process/openapi.py, OPERATIONS: {missing}"
            assert there <= it.routes()
            for method, path in described:
                reply = await it.call(method, re.sub(r"\{\w+\}", "some", path))
                assert reply.status != 405, (method, path)
                assert b"there is no path" not in reply.body, (method, path)

    asyncio.run(body())


def test_a_conductor_says_who_serves_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was given its address learns that it needs a gateway's."""

    async def body() -> None:
        async with served("conductor", monkeypatch) as it:
            reply = await it.call("POST", "/v1/chat/completions")
            assert reply.status == 404
            assert b"a Conductor serves no clients; send the request to a gateway" in reply.body
            reply = await it.call("POST", "/v1/audio/speech")
            assert b"no path /v1/audio/speech for POST; GET /openapi.json lists" in reply.body

    asyncio.run(body())


def test_all_descriptions_are_of_some_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No description is left of a route that is gone."""

    async def body() -> None:
        found: set[tuple[str, str]] = set()
        for kind in ("workers", "engines", "conductor", "registry"):
            async with served(kind, monkeypatch) as it:
                found |= it.routes()
        gone = {mounted(*route) for route in OPERATIONS} - found
        assert not gone, f"nobody serves it, remove it from OPERATIONS: {gone}"

    asyncio.run(body())


@pytest.mark.parametrize("kind", ["workers", "engines"])
def test_described_fields_are_those_that_the_parser_takes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server checks every described field with a type, and names no field beyond them."""

    async def body() -> None:
        async with served(kind, monkeypatch) as it:
            document = await it.document()
            checked = 0
            compared = set()
            for path, operations in document["paths"].items():
                content = operations.get("post", {}).get("requestBody", {}).get("content", {})
                if "application/json" not in content:
                    continue
                schema = content["application/json"]["schema"]
                fields = properties(schema, document)
                for name, field in fields.items():
                    if field in ({}, {"default": None}):  # any JSON: it goes to the engine
                        continue
                    base = BASES.get(path, {})
                    said = await it.call("POST", path, {**base, name: WRONG})
                    assert said.status == 400, (path, name)
                    assert name in said.body.decode(), (path, name)
                    checked += 1
                said = await it.call("POST", path, {"qqqq": 1})
                if known := re.search(r"qqqq.*known are ([\w, ]+)", said.body.decode()):
                    assert sorted(known[1].split(", ")) == sorted(fields), path
                    compared.add(path)
            assert checked > 40
            assert {"/api/select", "/api/reserve", "/api/release"} <= compared

    asyncio.run(body())


def properties(schema: dict[str, Any], document: Document) -> dict[str, Any]:
    """The fields of a body: of an object, or of the first of several shapes."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return properties(next(it for it in schema["anyOf"] if "$ref" in it), document)
    found: dict[str, Any] = schema["properties"]
    return found


def test_bodies_are_described_whole() -> None:
    """What the parsers decode for clients is what is described, in both kinds of gateways."""
    for form, parsed, refused in (
        ("chat", request._ChatBody, unserved.CHAT),
        ("completion", request._CompletionBody, unserved.COMPLETION),
    ):
        shape = request.generation_shape(form)  # type: ignore[arg-type]
        described = {*shape.struct.__struct_fields__, *shape.harmless, *refused.foreign}
        assert described == {*parsed.__struct_fields__}
        passed = external.body_shape(form)  # type: ignore[arg-type]
        assert {*external._RESERVED} < {*passed.hidden} < {*passed.struct.__struct_fields__}


def test_bodies_of_responses_and_messages_are_described_whole() -> None:
    """What the parsers decode is what is described, and fields of sisters, which are refused."""
    for shape, parsed, refused in (
        (responses.SHAPE, responses._ResponseBody, unserved.RESPONSES),
        (messages.SHAPE, messages._MessagesBody, unserved.MESSAGES),
        (messages.COUNT_SHAPE, messages._CountBody, unserved.COUNT_TOKENS),
    ):
        described = {*shape.struct.__struct_fields__, *shape.harmless, *refused.foreign}
        assert described == {*parsed.__struct_fields__}


PARSERS: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": lambda body: request.parse_chat(body, 9),
    "/v1/completions": lambda body: request.parse_completion(body, 9),
    "/v1/responses": lambda body: responses.parse_response(body, 9),
    "/v1/messages": lambda body: messages.parse_messages(body, 9),
}
BEYOND = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1}
"""Kind of a bound -> how far from it a number is out of bounds."""


@pytest.mark.parametrize("path", PARSERS)
def test_bounds_of_numbers_are_those_that_are_checked(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number at its bound is taken, one beyond it refused by name."""

    async def body() -> Document:
        async with served("workers", monkeypatch) as it:
            return await it.document()

    document = asyncio.run(body())
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    checked = 0
    for name, field in properties(content["schema"], document).items():
        kinds = [it for it in field.get("anyOf", [field]) if {*it} & {*BEYOND}]
        for kind in kinds:
            more = {"logprobs": True} if name == "top_logprobs" else {}
            for bound in {*kind} & {*BEYOND}:
                beyond = kind[bound] + BEYOND[bound]
                ask = {**BASES[path], **more}
                if bound != "exclusiveMinimum":
                    PARSERS[path](json.dumps({**ask, name: kind[bound]}).encode())
                with pytest.raises(BadRequest) as refused:
                    PARSERS[path](json.dumps({**ask, name: beyond}).encode())
                assert refused.value.param == name
                checked += 1
    assert checked >= 8


def test_parameters_have_the_types_that_their_parsers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of another type is refused by name, and every field of a query is described."""

    async def body() -> None:
        async with served("workers", monkeypatch) as it:
            found = {}
            for path, operations in (await it.document())["paths"].items():
                for one in operations.get("get", {}).get("parameters", ()):
                    if one["in"] != "query":
                        continue
                    found[path, one["name"]] = one["schema"]
                    if one["schema"].get("type") == "string":
                        continue
                    said = await it.call("GET", f"{path}?{one['name']}=x")
                    assert said.status == 400, (path, one)
                    assert json.loads(said.body)["error"]["param"] == one["name"]
        assert found["/api/decisions", "limit"] == {
            "type": "integer",
            "minimum": 1,
            "maximum": 1_000,
            "default": 100,
        }
        assert found["/api/segments", "limit"]["type"] == "integer"
        assert found["/api/decisions", "late"]["type"] == "boolean"
        assert found["/api/history", "step"]["enum"] == [1, 15]
        for (_, path), route in OPERATIONS.items():
            if route.query:
                assert {*route.query} == {*route.asks.__struct_fields__}, path

    asyncio.run(body())


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_holds_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """References lead to schemas, and names of operations are there once."""

    async def body() -> None:
        async with served(kind, monkeypatch) as it:
            document = await it.document()
        text = json.dumps(document)
        schemas = document["components"]["schemas"]
        references = re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text)
        assert references
        assert {*references} <= {*schemas}
        operations = [one for path in document["paths"].values() for one in path.values()]
        names = [one["operationId"] for one in operations]
        assert len(names) == len({*names})
        assert all(one["summary"] and one["responses"] for one in operations)

    asyncio.run(body())


def test_a_fronts_own_operations_win() -> None:
    """What a front serves itself is described by it, all else by its Conductor."""
    own: Document = {"paths": {"/ready": {"get": 1}}, "components": {"schemas": {"A": 1}}}
    other: Document = {
        "paths": {"/ready": {"get": 2, "post": 2}, "/query": {"post": 2}},
        "components": {"schemas": {"A": 2, "B": 2}},
    }
    both = joined(own, other)
    assert both["paths"] == {"/ready": {"get": 1, "post": 2}, "/query": {"post": 2}}
    assert both["components"]["schemas"] == {"A": 1, "B": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_page_answers_everybody(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser gets a page, a program JSON, curl text; all links lead to something."""

    async def body() -> None:
        async with served(kind, monkeypatch) as it:
            page = await it.call("GET", "/", token="", accept="text/html,*/*;q=0.8")
            assert page.headers["content-type"].startswith("text/html")
            plain = await it.call("GET", "/", token="", accept="*/*")
            assert plain.headers["content-type"].startswith("text/plain")
            said = await it.call("GET", "/", token="", accept="application/json")
            links = json.loads(said.body)["links"]
            assert {"/health", "/metrics", "/openapi.json", "/ui"} <= {*links}
            assert re.findall(r'href="([^"]+)"', page.body.decode()) == [*links]
            for path in links:
                assert path in plain.body.decode()
                assert (await it.call("GET", path)).status in (200, 503), path
                assert b"there is no path" not in (await it.call("GET", path)).body

    asyncio.run(body())

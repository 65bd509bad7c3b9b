"""The page for operators, and what it is made from: its files, its history, its prefixes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonserve import page
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Refuse
from moonserve.core.units import RequestId
from moonserve.live.access.scopes import scope_of
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse
from tests.support.inproc import BLOCK, TOKEN, Site, site

OWN = {"html", "css", "js"}


async def get(it: Site, path: str, **headers: str) -> ClientResponse:
    """A reply of the gateway."""
    return await it.http.request("GET", it.url + path, headers=headers, timeout_s=5)


async def told(it: Site, path: str) -> Any:
    """The JSON of an admin path, read with the token."""
    reply = await get(it, path, **bearer(TOKEN))
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


async def until(it: Site, path: str, true: Callable[[Any], object], within_s: float = 15.0) -> Any:
    """Read a path until it says so."""
    async with asyncio.timeout(within_s):
        while not true(found := await told(it, path)):
            await asyncio.sleep(0.05)
    return found


def on(test: Callable[[Site], Awaitable[None]], **config: Any) -> None:
    """Run a test on a gateway without workers."""

    async def main() -> None:
        async with site(**config) as it:
            await test(it)

    asyncio.run(main())


def test_the_page_needs_no_key_and_binds_the_browser_to_this_server() -> None:
    """All its files come with headers by which it loads nothing from elsewhere, and no page of
    another server can frame it; what it shows needs the key."""

    async def test(it: Site) -> None:
        names = [name for name in page.names() if name != "index.html"]
        assert {"charts.js", "style.css", "app.js"} <= set(names)
        for path in ("/ui", *(f"/ui/{name}" for name in names)):
            reply = await get(it, path)
            assert reply.status == 200
            assert reply.body
            policy = reply.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            kind = path.rpartition(".")[2] if "." in path else "html"
            assert kind.replace("js", "javascript") in reply.headers["content-type"]
        assert (await get(it, "/ui/__init__.py")).status == 404
        assert (await get(it, "/ui/../config.py")).status in (401, 404)
        for path in ("/api/history", "/api/prefixes", "/api/decisions", "/api/instances"):
            assert (await get(it, path)).status == 401
        assert (await get(it, "/ui/none.js")).status == 404
        slash = await get(it, "/ui/")
        assert (slash.status, slash.headers["location"]) == (308, "../ui")

    on(test)


def test_without_the_page() -> None:
    """--no-ui: its paths are unknown; the history stays, for other programs."""

    async def test(it: Site) -> None:
        assert (await get(it, "/ui")).status == 404
        assert (await get(it, "/ui/app.js")).status == 404
        assert (await told(it, "/api/history"))["step_s"] == 1
        assert (
            "/ui" not in json.loads((await get(it, "/", accept="application/json")).body)["links"]
        )

    on(test, no_ui=True)


def test_only_the_pages_own_paths_are_open() -> None:
    """A path that only begins like the page's needs a key."""
    assert scope_of("/ui") is scope_of("/ui/app.js") is None
    assert scope_of("/uis") == scope_of("/ui.json") == "admin"


def test_the_files_name_no_other_host_and_no_missing_file() -> None:
    """Every import and every link is another file of the page, and none is left over."""
    found = {"index.html"}
    for name in page.names():
        text = page.text(name)
        assert name.rpartition(".")[2] in OWN
        hosts = set(re.findall(r"https?://[^\s\"'`]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, name
        found |= set(re.findall(r'from "\./([\w.]+)"', text))
        found |= set(re.findall(r'(?:href|src)="ui/([\w.]+)"', text))
    assert found == set(page.names())


def test_the_history_counts_what_was_served() -> None:
    """Requests that are over are in a sample, with the tokens that they reused; joins are events;
    only what is new comes with `since`."""

    async def test(it: Site) -> None:
        began_ms = time.time() * 1_000
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        prompt = [7] * (4 * BLOCK + 1)
        for _ in range(2):
            await it.tokens(prompt, 4, **{"x-moonserve-tenant": "blue"})
            await it.settle()
        first = await until(it, "/api/history", lambda it: sum(it["columns"]["in_time"]) == 2)
        columns = first["columns"]
        assert sum(columns["prompt_tokens"]) == 2 * len(prompt)
        assert sum(columns["delivered_tokens"]) == sum(columns["promised_tokens"]) == 4 * BLOCK
        assert sum(columns["output_tokens"]) == 8
        assert [it for it in columns["ttft_p50_ms"] if it is not None]
        assert (columns["prefills"][-1], columns["decodes"][-1]) == (1, 1)
        assert first["minute"]["in_time"] == 2
        assert first["ttft_slo_ms"] == 5_000
        assert first["verdict"]["text"].startswith("All 2 requests of the last ")
        events = {(it["what"], it["subject"]) for it in first["lane"]}
        assert {("join", "p0"), ("join", "d0"), ("leader", "this Conductor")} <= events
        assert all(began_ms < it["at_ms"] <= first["now_ms"] for it in first["lane"])
        assert "heat" not in first
        last_ms = columns["at_ms"][-1]
        newer = await until(it, f"/api/history?since={last_ms}", lambda it: it["columns"]["at_ms"])
        assert newer["columns"]["at_ms"][0] > last_ms
        assert not newer["lane"]

    on(test, slo=Slo(5_000_000, None))


def test_the_history_shows_each_instance_and_pair() -> None:
    """With `heat`: how full each one was, and which pairs worked together; an instance that is
    lost is an event with its reason."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        await it.tokens([5] * 40, 4)
        await it.settle()
        path = "/api/history?heat=true"
        found = await until(it, path, lambda it: it["heat"] and it["pairs"])
        column = found["heat"][-1]
        assert set(column["instances"]) == {"p0", "d0"}
        assert len(column["percents"]) == 2
        [requests, failed, bytes_per_s] = found["pairs"]["p0"]["d0"]
        assert requests == pytest.approx(1, abs=0.1)
        assert failed == 0
        assert bytes_per_s > 0
        await it.lose("d0")
        lost = await until(it, path, lambda it: "d0" in losses(it))
        assert losses(lost)["d0"] == "it sent no heartbeat for too long"
        assert lost["verdict"]["level"] == "bad"
        assert "no decode instance is there" in lost["verdict"]["text"].lower()

    def losses(found: Any) -> dict[str, str]:
        return {it["subject"]: it["detail"] for it in found["lane"] if it["what"] == "loss"}

    on(test, dead_after_us=2_000_000)


@pytest.mark.parametrize("no_ui", [False, True])
def test_a_request_names_its_address_on_the_page(no_ui: bool) -> None:
    """Where the page is served, the explanation of a request has the path that shows it."""

    async def test(it: Site) -> None:
        loop = it.gateway.conductor
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        loop.open(Request(RequestId("r.1"), "m", 9), (), inbox)
        assert isinstance(await inbox.get(), Refuse)  # there is no instance
        found = await told(it, "/api/decisions/r.1")
        assert found["request"] == "r.1"
        assert found["page"] == (None if no_ui else "/ui#/requests/r.1")

    on(test, no_ui=no_ui)


def test_the_prefixes_show_what_is_shared_and_held() -> None:
    """What two prompts share is one node with two requests, and the pool holds it."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        head = list(range(1, 1 + 3 * BLOCK))
        for tail in (100, 200):
            await it.tokens([*head, *range(tail, tail + 2 * BLOCK), 9], 2)
            await it.settle()
        found = await told(it, "/api/prefixes")
        nodes = found["nodes"]
        assert found["requests"] == 2
        assert sorted((it["tokens"], it["requests"]) for it in nodes) == [
            (2 * BLOCK, 1),
            (2 * BLOCK, 1),
            (3 * BLOCK, 2),
        ]
        assert nodes[0]["parent"] is None
        assert [it["parent"] for it in nodes[1:]] == [0, 0]
        assert all(it["held_tokens"] == it["tokens"] for it in nodes)
        assert all(it["holders"] >= 1 for it in nodes)
        assert all(len(bytes.fromhex(it["key"])) == 32 for it in nodes)

    on(test)


@pytest.mark.parametrize(
    ("query", "field"), [("step=2", "step"), ("step=x", "step"), ("sinc=4", "sinc")]
)
def test_a_wrong_query_names_its_field(query: str, field: str) -> None:
    """400, with the field in `param`."""

    async def test(it: Site) -> None:
        reply = await get(it, f"/api/history?{query}", **bearer(TOKEN))
        assert reply.status == 400
        assert field in json.loads(reply.body)["error"]["message"]

    on(test)

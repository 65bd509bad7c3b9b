"""The page for operators in a real browser: what a reader sees, and what a checker of
accessibility finds, with a busy cluster and with an empty one.

Needs Chromium, Node.js and the two packages of package.json here; `make test-page` fetches these.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from moonserve.core.request import Slo
from moonserve.core.schedule.advice import Advice, ClusterShape, LoadOutcome, TwinTrial
from moonserve.core.schedule.cost import Cost
from moonserve.live.http.auth import bearer
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.report import report
from moonserve.sim.setup import Setup
from moonserve.sim.synthesize import synthesize
from tests.support.browser import BROWSER, NODE
from tests.support.inproc import TOKEN, Site, site

pytestmark = [
    pytest.mark.page,
    pytest.mark.model,  # for its tokenizer
]
LOOK = Path(__file__).with_name("look.mjs")
LOOK_S = 240.0
MODES = (("light", 1_240), ("dark", 1_240), ("light", 375))
SLOW = Cost((6_000, 30.0, 0.0, 0.0, 12_000, 300.0, 0.5), (5, 0.005), learns=False)
"""A prefill of 1,000 tokens takes 36 ms, a step of decode 12 ms or more."""
VIEWS = {"": "svg[role=img]", "requests": "main table, main .empty", "instances": "main section"}
VIEWS |= {"cache": "main .tiles", "tenants": "main section"}
VIEWS |= {"what-if": "main .tiles, main section"}


async def look(url: str, visits: list[dict[str, Any]], key: str = TOKEN, act: str = "") -> Any:
    """What the browser reports; see look.mjs."""
    asked = {"browser": BROWSER, "url": url, "key": key, "visits": visits, "act": act}
    process = await asyncio.create_subprocess_exec(
        NODE or "node",
        LOOK,
        json.dumps(asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LOOK_S):
        said, wrong = await process.communicate()
    assert process.returncode == 0, wrong.decode()[-2_000:]
    return json.loads(said)


def visit(view: str, mode: str, width: int, wait: str = "") -> dict[str, Any]:
    """One view of the page."""
    return {
        "name": f"{view or 'overview'}, {mode}, {width}",
        "hash": f"#/{view}",
        "mode": mode,
        "width": width,
        "height": 850,
        "wait": wait or VIEWS[view],
    }


def check(seen: list[dict[str, Any]], host: str) -> None:
    """Nothing in the console, no request elsewhere, nothing wider than the window, and nothing
    that axe-core finds."""
    for it in seen:
        assert it["errors"] == [], it["name"]
        assert it["axe"] == [], it["name"]
        assert {urlsplit(url).netloc for url in it["requests"]} <= {host, ""}, it["name"]
        assert it["wide"] <= 0, f"{it['name']}: {it['wide']} pixels wider than the window"
        assert it["cookies"] == ["", 0], it["name"]


async def ask(it: Site, rng: random.Random, heads: list[list[int]]) -> None:
    """A request that shares a prefix with others; it may be refused."""
    prompt = [*rng.choice(heads), *(rng.randrange(9, 9_000) for _ in range(rng.randrange(9, 400)))]
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
    reply = await it.http.request(
        "POST",
        it.url + "/v1/completions",
        headers={"x-moonserve-tenant": rng.choice(["blue", "green"])},
        body=json.dumps(body).encode(),
        timeout_s=60,
    )
    assert reply.status in (200, 429), reply.body


async def load(it: Site) -> None:
    """Some requests a second, until it is cancelled."""
    rng = random.Random(3)
    heads = [[rng.randrange(9, 9_000) for _ in range(size)] for size in (64, 320, 640)]
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(ask(it, rng, heads))
            await asyncio.sleep(0.12)


@asynccontextmanager
async def busy() -> AsyncIterator[Site]:
    """A cluster under load that refuses some requests, with samples of some seconds."""
    async with site(slo=Slo(120_000, 40_000)) as it:
        for name in ("p0", "p1"):
            await it.add(name, "prefill", SLOW)
        for name in ("d0", "d1"):
            await it.add(name, "decode", SLOW)
        loading = asyncio.create_task(load(it))
        try:
            async with asyncio.timeout(60):
                while len((await told(it, "/api/history?heat=true"))["heat"]) < 2:
                    await asyncio.sleep(0.5)
            await advise(it)
            yield it
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)


async def advise(it: Site) -> None:
    """What a twin might find."""

    def outcome(in_time: float, refused: float) -> LoadOutcome:
        return LoadOutcome(420, in_time, refused, 81.0, 119.0, 18.4, 31.0)

    now = ClusterShape(2, 2, 0, "kvcache_centric")
    shares = {(2, 2): (0.71, 0.28), (3, 2): (0.72, 0.26), (2, 3): (0.93, 0.05), (2, 4): (0.995, 0)}
    trials = [
        TwinTrial(msgspec.structs.replace(now, prefill=p, decode=d), outcome(*share))
        for (p, d), share in shares.items()
    ]
    late = msgspec.structs.replace(now, policy="late_binding")
    advice = Advice(
        text="Decode binds: with 2 + 4 the same load would have had 99% in time, now 70%.",
        binds="decode",
        now=now,
        wanted=msgspec.structs.replace(now, decode=4),
        happened=outcome(0.704, 0.27),
        trials=(*trials, TwinTrial(late, outcome(0.8, 0.1))),
        target=0.99,
        ttft_slo_ms=120.0,
        tbt_slo_ms=40.0,
        from_ms=1_800_000_000_000,
        until_ms=1_800_000_060_000,
        every_s=60.0,
        took_s=8.2,
    )
    reply = await it.http.request(
        "POST",
        it.url + "/internal/advice",
        headers=bearer(TOKEN),
        body=msgspec.json.encode(advice),
        timeout_s=10,
    )
    assert reply.status == 200, reply.body


async def told(it: Site, path: str) -> Any:
    """The JSON of an admin path."""
    reply = await it.http.request("GET", it.url + path, headers=bearer(TOKEN), timeout_s=10)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def on(cluster: Callable[[], Any], test: Callable[[Site], Awaitable[None]]) -> None:
    """Run a test on a cluster."""

    async def main() -> None:
        async with cluster() as it:
            await test(it)

    asyncio.run(main())


@pytest.mark.parametrize(("mode", "width"), MODES)
def test_each_view_of_a_busy_cluster(mode: str, width: int) -> None:
    """Each view shows what the cluster does, in light and dark and on a phone."""

    async def test(it: Site) -> None:
        rows = await told(it, "/api/decisions?limit=500")
        served = next(row["request"] for row in rows if row["outcome"] == "length")
        visits = [visit(f"requests/{served}", mode, width, "h1 .id")]  # it is kept for a while only
        visits += [visit(view, mode, width) for view in VIEWS]
        seen = await look(it.url + "/ui", visits)
        check(seen, urlsplit(it.url).netloc)
        text = {one["name"].split(",")[0]: one["text"] for one in seen}
        assert "requests of the last" in text["overview"]
        for said in ("Time to first token", "goal 120 ms", "p0 joined", "From prompt tokens"):
            assert said in text["overview"]
        pictures = seen[1]["pictures"]
        assert any(label.startswith("Time to first token. Latest: p50 ") for label in pictures)
        assert any("delivered: " in label for label in pictures)
        for said in ("in time", "blue", "green", "d0"):
            assert said in text["requests"]
        for said in ("4 instances", "How full each instance was", "From prefill to decode"):
            assert said in text["instances"]
        assert "Prefixes that were asked for lately" in text["cache"]
        assert "held now" in text["cache"]
        assert "of the work" in text["tenants"]
        assert "green" in text["tenants"]
        for said in ("Decode binds: with 2 + 4", "(wanted)", "late_binding", "Instances wanted"):
            assert said in text["what-if"]
        account = text[f"requests/{served}"]
        for said in (
            "Where its time went",
            "by candidate",
            "Reuse delivered",
            "to the first token",
        ):
            assert said in account

    on(busy, test)


def test_each_view_of_an_empty_cluster() -> None:
    """Each view says why it shows nothing, and what to do."""

    async def test(it: Site) -> None:
        visits = [visit(view, "light", 1_240) for view in VIEWS]
        visits.append(visit("requests/none", "light", 1_240, "h1 .id"))
        seen = await look(it.url + "/ui", visits)
        missing = seen.pop()
        assert "keeps no account of it" in missing["text"]
        check(seen, urlsplit(it.url).netloc)
        overview, requests, instances, cache, tenants, whatif = [one["text"] for one in seen]
        assert "No prefill and no decode instance is there" in overview
        assert "No prompt was placed in this time" in overview
        assert "No request has come since this process started" in requests
        assert "No instance has joined" in instances
        assert "No prompt with a full block of tokens has come yet" in cache
        assert "No request has ended since this process started" in tenants
        assert f"moonserve twin --url {it.url}" in whatif

    on(site, test)


def test_a_refused_request_is_explained() -> None:
    """The account of a 429 shows its objective, and when it would have fitted."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill", SLOW)
        await it.add("d0", "decode", SLOW)
        prompt = list(range(9, 2_000))
        body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 2}
        refused = ""
        for number in range(40):
            reply = await it.http.request(
                "POST",
                it.url + "/v1/completions",
                headers={"x-request-id": f"r{number}"},
                body=json.dumps(body | {"prompt": [number + 9, *prompt]}).encode(),
                timeout_s=60,
            )
            if reply.status == 429:
                refused = f"r{number}"
                break
        assert refused, "2,000 tokens take more than 50 ms"
        seen = await look(it.url + "/ui", [visit(f"requests/{refused}", "light", 1_240, "h1 .id")])
        check(seen, urlsplit(it.url).netloc)
        assert "It missed its objective by" in seen[0]["text"]
        assert "refused (ttft_slo)" in seen[0]["text"]
        assert any("objective 50 ms" in label for label in seen[0]["pictures"])

    on(lambda: site(slo=Slo(50_000, None)), test)


def test_the_key_is_asked_for_and_kept_in_the_tab_only() -> None:
    """A wrong key is refused in words, the right one opens the page, and it can be forgotten."""

    async def test(it: Site) -> None:
        seen = await look(it.url + "/ui", [], act="key")
        steps = seen["act"]
        assert steps["focused"] == "key"
        assert "missing or wrong" in steps["wrong"]
        assert steps["kept"] == [[TOKEN], 0, ""]
        assert steps["left"] is None
        assert all(TOKEN not in url for url in seen["requests"])

    on(site, test)


def test_a_request_is_opened_by_keyboard() -> None:
    """Every control has a visible focus, in order, and a list that is drawn anew keeps it."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        await it.tokens([5] * 20, 3, **{"x-request-id": "r1"})
        await it.settle()
        steps = (await look(it.url + "/ui", [], act="keyboard"))["act"]
        assert steps["names"][-1] == ["r1", True]
        assert all(visible for _, visible in steps["names"])
        assert steps["still"] == "r1"
        assert steps["opened"] == "r1"

    on(site, test)


def test_charts_draw_what_they_are_given() -> None:
    """Round ticks, decades of equal room, gaps for what is missing, cells of one shade together,
    and no text as markup."""

    async def test(it: Site) -> None:
        seen = (await look(it.url + "/ui", [], key="", act="charts"))["act"]
        assert seen["ticks"] == [20, 25, 30, 35, 40]
        assert seen["logTicks"] == [1, 2, 5, 10, 20, 50, 100]
        assert seen["middle"] == pytest.approx(100)
        assert seen["one"] >= 1
        assert seen["runs"] == [[0, 2, 12], [2, 3, 0], [4, 5, 12]]
        assert seen["path"].count("M") == 2
        assert "goal 30 s" in seen["said"]
        assert seen["label"] == "t. At the right end: a 100.0%; goal 30 s"
        assert seen["markup"] == 0
        assert seen["words"] == [
            *("99.9%", "100.0%", "0.5 ms", "1.23 s", "10 min", "–", "1,234,567", "3 MiB", "12.3k"),
        ]

    on(site, test)


def test_a_report_of_a_simulation_draws_its_charts(tmp_path: Path) -> None:
    """The file opens without a network; every chart is drawn; axe-core finds nothing."""
    sim = Simulation(synthesize(3, 60, 2.0), Setup(2, 2))
    sim.run()
    file = tmp_path / "run.html"
    file.write_text(report(sim, measure(sim, 0.0), "a run", "for a test"))
    visits = [
        {**visit("", mode, width, "figure svg"), "hash": "", "name": f"report, {mode}, {width}"}
        for mode, width in MODES
    ]
    seen = asyncio.run(look(file.as_uri(), visits, key=""))
    check(seen, "")
    for one in seen:
        assert len(one["pictures"]) == 10
        assert "nothing to show" not in one["text"]

"""Debian's Prometheus scrapes a cluster under load, and answers every query of deploy/."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import yaml

from moonserve.core.request import Slo
from moonserve.core.schedule.advice import Advice, ClusterShape
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient, UpstreamError
from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.board import RULES, RULES_TEST, Query, of_alerts, of_board
from tests.support.inproc import TOKEN, Site, site

pytestmark = [pytest.mark.prometheus, pytest.mark.model]
EXTERNAL = re.compile(r"moonserve_instance_(up|trust|hit_|events_)|moonserve_conductor_leads")
"""Metrics of external engines and of a registry, which this cluster has not got."""
_SCRAPES = 6
_NOW = ClusterShape(2, 1, 0, "kvcache_centric")


def test_promtool_finds_no_fault_in_the_rules() -> None:
    """Syntax, and what some of the alerts say to series that are made up."""
    for args in (["check", "rules", RULES], ["test", "rules", RULES_TEST]):
        done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A Prometheus that scrapes pages of this process."""

    def __init__(self, http: HttpClient, port: int) -> None:
        self._http = http
        self._url = f"http://127.0.0.1:{port}"

    async def is_ready(self) -> bool:
        """Whether it has started."""
        try:
            reply = await self._http.request("GET", f"{self._url}/-/ready", timeout_s=5)
        except UpstreamError:
            return False
        return reply.status == 200

    async def get(self, path: str) -> Any:
        """The data of an answer of its API."""
        reply = await self._http.request("GET", f"{self._url}/api/v1/{path}", timeout_s=5)
        said = json.loads(reply.body)
        assert said["status"] == "success", (path, said)
        return said["data"]

    async def ask(self, query: str) -> list[Any]:
        """The samples that a query returns now."""
        found: list[Any] = (await self.get(f"query?query={quote(query, safe='')}"))["result"]
        return found


@contextlib.asynccontextmanager
async def prometheus(it: Site, path: Path) -> AsyncIterator[Prometheus]:
    """Prometheus with the rules of deploy/, over the gateway and all workers."""
    found_by_http = {
        "url": f"{it.url}/api/targets",
        "refresh_interval": "1s",
        "authorization": {"type": "Bearer", "credentials": TOKEN},
    }
    config = {
        "global": {
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "evaluation_interval": "500ms",
        },
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "moonserve",
                "static_configs": [{"targets": [f"127.0.0.1:{it.gateway.port}"]}],
            },
            {"job_name": "moonserve-workers", "http_sd_configs": [found_by_http]},
        ],
    }
    (path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = _free_port()
    with (path / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={path / 'prometheus.yml'}",
            f"--storage.tsdb.path={path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        found = Prometheus(it.http, port)
        async with asyncio.timeout(20):
            while not await _has_scraped(found, len(it.workers) + 1):
                assert process.returncode is None, (path / "log").read_text()
                await asyncio.sleep(0.1)
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def _has_scraped(it: Prometheus, pages: int) -> bool:
    """Whether each page was scraped several times under load, and the rules were evaluated."""
    if not await it.is_ready():
        return False
    scraped = await it.ask(f"count_over_time(up[1m]) >= {_SCRAPES}")
    rules = (await it.get("rules"))["groups"]
    return len(scraped) == pages and all(
        rule["health"] != "unknown" for group in rules for rule in group["rules"]
    )


@contextlib.asynccontextmanager
async def loaded(it: Site) -> AsyncIterator[None]:
    """The cluster under load, which must not end before the block does."""
    loading = asyncio.create_task(load(it))
    try:
        yield
        assert not loading.done(), loading.result()
    finally:
        loading.cancel()
        await asyncio.wait([loading])


async def load(it: Site) -> None:
    """Requests of two tenants with prefixes in common; some clients want an answer too soon."""
    body = {"model": DEFAULT_MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for number in range(1_000_000):
        is_hasty = number % 5 == 4
        prompt = [100 + number % 4] * 100 + [number % 1_000] * (400 if is_hasty else 20)
        hasty = {"x-moonserve-ttft-slo-ms": "0.001"} if is_hasty else {}
        reply = await it.http.request(
            "POST",
            it.url + "/v1/completions",
            headers={"x-moonserve-tenant": f"t{number % 2}", **hasty},
            body=json.dumps({**body, "prompt": prompt}).encode(),
            timeout_s=10,
        )
        assert reply.status in ((200, 429) if is_hasty else (200,)), reply.body
        await asyncio.sleep(0.02)


async def answers(path: Path) -> list[str]:
    """What is wrong with the answers to all queries."""
    slo = Slo(ttft_us=10_000_000, tbt_us=1_000_000)
    async with asyncio.timeout(60), site(slo=slo) as it:
        body = json.dumps({"model": DEFAULT_MODEL, "prompt": [1], "max_tokens": 1}).encode()
        early = await it.http.request("POST", it.url + "/v1/completions", body=body, timeout_s=10)
        assert early.status == 503
        await it.add("p0", "prefill")
        await it.add("p1", "prefill")
        await it.add("d0", "decode")
        advice = Advice(text="", now=_NOW, wanted=_NOW, target=1.0, every_s=60.0)
        posted = await it.http.request(
            "POST",
            it.url + "/internal/advice",
            headers=bearer(TOKEN),
            body=msgspec.json.encode(advice),
            timeout_s=10,
        )
        assert posted.status == 200
        for page in (it.url, *(worker.info.url for worker in it.workers.values())):
            await _check_page(it.http, page)
        async with loaded(it), prometheus(it, path) as found:
            wrong = [text for query in of_board() if (text := await _unanswered(found, query))]
            for query in of_alerts():
                for name, matchers in query.selectors():
                    selector = Query(query.where, f"{name}{{{matchers}}}")
                    if text := await _unanswered(found, selector):
                        wrong.append(text)
            for group in (await found.get("rules"))["groups"]:
                wrong += [
                    f"{it['name']}: {it['lastError']}"
                    for it in group["rules"]
                    if it.get("lastError")
                ]
        await it.settle()
    return wrong


async def _check_page(http: HttpClient, url: str) -> None:
    """promtool finds no fault in our own metrics; vLLM's names are vLLM's."""
    reply = await http.request("GET", url + "/metrics", timeout_s=5)
    lines = [line for line in reply.body.decode().splitlines(True) if "vllm:" not in line]
    done = await asyncio.to_thread(
        subprocess.run,
        ["promtool", "check", "metrics"],
        input="".join(lines),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def _unanswered(found: Prometheus, query: Query) -> str:
    """Why the answer to a query is none; empty: it is one."""
    text = query.text.replace("$__rate_interval", "4s")
    samples = await found.ask(text)
    if EXTERNAL.search(text) or any(
        value != "NaN" for _, value in map(itemgetter("value"), samples)
    ):
        return ""
    return f"{query.where}: {text}"


def test_prometheus_answers_every_query_of_board_and_alerts(tmp_path: Path) -> None:
    """Under load no panel is empty, but for external engines; alerts read series that exist."""
    assert asyncio.run(answers(tmp_path)) == []

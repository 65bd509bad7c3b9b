"""Several gateways over a real etcd: real processes, workers with the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.engines import Engine
from tests.support.etcd import Etcd
from tests.support.store_processes import Process
from tests.support.up import TOKEN

pytestmark = pytest.mark.model

WORDS = " ".join(f"word{n}" for n in range(300))


class Fleet:
    """A store's master, gateways and workers, each a process, all in one etcd."""

    def __init__(self, etcd: Etcd, stack: contextlib.ExitStack) -> None:
        self.etcd = etcd
        self._stack = stack
        self.workers: dict[str, Process] = {}
        self.gateways: dict[str, Process] = {}
        """The gateways by URL."""
        self.store = self.master()

    def master(self) -> Process:
        """Start a master of the store, at a port of its own."""
        argv = ("store", "serve", "--listen", "0", "--recover-s", "2", "--segment-ttl-s", "3")
        return self.start(*argv)

    def start(self, *argv: str) -> Process:
        """Start one role of this registry."""
        process = Process(*argv, "--registry", self.etcd.url)
        self._stack.callback(process.close)
        return process

    def gateway(self) -> str:
        """Start a gateway; its URL once it listens."""
        process = self.start("gateway", "--port", "0", "--model", DEFAULT_MODEL)
        until(lambda: any("listening on" in line for line in process.lines), process)
        line = next(line for line in process.lines if "listening on" in line)
        url = line.split()[-1]
        self.gateways[url] = process
        return url

    def worker(self, name: str, role: str) -> Process:
        """Start a worker with the fake engine."""
        self.workers[name] = self.start(
            "worker", "--name", name, "--role", role, "--engine", "fake", "--model", DEFAULT_MODEL,
            "--block-size", "16", "--segment-bytes", "16MiB",
        )  # fmt: skip
        return self.workers[name]

    def pids_told(self) -> str:
        """The lines of all processes, for the message of a failure."""
        return "\n".join(
            "".join(p.lines) for p in (*self.gateways.values(), *self.workers.values())
        )


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two workers of each role; gateways are started by the test."""
    with contextlib.ExitStack() as stack:
        etcd = Etcd(tmp_path)
        stack.callback(etcd.close)
        it = Fleet(etcd, stack)
        for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
            it.worker(name, role)
        try:
            yield it
        except BaseException:
            print(it.pids_told())
            raise


def until(true: Callable[[], object], of: Process | None = None, within_s: float = 40.0) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "waited in vain" + ("".join(of.lines) if of else "")
        time.sleep(0.05)


def tell(url: str, method: str, path: str, body: Any = None) -> Any:
    """The JSON of a call with the cluster's token."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    asked = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(asked, timeout=10) as reply:
        return json.loads(reply.read())


def get(url: str, path: str) -> Any:
    """The JSON of a GET; None where it is refused."""
    try:
        return tell(url, "GET", path)
    except (urllib.error.URLError, ConnectionError):
        return None


def ask(url: str, prompt: str, model: str = DEFAULT_MODEL) -> Any:
    """A short completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def same_id(url: str) -> bool:
    """Whether a gateway makes a client's request id its own, and knows the request by it."""
    body = json.dumps({"model": DEFAULT_MODEL, "prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"x-request-id": "mine"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        name = reply.headers["x-request-id"]
    return name.startswith("mine-") and get(url, f"/api/decisions/{name}") is not None


def names(url: str) -> list[str]:
    """The instances that a gateway knows."""
    return [row["id"] for row in get(url, "/api/instances") or ()]


def leaders(urls: list[str]) -> list[str]:
    """The gateways that lead."""
    return [url for url in urls if (get(url, "/api/gateways") or {}).get("leads")]


def ledger(url: str) -> list[int]:
    """What is promised, by this gateway and, as far as it knows, by others."""
    stats, rows = get(url, "/api/stats"), get(url, "/api/instances")
    own = [value for key, value in stats.items() if key == "requests" or "promised" in key]
    return own + [row["queue_ms"] for row in rows]


def test_gateways_share_workers_index_and_ledger_and_outlive_each_other(fleet: Fleet) -> None:
    """Either serves; a prefix computed through one is a hit through the other; a killed worker
    leaves both; a killed leader is followed by the other; one that comes later is ready with the
    whole index; etcd may go and come back, and the store's master comes up elsewhere; ledgers end
    at zero."""
    urls = [fleet.gateway(), fleet.gateway()]
    until(lambda: all(get(url, "/ready") for url in urls))
    until(lambda: all(names(url) == ["d0", "p0", "p1"] for url in urls))
    until(lambda: len(leaders(urls)) == 1)
    first, second = urls

    assert ask(first, WORDS)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    whole = get(first, "/api/stats")["index_blocks"]
    assert whole > 10
    until(lambda: get(second, "/api/stats")["index_blocks"] == whole)
    assert {same_id(url) for url in urls} == {True}
    again = ask(second, WORDS + " and more")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 200

    with ThreadPoolExecutor(8) as many:
        jobs = [many.submit(ask, urls[n % 2], f"{n} {WORDS}") for n in range(24)]
        assert all(job.result()["choices"] for job in jobs)
    for url in urls:
        until(lambda url=url: not any(ledger(url)))

    fleet.workers["p0"].kill()
    until(lambda: all(names(url) == ["d0", "p1"] for url in urls), within_s=12.0)
    assert ask(first, WORDS)["choices"]

    fleet.etcd.lose_all()
    time.sleep(1.0)
    assert ask(second, WORDS)["choices"], "nobody needs etcd to serve"
    assert all(names(url) == ["d0", "p1"] for url in urls)
    fleet.etcd.start()
    until(lambda: len(leaders(urls)) == 1)
    assert all(names(url) == ["d0", "p1"] for url in urls)

    (leader,) = leaders(urls)
    (other,) = [url for url in urls if url != leader]
    fleet.gateways[leader].kill()
    until(lambda: leaders([other]) == [other], within_s=15.0)
    assert ask(other, WORDS)["choices"]

    third = fleet.gateway()
    until(lambda: get(third, "/ready"))
    assert get(third, "/api/gateways")["index"] == "as told by the store's master"
    assert get(third, "/api/stats")["index_blocks"] == get(other, "/api/stats")["index_blocks"]
    assert names(third) == ["d0", "p1"]
    assert ask(third, WORDS)["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    until(lambda: [p["url"] for p in get(third, "/api/gateways")["peers"] if p["heard"]] == [other])

    fleet.store.kill()
    fleet.master()
    for url in (other, third):
        until(lambda url=url: (get(url, "/api/stats") or {"index_blocks": 0})["index_blocks"] > 10)
        again = ask(url, WORDS)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
        until(lambda url=url: not any(ledger(url)))


def test_an_engine_registered_once_is_used_by_every_gateway(tmp_path: Path) -> None:
    """moonserve register, or POST to one gateway: all of them find it, and lose it again; a gateway
    that was told nothing else is ready with it; one that comes after etcd lost all finds it too."""

    async def main(etcd: Etcd, stack: contextlib.ExitStack) -> None:
        engine = Engine()
        await engine.start()
        config = tmp_path / "cluster.yaml"
        config.write_text(f"instances: []\nregistry: {etcd.url}\n")

        def start(*argv: str) -> Process:
            process = Process(*argv, "--config", str(config))
            stack.callback(process.close)
            return process

        registered = start("register", "--url", engine.url, "--name", "e0", "--events", "off")
        await registered.says("registered: e0")
        gateways = [start("gateway", "--port", "0") for _ in range(2)]
        urls = [await it.says(r"listening on (http\S+)") for it in gateways]
        try:
            for url in urls:
                await asyncio.to_thread(until, lambda url=url: get(url, "/ready"))
                told = await asyncio.to_thread(get, url, "/api/gateways")
                assert told["index"] == "as told by the engines"
                said = await asyncio.to_thread(ask, url, "What follows?", engine.model)
                assert said["choices"][0]["text"]
            assert len(engine.calls) == 2
            await start("unregister", "e0").says("unregistered: e0")
            for url in urls:
                await asyncio.to_thread(until, lambda url=url: not names(url))
            await start("unregister", "e0").says("no engine of that name was registered: e0")
            spec = {"name": "e1", "url": engine.url, "events": "off"}
            said = await asyncio.to_thread(tell, urls[0], "POST", "/api/instances", spec)
            assert said == {"changed": ["e1"]}
            for url in urls:
                await asyncio.to_thread(until, lambda url=url: names(url) == ["e1"])
            await asyncio.to_thread(etcd.lose_all)
            await asyncio.to_thread(etcd.start)
            late = start("gateway", "--port", "0")
            gateways.append(late)
            urls.append(await late.says(r"listening on (http\S+)"))
            await asyncio.to_thread(until, lambda: names(urls[-1]) == ["e1"])
            said = await asyncio.to_thread(tell, urls[1], "DELETE", "/api/instances/e1")
            assert said == {"changed": ["e1"]}
            for url in urls:
                await asyncio.to_thread(until, lambda url=url: not names(url))
        except BaseException:
            print("\n".join("".join(it.lines) for it in gateways))
            raise
        finally:
            await engine.stop()

    with contextlib.ExitStack() as stack:
        etcd = Etcd(tmp_path)
        stack.callback(etcd.close)
        asyncio.run(main(etcd, stack))

"""The store's roles and commands by real processes: what a person can see and do."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from moonserve.core.store.words import PutOptions
from moonserve.core.units import SegmentId
from tests.support.store_processes import (
    TOKEN,
    TWICE,
    Pool,
    answers,
    content,
    put,
    replicas,
    run,
    until,
)


async def cli(*argv: str, token: str = TOKEN) -> tuple[int, str, str]:
    """One `moonserve store ...`: exit code, stdout and stderr."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "moonserve", "store", *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MOONSERVE_TOKEN": token},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_the_commands_show_and_move_what_there_is() -> None:
    """ls, stat, get, evict and drain over a pool, and their errors in one line."""

    async def test(it: Pool) -> None:
        client = await it.client("writer")
        on_a = PutOptions(preferred=SegmentId("a"), blocks=False)
        for name in ("x1", "x2", "y"):
            await put(client, name, on_a)
        url = ("--url", it.url)
        _, listed, _ = await cli("ls", "--text", "x", "--json", *url)
        assert [(row["key"], row["size"]) for row in json.loads(listed)] == [
            (b"x1".hex(), len(content("x1"))),
            (b"x2".hex(), len(content("x2"))),
        ]
        code, shown, _ = await cli("ls", *url)
        assert (code, len(shown.splitlines())) == (0, 3)
        _, found, _ = await cli("stat", "--text", "y", "--json", *url)
        assert [replica["segment"] for replica in json.loads(found)["replicas"]] == ["a"]
        _, shown, _ = await cli("stat", *url)
        assert "a " in shown
        assert "objects 3" in shown
        code, _, said = await cli("stat", "--text", "z", *url)
        assert (code, said) == (1, "error: there is no object z\n")
        code, _, said = await cli("get", "zz", *url)
        assert (code, said) == (
            2,
            "error: key: 'zz' is not hex; add --text if the key is text\n",
        )
        code, _, said = await cli("get", "--text", "y", *url, token="wrong")
        assert (code, "set MOONSERVE_TOKEN" in said) == (2, True)
        code, _, said = await cli("drain", "d", *url)
        assert (code, said.startswith("error: segment: the pool has no segment 'd'")) == (2, True)
        code, told, _ = await cli("drain", "a", "--wait-s", "10", *url)
        assert (code, told) == (0, "a is empty\n")
        assert all("a" not in places for places in (await replicas(client)).values())
        code, told, _ = await cli("evict", "a", "1MiB", *url)
        assert (code, told) == (0, "0 bytes are free now, or will be when they are on disk\n")

    run(test)


def test_get_writes_the_bytes_alone(tmp_path: Any) -> None:
    """moonserve store get: the object's bytes in a file, and nothing else."""

    async def test(it: Pool) -> None:
        client = await it.client("writer")
        await put(client, "thing")
        path = tmp_path / "out"
        code, out, _ = await cli("get", "--text", "thing", "-o", str(path), "--url", it.url)
        assert (code, out) == (0, "")
        assert path.read_bytes() == content("thing")

    run(test)


def test_a_segment_told_to_stop_leaves_nothing_behind() -> None:
    """SIGTERM: what lay in its memory alone lies elsewhere when it has ended."""

    async def test(it: Pool) -> None:
        client = await it.client("writer")
        on_a = PutOptions(preferred=SegmentId("a"), blocks=False)
        names = [f"o{n}" for n in range(30)]
        for name in names:
            await put(client, name, on_a)
        it.segments["a"].process.terminate()
        await it.segments["a"].says("stopped")
        lie = await replicas(client)
        assert sorted(lie) == sorted(names)
        assert not any("a" in places for places in lie.values())
        assert "left with" not in "".join(it.segments["a"].lines)

    run(test)


def test_a_segment_at_two_addresses_tells_what_its_lanes_carried() -> None:
    """--card: bytes go by both; what another segment pulled from it is on that one's /metrics."""

    async def test(it: Pool) -> None:
        cards = ("--card", "127.0.0.1@red", "--card", "127.0.0.2@blue")
        await it.start_segment("e", more=cards)
        puller = await it.start_segment("f", more=("--metrics-port", "0", "--rack", "far"))
        page = await puller.says(r"metrics at (http\S+)")
        client = await it.client("writer")
        await put(client, "x", PutOptions(preferred=SegmentId("e"), blocks=False))
        hosts = {lane.path.address.host for lane in client.transfer.stats()}
        assert hosts == {"127.0.0.1", "127.0.0.2"}
        await put(client, "y", PutOptions(replicas=2, preferred=SegmentId("e"), blocks=False))
        await until(lambda: lies_twice(client, "y"))
        told = await text(page)
        assert "moonserve_transfer_bytes_total{" in told
        assert 'peer="e:e"' in told
        assert await text(page.replace("/metrics", "/health"))

    run(test)


@pytest.mark.model
def test_a_cluster_around_a_master_elsewhere() -> None:
    """A gateway and workers with --store-url: prefixes are shared, as the index knows; also after
    the master was killed and started anew.
    """

    async def test(it: Pool) -> None:
        store = ("--store-url", it.url)
        gateway = it.start("gateway", "--port", "0", *store)
        url = await gateway.says(r"listening on (http\S+)")
        for role, name in (("prefill", "p0"), ("prefill", "p1"), ("decode", "d0")):
            named = ("--role", role, "--name", name, "--gateway", url, "--engine", "fake")
            worker = it.start("worker", *named, "--segment-bytes", "16MiB", *store)
            await worker.says("joined")
        ids = list(range(1000, 1200))
        assert (await ask(url, ids))["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await ask(url, ids))["prompt_tokens_details"]["cached_tokens"] >= 160
        stats = await fetch(url + "/api/stats")
        assert stats["index_blocks"] >= 6
        segments = {row["id"] for row in stats["store"]["segments"]}
        assert segments >= {"a", "b", "c", "p0", "p1", "d0"}
        it.master.kill()
        client = await start_again(it)
        await until(lambda: answers(client))
        assert (await ask(url, ids))["prompt_tokens_details"]["cached_tokens"] >= 160
        code, _, said = await cli("drain", "p0", "--url", url)
        assert (
            code,
            f"error: url: {url} is no store's master: the store's master is at {it.url}" in said,
        ) == (
            2,
            True,
        )
        await put(client, "twice", TWICE)

    run(test)


@pytest.mark.model
def test_a_worker_told_to_stop_hands_on_what_only_it_has() -> None:
    """SIGTERM: the prefixes that lay in its segment alone are reused by another afterwards."""

    async def test(it: Pool) -> None:
        store = ("--store-url", it.url)
        gateway = it.start("gateway", "--port", "0", *store)
        url = await gateway.says(r"listening on (http\S+)")
        workers, pages = {}, {}
        for name in ("w0", "w1"):
            named = ("--role", "both", "--name", name, "--gateway", url, "--engine", "fake")
            workers[name] = it.start("worker", *named, "--segment-bytes", "16MiB", *store)
            pages[name] = await workers[name].says(r"listening on (http\S+)") + "/metrics"
            await workers[name].says("joined")
        ids = list(range(1000, 1200))
        await ask(url, ids)
        client = await it.client("looker")
        found = await client.scan(b"", None, 100)
        (holder,) = {place.segment for it in found for place in it.replicas}
        assert f'moonserve_transfer_bytes_total{{host="127.0.0.1",lane="0",peer="{holder}' in (
            await text(pages[holder])
        )
        workers[holder].process.terminate()
        await workers[holder].says("stopped")
        left = await client.scan(b"", None, 100)
        assert [it.key for it in left] == [it.key for it in found]
        assert holder not in {place.segment for it in left for place in it.replicas}
        assert (await ask(url, ids))["prompt_tokens_details"]["cached_tokens"] >= 160

    run(test)


async def start_again(it: Pool) -> Any:
    """A new master where the old one was, and a client of it."""
    await it.start_master()
    return await it.client("late")


async def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    """JSON of a GET, or of a POST."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}

    def call() -> Any:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return json.load(reply)

    return await asyncio.to_thread(call)


async def text(url: str) -> str:
    """The body of a GET."""

    def call() -> str:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return str(reply.read().decode())

    return await asyncio.to_thread(call)


async def lies_twice(client: Any, name: str) -> bool:
    """Whether an object has both its replicas."""
    return len((await replicas(client))[name]) == 2


async def ask(url: str, ids: list[int]) -> Any:
    """The usage of one completion."""
    model = (await fetch(url + "/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": ids, "max_tokens": 4}
    return (await fetch(url + "/v1/completions", body))["usage"]

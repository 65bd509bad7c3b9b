"""Mooncake's Indexer API on a socket; tests give the engines' events to its indexers directly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.kv.events import ClearedEvent, KvBatch, StoredEvent
from moonserve.core.kv.indexer import local_hashes, rolling
from moonserve.live.access.guard import Guard
from moonserve.live.external import indexer_api as module
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.http.server import App, serve
from moonserve.live.kvevents.follower import BlockIndexer, Feed, FeedCounts
from moonserve.live.kvevents.wire import EventAddress

SIZE = 4
TOKENS = list(range(1, 18))
TOKEN = "secret"
BAD = "tcp://bad:1"
ONE: dict[str, Any] = {
    "endpoint": "tcp://10.0.0.1:5557",
    "replay_endpoint": "tcp://10.0.0.1:5558",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "a",
    "block_size": SIZE,
    "dp_rank": 0,
}
ASK: dict[str, Any] = {"model": "m", "block_size": SIZE, "token_ids": TOKENS}


class ScriptedFeed:
    """A Feed whose events come from the test."""

    def __init__(self, address: EventAddress, indexer: BlockIndexer) -> None:
        self.address = address
        self.indexer = indexer
        self.state = "open"
        self.resets = 0

    def counts(self) -> FeedCounts:
        """See Feed."""
        return FeedCounts(connected=True, resets=self.resets)

    async def close(self) -> None:
        """See Feed."""
        await asyncio.sleep(0)
        self.state = "closed"

    def tell(self, blocks: int, medium: str = "GPU", tokens: list[int] = TOKENS) -> None:
        """So many leading blocks are stored."""
        self.stored(range(blocks), tokens[: blocks * SIZE], medium)

    def stored(self, names: Iterable[int], tokens: list[int], medium: str = "GPU") -> None:
        """The blocks with these names are stored: a whole chain."""
        event = StoredEvent(list(names), None, tokens, SIZE, medium=medium)
        self.indexer.batch(KvBatch(0.0, (event,)))

    def reset(self) -> None:
        """Batches were lost."""
        self.resets += 1
        self.indexer.reset(restarted=False)


class Rig:
    """The API and a client of it."""

    def __init__(self, api: IndexerApi, url: str, feeds: list[ScriptedFeed]) -> None:
        self.api = api
        self.url = url
        self.feeds = feeds
        self.client = HttpClient()

    async def send(self, path: str, body: Any, token: str = TOKEN) -> ClientResponse:
        """POST; None: GET."""
        headers = {"authorization": f"Bearer {token}"}
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        return await self.client.request(
            method, self.url + path, headers=headers, body=data, timeout_s=5
        )

    async def good(self, path: str, body: Any = None) -> Any:
        """The reply, which is a good one."""
        reply = await self.send(path, body)
        assert reply.status == 200, reply.body
        return json.loads(reply.body)

    async def bad(self, path: str, body: Any) -> tuple[int, str | None]:
        """Status, and the field at fault."""
        reply = await self.send(path, body)
        error = json.loads(reply.body)["error"]
        assert error["message"]
        assert "\n" not in error["message"]
        return reply.status, error["param"]


def run(use: Callable[[Rig], Awaitable[None]], max_blocks: int = 1_000) -> None:
    """With an API that follows nobody yet; no feed is left open."""

    async def main() -> None:
        async with asyncio.timeout(20):
            feeds: list[ScriptedFeed] = []

            async def follow(address: EventAddress, indexer: BlockIndexer) -> Feed:
                if address.endpoint == BAD:
                    raise ConfigError("Invalid argument", "events")
                feeds.append(ScriptedFeed(address, indexer))
                return feeds[-1]

            api = IndexerApi(follow, max_blocks)
            server = await serve(App(api.routes(), gate=Guard(TOKEN)), "127.0.0.1", 0)
            rig = Rig(api, f"http://127.0.0.1:{server.port}", feeds)
            await use(rig)
            await api.close()
            await rig.client.close()
            await server.stop(0)
            assert {feed.state for feed in feeds} <= {"closed"}

    asyncio.run(main())


def hits(tokens: int, **dp: int) -> dict[str, Any]:
    """The answer about an instance with so many tokens on its device."""
    return {"longest_matched": tokens, "GPU": tokens, "DP": dp, "CPU": tokens, "DISK": tokens}


def test_register_query_unregister() -> None:
    """The standard's exchange, with two ranks of one instance and one of another."""

    async def use(rig: Rig) -> None:
        told = await rig.good("/register", ONE)
        assert told == {"status": "registered successfully", "instance_id": "a"}
        await rig.good("/register", {**ONE, "dp_rank": 1, "endpoint": "tcp://10.0.0.1:5558"})
        await rig.good("/register", {**ONE, "instance_id": 7, "replay_endpoint": None})
        assert [feed.address for feed in rig.feeds[1:]] == [
            EventAddress("tcp://10.0.0.1:5558", "tcp://10.0.0.1:5558"),
            EventAddress("tcp://10.0.0.1:5557"),
        ]
        nothing = {"default": {"a": hits(0, **{"0": 0, "1": 0}), "7": hits(0, **{"0": 0})}}
        assert await rig.good("/query", ASK) == nothing
        rig.feeds[0].tell(2)
        rig.feeds[1].tell(3)
        rig.feeds[1].tell(4, "cpu")
        found = await rig.good("/query", ASK)
        assert found["default"]["a"] == {
            "longest_matched": 16,
            "GPU": 12,
            "DP": {"0": 8, "1": 12},
            "CPU": 16,
            "DISK": 16,
        }
        assert found["default"]["7"] == nothing["default"]["7"]
        only = await rig.good("/query", {**ASK, "instance_id": 7})
        assert only == {"default": {"7": nothing["default"]["7"]}}
        seqs = rolling(local_hashes(TOKENS, SIZE))
        signed = [each - 2**64 if each >= 2**63 else each for each in seqs]
        assert min(signed) < 0
        for hashes in ({"seq_hashes": seqs}, {"block_hash": seqs}, {"seq_hashes": signed}):
            assert await rig.good("/query_by_hash", {"model": "m", **hashes}) == found
        local = [each - 2**64 if each >= 2**63 else each for each in local_hashes(TOKENS, SIZE)]
        asked = {"model_name": "m", "block_hashes": local}
        assert await rig.good("/query_by_hash", asked) == found
        gone = await rig.good("/unregister", {**ONE, "dp_rank": 1})
        assert gone == {
            "status": "unregistered successfully",
            "removed_instances": ["a|default|1"],
        }
        assert (await rig.good("/query", ASK))["default"]["a"] == hits(8, **{"0": 8})
        await rig.good("/unregister", {"instance_id": "a"})
        assert list((await rig.good("/query", ASK))["default"]) == ["7"]
        await rig.good("/unregister", {"instance_id": "7", "dp_rank": 0})
        assert await rig.bad("/query", ASK) == (404, "model")

    run(use)


def test_the_same_again_is_no_news_and_something_else_a_conflict() -> None:
    """409 names the first field that differs; what is registered stays as it is."""

    async def use(rig: Rig) -> None:
        for _ in range(2):
            await rig.good("/register", ONE)
        for field, value in (
            ("endpoint", "tcp://10.0.0.2:5557"),
            ("modelname", "other"),
            ("lora_name", "l"),
            ("additionalsalt", "s"),
            ("block_size", 8),
            ("type", "SGLang"),
            ("topic", "kv"),
            ("seed", 1),
        ):
            assert await rig.bad("/register", {**ONE, field: value}) == (409, field)
        assert await rig.bad("/register", {**ONE, "instance_id": "b", "seed": 1}) == (409, "seed")
        assert len(rig.feeds) == 1
        assert (await rig.good("/services"))["count"] == 1

    run(use)


def test_spaces_do_not_see_each_other() -> None:
    """Models, tenants, block sizes, adapters and salts each have their own answers."""

    async def use(rig: Rig) -> None:
        await rig.good("/register", ONE)
        await rig.good("/register", {**ONE, "tenant_id": "t", "additionalsalt": "w8a8"})
        await rig.good("/register", {**ONE, "instance_id": "l", "lora_name": "sql"})
        await rig.good("/register", {**ONE, "instance_id": "b", "block_size": 8})
        for feed, blocks in zip(rig.feeds, (1, 2, 3, 1), strict=True):
            feed.tell(blocks)
        found = await rig.good("/query", ASK)
        assert found["default"]["a"]["GPU"] == 4
        assert found["default"]["l"]["GPU"] == 0
        assert (await rig.good("/query", {**ASK, "lora_name": "sql"}))["default"]["l"]["GPU"] == 12
        assert (await rig.good("/query", {**ASK, "tenant_id": "t"}))["t"]["a"]["GPU"] == 0
        salted = {**ASK, "tenant_id": "t", "cache_salt": "w8a8"}
        assert (await rig.good("/query", salted))["t"]["a"]["GPU"] == 8
        assert list((await rig.good("/query", {**ASK, "block_size": 8}))["default"]) == ["b"]
        rows = (await rig.good("/services"))["services"]
        assert [row["their_block_size"] for row in rows] == [None, None, None, 4]
        assert all(row["connected"] for row in rows)
        asked = {key: value for key, value in ASK.items() if key != "block_size"}
        assert await rig.bad("/query", asked) == (400, "block_size")
        assert list(await rig.good("/query", {**asked, "tenant_id": "t"})) == ["t"]

    run(use)


def test_services_count_resets() -> None:
    """How often a stream's blocks were forgotten is in its row, beside what its events came to."""

    async def use(rig: Rig) -> None:
        await rig.good("/register", ONE)
        rig.feeds[0].tell(4)
        rig.feeds[0].reset()
        assert (await rig.good("/query", ASK))["default"]["a"]["longest_matched"] == 0
        [row] = (await rig.good("/services"))["services"]
        assert (row["resets"], row["events"]["stored"]) == (1, 4)

    run(use)


def test_a_store_that_is_registered_counts_for_all() -> None:
    """Type Mooncake: its hashes are the standard's own; it is no instance in answers."""

    async def use(rig: Rig) -> None:
        await rig.good("/register", ONE)
        store = {**ONE, "type": "Mooncake", "instance_id": "pool", "endpoint": "tcp://10.0.0.9:1"}
        await rig.good("/register", store)
        seqs = rolling(local_hashes(TOKENS, SIZE))
        for seq in seqs[1:3]:
            event = StoredEvent([seq], None, [], SIZE, medium="cpu")
            rig.feeds[1].indexer.batch(KvBatch(0.0, (event,)))
        rig.feeds[0].tell(1)
        found = (await rig.good("/query", ASK))["default"]
        assert found == {"a": {**hits(4, **{"0": 4}), "CPU": 12, "DISK": 12, "longest_matched": 12}}
        rig.feeds[1].indexer.batch(KvBatch(0.0, (ClearedEvent(),)))
        assert (await rig.good("/query", ASK))["default"] == {"a": hits(4, **{"0": 4})}

    run(use)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"type": "TGI"}, "type: must be Mooncake, SGLang or vLLM"),
        ({"endpoint": "127.0.0.1:1"}, "write it like tcp://10.0.0.5:5557"),
        ({"replay_endpoint": "127.0.0.1:1"}, "replay_endpoint: '127.0.0.1:1' is not an endpoint"),
        ({"blocksize": 4}, "blocksize: there is no such field; did you mean block_size?"),
        ({"instance_id": []}, "instance_id: must be text or a whole number"),
        ({"block_size": None}, "block_size: must be a whole number, not null"),
        ({"block_size": 0}, "block_size: must be 1 or more"),
    ],
)
def test_what_is_wrong_is_told_what_would_be_right(body: Any, says: str) -> None:
    """Values that there are, the field that was meant, the scheme of an address."""

    async def use(rig: Rig) -> None:
        reply = await rig.send("/register", {**ONE, "dp_rank": 5, **body})
        assert reply.status == 400
        assert says in json.loads(reply.body)["error"]["message"]

    run(use)


def test_what_others_say_beyond_the_standard_is_skipped() -> None:
    """A field that is nothing like one of the standard's is no slip."""

    async def use(rig: Rig) -> None:
        await rig.good("/register", {**ONE, "dp_rank": 5, "gpu_model": "H200"})
        rig.feeds[0].tell(2)
        [row] = (await rig.good("/services"))["services"]
        assert (row["dp_rank"], "gpu_model" in row) == (5, False)
        found = await rig.good("/query", {**ASK, "trace": {"span": [1]}})
        assert found == {"default": {"a": hits(8, **{"5": 8})}}

    run(use)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/register", {}, 400, "endpoint"),
        ("/register", [], 400, None),
        ("/register", {**ONE, "endpoint": ""}, 400, "endpoint"),
        ("/register", {**ONE, "endpoint": "ipc://x", "dp_rank": 5}, 400, "endpoint"),
        ("/register", {**ONE, "endpoint": "inproc://x", "dp_rank": 5}, 400, "endpoint"),
        ("/register", {**ONE, "replay_endpoint": "ipc://x", "dp_rank": 5}, 400, "replay_endpoint"),
        ("/register", {**ONE, "endpoint": BAD, "dp_rank": 5}, 400, "endpoint"),
        ("/register", {**ONE, "type": "TGI"}, 400, "type"),
        ("/register", {**ONE, "tenant": "t"}, 400, "tenant"),
        ("/query", {**ASK, "tenantid": "t"}, 400, "tenantid"),
        ("/unregister", {"instance_id": "a", "rank": 1, "dprank": 1}, 400, "dprank"),
        ("/register", {**ONE, "modelname": None}, 400, "modelname"),
        ("/register", {**ONE, "block_size": 0}, 400, "block_size"),
        ("/register", {**ONE, "block_size": "16"}, 400, "block_size"),
        ("/register", {**ONE, "dp_rank": -1}, 400, "dp_rank"),
        ("/register", {**ONE, "seed": 2**64}, 400, "seed"),
        ("/register", {**ONE, "instance_id": None}, 400, "instance_id"),
        ("/register", {**ONE, "lora_id": 3}, 400, "lora_id"),
        ("/unregister", {}, 400, "instance_id"),
        ("/unregister", {"instance_id": "nobody"}, 404, "instance_id"),
        ("/unregister", {"instance_id": "a", "dp_rank": 3}, 404, "instance_id"),
        ("/unregister", {"instance_id": "a", "modelname": "other"}, 404, "instance_id"),
        ("/query", {"block_size": 4, "token_ids": []}, 400, "model"),
        ("/query", {"model": "m"}, 400, "token_ids"),
        ("/query", {**ASK, "token_ids": [-1] * 4}, 400, "token_ids"),
        ("/query", {**ASK, "token_ids": [1.5]}, 400, "token_ids[0]"),
        ("/query", {**ASK, "model": "other"}, 404, "model"),
        ("/query", {**ASK, "tenant_id": "other"}, 404, "tenant_id"),
        ("/query", {**ASK, "block_size": 8}, 404, "block_size"),
        ("/query", {**ASK, "instance_id": "b"}, 404, "instance_id"),
        ("/query_by_hash", {"model": "m"}, 400, "seq_hashes"),
        ("/query_by_hash", {"model": "m", "seq_hashes": ["1"]}, 400, "seq_hashes[0]"),
        ("/query_by_hash", {"model": "m", "seq_hashes": [2**64]}, 400, "seq_hashes"),
        ("/query_by_hash", {"model": "m", "block_hashes": [-(2**63) - 1]}, 400, "block_hashes"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: Any, status: int, param: str | None) -> None:
    """A bad request changes nothing, and its answer names the wrong field."""

    async def use(rig: Rig) -> None:
        await rig.good("/register", ONE)
        rig.feeds[0].tell(2)
        assert await rig.bad(path, body) == (status, param)
        assert (await rig.good("/query", ASK))["default"] == {"a": hits(8, **{"0": 8})}
        assert (await rig.good("/services"))["count"] == 1

    run(use)


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the most is refused, 429, and nothing of it stays."""
    monkeypatch.setattr(module, "MAX_STREAMS", 1)

    async def use(rig: Rig) -> None:
        await rig.good("/register", ONE)
        reply = await rig.send("/register", {**ONE, "instance_id": "b", "modelname": "n"})
        assert (reply.status, reply.headers["x-moonserve-reject-reason"]) == (429, "streams")
        assert await rig.bad("/query", {**ASK, "model": "n"}) == (404, "model")

    run(use)


def test_a_full_index_forgets_what_nobody_asks_for() -> None:
    """Each space has the bound; metrics count what was forgotten, in spaces that are gone too."""

    async def use(rig: Rig) -> None:
        await rig.good("/register", ONE)
        rig.feeds[0].tell(4)
        assert (await rig.good("/query", ASK))["default"]["a"]["GPU"] == 4 * SIZE
        for start in (100, 200, 300):
            rig.feeds[0].stored(range(start, start + 2), [start] * 2 * SIZE)
        assert (await rig.good("/query", ASK))["default"]["a"]["GPU"] == 4 * SIZE
        metrics = {it.name: it.samples[0].value for it in rig.api.metrics()}
        counted = {"moonserve_indexer_blocks": 8, "moonserve_indexer_evicted_blocks": 2}
        assert metrics == counted
        await rig.good("/unregister", {"modelname": "m", "instance_id": "a"})
        metrics = {it.name: it.samples[0].value for it in rig.api.metrics()}
        assert metrics == counted | {"moonserve_indexer_blocks": 0}

    run(use, max_blocks=8)


def test_without_the_token_nobody_is_told_anything() -> None:
    """401 on all paths."""

    async def use(rig: Rig) -> None:
        for path in ("/register", "/unregister", "/query", "/query_by_hash"):
            assert (await rig.send(path, ONE, token="wrong")).status == 401
        assert (await rig.send("/services", None, token="")).status == 401

    run(use)

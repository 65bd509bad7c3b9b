"""The curl examples of docs/reference/indexer-api.md, sent as they stand."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from moonserve.core.kv.events import KvBatch, StoredEvent
from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Joined
from moonserve.core.units import SegmentId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.placement_api import PlacementApi
from moonserve.live.external.indexer_api import IndexerApi
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, serve
from moonserve.live.kvevents.follower import BlockIndexer, Feed, FeedCounts
from moonserve.live.kvevents.wire import EventAddress
from tests.support.cluster import BLOCK, NAMESPACE, exact, info

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "indexer-api.md").read_text()
TOKENS = list(range(1, 13))


class NoFeed:
    """A Feed that has told all that it has to tell."""

    def counts(self) -> FeedCounts:
        """See Feed."""
        return FeedCounts(connected=True)

    async def close(self) -> None:
        """Nothing is open."""


async def follow(address: EventAddress, indexer: BlockIndexer) -> Feed:
    """An engine that has the first two blocks of the page's prompt."""
    event = StoredEvent([1, 2], None, TOKENS[: 2 * BLOCK], BLOCK, medium="GPU")
    indexer.batch(KvBatch(0.0, (event,)))
    return NoFeed()


def examples() -> list[tuple[str, dict[str, Any], Any]]:
    """Path, body, and the reply where the page shows one."""
    found = []
    for path, body, reply in re.findall(
        r"curl \$URL(\S+) .*?-d '(.*?)'(?:\n# ([^\n]*))?", PAGE, re.S
    ):
        found.append((path, json.loads(body), json.loads(reply) if reply else None))
    return found


async def replies() -> dict[str, list[Any]]:
    """What each path says, one example after the other; all must be 200."""
    loop = ConductorLoop(Conductor(cost_of=exact), lambda lease: None)
    loop.tell(Joined(info("p0", "prefill")), Joined(info("d0", "decode")))
    keys = tuple(chain_keys(NAMESPACE.root(), TOKENS, BLOCK))
    loop.tell(BlocksStored(SegmentId("p0"), keys[:2], None, "dram", 1))
    api, selection = IndexerApi(follow), PlacementApi(loop, lambda model: None)
    server = await serve(App(api.routes() | selection.routes()), "127.0.0.1", 0)
    client, said = HttpClient(), dict[str, list[Any]]()
    for path, body, shown in examples():
        url = f"http://127.0.0.1:{server.port}{path}"
        reply = await client.request("POST", url, body=json.dumps(body).encode(), timeout_s=5)
        assert reply.status == 200, (path, reply.body)
        told = json.loads(reply.body)
        assert shown in (None, told), path
        said.setdefault(path, []).append(told)
    await api.close()
    selection.stop()
    loop.stop()
    await client.close()
    await server.stop(0)
    return said


def test_the_page_says_what_happens() -> None:
    """Every example is answered, as shown where an answer is shown; the JSON has these fields."""

    async def main() -> dict[str, list[Any]]:
        async with asyncio.timeout(20):
            return await replies()

    said = asyncio.run(main())
    assert said["/query"] == said["/query_by_hash"]
    [placed] = said["/api/reserve"]
    [shown] = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    fields = json.loads(shown)
    assert set(placed) == set(fields)
    assert set(placed["prefill"]) == set(fields["prefill"])
    assert set(placed["decode"]) == set(fields["decode"])
    assert (placed["reused_tokens"], placed["prompt_tokens"]) == (8, 12)
    assert [set(told) for told in said["/api/release"]] == [
        {"id", "decode", "deadline_s"},
        {"id", "released"},
    ]

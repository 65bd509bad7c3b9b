"""cache_salt on a whole cluster on one loop: who has another salt, or none, shares no KV."""

from __future__ import annotations

import asyncio
from pathlib import Path

from moonserve.core.shares import Party
from moonserve.live.access.keys import ApiKey, hash_of
from moonserve.live.access.sources import changed_file
from moonserve.live.access.terms import ClientTerms
from moonserve.live.control.loop import Record
from moonserve.live.engine.fake import fake_cost
from moonserve.live.http.auth import bearer
from tests.support.inproc import BLOCK, Site, site
from tests.support.records import record_of

PROMPT = list(range(5_000, 5_000 + 5 * BLOCK + 3))
SOON = {"x-moonserve-ttft-slo-ms": "1"}
"""An objective that one instance would miss, and that none can meet."""


async def ask(it: Site, name: str, prompt: list[int], salt: str | None, count: int = 8) -> Record:
    """The tokens are right; what became of the request."""
    headers = {"x-request-id": name, **SOON}
    assert await it.tokens(prompt, count, salt, **headers) == it.reference(prompt, count)
    await it.settle()
    return record_of(it.gateway.conductor, name)


def reuse_of(record: Record) -> tuple[int | None, int]:
    """Prompt tokens that prefill reused, and what the Conductor took to be there."""
    assert record.decision is not None
    return record.measured.cached_tokens, record.decision.reused_tokens


def test_kv_is_shared_by_requests_of_one_salt_only() -> None:
    """Prompt and answer, as the Conductor sees them and as the workers find them."""

    async def main() -> None:
        async with site(admission="none") as it:
            await it.add("p0", "prefill")
            await it.add("d0", "decode")
            answer = it.reference(PROMPT, 3 * BLOCK)
            longer = [*PROMPT, *answer, 7, 8, 9]
            for salt, reused in (("A", 0), ("A", 5), ("B", 0), (None, 0), (None, 5), ("a", 0)):
                record = await ask(it, "r", PROMPT, salt, 3 * BLOCK)
                assert reuse_of(record) == (reused * BLOCK,) * 2, salt
            for salt, reused in (("A", 8), ("C", 0), (None, 8)):
                record = await ask(it, "r", longer, salt)
                assert reuse_of(record) == (reused * BLOCK,) * 2, salt

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stream_is_resumed_from_kv_of_its_own_salt() -> None:
    """Its decode worker is lost: what that stored is found again, under the salt."""

    async def main() -> None:
        async with site() as it:
            await it.add("p0", "prefill")
            for name in ("d0", "d1"):
                await it.add(name, "decode", fake_cost(200, 10, 4_000), decode_kv=1)
            asked = asyncio.create_task(ask(it, "r", PROMPT, "A", 8 * BLOCK))
            while it.gateway.pool.service.master.stats().objects < 5 + 3:
                await asyncio.sleep(0.01)
            [name] = it.busy_decode()
            await it.lose(name)
            record = await asked
            assert record.attempts == 2
            assert reuse_of(record)[1] >= (5 + 2) * BLOCK
            assert reuse_of(await ask(it, "s", PROMPT, "B"))[0] == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_group_computes_under_the_salt() -> None:
    """Each part is published under it: the next of that salt finds all of them, others none."""

    async def main() -> None:
        async with site(admission="none") as it:
            for name in ("p0", "p1"):
                await it.add(name, "prefill", fake_cost(0, 400, 0), blocks=160)
            await it.add("d0", "decode", blocks=160)
            prompt = list(range(2_000, 2_000 + 1_003))
            first = await ask(it, "first", prompt, "A")
            assert first.decision is not None
            assert len(first.decision.stages) == 2
            assert (await ask(it, "other", prompt, "B")).measured.cached_tokens == 0
            found = await ask(it, "again", prompt, "A")
            assert found.measured.cached_tokens == len(prompt) // BLOCK * BLOCK

    asyncio.run(asyncio.wait_for(main(), 60))


def test_tenants_with_keys_share_no_kv(tmp_path: Path) -> None:
    """The same prompt from two tenants: nothing is cached for the second, whatever salt it sends.
    Two keys of one tenant share."""

    async def main() -> None:
        file = tmp_path / "keys"
        with changed_file(file) as keys:
            for name, tenant in (("a", "A"), ("b", "B"), ("c", "A")):
                keys.append(ApiKey(name=name, hash=hash_of(name), tenant=tenant))
        async with site(admission="none", keys=str(file)) as it:
            await it.add("p0", "prefill")
            await it.add("d0", "decode")
            stolen = ClientTerms(Party("A"), salted=True).salt("")
            for key, salt, reused in (
                ("a", None, 0),
                ("a", None, 5),
                ("b", None, 0),
                ("b", stolen, 0),
                ("c", None, 5),
                ("c", "own", 0),
            ):
                headers = {"x-request-id": "r", **bearer(key)}
                assert await it.tokens(PROMPT, 8, salt, **headers) == it.reference(PROMPT, 8)
                await it.settle()
                record = record_of(it.gateway.conductor, "r")
                assert reuse_of(record) == (reused * BLOCK,) * 2, key

    asyncio.run(asyncio.wait_for(main(), 60))

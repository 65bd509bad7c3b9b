"""More clients than a live cluster holds: refusals that can be obeyed, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import pytest

from moonserve.core.request import Slo
from moonserve.live.engine.fake import fake_cost
from moonserve.live.http.client import ClientResponse
from moonserve.live.model.catalog import DEFAULT_MODEL
from tests.support.inproc import Site, site

pytestmark = pytest.mark.model  # for its tokenizer and chat template

CLIENTS = 12


async def post(it: Site, number: int) -> ClientResponse:
    """A completion of a prompt of its own."""
    prompt = list(range(100 + number, 170 + number))
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
    return await it.http.request(
        "POST", it.url + "/v1/completions", body=json.dumps(body).encode(), timeout_s=30
    )


async def obedient(it: Site, number: int) -> AsyncIterator[ClientResponse]:
    """Every reply until it is let in, each asked for when the one before said."""
    while True:
        reply = await post(it, number)
        yield reply
        if reply.status != 429:
            return
        await asyncio.sleep(int(reply.headers["retry-after"]))


def test_those_who_are_refused_and_obey_get_in_and_nothing_is_left() -> None:
    """429 in OpenAI's shape, with its reason and a time; in the end all are served."""

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode", fake_cost(base_us=10_000, decode_us_per_seq=10_000))
        view = it.gateway.conductor.core.view.instances["d0"]
        while not view.cost.known:  # before that nobody is refused
            assert (await post(it, 0)).status == 200
        retries = it.gateway.conductor.core.retries

        async def client(number: int) -> list[ClientResponse]:
            return [reply async for reply in obedient(it, number)]

        replies = await asyncio.gather(*map(client, range(1, CLIENTS + 1)))
        assert [of[-1].status for of in replies] == [200] * CLIENTS
        refused = [reply for of in replies for reply in of[:-1]]
        assert refused
        for reply in refused:
            error = json.loads(reply.body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == reply.headers["x-moonserve-reject-reason"]
            assert error["code"] in ("tbt_slo", "tbt_slo_late", "ttft_slo")
            assert error["type"] == "overloaded_error"
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        await it.settle()
        assert len(retries) == 0
        metrics = await it.http.request("GET", it.url + "/metrics", timeout_s=5)
        told = metrics.body.decode()
        counted = re.findall(r"^moonserve_rejected_requests_total\{.*\} (\d+)", told, re.MULTILINE)
        assert sum(map(int, counted)) == len(refused)
        assert "moonserve_requests_in_flight 0.0" in told
        assert len(it.gateway.conductor.account) == 0
        assert "moonserve_good_requests_total " in told
        assert re.search(r"^moonserve_wasted_prefill_seconds_total \d", told, re.MULTILINE)

    async def main() -> None:
        async with asyncio.timeout(60), site(slo=Slo(2_000_000, 55_000)) as it:
            await test(it)

    asyncio.run(main())

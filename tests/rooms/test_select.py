"""The placement service on a socket, over a Conductor whose instances nobody calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Connector, InstanceInfo, Joined, Left, Role
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import Promised
from moonserve.core.units import InstanceId, SegmentId
from moonserve.live.access.guard import Guard
from moonserve.live.control import placement_api as module
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.placement_api import PlacementApi
from moonserve.live.http.client import ClientResponse, HttpClient
from moonserve.live.http.server import App, serve
from tests.support.cluster import BLOCK, NAMESPACE, info
from tests.support.records import record_of
from tests.support.serving import ByteText

PROMPT = list(range(41))
KEYS = tuple(chain_keys(NAMESPACE.root(), PROMPT, BLOCK))
ASK: dict[str, Any] = {"model": "m", "token_ids": PROMPT, "max_tokens": 8}
NOTHING = Promised(0, 0, 0, 0)
TOKEN = "secret"


class Rig:
    """The service and a client of it."""

    def __init__(self, loop: ConductorLoop, selection: PlacementApi, url: str) -> None:
        self.loop = loop
        self.selection = selection
        self.url = url
        self.client = HttpClient()

    async def post(self, what: str, body: Any, token: str = TOKEN) -> ClientResponse:
        """To /api/`what`."""
        headers = {"authorization": f"Bearer {token}"}
        data = json.dumps(body).encode()
        url = f"{self.url}/api/{what}"
        return await self.client.request("POST", url, headers=headers, body=data, timeout_s=5)

    async def good(self, what: str, body: Any) -> dict[str, Any]:
        """The reply, which is a good one."""
        reply = await self.post(what, body)
        assert reply.status == 200, reply.body
        told: dict[str, Any] = json.loads(reply.body)
        return told

    async def bad(self, what: str, body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the error."""
        reply = await self.post(what, body)
        error: dict[str, Any] = json.loads(reply.body)["error"]
        return reply.status, error

    def promised(self) -> Promised:
        """The ledger."""
        return self.loop.core.promised()


def run(
    use: Callable[[Rig], Awaitable[None]], tuning: Tuning | None = None, us_per_token: int = 10
) -> None:
    """p0 and p1 prefill, d0 and d1 decode; p1 has six blocks of the prompt."""

    def cost(joining: InstanceInfo) -> Cost:
        return Cost((0, us_per_token, 0, 0, 100, 10, 1), (5, 0.005), learns=False)

    async def main() -> None:
        async with asyncio.timeout(20):
            loop = ConductorLoop(Conductor(tuning, None, cost), lambda lease: None)
            loop.tell(*(Joined(info(name, "prefill")) for name in ("p0", "p1")))
            loop.tell(*(Joined(info(name, "decode")) for name in ("d0", "d1")))
            loop.tell(BlocksStored(SegmentId("p1"), KEYS[:6], None, "dram", 1))
            selection = PlacementApi(loop, {"m": ByteText()}.get, "m")
            server = await serve(App(selection.routes(), gate=Guard(TOKEN)), "127.0.0.1", 0)
            rig = Rig(loop, selection, f"http://127.0.0.1:{server.port}")
            try:
                await use(rig)
            finally:
                selection.stop()
                loop.stop()
                await rig.client.close()
                await server.stop(0)

    asyncio.run(main())


def test_select_decides_and_reserves_nothing() -> None:
    """By token ids, by text or by block keys, the same decision; the ledger stays empty."""

    async def use(rig: Rig) -> None:
        first = await rig.good("select", ASK)
        assert first["prefill"]["instance"] == "p1"
        assert first["prefill"]["url"] == "http://p1"
        decodes = [first.pop("decode")["instance"]]
        assert (first["reused_tokens"], first["prompt_tokens"]) == (6 * BLOCK, 41)
        assert first["predicted_ttft_ms"] == (41 - 6 * BLOCK) * 10 / 1_000
        text = bytes(PROMPT).decode()
        for other in (
            {"prompt": text},
            {"block_keys": [key.hex() for key in KEYS], "prompt_tokens": 41},
        ):
            found = await rig.good("select", {"model": "m", "max_tokens": 8, **other})
            decodes.append(found.pop("decode")["instance"])
            assert found | {"id": ""} == first | {"id": ""}
        assert decodes == ["d0", "d1", "d0"], "of equals, others are next"
        salted = await rig.good("select", {**ASK, "cache_salt": "A"})
        assert salted["reused_tokens"] == 0, "that KV has no salt"
        assert rig.promised() == NOTHING
        assert not list(rig.loop.account.latest())

    run(use)


def test_a_reservation_from_prefill_to_the_end() -> None:
    """The Conductor's one ledger counts it at every stage; `explain` has it like any request."""

    async def use(rig: Rig) -> None:
        placed = await rig.good("reserve", {**ASK, "id": "abc", "ttl_s": 60})
        assert placed["id"] == "abc"
        assert placed["prefill"]["instance"] == "p1"
        assert placed["prefill"]["kv_transfer_params"]["reuse_tokens"] == 6 * BLOCK
        assert placed["deadline_s"] == 60
        assert rig.promised() == Promised(1, 1, 170, 1)
        assert (await rig.good("select", ASK))["id"] != "abc"
        ended = {"id": "abc", "outcome": "prefill_ended", "cached_tokens": 24}
        went_on = await rig.good("release", ended)
        assert went_on["decode"]["instance"] == placed["decode"]["instance"]
        assert await rig.good("release", ended) == went_on  # the reply was lost: asked again
        assert rig.promised() == Promised(1, 0, 0, 1)
        assert record_of(rig.loop, "abc").measured.cached_tokens == 24
        over = await rig.good("release", {"id": "abc", "outcome": "decode_ended", "tokens": 7})
        assert over == {"id": "abc", "released": True}
        await asyncio.sleep(0)
        assert rig.promised() == NOTHING
        assert rig.loop.core.errors.output.count == 1
        again = await rig.good("release", {"id": "abc", "outcome": "decode_ended"})
        assert again == {"id": "abc", "released": False}
        assert rig.selection.reservations == 0

    run(use)


def foreign(name: str, role: Role, connector: Connector, epoch: int = 1) -> Joined:
    """An engine of model f that hands KV on this way."""
    own = info(name, role, epoch)
    bootstrap = f"http://{name}:8998" if connector == "mooncake" else ""
    engine = {"model": "f", "connector": connector, "bootstrap": bootstrap, "fetches": False}
    return Joined(msgspec.structs.replace(own, **engine))


def test_one_call_may_do_both() -> None:
    """Of an engine that hands nothing on both are one call, which ends with one release or two."""

    async def use(rig: Rig) -> None:
        rig.loop.tell(foreign("v0", "both", "none"))
        ask = {**ASK, "model": "f"}
        for name in ("a", "b"):
            placed = await rig.good("reserve", {**ask, "id": name})
            assert placed["one_call"]
            assert placed["prefill"]["instance"] == placed["decode"]["instance"] == "v0"
            assert "kv_transfer_params" not in placed["prefill"]
        went_on = await rig.good("release", {"id": "a", "outcome": "prefill_ended"})
        assert went_on["decode"]["instance"] == "v0"
        promised = rig.promised()
        assert (promised.requests, promised.prefills, promised.decodes) == (2, 1, 2)
        for name in ("a", "b"):
            over = {"id": name, "outcome": "decode_ended", "tokens": 5}
            assert (await rig.good("release", over))["released"]
        await asyncio.sleep(0)
        assert rig.promised() == NOTHING
        assert rig.loop.core.errors.output.count == 2

    run(use)


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_hints_are_those_of_the_connector(connector: Connector) -> None:
    """What goes into prefill's body, and where Mooncake's decode finds it."""

    async def use(rig: Rig) -> None:
        rig.loop.tell(foreign("vp", "prefill", connector), foreign("vd", "decode", connector))
        placed = await rig.good("reserve", {**ASK, "model": "f", "id": "a"})
        params = placed["prefill"]["kv_transfer_params"]
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        assert placed["prefill"]["connector"] == placed["decode"]["connector"] == connector
        if connector == "mooncake":
            assert placed["prefill"]["bootstrap"] == "http://vp:8998"
            assert params["transfer_id"] == "a/1"

    run(use)


@pytest.mark.parametrize("outcome", ["decode_ended", "failed", "cancelled"])
def test_every_end_releases_everything(outcome: str) -> None:
    """Whatever the outcome, before prefill has ended or after."""

    async def use(rig: Rig) -> None:
        for name in ("a", "b"):
            await rig.good("reserve", {**ASK, "id": name})
        await rig.good("release", {"id": "b", "outcome": "prefill_ended"})
        for name in ("a", "b"):
            told = await rig.good("release", {"id": name, "outcome": outcome, "tokens": 3})
            assert told["released"]
        await asyncio.sleep(0)
        assert rig.promised() == NOTHING
        assert record_of(rig.loop, "a").outcome == outcome
        seen = rig.loop.core.errors.output.count
        assert seen == (2 if outcome == "decode_ended" else 0)

    run(use)


def test_an_end_told_of_a_decode_that_never_began_is_an_end() -> None:
    """Decode instances have left, and another prefill was called for: no rule of the Conductor's is
    broken by it, and other requests go on."""

    async def use(rig: Rig) -> None:
        for name in ("a", "b"):
            await rig.good("reserve", {**ASK, "id": name})
        for decode in ("d0", "d1"):
            rig.loop.tell(Left(InstanceId(decode), 1, "gone"))
        told = await rig.good("release", {"id": "a", "outcome": "decode_ended", "tokens": 3})
        assert told["released"]
        await asyncio.sleep(0)
        assert rig.promised().requests == 1
        rig.loop.tell(Joined(info("d2", "decode")))
        went_on = await rig.good("release", {"id": "b", "outcome": "prefill_ended"})
        assert went_on["decode"]["instance"] == "d2"

    run(use)


def test_who_never_comes_back_is_released_at_the_deadline() -> None:
    """Whether it was prefilling or decoding by then; the ledger is empty."""

    async def use(rig: Rig) -> None:
        for name in ("a", "b"):
            await rig.good("reserve", {**ASK, "id": name, "ttl_s": 0.5})
        await rig.good("release", {"id": "b", "outcome": "prefill_ended"})
        while rig.selection.reservations:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0)
        assert rig.promised() == NOTHING
        assert record_of(rig.loop, "a").outcome == "expired"
        assert (await rig.good("release", {"id": "a", "outcome": "cancelled"}))["released"] is False

    run(use)


def test_the_end_of_prefill_renews_the_deadline() -> None:
    """As long again from then on."""

    async def use(rig: Rig) -> None:
        await rig.good("reserve", {**ASK, "id": "a", "ttl_s": 60})
        [held] = rig.selection._held.values()
        assert held.timer is not None
        first = held.timer
        await rig.good("release", {"id": "a", "outcome": "prefill_ended"})
        assert first.cancelled()
        assert held.timer.when() > first.when()

    run(use)


def test_what_failed_can_be_placed_again_elsewhere() -> None:
    """The instance that failed is avoided; after three attempts that is all."""

    async def use(rig: Rig) -> None:
        placed = await rig.good("reserve", {**ASK, "id": "a"})
        failed = {"id": "a", "outcome": "failed", "retry": True}
        second = await rig.good("release", failed)
        names = {placed["prefill"]["instance"], second["prefill"]["instance"]}
        assert names == {"p0", "p1"}
        await rig.good("release", failed)
        status, error = await rig.bad("release", failed | {"why": "it broke"})
        assert (status, error["message"]) == (502, "it broke")
        await asyncio.sleep(0)
        assert rig.promised() == NOTHING

    run(use)


def test_a_lost_decode_instance_is_replaced_when_prefill_has_ended() -> None:
    """The reply names the instance that decodes now."""

    async def use(rig: Rig) -> None:
        placed = await rig.good("reserve", {**ASK, "id": "a"})
        lost = InstanceId(placed["decode"]["instance"])
        rig.loop.tell(Left(lost, 1))
        went_on = await rig.good("release", {"id": "a", "outcome": "prefill_ended"})
        assert went_on["decode"]["instance"] in {"d0", "d1"} - {lost}

    run(use)


def test_refusals_are_those_of_the_main_path() -> None:
    """429 with the reason and Retry-After, for select and reserve; nothing stays reserved."""

    async def use(rig: Rig) -> None:
        for at, name in enumerate(("a", "b", "c")):
            other = {"token_ids": [500 + at] * 41, "id": name}
            await rig.good("reserve", {**ASK, **other})
        for what in ("select", "reserve"):
            reply = await rig.post(what, {**ASK, "ttft_slo_ms": 500})
            assert reply.status == 429
            assert reply.headers["x-moonserve-reject-reason"] == "ttft_slo"
            assert int(reply.headers["retry-after"]) >= 1
            status, error = await rig.bad(what, {**ASK, "model": "unknown"})
            assert (status, error["code"]) == (404, "model_not_found")
            assert error["message"] == "model: 'unknown' is not served here; known: m"
        await asyncio.sleep(0)
        assert rig.promised().requests == rig.selection.reservations == 3

    run(use, us_per_token=10_000)


@pytest.mark.parametrize(("model", "status"), [("m", 503), ("unknown", 404)])
def test_a_served_model_without_an_instance_is_another_case(
    model: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come back: 503. A model that is not served is the client's error, which is no line in
    the log."""

    async def use(rig: Rig) -> None:
        rig.loop.tell(*(Left(InstanceId(name), 1) for name in ("p0", "p1", "d0", "d1")))
        await asyncio.sleep(0)
        caplog.clear()
        for what in ("select", "reserve"):
            answered, _ = await rig.bad(what, {**ASK, "model": model})
            assert answered == status
        assert bool(caplog.records) == (status == 503)

    run(use)


def test_one_that_waits_too_long_is_over() -> None:
    """With late binding a reservation waits for an instance, no longer than its ttl_s; 504."""

    async def use(rig: Rig) -> None:
        for name in ("a", "b"):  # with prefixes of their own: one would wait for the other's
            await rig.good("reserve", {**ASK, "id": name, "cache_salt": name})
        status, error = await rig.bad("reserve", {**ASK, "id": "c", "ttl_s": 0.1})
        assert (status, error["type"]) == (504, "timeout_error")
        waiting = asyncio.create_task(rig.good("reserve", {**ASK, "id": "d"}))
        await rig.good("release", {"id": "a", "outcome": "cancelled"})
        assert (await waiting)["prefill"]["instance"] in ("p0", "p1")
        assert rig.promised().requests == 2

    run(use, Tuning(policy="late_binding"))


def test_reservations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than the most is refused, 429."""
    monkeypatch.setattr(module, "MAX_RESERVATIONS", 1)

    async def use(rig: Rig) -> None:
        await rig.good("reserve", {**ASK, "id": "a"})
        reply = await rig.post("reserve", ASK)
        assert (reply.status, reply.headers["x-moonserve-reject-reason"]) == (429, "reservations")

    run(use)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"token_ids": [1]}, 400, "model"),
        ([], 400, None),
        ({"model": "m"}, 400, "prompt"),
        ({"model": None, "token_ids": [1]}, 400, "model"),
        ({"model": "m", "prompt": None}, 400, "prompt"),
        ({"model": "m", "prompt": 5}, 400, "prompt"),
        ({"model": "m", "token_ids": [1, None]}, 400, "token_ids[1]"),
        ({**ASK, "max_token": 5}, 400, "max_token"),
        ({"model": "m", "prompt": "a", "token_ids": [1]}, 400, "prompt"),
        ({"model": "m", "prompt": ""}, 400, "token_ids"),
        ({"model": "m", "token_ids": [-1, 2, 3, 4]}, 400, "token_ids"),
        ({"model": "m", "token_ids": [2**32]}, 400, "token_ids"),
        ({"model": "m", "token_ids": [1] * 5_000}, 400, "token_ids"),
        ({"model": "m", "token_ids": ["1"]}, 400, "token_ids[0]"),
        ({"model": "m", "block_keys": ["00"], "prompt_tokens": 4}, 400, "block_keys"),
        ({"model": "m", "block_keys": ["zz" * 32], "prompt_tokens": 4}, 400, "block_keys"),
        ({"model": "m", "block_keys": ["00" * 32]}, 400, "block_keys"),
        ({**ASK, "max_tokens": 0}, 400, "max_tokens"),
        ({**ASK, "priority": 101}, 400, "priority"),
        ({**ASK, "ttft_slo_ms": 0}, 400, "ttft_slo_ms"),
        ({**ASK, "tbt_slo_ms": -5}, 400, "tbt_slo_ms"),
        ({**ASK, "ttl_s": 1e9}, 400, "ttl_s"),
        ({**ASK, "id": "taken"}, 409, "id"),
        ({**ASK, "id": "a/b"}, 400, "id"),
        ({**ASK, "tenant": "a b"}, 400, "tenant"),
        ({**ASK, "cache_salt": 5}, 400, "cache_salt"),
        ({**ASK, "cache_salt": ""}, 400, "cache_salt"),
    ],
)
def test_what_is_wrong_is_named(body: Any, status: int, param: str | None) -> None:
    """A bad request changes nothing, and its answer names the wrong field."""

    async def use(rig: Rig) -> None:
        await rig.good("reserve", {**ASK, "id": "taken"})
        got, error = await rig.bad("reserve", body)
        assert (got, error["param"]) == (status, param), error
        assert rig.promised().requests == rig.selection.reservations == 1

    run(use)


def test_more_output_than_the_context_leaves_is_cut() -> None:
    """As for this gateway's own clients: max_tokens refuses nobody."""

    async def use(rig: Rig) -> None:
        await rig.good("reserve", {**ASK, "id": "r", "max_tokens": 1 << 40})
        [held] = rig.selection._held.values()
        assert held.request.stopping.max_tokens == 4_096 - held.request.length

    run(use)


def test_a_pattern_is_told_in_words() -> None:
    """The answer to a wrong id says what an id may be, not the regular expression."""

    async def use(rig: Rig) -> None:
        for field, what in (("id", "1 to 128 letters"), ("tenant", "at most 64 letters")):
            _, error = await rig.bad("reserve", {**ASK, field: "a b"})
            assert error["message"].startswith(f"{field}: must be {what}"), error

    run(use)


def test_without_the_token_nobody_reserves() -> None:
    """401 on all three paths."""

    async def use(rig: Rig) -> None:
        for what in ("select", "reserve", "release"):
            assert (await rig.post(what, ASK, token="wrong")).status == 401

    run(use)


def test_a_client_that_leaves_while_it_waits_reserves_nothing() -> None:
    """Its place in the queue is given up with it."""

    async def use(rig: Rig) -> None:
        for name in ("a", "b"):  # with prefixes of their own: one would wait for the other's
            await rig.good("reserve", {**ASK, "id": name, "cache_salt": name})
        waiting = asyncio.create_task(rig.post("reserve", {**ASK, "id": "c"}))
        while rig.selection.reservations < 3:
            await asyncio.sleep(0.01)
        waiting.cancel()
        while rig.selection.reservations == 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert rig.promised().requests == 2

    run(use, Tuning(policy="late_binding"))

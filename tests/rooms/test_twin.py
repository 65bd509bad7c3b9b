"""The twin beside a live cluster: what it reads and posts, and what others then see."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.cli import twin as command
from moonserve.cli.client import Client
from moonserve.cli.twin import TwinRounds
from moonserve.core.errors import EngineFailed, NobodyAlive
from moonserve.core.request import Slo
from moonserve.core.schedule.advice import Advice, ClusterShape, LoadOutcome, TwinTrial
from moonserve.core.schedule.cost import Cost
from moonserve.live.control import advice as control
from moonserve.live.http.auth import bearer
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.record import recent
from moonserve.logs import LINES
from moonserve.sim import twin as simulated
from tests.support.inproc import TOKEN, Site, site
from tests.support.recorded import row

pytestmark = pytest.mark.model  # for its tokenizer
NOW = ClusterShape(3, 4, 0, "kvcache_centric")
SERVED = LoadOutcome(420, 0.714, 0.2, 400.0, 900.0, 40.0, None)
FOUND = Advice(
    text="Decode binds: with 3 + 5 the same load would have had 99% in time, now 71%.",
    binds="decode",
    now=NOW,
    wanted=msgspec.structs.replace(NOW, decode=5),
    happened=SERVED,
    trials=(TwinTrial(NOW, SERVED), TwinTrial(msgspec.structs.replace(NOW, decode=5), SERVED)),
    target=0.99,
    ttft_slo_ms=2_000.0,
    every_s=60.0,
    took_s=4.0,
    until_ms=60_000,
)


def on(test: Callable[[Site], Awaitable[None]], **config: Any) -> None:
    """Run a test on a gateway."""

    async def main() -> None:
        async with asyncio.timeout(600), site(**config) as it:
            await test(it)

    asyncio.run(main())


async def call(it: Site, path: str, body: Any = None, token: str = TOKEN, status: int = 200) -> Any:
    """The JSON of a reply; with a body, it is posted."""
    reply = await it.http.request(
        "GET" if body is None else "POST",
        it.url + path,
        headers=bearer(token),
        body=b"" if body is None else msgspec.json.encode(body),
        timeout_s=10,
    )
    assert reply.status == status, reply.body
    return json.loads(reply.body)


async def gauges(it: Site) -> dict[str, float]:
    """The samples about advice on /metrics."""
    reply = await it.http.request("GET", it.url + "/metrics", timeout_s=10)
    lines = [line.rpartition(" ") for line in reply.body.decode().splitlines()]
    names = ("moonserve_wanted_instances", "moonserve_advice")
    return {name: float(value) for name, _, value in lines if name.startswith(names)}


def test_advice_is_served_with_its_age_until_it_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale advice is marked, and its gauges are gone, as without any advice."""

    async def test(it: Site) -> None:
        assert await call(it, control.PATH) == {"advice": None, "age_s": None, "is_stale": False}
        assert await gauges(it) == {}
        await call(it, "/internal/advice", FOUND)
        said = await call(it, control.PATH)
        assert msgspec.convert(said["advice"], Advice) == FOUND
        assert 0 <= said["age_s"] < 60
        found = await gauges(it)
        assert found.pop("moonserve_advice_age_seconds") >= 0
        assert found == {
            'moonserve_wanted_instances{role="prefill"}': 3,
            'moonserve_wanted_instances{role="decode"}': 5,
        }
        monkeypatch.setattr(control, "is_stale", lambda advice, age_s: True)
        assert (await call(it, control.PATH))["is_stale"]
        assert list(await gauges(it)) == ["moonserve_advice_age_seconds"]
        monkeypatch.undo()
        await call(it, "/internal/advice", msgspec.structs.replace(FOUND, wanted=None))
        assert list(await gauges(it)) == ["moonserve_advice_age_seconds"]

    on(test)


def test_advice_is_bounded_and_for_those_with_the_token() -> None:
    """A wrong field is named, and the advice before stays."""
    wrong: dict[str, Any] = {
        "text": "x" * 1_001,
        "target": 1.5,
        "every_s": -1,
        "now": {"prefill": 20_000, "decode": 1, "mixed": 0, "policy": "a"},
        "wanted": {"prefill": 1, "decode": 1, "mixed": 0, "policy": "<script>"},
        "trials": [TwinTrial(NOW, SERVED)] * 65,
        "more": 1,
    }

    async def test(it: Site) -> None:
        for path, body in ((control.PATH, None), ("/internal/advice", FOUND), (recent.PATH, None)):
            await call(it, path, body, token="wrong", status=401)
        await call(it, "/internal/advice", FOUND)
        for field, value in wrong.items():
            body = json.loads(msgspec.json.encode(FOUND)) | {field: value}
            said = await call(it, "/internal/advice", body, status=400)
            assert field in said["error"]["message"]
        assert (await call(it, control.PATH))["advice"]["text"] == FOUND.text

    on(test)


def test_rows_are_kept_from_the_first_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent once, by number, in portions; requests under way come with the last one."""
    monkeypatch.setattr(recent, "_MOST_AT_ONCE", 2)

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode", Cost((200, 10, 0, 0, 20_000, 0, 0), learns=False))
        await it.tokens([5] * 40, 3)
        await it.settle()
        empty = {"last": 0, "more": False, "rows": [], "under_way": []}
        said = await call(it, recent.PATH)  # nobody had asked before
        began_ms = said.pop("now_ms")
        assert said == empty
        for number in range(3):
            await it.tokens([number + 9] * 40, 3, **{"x-request-id": f"r{number}"})
        await it.settle()
        running = asyncio.create_task(it.tokens([50] * 70, 100, **{"x-request-id": "open"}))
        while not it.busy_decode():
            await asyncio.sleep(0.01)
        first = await call(it, recent.PATH)
        assert (first["last"], first["more"], first["under_way"]) == (2, True, [])
        second = await call(it, f"{recent.PATH}?after=2")
        assert (second["last"], second["more"]) == (3, False)
        times_ms = [began_ms, *(row["timestamp"] for row in first["rows"]), second["now_ms"]]
        assert times_ms == sorted(times_ms)
        rows = first["rows"] + second["rows"]
        assert [row["request"] for row in rows] == ["r0", "r1", "r2"]
        assert [(row["input_length"], row["output_length"]) for row in rows] == [(40, 3)] * 3
        assert {len(row["hash_ids"]) for row in rows} == {2}
        for stages in [each["stages"] for each in rows]:
            parts = [stages[f"decode_{part}_ms"] for part in ("queue", "load", "first")]
            assert min(parts) >= 0
            assert sum(parts) <= stages["handover_ms"]
        assert {len(row["candidates"]) for row in rows} == {0}
        [under_way] = second["under_way"]
        assert (under_way["request"], under_way["outcome"]) == ("open", "running")
        assert (under_way["input_length"], under_way["output_length"]) == (70, 3)  # a guess
        assert (await call(it, f"{recent.PATH}?after=3"))["rows"] == []
        assert (await call(it, f"{recent.PATH}?after=99"))["last"] == 2  # of an earlier process
        await running

    on(test)


def test_rows_are_bounded_and_forgotten_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, by their number and by their keys."""
    monkeypatch.setattr(recent, "_MOST_KEPT", 2)

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        await call(it, recent.PATH)
        for number in range(4):
            await it.tokens([number + 9] * 40, 2, **{"x-request-id": f"r{number}"})
        await it.settle()
        said = await call(it, recent.PATH)
        assert [row["request"] for row in said["rows"]] == ["r2", "r3"]
        assert said["last"] == 4
        monkeypatch.setattr(recent, "_MOST_KEYS", 3)
        await it.tokens([99] * 40, 2, **{"x-request-id": "r4"})
        await it.settle()
        assert [row["request"] for row in (await call(it, recent.PATH))["rows"]] == ["r4"]
        monkeypatch.setattr(recent, "_WANTED_US", -1)
        await call(it, recent.PATH)
        await it.tokens([98] * 40, 2)
        await it.settle()
        monkeypatch.undo()
        assert (await call(it, recent.PATH))["rows"] == []

    on(test)


async def observed(it: Site, observer: TwinRounds) -> tuple[str, Advice]:
    """A round of the twin, and what it posted."""
    line = await asyncio.to_thread(observer.round)
    said = (await call(it, control.PATH))["advice"]
    return line, msgspec.convert(said, Advice)


def test_a_round_without_requests_or_instances_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It posts that there is no advice, so that nobody follows an earlier one."""

    async def test(it: Site) -> None:
        observer = TwinRounds(Client(it.url, 10.0, TOKEN), 5.0, 1_000, 0.99)
        line, advice = await observed(it, observer)
        assert "there is no prefill or no decode instance" in line
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        line, advice = await observed(it, observer)
        assert "no request that arrived lately can be judged yet, 20 are needed" in advice.text
        assert advice.happened is None
        assert advice.now == ClusterShape(1, 1, 0, "kvcache_centric")
        monkeypatch.setattr(simulated, "LEAST_JUDGED", 1)
        for number in range(9):
            await it.tokens([number + 9] * 40, 1)
        await it.settle()
        line, advice = await observed(it, observer)
        assert "start the gateway with --ttft-slo and --tbt-slo" in line
        assert advice.wanted is None
        assert not observer.has_judged

    on(test)


class Told(Client):
    """A gateway of one prefill and one decode instance, with the rows that a test sets."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", 1.0, "")
        self.instances = [instance("p0", role="prefill"), instance("d0", role="decode")]
        self.rows: list[dict[str, Any]] = []
        """The next replies; the last one stays."""
        self.posted: list[Advice] = []

    def send(self, method: str, path: str, shape: Any, body: object = None) -> Any:
        """What a gateway would answer, or what was set."""
        told: Any = {}
        if isinstance(body, Advice):
            self.posted.append(body)
        elif path == "/api/instances":
            told = self.instances
        elif path == "/api/stats":
            told = {"tuning": {}}
        elif path.startswith(recent.PATH):
            told = self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]
        return msgspec.json.decode(msgspec.json.encode(told), type=shape)


def instance(name: str, **known: Any) -> dict[str, Any]:
    """A row of an instance that has joined."""
    sizes = ("block_bytes", "kv_blocks", "max_seqs", "chunk_tokens", "segment_bytes", "layers")
    row = {"id": name, "connector": "embedded", "block_size": 32, **dict.fromkeys(sizes, 64)}
    return {**row, "epoch": 1, "drained": False, **known}


def rows_reply(numbers: Sequence[int], now_ms: int, **known: Any) -> dict[str, Any]:
    """The rows of these requests, the last ones; each arrived 100 ms after the one before."""
    rows = [row(f"r{at}", 100 * at) for at in numbers]
    reply = {"last": numbers[-1] if numbers else 0, "more": False, "rows": rows, "under_way": []}
    return {**reply, "now_ms": now_ms, **known}


def test_only_instances_that_serve_count() -> None:
    """Drained ones and lost external engines do not, whatever their rows lack."""
    told = Told()
    told.rows = [rows_reply([], 0)]
    told.instances += [
        instance("d1", role="decode", drained=True),
        instance("e0", role="decode", state="down"),
        {"id": "e1", "role": "prefill", "state": "lost", "why": "connection refused"},
    ]
    TwinRounds(told, 5.0, 1_000, 0.99).round()
    assert told.posted[0].now == ClusterShape(1, 1, 0, "kvcache_centric")
    told.instances[0]["kv_blocks"] = "many"
    with pytest.raises(EngineFailed, match=r"another version: .*kv_blocks"):
        TwinRounds(told, 5.0, 1_000, 0.99).round()


def test_advice_ends_with_the_load() -> None:
    """Without new requests the next round judges none, and its time is the gateway's."""
    told = Told()
    first = rows_reply(range(1, 11), 1_100)
    told.rows = [rows_reply([], 0), first, rows_reply([], 6_100, last=10)]
    rounds_ = TwinRounds(told, 5.0, 1_000, 0.99)
    for _ in range(3):
        rounds_.round()
    was = [it.happened for it in told.posted]
    assert [None if it is None else it.requests for it in was] == [None, 10, None]
    assert "only 10 requests can be judged" in told.posted[1].text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (rows_reply([], 0, under_way=[row("open", 0)]), rows_reply(range(1, 31), 3_100)),
        (rows_reply(range(1, 31), 3_100), rows_reply([], 3_100, last=30)),
        (rows_reply([], 0), rows_reply(range(11, 31), 3_100)),
    ],
    ids=["some ran before", "rows from before", "rows that were dropped"],
)
def test_what_may_lack_earlier_requests_only_warms_up(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Nobody knows what ran beside the first rows, so a third of the time is judged."""
    told = Told()
    told.rows = [first, second]
    rounds_ = TwinRounds(told, 5.0, 1_000, 0.99)
    rounds_.round()
    rounds_.round()
    happened = told.posted[1].happened
    assert happened is not None
    assert happened.requests < 15


def test_a_twin_waits_for_a_cluster_that_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks again soon, and says once that it waits; after a round's time it goes on."""
    monkeypatch.setattr(command, "_LOOK_AGAIN_S", 0.001)
    faults: list[Exception] = [NobodyAlive("nothing listens"), EngineFailed("503")]

    class Starting(Client):
        def get(self, path: str) -> dict[str, Any]:
            assert path == "/ready"
            if faults:
                raise faults.pop()
            return {"ready": True}

    client = Starting("http://127.0.0.1:1", 1.0, "")
    command._await_ready(client, "http://gateway", 60.0)
    assert not faults
    faults += [NobodyAlive("nothing listens")] * 9_999
    command._await_ready(client, "http://gateway", 0.01)
    assert faults
    LINES.flush()
    assert capsys.readouterr().out.count("until http://gateway is ready") == 2


def test_a_wrong_token_ends_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot pass by itself. The error names the variable once."""
    monkeypatch.setattr(os, "nice", lambda by: 0)
    monkeypatch.setenv("MOONSERVE_TOKEN", "wrong")

    async def test(it: Site) -> None:
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        argv = ["twin", "--url", it.url, "--every", "2s"]
        done = await asyncio.to_thread(CliRunner().invoke, cli, argv)
        assert done.exit_code == 1
        assert "401 the cluster's token is missing or wrong" in done.stderr
        assert done.stderr.count("MOONSERVE_TOKEN") == 1

    on(test)


async def loaded(it: Site, seconds: float, rate: float, prompt: int, output: int) -> None:
    """Send a load of one shape for some time; what is refused or slow is part of it."""
    rng = Random(prompt)
    body = {"model": DEFAULT_MODEL, "max_tokens": output, "ignore_eos": True}

    async def one() -> None:
        tokens = [rng.randrange(9, 9_000) for _ in range(prompt)]
        await it.http.request(
            "POST",
            it.url + "/v1/completions",
            body=json.dumps(body | {"prompt": tokens}).encode(),
            timeout_s=60,
        )

    until_s = asyncio.get_running_loop().time() + seconds
    sent: list[asyncio.Task[None]] = []
    while asyncio.get_running_loop().time() < until_s:
        sent.append(asyncio.create_task(one()))
        await asyncio.sleep(rng.expovariate(rate))
    for task in sent:
        task.cancel()  # clients that leave: nothing of this load is left for the next one
    await asyncio.gather(*sent, return_exceptions=True)


@asynccontextmanager
async def twin(it: Site, every_s: float) -> AsyncIterator[None]:
    """A twin in a process of its own, that does not give way to whatever else the machine does."""
    start = "import os; os.nice = lambda by: 0; from moonserve.cli import cli; cli()"
    argv = ("-c", start, "twin", "--url", it.url, "--every", f"{every_s:g}s")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        stdout=None,
        env={**os.environ, "MOONSERVE_TOKEN": TOKEN},
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def rounds(it: Site, count: int) -> list[Advice]:
    """The advice of the next rounds, without those in which the twin had no time to simulate."""
    found: list[Advice] = []
    before = (await call(it, control.PATH))["advice"]
    while len(found) < count:
        await asyncio.sleep(0.2)
        now = (await call(it, control.PATH))["advice"]
        if (
            now != before
            and " time for all " not in now["text"]
            and " longer than " not in now["text"]
        ):
            found.append(msgspec.convert(now, Advice))
        before = now
    return found


@pytest.mark.slow
def test_advice_turns_with_the_load_of_a_live_cluster() -> None:
    """From long prompts to long outputs, on instances that take real time: within two rounds the
    twin matches what happens, also while requests wait for a place in decode, and says that more
    of the role that is short are wanted. The round that is under way when the load turns does not
    count."""
    slow = Cost((20_000, 100, 0, 0, 20_000, 300, 0), learns=False)

    async def test(it: Site) -> None:
        await it.add("p0", "prefill", slow, blocks=1_024)
        await it.add("d0", "decode", slow, blocks=1_024)
        async with twin(it, 12.0):
            for rate, prompt, output, binds in (
                (12.0, 1_000, 12, "prefill"),
                (18.0, 50, 60, "decode"),
            ):
                loading = asyncio.create_task(loaded(it, 300.0, rate, prompt, output))
                said = (await rounds(it, 4 if binds == "prefill" else 3))[-2:]
                # a queue of the load before may remain
                right = [advice for advice in said if advice.binds in (binds, "both")]
                assert right, [it.text for it in said]
                assert right[-1].wanted is not None, right[-1].text
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)

    on(test, slo=Slo(1_000_000, 50_000), admission="none")


def test_the_command_shows_the_advice_and_what_to_do_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence comes first, then what happened, then what was simulated."""
    said: dict[str, Any] = {"advice": FOUND, "age_s": 12.0, "is_stale": False}

    def get_as(self: Client, path: str, shape: Any) -> Any:
        assert path == control.PATH
        return msgspec.json.decode(msgspec.json.encode(said), type=shape)

    monkeypatch.setattr(Client, "get_as", get_as)
    lines = CliRunner().invoke(cli, ["advise"]).stdout.splitlines()
    assert lines[0] == FOUND.text
    assert [line.split()[0] for line in lines[2:6]] == ["policy", "happened", "3", "3"]
    assert lines[4].startswith("3 + 4 (twin)")
    assert lines[5].startswith("3 + 5 (wanted)")
    assert "71%" in lines[3]
    assert lines[-1] == (
        "420 requests that arrived within 60 s; objectives: TTFT 2,000 ms; reported 12 s ago,"
        " after 4.0 s of work"
    )
    said["is_stale"] = True
    assert "is stale" in CliRunner().invoke(cli, ["advise"]).stdout
    assert json.loads(CliRunner().invoke(cli, ["advise", "--json"]).stdout)["age_s"] == 12.0
    said["advice"] = said["age_s"] = None
    done = CliRunner().invoke(cli, ["advise"])
    assert done.exit_code == 1
    assert "moonserve twin --url" in done.stderr


@pytest.mark.parametrize("every", ["1s", "10", "soon"])
def test_the_time_of_a_round_has_a_unit_and_a_least_value(every: str) -> None:
    """The error names the flag."""
    done = CliRunner().invoke(cli, ["twin", "--every", every])
    assert done.exit_code == 2
    assert "--every" in done.stderr

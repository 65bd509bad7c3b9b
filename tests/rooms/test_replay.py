"""`moonserve replay`: prompts from blocks, an open loop, honest counts; what a profile adds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.cli.mirror import ClusterWatch
from moonserve.cli.replay import prompt_of, summary
from moonserve.core.errors import BadRequest, EngineFailed
from moonserve.core.schedule.profiles import PROFILES, Overhead, Profile
from moonserve.core.units import SegmentId
from moonserve.live.replay import ReplayResult, TimedRequest, replay
from moonserve.sim.cluster import Simulation
from moonserve.sim.metrics import measure
from moonserve.sim.segments import full_keys
from moonserve.sim.setup import Setup
from moonserve.sim.trace import Row, Trace

Answer = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(**body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def tokens(*ids: int, finish: str | None = None) -> bytes:
    """A chunk of output."""
    return event(choices=[{"text": "x", "token_ids": ids, "finish_reason": finish}])


@asynccontextmanager
async def gateway(answer: Answer) -> AsyncIterator[str]:
    """A server that answers the n-th request by `answer`."""
    count = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(x for x in head.split(b"\r\n") if x.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
        number, count = count, count + 1
        await answer(number, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def sent(answer: Answer, count: int, bound: int = 100) -> list[ReplayResult]:
    """`count` requests, all due at once."""

    async def main() -> list[ReplayResult]:
        async with asyncio.timeout(20), gateway(answer) as url:
            dues = [TimedRequest(f"r{i}", 0, (1, 2), 3) for i in range(count)]
            return await replay(url, "m", dues, bound)

    return asyncio.run(main())


# Prompts.


def test_equal_blocks_are_equal_tokens_and_partial_ones_begin_alike() -> None:
    """What shares leading blocks in the trace shares those tokens, and nothing more."""
    one = prompt_of(Row(0, 40, 1, (7, 8, 9)), 16, 0)
    two = prompt_of(Row(0, 35, 1, (7, 8, 9)), 16, 0)
    three = prompt_of(Row(0, 40, 1, (7, 8, 10)), 16, 0)
    assert len(one) == 40
    assert two == one[:35]
    assert three[:32] == one[:32]
    assert three[32:] != one[32:]
    assert prompt_of(Row(0, 40, 1, (7, 8, 9)), 16, 1)[:16] != one[:16]


# The loop.


def test_every_token_has_its_time_and_usage_is_read() -> None:
    """Tokens that come together have one time, later ones a later one."""

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + tokens(1))
        await asyncio.sleep(0.03)
        usage = {"prompt_tokens_details": {"cached_tokens": 32}}
        end = event(choices=[], usage=usage) + b"data: [DONE]\n\n"
        writer.write(tokens(2, 3, finish="length") + end)

    (got,) = sent(answer, 1)
    assert (got.outcome, got.error, got.cached_tokens) == ("completed", "", 32)
    first, second, third = got.tokens_us
    assert first < second == third


def test_refusals_and_failures_are_counted_apart() -> None:
    """429 is a refusal; other statuses, errors in mid-stream and broken streams are failures."""

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        replies = (
            b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy",
            b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\ngone",
            STREAM + tokens(1) + event(error={"message": "the engine failed"}),
            STREAM + tokens(1),
            STREAM + b"data: nonsense\n\n",
            STREAM + tokens(1, finish="length") + b"data: [DONE]\n\n",
        )
        writer.write(replies[number])

    got = sorted(sent(answer, 6, bound=1), key=lambda one: one.id)
    assert [one.outcome for one in got] == ["refused", *["failed"] * 4, "completed"]
    assert got[0].error == "429 busy"
    assert "the engine failed" in got[2].error
    assert all(one.error for one in got[:5])


def test_what_fails_all_ends_the_replay_at_once() -> None:
    """A model or a path that is not there is told by the first answer; the rest is not sent."""
    seen = []

    async def nope(number: int, writer: asyncio.StreamWriter) -> None:
        seen.append(number)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 12\r\n\r\nno model nope")

    with pytest.raises(BadRequest, match="the gateway answered 404 no model"):
        sent(nope, 50, bound=1)
    assert len(seen) <= 2


def test_the_loop_is_open_and_its_bound_shows_as_lateness() -> None:
    """Requests do not wait for answers; at the bound they do, and the wait is in their times."""
    arrived = asyncio.Event()

    async def together(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            arrived.set()
        await arrived.wait()  # the first is answered only when the second is here
        writer.write(STREAM + tokens(1, finish="length"))

    assert [one.outcome for one in sent(together, 2)] == ["completed"] * 2

    async def slow(number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(STREAM + tokens(1, finish="length"))

    first, second = sent(slow, 2, bound=1)
    assert second.late_us >= first.tokens_us[0] >= 40_000
    assert second.tokens_us[0] > second.late_us


def test_the_figures_count_what_came() -> None:
    """Times are of completed requests, hits of all input; refused ones count as rejected."""
    rows = [Row(0, 64, 3, (1, 2)), Row(1_000_000, 64, 3, (1, 3)), Row(1_000_000, 32, 1, (4,))]
    answers = [
        ReplayResult("a", 0, "completed", "", [100_000, 120_000, 150_000], 0),
        ReplayResult("b", 0, "completed", "", [300_000, 310_000, 320_000], 32),
        ReplayResult("c", 0, "refused", "429"),
    ]
    found = summary(Trace("t", 32, rows), answers)
    assert (found["completed"], found["rejected"], found["failed"]) == (2, 1, 0)
    assert found["ttft_mean_s"] == pytest.approx(0.2)
    assert found["tbt_mean_ms"] == pytest.approx((30 + 10) / 2)
    assert found["span_s"] == pytest.approx(1.32)
    assert found["hit_rate_tokens"] == pytest.approx(32 / 160)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--scale", "7"], "error: lengths: 7 must divide the block size of 512 tokens"),
        (["--speed", "0"], "error: speed: 0.0 must be above 0"),
        (["--rows", "no/such.csv"], "error: --rows: cannot write no/such.csv: "),
        (["--profile-out", "no/such.json"], "error: --profile-out: cannot write no/such.json: "),
        (["--url", "http://127.0.0.1:9"], "error: nothing listens at http://127.0.0.1:9"),
        (["--url", "127.0.0.1:x"], "error: url: "),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, argv: list[str], message: str) -> None:
    """What cannot be replayed is said in one line that names the field."""
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n')
    done = CliRunner().invoke(cli, ["replay", str(file), *argv], prog_name="moonserve")
    assert done.exit_code in (1, 2)
    assert done.output.startswith(message)
    assert done.output.count("\n") == 1


# What a fitted profile adds to a simulation.


def simulated(profile: Profile, *rows: Row, **setup: bool) -> Simulation:
    """These rows on two prefill instances and one that decodes; KV moves when prefill has ended."""
    sim = Simulation(
        Trace("t", 512, [*rows]),
        Setup(prefill=2, decode=1, profile=profile, overlap=False, **setup),
    )
    assert sim.run()
    return sim


def test_measured_overheads_delay_tokens_and_nothing_else() -> None:
    """Those before the first token come on top of TTFT; a decode call's and a load's way on the
    first gap."""
    row = Row(0, 1_000, 3, (1, 2))
    plain = PROFILES["a800"]
    more = msgspec.structs.replace(
        plain,
        arrive=Overhead(500.0, 1.0),
        call=Overhead(2_000.0, 2.0),
        turn=Overhead(700.0),
        publish=Overhead(2_000.0, 1.0),
        decode_call=Overhead(2_000.0),
        load_base_us=500,
    )
    before, after = (simulated(profile, row) for profile in (plain, more))
    assert after.served[0].first_us == before.served[0].first_us + 1_500 + 4_000 + 700 + 3_000
    gaps = [measure(sim, 0.0).gaps_ms for sim in (before, after)]
    assert gaps[1][0] - gaps[0][0] == pytest.approx(2.5, abs=0.01)
    assert gaps[1][1] == gaps[0][1]


def test_one_copy_keeps_blocks_where_they_are() -> None:
    """Blocks that another instance holds are neither stored again nor copied when fetched."""
    rows = [Row(0, 1_024, 2, (1, 2)), Row(0, 1_024, 2, (1, 2)), Row(9_000_000, 1_500, 2, (1, 2, 3))]
    for one_copy, copies in ((False, 2), (True, 1)):
        sim = simulated(PROFILES["a800"], *rows, one_copy=one_copy)
        first = full_keys(rows[0], 512)[:1]
        prefills = [it for it in sim.nodes.values() if it.info.role == "prefill"]
        held = [sim.segments.held(SegmentId(node.name), first) for node in prefills]
        assert sum(held) == copies
        assert sim.served[2].cached == 1_024


class Gateway:
    """Says what a cluster of one prefill and one decode instance says, before and after a run."""

    after = False
    placed = 10

    def get_as(self, path: str, shape: Any) -> Any:
        """The API's views, as the mirror reads them."""
        if path.startswith("/api/decisions/"):
            number = int(path.removeprefix("/api/decisions/r"))
            return msgspec.convert(self._decision(number), shape)
        return msgspec.convert(self._view(path), shape)

    def _view(self, path: str) -> object:
        one = {"kv_blocks": 64, "block_bytes": 256, "block_size": 32, "max_seqs": 8, "layers": 0}
        one |= {"chunk_tokens": 512, "segment_bytes": 4_096, "connector": "embedded"}
        if path == "/api/instances":
            return [{"id": "p0", "role": "prefill", **one}, {"id": "d0", "role": "decode", **one}]
        return {"tuning": {}, "placed": self.placed if Gateway.after else 0}

    def _decision(self, number: int) -> object:
        if not number:
            raise EngineFailed("no decision is kept for request r0")
        stages = {"waited_ms": 8.0, "queue_ms": 4.0, "load_ms": 0.0, "compute_ms": 40.0}
        stages |= {"publish_ms": 6.0, "prefill_ms": 62.0, "handover_ms": 30.0}
        stages |= {"decode_ms": 20.0, "total_ms": 120.0}
        ends = {"actual_ttft_ms": 70.0, "actual_tbt_ms": 25.0, "actual_cached_tokens": 0}
        where = {"prefill": "p0", "decode": "d0", "prompt_tokens": 60, "output_tokens": 3}
        return {
            "request": f"r{number}",
            "outcome": "length",
            "why": "",
            "arrived_ms": 10_000 * number,
            "in_time": True,
            "stages": stages,
            **ends,
            **where,
        }


def watched(monkeypatch: pytest.MonkeyPatch, late_us: int = 0, placed: int = 10) -> ClusterWatch:
    """A run of ten requests, of which the gateway has forgotten the first one."""
    monkeypatch.setattr(Gateway, "after", False)
    monkeypatch.setattr(Gateway, "placed", placed)
    watch = ClusterWatch(Gateway(), 32)  # type: ignore[arg-type]
    monkeypatch.setattr(Gateway, "after", True)
    times = [70_000 + late_us]
    watch.end("t", [ReplayResult(f"r{at}", late_us, "completed", "", times) for at in range(10)])
    return watch


def test_a_profile_has_what_the_gateway_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage's time is that of its term, and the comparison is of what is still known."""
    watch = watched(monkeypatch)
    profile = watch.profile
    stages = {"arrive": 8_000, "call": 12_000, "turn": 4_000, "publish": 6_000}
    for name, us in stages.items():
        assert getattr(profile, name).us(60, 1.0) == pytest.approx(us, rel=0.02), name
    assert profile.cost().decode_step_us(1, 62) == pytest.approx(20_000, rel=0.02)
    assert watch.doubts == []
    rows = [Row(10_000_000 * at, 60, 3, (2 * at, 2 * at + 1)) for at in range(10)]
    found = {it.name: it for it in watch.compare(Trace("t", 32, rows))}
    assert found["ttft_ms"].requests == 9
    assert found["ttft_ms"].recorded.mean == 70.0
    assert not found["ttft_ms"].missed()
    assert not found["tbt_ms"].missed()


@pytest.mark.parametrize(
    ("late_us", "placed", "told"),
    [
        (0, 11, "requests of others were served meanwhile (1)"),
        (1_000_000, 10, "this client was overloaded"),
    ],
)
def test_a_profile_of_the_run_more_than_of_the_cluster_is_doubted(
    monkeypatch: pytest.MonkeyPatch, late_us: int, placed: int, told: str
) -> None:
    """Each sign of it is one warning."""
    [doubt] = watched(monkeypatch, late_us, placed).doubts
    assert told in doubt

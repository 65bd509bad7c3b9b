"""Traces: what is read, what is refused and how it is told, and what the transforms keep."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli
from moonserve.core.errors import ConfigError
from moonserve.sim.stats import hits, stats
from moonserve.sim.synthesize import Shape, synthesize
from moonserve.sim.trace import Row, Trace, head, read_trace, scale, validate, write_trace

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n'
SIMPLE = "timestamp_ms,input_length,output_length,hash_ids\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file for a trace."""
    return tmp_path / "t.jsonl"


def run(*argv: str | Path) -> Result:
    """Run `moonserve trace` in this process."""
    return CliRunner().invoke(cli, [str(arg) for arg in ("trace", *argv)])


def test_jsonl_is_read(path: Path) -> None:
    """Mooncake's JSONL gives rows in microseconds; blank lines and further fields do not matter."""
    late = '{"timestamp": 5.5, "input_length": 512, "output_length": 1, "hash_ids": [9], "x": 1}\n'
    path.write_text(GOOD + "\n" + late)
    rows = [Row(5_000, 600, 7, (0, 1)), Row(5_500, 512, 1, (9,))]
    assert read_trace(path) == Trace("t", 512, rows)
    assert read_trace(path, limit=1).rows == rows[:1]


def test_simple_csv_is_read(path: Path) -> None:
    """A CSV may name its blocks; one that does not shares none."""
    path.write_text(SIMPLE + "0,600,7,4 5\n2.5,512,1,4\n")
    assert read_trace(path).rows == [Row(0, 600, 7, (4, 5)), Row(2_500, 512, 1, (4,))]
    path.write_text("timestamp_ms,input_length,output_length\n0,600,7\n1,600,7\n")
    assert [row.blocks for row in read_trace(path).rows] == [(0, 1), (2, 3)]


def test_azure_csv_is_read(path: Path) -> None:
    """Azure's times, of either release, count from the first row; blocks are each row's own."""
    path.write_text(
        "\ufeff"
        + AZURE
        + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805901,1025,1\n"
    )
    assert read_trace(path).rows == [Row(0, 374, 44, (0,)), Row(1_000_000, 1025, 1, (1, 2, 3))]
    path.write_text(AZURE + "2024-05-10 00:00:00.5+00:00,1,2\n2024-05-10 00:00:01+00:00,1,2\n")
    assert [row.at_us for row in read_trace(path).rows] == [0, 500_000]


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        (GOOD + "{", "2: row", "is no JSON; write one object"),
        (GOOD + "[]", "2: row", "is no JSON object; write one"),
        (GOOD + GOOD.replace("5", '"5"'), "2: timestamp", "is not a number of milliseconds"),
        (GOOD.replace('"hash_ids": [0, 1]', '"ids": 0'), "1: hash_ids", "is missing; it is a list"),
        (GOOD.replace("[0, 1]", '[0, "1"]'), "1: hash_ids", "is not a list of whole numbers"),
        (GOOD.replace("600", "6.5"), "1: input_length", "is not a whole number of tokens"),
        (GOOD + GOOD.replace("5", "4.5"), "2: timestamp", "goes back by 0.5 ms; sort"),
        (GOOD.replace("5", "-5"), "1: timestamp", "must not be negative"),
        (GOOD.replace("5", "-1e308"), "1: timestamp", "must not be negative"),
        (GOOD + GOOD.replace("5", "1e308"), "2: timestamp", "is too large to be a time in ms"),
        (GOOD.replace("5", "1" + "0" * 15), "1: timestamp", "is too large to be a time in ms"),
        (GOOD.replace("5", "1e400"), "1: timestamp", "is not a number of milliseconds"),
        (SIMPLE + "1e15,1,1,1", "2: timestamp_ms", "is too large to be a time in ms"),
        (SIMPLE + "inf,1,1,1", "2: timestamp_ms", "is not a time"),
        (GOOD.replace("600", "0"), "1: input_length", "0 must be between 1 and"),
        (GOOD.replace("7", "99999999"), "1: output_length", "99999999 must be between 1 and"),
        (GOOD.replace("600", "512"), "1: hash_ids", "2 blocks for 512 input tokens, which are 1 "),
        (GOOD.replace("600", "1025"), "1: hash_ids", "which are 3 blocks of 512"),
        (GOOD.replace("[0, 1]", "[1, 1]"), "1: hash_ids", "an id comes twice"),
        (GOOD + GOOD.replace("[0, 1]", f"[0, {1 << 64}]"), "2: hash_ids", "from 0 to 2^64 - 1"),
        (GOOD.replace("[0, 1]", "[0, -1]"), "1: hash_ids", "-1 is no id"),
        (GOOD.replace("[0, 1]", f"[0, {'9' * 4_000}]"), "1: hash_ids", "is no id"),
        (GOOD.replace("[0, 1]", f"[0, {'9' * 9_000}]"), "1: hash_ids", ""),
        (
            GOOD.replace("{", f'{{"priority": {1 << 70}, '),
            "1: priority",
            "must be from -100 to 100",
        ),
        (GOOD.replace("{", '{"priority": -101, '), "1: priority", "must be from -100 to 100"),
        (SIMPLE + f"0,1,1,{1 << 64}", "2: hash_ids", "is no id"),
        (SIMPLE + "0,1,1,1\n1,1,1,x", "3: hash_ids", "is not a whole number"),
        (SIMPLE + "nan,1,1,1", "2: timestamp_ms", "is not a time"),
        (SIMPLE + "0,1,1", "2: row", "3 columns where the header has 4"),
        (AZURE + "yesterday,1,1", "2: TIMESTAMP", "is not a time"),
        (AZURE + "2024-05-10,many,1", "2: ContextTokens", "is not a whole number"),
        (AZURE + "2024-05-10,-9,1", "2: ContextTokens", "-9 must be between 1"),
    ],
)
def test_bad_rows_are_named(path: Path, text: str, where: str, why: str) -> None:
    """Reading fails, and validating tells, by line, the file's own field name, and the reason."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{where}: ")
    assert why in str(caught.value)
    _, [fault] = validate(path, 9)
    assert f"{fault.line}: {fault.field}" == where


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "not a trace"), ("a,b,c\n1,2,3\n", "not a trace"), (SIMPLE, "no requests in this file")],
)
def test_what_is_no_trace_is_refused(path: Path, text: str, why: str) -> None:
    """A file of another kind is told from one of bad rows, as is one without requests."""
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_trace(path)


def test_a_missing_file_is_told(path: Path) -> None:
    """A file that is not there is an operating error that names it."""
    with pytest.raises(ConfigError, match=r"t\.jsonl: cannot be read: No such file"):
        read_trace(path)


def test_validate_tells_several_and_stops(path: Path) -> None:
    """All faults up to the bound are told; good rows between them are counted."""
    path.write_text((GOOD + "{}\n") * 5)
    good, faults = validate(path, 3)
    assert (good, [fault.line for fault in faults]) == (3, [2, 4, 6])


def test_what_is_written_is_read_back(path: Path) -> None:
    """Writing and reading give the same rows, also at times between milliseconds."""
    made = scale(synthesize(3, 200, 7.0), speed=1.7, lengths=16)
    made.rows[0] = msgspec.structs.replace(made.rows[0], priority=-2, tenant="t")
    with path.open("w") as out:
        write_trace(made, out)
    assert read_trace(path, block_size=32).rows == made.rows
    assert read_trace(path, block_size=32, limit=20).rows == head(made, 20).rows


def test_scaling_keeps_order_and_blocks() -> None:
    """Times shrink by the speed; no length reaches 0; block ids and their number stay valid."""
    made = synthesize(3, 200, 7.0)
    small = scale(made, speed=2.0, lengths=512)
    assert small.block_size == 1
    for before, after in zip(made.rows, small.rows, strict=True):
        assert abs(2 * after.at_us - before.at_us) <= 1
        assert after.output_tokens == max(1, -(-before.output_tokens // 512))
        assert after.blocks == before.blocks
        assert after.input_tokens == len(after.blocks)


@pytest.mark.parametrize(
    ("speed", "lengths"),
    [(0.0, 1), (float("nan"), 1), (1e-300, 1), (1e-13, 1), (1.0, 0), (1.0, 3)],
)
def test_scales_that_make_no_trace_are_refused(speed: float, lengths: int) -> None:
    """A speed must be positive and end this age; lengths' divisor must divide the block size."""
    with pytest.raises(ConfigError, match=r"^(speed|lengths): "):
        scale(synthesize(3, 2, 1.0), speed, lengths)


def test_synthetic_traces_are_sound(path: Path) -> None:
    """Any seed gives rows that validate; the same seed the same; each block after one prefix."""
    for seed in range(5):
        made = synthesize(seed, 400, 5.0, Shape(most_tokens=9_000))
        assert made == synthesize(seed, 400, 5.0, Shape(most_tokens=9_000))
        with path.open("w") as out:
            write_trace(made, out)
        assert validate(path, 1) == (400, [])
        before: dict[int, int | None] = {}
        for row in made.rows:
            assert row.input_tokens <= 9_000
            for block, parent in zip(row.blocks, (None, *row.blocks), strict=False):
                assert before.setdefault(block, parent) == parent
    assert synthesize(1, 50, 5.0) != synthesize(2, 50, 5.0)


def test_synthetic_shape_follows_its_numbers() -> None:
    """Arrivals come at the rate asked for, and more turns share more."""
    one = synthesize(0, 3_000, 5.0, Shape(turns=1.0, system_tokens=64, sigma=0.1))
    many = synthesize(0, 3_000, 5.0, Shape(turns=8.0, system_tokens=64, sigma=0.1))
    assert 550 < one.rows[-1].at_us / 1e6 < 650
    assert hits(one, None).block_hits == 0
    assert hits(many, None).block_hits > 0.5 * stats(many).block_touches


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, 0) for field in ("turns", "open_sessions", "system_prompts", "user_tokens")),
        *((field, 1e300) for field in ("turns", "zipf", "sigma")),
        *((field, 10**30) for field in ("system_prompts", "user_tokens", "most_tokens")),
    ],
)
def test_shapes_out_of_range_are_refused(field: str, value: float) -> None:
    """A number that makes no trace is named."""
    with pytest.raises(ConfigError, match=f"{field}: .* must be between"):
        synthesize(0, 1, 1.0, Shape(**{field: value}))


def test_hits_by_hand() -> None:
    """A hit is the leading run; a hole ends it; a partial last block counts for its tokens."""
    rows = [
        Row(0, 1_100, 1, (1, 2, 3)),
        Row(0, 1_100, 1, (1, 2, 3)),
        Row(1_000, 1_030, 1, (1, 8, 3)),
    ]
    found = stats(Trace("hand", 512, rows))
    assert (found.block_touches, found.unique_blocks, found.span_ms) == (9, 4, 1)
    assert (found.infinite_hits, found.infinite_hit_tokens) == (3 + 1, 1_100 + 512)
    assert found.input_quantiles == {50: 1_100, 90: 1_100, 99: 1_100, 100: 1_100}
    assert hits(Trace("hand", 512, rows), 2).block_hits == 2 + 1


def test_commands_read_pipes() -> None:
    """FILE may be -, and what is made twice is the same."""
    made = run("synthesize", "--seed", "4", "-n", "60", "--rps", "9").stdout
    assert run("synthesize", "--seed", "4", "-n", "60", "--rps", "9").stdout == made
    argv = [sys.executable, "-m", "moonserve", "trace", "head", "-", "-n", "50"]
    cut = subprocess.run(argv, input=made, capture_output=True, text=True, check=True).stdout
    assert cut.splitlines() == made.splitlines()[:50]


def test_commands_work_on_files(tmp_path: Path) -> None:
    """Every command reads and writes files, and prints JSON where it prints data."""
    made, small = tmp_path / "made.jsonl", tmp_path / "small.jsonl"
    assert run("synthesize", "-n", "60", "--turns", "6", "-o", made).exit_code == 0
    assert run("scale", made, "--lengths", "16", "-o", small).exit_code == 0
    whole, tiny = (
        json.loads(run("stats", path, "--block-size", size, "--lru", "40", "--json").stdout)
        for path, size in ((made, "512"), (small, "32"))
    )
    assert whole["requests"] == 60
    assert whole["lru_hits"] == tiny["lru_hits"]
    assert whole["hits"][0]["policy"] == "lru"
    assert json.loads(run("validate", made, "--json").stdout) == {"good_rows": 60, "faults": []}
    table = run("stats", made, "--policy", "sieve", "--policy", "lfu", "--capacity", "9").stdout
    assert "sieve 9 " in table
    assert "lfu 9 " in table
    assert len(run("head", made, "-n", "7").stdout.splitlines()) == 7


def test_validate_ends_with_one_on_faults(path: Path) -> None:
    """A script can tell a good trace from a bad one by the exit code."""
    path.write_text(GOOD)
    assert run("validate", path).exit_code == 0
    path.write_text(GOOD + "{}\n")
    done = run("validate", path)
    assert (done.exit_code, "t.jsonl:2: timestamp: " in done.stdout) == (1, True)


def test_a_trace_without_requests_says_so(path: Path) -> None:
    """A header alone is a fault with a reason, in text and in JSON."""
    path.write_text(SIMPLE)
    done = run("validate", path)
    assert done.exit_code == 1
    assert "no requests in this file" in done.stdout
    [fault] = json.loads(run("validate", path, "--json").stdout)["faults"]
    assert fault["message"] == "no requests in this file"


def test_a_trace_is_not_written_over_itself(path: Path) -> None:
    """Neither head nor scale; what was there stays."""
    path.write_text(GOOD * 3)
    for argv in (("head", path, "-n", "1"), ("scale", path, "--speed", "2")):
        done = run(*argv, "-o", path)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == f"error: --output: {path} is also FILE; name another file\n"
    assert path.read_text() == GOOD * 3


def test_capacities_need_a_policy(path: Path) -> None:
    """Alone they would say nothing."""
    path.write_text(GOOD)
    done = run("stats", path, "--capacity", "10")
    assert (done.exit_code, "--capacity" in done.stderr) == (2, True)
    assert run("stats", path, "--capacity", "10", "--policy", "lru").exit_code == 0


def test_faults_are_one_line(path: Path) -> None:
    """A bad file ends a command with 2 and one line, not a traceback."""
    path.write_text(GOOD + "{}\n")
    done = run("stats", path)
    assert (done.exit_code, done.stderr.count("\n"), done.exception.__class__) == (2, 1, SystemExit)


def test_writing_needs_no_seek() -> None:
    """Traces go to any text stream."""
    out = io.StringIO()
    write_trace(Trace("t", 512, [Row(1_500, 5, 1, (3,))]), out)
    assert out.getvalue() == (
        '{"timestamp":1.5,"input_length":5,"output_length":1,"hash_ids":[3]}\n'
    )

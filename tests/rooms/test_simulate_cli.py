"""`moonserve simulate`: its options, its figures, what it writes, and how it says no."""

from __future__ import annotations

import csv
import json
import pstats
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from moonserve import __version__
from moonserve.cli import cli
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.profiles import PROFILES
from moonserve.sim.metrics import percent
from moonserve.sim.synthesize import synthesize
from moonserve.sim.trace import write_trace

STABLE = {
    *("policy", "requests", "completed", "rejected", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s"),
    *("ttft_p99_s", "tbt_p50_ms", "tbt_p90_ms", "tbt_p99_ms", "attainment", "attainment_ttft"),
    *("goodput_rps", "goodput_tokens_per_s", "hit_rate_tokens", "hit_rate_blocks"),
    *("prefill_gpu_s_mean", "wasted_prefill_s", "imbalance", "transfers", "digest", "cpu_s"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of 40 requests."""
    file = tmp_path / "chat.jsonl"
    with file.open("w") as out:
        write_trace(synthesize(3, 40, 2.0), out)
    return file


def run(*argv: str | Path, code: int = 0) -> Result:
    """Run `moonserve simulate` on two prefill and two decode instances, in this process."""
    cluster = [] if "--mixed" in argv else ["--prefill", "2", "--decode", "2"]
    done = CliRunner().invoke(cli, ["simulate", *map(str, argv[:1]), *cluster, *map(str, argv[1:])])
    assert done.exit_code == code, done.output
    return done


def figures(*argv: str | Path) -> dict[str, object]:
    """Its --json."""
    found: dict[str, object] = json.loads(run(*argv, "--json").stdout)
    return found


def test_json_has_the_stable_names(path: Path) -> None:
    """Every figure that others read is there, and has a value."""
    found = figures(path)
    assert found.keys() >= STABLE
    assert not [name for name in STABLE if found[name] is None]
    assert (found["trace"], found["requests"], found["completed"]) == ("chat", 40, 40)
    queues = found["queues"]
    assert isinstance(queues, dict)
    names = ["times_s", "waiting", "prefill_queued", "decode_queued", "decoding"]
    assert list(queues) == names
    assert 10 < len(queues["times_s"]) <= 200
    assert figures(path, "--limit", str(10**30))["digest"] == found["digest"]


def test_the_table_says_the_same(path: Path) -> None:
    """People read the figures of --json, with the goals beside them."""
    found = figures(path)
    table = run(path, "--ttft-slo", "5s", "--tbt-slo", "90ms").stdout
    assert "chat at 1x" in table
    assert "2 prefill + 2 decode, kvcache_centric, a800-loaded" in table
    assert f"mean {found['ttft_mean_s']:.2f} s" in table
    assert "goal 5 s met by" in table
    assert "goal 90 ms met by" in table
    assert str(found["digest"]) in table


def test_options_reach_the_simulation(path: Path) -> None:
    """Each option makes another run of it, or another measure."""
    usual = figures(path)
    for argv in (
        ("--policy", "random"),
        ("--speed", "4"),
        ("--profile", "h800"),
        ("--cache-blocks", "0"),
        ("--limit", "20"),
        ("--ttft-slo", "100ms", "--admission", "ttft"),
        ("--speed", "9", "--prefill-seqs", "8"),
        ("--chunk-tokens", "512"),
        ("--no-overlap",),
        ("--first-token", "decode", "--no-overlap"),
        ("--pool", "global"),
        ("--mixed", "3"),
        ("--fault", "kill:p000@3s", "--fault", "join:p000@6s"),
        ("--fault", "slow:d001@2sx3"),
    ):
        assert figures(path, *argv)["digest"] != usual["digest"], argv
    assert figures(path, "--seed", "5")["digest"] == usual["digest"], "this policy does not draw"
    assert figures(path, "--tbt-slo", "1ms")["attainment"] == 0
    infinite = figures(path, "--cache-blocks", "infinite", "--eviction", "fifo")
    assert infinite["hit_rate_tokens"] >= usual["hit_rate_tokens"]
    racks = figures(path, "--racks", "2", "--keep-output", "--threshold", "2")
    assert racks["completed"] == 40


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_named(path: Path, policy: str) -> None:
    """What live can do, simulation can."""
    assert figures(path, "--policy", policy, "--limit", "10")["policy"] == policy


def test_a_profile_may_be_a_file(path: Path, tmp_path: Path) -> None:
    """A profile written from a live run is read; a wrong one is told by its field."""
    import msgspec

    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(PROFILES["h800"]))
    assert (
        figures(path, "--profile", file)["digest"] == figures(path, "--profile", "h800")["digest"]
    )
    file.write_text('{"name": "x"}')
    assert "mine.json is no profile" in run(path, "--profile", file, code=2).stderr


def test_rows_are_written(path: Path, tmp_path: Path) -> None:
    """--rows has a line for each request, with what was predicted and what came."""
    file = tmp_path / "rows.csv"
    run(path, "--rows", file)
    with file.open() as written:
        rows = list(csv.DictReader(written))
    assert [row["id"] for row in rows] == [f"r{at:06}" for at in range(40)]
    assert float(rows[0]["ttft_s"]) == float(rows[0]["predicted_ttft_s"])
    assert {row["met_ttft"] for row in rows} == {"True"}


class _Page(HTMLParser):
    """Elements of a page, and whether all that were opened were closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.seen: dict[str, int] = {}
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        assert not [value for name, value in attrs if name in ("src", "href")], "needs a network"
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("argv", [(), ("--mixed", "3"), ("--limit", "1"), ("--ttft-slo", "1us")])
def test_the_page_stands_alone(path: Path, tmp_path: Path, argv: tuple[str, ...]) -> None:
    """--report is one well-formed file with its plots inside, however little there was to plot."""
    file = tmp_path / "run.html"
    refuse = ("--admission", "ttft") if "1us" in argv else ()
    run(path, "--report", file, *argv, *refuse)
    page = _Page(file.read_text())
    assert page.open == []
    charts = [
        chart
        for part in ("charts", "timelines")
        for chart in json.loads(page.text.split(f'id="{part}">')[1].split("</script>")[0])
    ]
    assert len(charts) == 10
    drawn = [
        chart
        for chart in charts
        if any(y is not None for line in chart.get("lines", ()) for y in line["ys"])
    ]
    assert len(drawn) == (5 if refuse else 9), "no curves where nobody was served"
    assert charts[-1]["kind"] == "heat"
    assert "@import" not in page.text


def test_a_request_is_explained(path: Path) -> None:
    """--explain shows the candidates, why one won, and what was predicted beside what came."""
    said = run(path, "--explain", "r000007").stdout
    assert "request r000007: completed" in said
    assert "kvcache_centric chose p00" in said
    for instance in ("p000", "p001"):
        assert instance in said.split("candidate")[1]
    assert "predicted" in said
    assert "with hindsight: p00" in said
    told = figures(path, "--explain", "r000007")["explanation"]
    assert isinstance(told, dict)
    assert told["actual_ttft_ms"] == pytest.approx(told["predicted_ttft_ms"], rel=0.5)
    assert len(told["candidates"]) == 2


def test_a_refusal_is_explained(path: Path) -> None:
    """Who was refused is told why, though nobody served it; no time is rounded away."""
    said = run(path, "--explain", "r000000", "--admission", "ttft", "--ttft-slo", "1us").stdout
    assert "misses the objective of 0.001 ms" in said
    said = run(path, "--explain", "r000000", "--admission", "ttft", "--ttft-slo", "10ms").stdout
    assert "request r000000: refused" in said
    assert "10 ms" in said


def test_the_profiler_says_where_time_went(path: Path, tmp_path: Path) -> None:
    """--cprofile writes what pstats reads, and shows the first ten by their own time."""
    file = tmp_path / "run.pstats"
    done = run(path, "--cprofile", file, "--json")
    assert json.loads(done.stdout)["completed"] == 40
    assert "python -m pstats" in done.stderr
    assert "tottime" in done.stderr
    assert pstats.Stats(str(file)).total_calls > 1_000


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--fault", "kill:p000"), "--fault: kill:p000 is not kill:INSTANCE@TIME"),
        (("--fault", "slow:p000@3s"), "--fault"),
        (("--fault", "kill:p000@3"), "--fault: kill:p000@3: 3 has no unit; write 3s for seconds"),
        (("--fault", "slow:p000@3sx0"), "--fault"),
        (("--fault", "slow:p000@3sx" + "9" * 400), "--fault"),
        (("--fault", "kill:p000@" + "9" * 400 + "s"), "--fault"),
        (("--fault", "kill:p009@3s"), "fault: p009 is none of d000, d001, p000, p001"),
        (("--cache-blocks", "lots"), "--cache-blocks: lots is neither"),
        (("--ttft-slo", "30"), "ttft_slo: 30 has no unit; write 30s for seconds or 30ms"),
        (("--tbt-slo", "0s"), "tbt_slo: "),
        (("--threshold", "-1"), "--threshold"),
        (("--speed", "0"), "speed"),
        (("--speed", "1e-300"), "speed: 1e-300 is too slow for chat: must be above "),
        (("--prefill", "9" * 20), "prefill, decode or mixed"),
        (("--profile", "b200"), "profile: b200 is neither"),
        (("--explain", "r000040"), "--explain: r000040 is none of r000000 to r000039"),
        (("--policy", "best"), "--policy"),
        (("--prefill", "0"), "prefill"),
    ],
)
def test_what_is_wrong_is_named(path: Path, argv: tuple[str, ...], named: str) -> None:
    """A wrong option ends with 2, one line that names it, and nothing on stdout."""
    done = run(path, *argv, code=2)
    assert named in done.stderr
    assert done.stdout == ""


def test_a_file_that_cannot_be_written_is_told_at_once(path: Path) -> None:
    """What has no place ends with one line before the trace is even read; nothing is left."""
    for option in ("--report", "--rows", "--cprofile"):
        for place in ("no/such/folder.html", str(path.parent), "/dev/null"):
            done = run("not-read.jsonl", option, place, code=2)
            assert done.stderr.startswith(f"error: {option}: cannot write {place}: ")
            assert done.stderr.count("\n") == 1
    assert list(path.parent.iterdir()) == [path]


def test_what_was_simulated_says_what_is_off(path: Path) -> None:
    """A slow instance shows by how much, and a profile that nothing confirms shows that."""
    faults = ("--fault", "slow:d001@20sx3", "--fault", "kill:p000@9s")
    table = run(path, "--profile", "h800", *faults).stdout
    assert "h800 (not validated), " in table
    assert "slow d001 x3 at 20 s, kill p000 at 9 s" in table
    assert "not validated" not in run(path).stdout


def test_json_says_how_to_repeat_it(path: Path, tmp_path: Path) -> None:
    """`setup` has every option; run with these, the same trace gives the same digest."""
    import msgspec

    mine = tmp_path / "mine.json"
    mine.write_bytes(
        msgspec.json.encode(msgspec.structs.replace(PROFILES["h800"], name="mine", wake_us=5_000))
    )
    argv = ("--policy", "random", "--seed", "4", "--speed", "3", "--limit", "30", "--racks", "2")
    found = figures(path, *argv, "--profile", mine, "--fault", "kill:p000@3s", "--no-overlap")
    setup = found["setup"]
    assert isinstance(setup, dict)
    assert (setup["trace"], setup["trace_rows"], setup["moonserve"]) == ("chat", 30, __version__)
    assert figures(path)["setup"]["trace_digest"] != setup["trace_digest"]  # type: ignore[index]
    mine.write_bytes(msgspec.json.encode(setup["profile"]))
    again: list[str | Path] = ["--profile", mine]
    for name, value in setup.items():
        option = "--" + name.replace("_", "-")
        if name in ("moonserve", "profile") or name.startswith("trace") or value in (None, False):
            continue
        for one in value if isinstance(value, list) else [value]:
            again += [option] if one is True else [option, str(one)]
    assert figures(path, *again)["digest"] == found["digest"]


def test_the_table_names_what_is_not_usual(path: Path) -> None:
    """Options that no figure and no title shows stand in the second line."""
    usual = run(path).stdout.splitlines()[1]
    assert usual.endswith("admission none")
    argv = ("--seed", "3", "--keep-output", "--chunk-tokens", "512", "--limit", "9")
    line = run(path, *argv).stdout.splitlines()[1]
    assert line == f"{usual}, keep-output, chunk-tokens 512, seed 3, limit 9"


def test_losses_are_counted_by_reason(path: Path, tmp_path: Path) -> None:
    """Refusals and failures of like reasons make one line, with the first of them."""
    small = tmp_path / "small.json"
    import msgspec

    profile = msgspec.structs.replace(PROFILES["a800"], name="small", kv_tokens=4_096)
    small.write_bytes(msgspec.json.encode(profile))
    found = figures(path, "--profile", small)
    lost = found["lost"]
    assert isinstance(lost, list)
    by_outcome = {"refused": 0, "failed": 0}
    for group in lost:
        by_outcome[group["outcome"]] += group["count"]
    assert by_outcome == {"refused": found["rejected"], "failed": found["failed"]}
    assert by_outcome["refused"] > 1
    [refused] = [group for group in lost if group["outcome"] == "refused"]
    assert refused["reason"] == "kv_memory"
    said = f"{refused['count']} refused as {refused['first']}: {refused['why']}"
    assert said in run(path, "--profile", small).stdout


def test_not_all_is_never_100_percent() -> None:
    """Shares that people read are rounded down."""
    assert [percent(x) for x in (1.0, 0.99996, 0.57, 0.29, 0.0)] == [
        *("100.0%", "99.9%", "57.0%", "29.0%", "0.0%")
    ]
    assert percent(0.98996, 2) == "98.99%"


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (("--policy", "late_binding", "--threshold", "2"), "--threshold"),
        (("--mixed", "2", "--no-overlap"), "--no-overlap"),
        (("--mixed", "2", "--keep-output"), "--keep-output"),
        (("--mixed", "2", "--prefill-seqs", "2"), "--prefill-seqs"),
        (("--cache-blocks", "infinite", "--eviction", "fifo"), "--eviction"),
    ],
)
def test_options_that_change_nothing_are_told(
    path: Path, argv: tuple[str, ...], option: str
) -> None:
    """A line of warning, for each that another option makes idle; none for what works."""
    assert run(path, *argv).stderr.startswith(f"warning: {option} changes nothing: ")
    assert "warning" not in run(path, "--threshold", "2", "--no-overlap").stderr


def test_no_output_is_written_over_another_file_of_the_run(path: Path, tmp_path: Path) -> None:
    """Neither the trace, by whatever name, nor another output; before anything runs."""
    before = path.read_text()
    link = tmp_path / "link.jsonl"
    link.hardlink_to(path)
    for option in ("--report", "--rows", "--cprofile"):
        for name in (path, link):
            done = run(path, option, name, code=2)
            assert done.stderr == f"error: {option}: {name} is also TRACE; name another file\n"
    both = ("--report", tmp_path / "x", "--rows", tmp_path / "." / "x")
    assert "is also --report; name another file" in run(path, *both, code=2).stderr
    assert "is also --rep" in run(path, "--report", "-", "--rows", "-", code=2).stderr
    assert path.read_text() == before
    assert not (tmp_path / "x").exists()


def test_a_mixed_cluster_is_nothing_else(path: Path) -> None:
    """--mixed stands alone; with --prefill beside it, it is refused."""
    assert figures(path, "--mixed", "2")["prefill"] == 0
    assert "mixed" in run(path, "--mixed", "2", "--prefill", "1", code=2).stderr


def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A bad row is named by file, line and field."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    assert "bad.jsonl:1: hash_ids" in run(file, code=2).stderr


def test_long_prompts_are_shared_where_told(tmp_path: Path) -> None:
    """By as many as --cpp allows; told where the profile does not know the model's layers."""
    long = tmp_path / "long.jsonl"
    row = {"timestamp": 0, "input_length": 60_000, "output_length": 2, "hash_ids": [*range(118)]}
    long.write_text(json.dumps(row) + "\n")
    argv = (long, "--cpp", "2", "--ttft-slo", "6s", "--explain", "r000000")
    assert " 2 instances share it: p000 " in run(*argv).stdout
    assert " share it" not in run(*argv[:1], *argv[3:]).stdout
    flat = tmp_path / "flat.json"
    flat.write_bytes(msgspec.json.encode(msgspec.structs.replace(PROFILES["a800"], layers=0)))
    warned = run(*argv, "--profile", flat)
    assert warned.stderr.startswith("warning: --cpp changes nothing: profile a800 ")
    assert "Not split: no other instance can take a part of it." in warned.stdout


def test_groups_of_mixed_instances_are_warned_of(path: Path) -> None:
    """Plans leave out what they decode."""
    assert run(path, "--mixed", "4", "--cpp", "4").stderr.startswith("warning: --cpp plans for")


def test_priorities_of_the_trace_are_admitted_by_their_modes(tmp_path: Path) -> None:
    """Those below 0 are let in where their mode refuses nobody, and the others refused."""
    path = tmp_path / "p.jsonl"
    rows = [
        {
            "timestamp": at,
            "input_length": 51_200,
            "output_length": 2,
            "hash_ids": list(range(100 * at, 100 * at + 100)),
            "priority": -(at % 2),
            "tenant": "ab"[at % 2],
        }
        for at in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "rows.csv"
    goals = ("--ttft-slo", "9s", "--admission", "ttft", "--admission-low", "none")
    assert run(path, "--prefill", "2", *goals, "--rows", str(out)).exit_code == 0
    with out.open() as file:
        told = list(csv.DictReader(file))
    refused = {(row["tenant"], row["priority"]) for row in told if row["outcome"] == "refused"}
    assert refused == {("a", "0")}

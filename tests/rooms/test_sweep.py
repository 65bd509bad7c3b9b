"""Grids: what an axis takes, what a cell gives, and that one cell's failure is its own."""

from __future__ import annotations

import csv
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli
from moonserve.cli.jobs import Failed, run_jobs
from moonserve.core.errors import ConfigError
from moonserve.sim.sweep import grid
from moonserve.sim.synthesize import synthesize
from moonserve.sim.trace import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of forty requests."""
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    with path.open("w") as file:
        write_trace(synthesize(1, 40, 2.0), file)
    return str(path)


def run(*argv: str | Path) -> Result:
    """Run `moonserve sweep` in this process; its cells have processes of their own."""
    return CliRunner().invoke(cli, ["sweep", *map(str, argv)])


def test_a_grid_is_every_combination() -> None:
    """The cells are the product of the axes, in order, and each has the setup its values say."""
    cells = grid(
        {"trace": "t", "split": ["2+3", "4"], "policy": ["random", "cache_aware"], "seed": 7}
    )
    made = [(c.setup.prefill, c.setup.decode, c.setup.mixed, c.setup.tuning.policy) for c in cells]
    assert made == [
        *[(2, 3, 0, "random"), (2, 3, 0, "cache_aware")],
        *[(0, 0, 4, "random"), (0, 0, 4, "cache_aware")],
    ]
    assert {cell.setup.seed for cell in cells} == {7}


def test_axes_reach_the_setup_the_conductor_and_the_goal() -> None:
    """Settings of Setup and of Tuning are axes; objectives are set for both who use them."""
    [cell] = grid(
        {
            "trace": "t",
            "cache_blocks": "infinite",
            "kvcache_balancing_threshold": "2.5",
            "pooled": "true",
            "ttft_slo": "5s",
            "tbt_slo": None,
        }
    )
    setup = cell.setup
    assert (setup.cache_blocks, setup.pooled) == (None, True)
    assert setup.tuning.kvcache_balancing_threshold == 2.5
    assert setup.goal == setup.tuning.slo
    assert (setup.goal.ttft_us, setup.goal.tbt_us) == (5_000_000, None)


@pytest.mark.parametrize("none", [None, "null"])
def test_an_objective_may_be_none(none: str | None) -> None:
    """In YAML and on the command line; other values are shown with the largest whole unit."""
    cells = grid({"trace": "t", "tbt_slo": [none, "0.25s"]})
    assert [cell.values["tbt_slo"] for cell in cells] == [None, "250ms"]
    assert [cell.setup.goal.tbt_us for cell in cells] == [None, 250_000]


def test_an_axis_that_is_there_twice_is_named(trace: str, tmp_path: Path) -> None:
    """The file and the line are named."""
    axes = tmp_path / "axes.yaml"
    axes.write_text("speed: [1]\nrequests: [5]\nspeed: [2]\n")
    ran = run(axes, "--trace", trace)
    assert ran.exit_code != 0
    assert "line 3: the key speed is in line 1 already" in (ran.output + str(ran.exception))


@pytest.mark.parametrize(
    ("axes", "field"),
    [
        ({"policy": ["random"]}, "trace"),
        ({"trace": "t", "polcy": ["random"]}, "polcy"),
        ({"trace": "t", "policy": ["none_such"]}, "policy"),
        ({"trace": "t", "split": ["8:8"]}, "split"),
        ({"trace": "t", "split": ["8+0"]}, "prefill and decode"),
        ({"trace": "t", "speed": ["fast"]}, "speed"),
        ({"trace": "t", "seed": []}, "seed"),
        ({"trace": "t", "admission": "all"}, "admission"),
        ({"trace": "t", "profile": "b900"}, "profile"),
        ({"trace": "t", "eviction": "best"}, "eviction"),
        ({"trace": "t", "kvcache_balancing_threshold": "0"}, "kvcache_balancing_threshold"),
        ({"trace": "t", "cache_blocks": "-1"}, "cache_blocks"),
        ({"trace": "t", "cache_blocks": "lots"}, "cache_blocks"),
        ({"trace": "t", "ttft_slo": "-1s"}, "ttft_slo"),
        ({"trace": "t", "tbt_slo": 100}, "tbt_slo"),
        ({"trace": "t", "tbt_slo": "inf"}, "tbt_slo"),
        ({"trace": "t", "spread_bytes": "-5"}, "spread_bytes"),
        ({"trace": "t", "admission_low": "bogus"}, "admission_low"),
    ],
)
def test_a_wrong_axis_is_named(axes: dict[str, Any], field: str) -> None:
    """An axis that does not exist, or a value it does not take, is told before anything runs."""
    with pytest.raises(ConfigError) as caught:
        grid(axes)
    assert caught.value.field == field


def test_a_wrong_mode_is_answered_with_all() -> None:
    """Also where none may be given."""
    with pytest.raises(ConfigError, match="must be early, none, predictive or ttft"):
        grid({"trace": "t", "admission_low": "bogus"})


def test_rows_have_their_values_and_stable_names(trace: str, tmp_path: Path) -> None:
    """CSV and JSON hold the same rows: the values of the cell, and the summary's figures."""
    grid_file = tmp_path / "grid.yaml"
    grid_file.write_text(f"trace: {trace}\nspeed: [1, 4]\npolicy: random\nsplit: 2+2\n")
    out = tmp_path / "out.csv"
    done = run(grid_file, "--policy", "cache_aware", "-j", "2", "-o", out, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    with out.open() as file:
        read = list(csv.DictReader(file))
    assert [(row["speed"], row["policy"], row["split"]) for row in rows] == [
        (1.0, "cache_aware", "2+2"),
        (4.0, "cache_aware", "2+2"),
    ]
    for row, line in zip(rows, read, strict=True):
        assert row["completed"] == 40
        assert line["digest"] == row["digest"]
        assert float(line["ttft_mean_s"]) == row["ttft_mean_s"]
    assert rows[0]["ttft_mean_s"] < rows[1]["ttft_mean_s"]


def test_a_cell_that_fails_loses_no_other(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell whose process dies is a row with its error; the command ends with 1."""

    def one_dies(calls: list[Callable[[], object]], at_once: int) -> Iterator[tuple[int, object]]:
        yield 0, Failed("its process ended with -9")
        yield 1, calls[1]()

    monkeypatch.setattr("moonserve.cli.jobs.run_jobs", one_dies)
    done = run("--trace", trace, "--split", "1+1", "--seed", "0,1", "--json")
    failed, good = json.loads(done.stdout)
    assert done.exit_code == 1
    assert failed["error"] == "its process ended with -9"
    assert good["completed"] == 40
    table = run("--trace", trace, "--split", "1+1", "--set", "cache_blocks=infinite,9").stdout
    assert table.splitlines()[1].split() == ["infinite", "its", "process", "ended", "with", "-9"]


def test_a_sweep_stopped_at_once_writes_nothing(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the first cell is done: no file, no empty table, and how many were done."""

    def stopped(calls: object, at_once: int) -> Iterator[tuple[int, object]]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("moonserve.cli.jobs.run_jobs", stopped)
    out = tmp_path / "x.csv"
    done = run("--trace", trace, "--seed", "1,2,3", "-o", out)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "stopped, 0 of 3 done\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--trace", "TRACE,none.jsonl"), "error: none.jsonl: cannot be read: "),
        (("--trace", "TRACE", "--speed", "1,0"), "error: speed: 0.0 must be above 0"),
        (("--trace", "TRACE", "--speed", "1,1e-300"), "error: speed: 1e-300 is too slow"),
        (("--trace", "TRACE", "--set", "eviction=lru,x"), "error: eviction: x is none of lru"),
        (("--trace", "TRACE", "--set", "seed=1,x"), "error: seed: must be a whole number, not 'x'"),
        (
            ("--trace", "TRACE", "--admission", "all"),
            "error: admission: must be early, none, predictive or ttft",
        ),
        (("--trace", "-"), "error: trace: "),
        (("--trace", "TRACE", "-o", "TRACE.csv"), "error: --output: TRACE.csv is also trace "),
    ],
)
def test_all_cells_are_looked_at_before_the_first_runs(
    trace: str, argv: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last cell's fault is told in one line, and nothing has run."""
    monkeypatch.chdir(tmp_path)
    Path("TRACE").write_text(Path(trace).read_text())
    Path("TRACE.csv").hardlink_to("TRACE")
    monkeypatch.setattr("moonserve.cli.jobs.run_jobs", None)
    done = run(*argv)
    assert done.exit_code == 2
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


def test_a_process_that_dies_takes_no_other_with_it() -> None:
    """A call whose process is killed gives Failed; results keep the number of their call."""
    calls: list[Callable[[], object]] = [partial(os._exit, 3), partial(int, "7")]
    results = dict(run_jobs(calls, 2))
    assert results[1] == 7
    assert isinstance(results[0], Failed)
    assert "3" in results[0].reason


def test_ctrl_c_during_a_start_leaves_no_process_behind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that Ctrl-C meets halfway through its start is ended like any other, in silence."""
    real = multiprocessing.util.spawnv_passfds
    started: list[int] = []

    def interrupted(*args: Any) -> int:
        pid = real(*args)
        if b"resource_tracker" not in b"".join(map(os.fsencode, args[1])):
            started.append(pid)
            # any thread may take a signal of the process
            taker = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
            taker.start()
            taker.join()
        return pid

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs([partial(time.sleep, 60)], 1))
    with pytest.raises(ChildProcessError):  # its parent has waited for its end
        os.waitpid(started[0], 0)
    assert capfd.readouterr().err == ""


def test_no_process_of_a_sweep_sees_ctrl_c() -> None:
    """Also the first, before which multiprocessing starts a process of its own."""
    script = (
        "import signal\n"
        "from functools import partial\n"
        "from moonserve.cli.jobs import run_jobs\n"
        "if __name__ == '__main__':\n"
        "    calls = [partial(signal.pthread_sigmask, signal.SIG_BLOCK, [])]\n"
        "    print(dict(run_jobs(calls, 1))[0] == {signal.SIGINT})\n"
    )
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_an_interrupted_sweep_keeps_what_is_done(trace: str, tmp_path: Path) -> None:
    """After Ctrl-C the file holds the cells that had ended, and no process is left."""
    out = tmp_path / "out.json"
    seeds = ",".join(map(str, range(500)))
    argv = ["sweep", "--trace", trace, "--seed", seeds, "-j", "1", "-o", str(out)]
    child = subprocess.Popen(
        [sys.executable, "-m", "moonserve", *argv],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    assert child.stderr.readline().startswith("1/500")
    child.send_signal(signal.SIGINT)
    began_s = time.monotonic()
    _, told = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "Traceback" not in told
    assert 1 <= len(json.loads(out.read_text())) < 500
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize(
    "argv",
    [["--set", "seed"], ["-o", "x.txt"], ["--seed", "x"], ["-o", "no/such/x.csv"]],
)
def test_bad_flags_are_one_line(trace: str, argv: list[str]) -> None:
    """What cannot be understood ends with 2 and one line."""
    done = run("--trace", trace, *argv)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""

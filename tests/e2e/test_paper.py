"""The papers' figures are made, from any traces: what they show is read, never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonserve.sim.synthesize import synthesize
from moonserve.sim.trace import write_trace

ROOT = Path(__file__).parents[2]
NAMES = [
    *("cpp", "cpp_load", "fig01", "fig05", "fig09", "fig10", "fig15", "goodput", "policies"),
    "table1",
]


@pytest.mark.parametrize(
    "figures",
    [["fig09", "policies"], pytest.param([], marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_figures_are_measured_tabulated_and_drawn(figures: list[str], tmp_path: Path) -> None:
    """Each figure leaves its numbers, a page with a table, and a plot whose texts can be read."""
    pytest.importorskip("matplotlib", reason="plots need the extra [paper]")
    for seed, name in enumerate(["conversation", "synthetic", "trace_1000"]):
        with (tmp_path / f"mooncake_{name}.jsonl").open("w") as file:
            write_trace(synthesize(seed, 60, 3.0), file)
    argv = ["--quick", "--traces", str(tmp_path), "--out", str(tmp_path), *figures]
    done = subprocess.run(
        [sys.executable, "-m", "bench.paper.make", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in figures or NAMES:
        assert json.loads((tmp_path / f"{name}.json").read_text())["found"]
        assert "|---" in (tmp_path / f"{name}.md").read_text()
        assert "</text>" in (tmp_path / f"{name}.svg").read_text()

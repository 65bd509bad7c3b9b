"""The benchmarks run: their figures are read elsewhere, never asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("script", "args", "word"),
    [
        ("decide.py", ["--quick"], "moonserve: ledger empty at the end"),
        ("front.py", ["--requests", "64", "--rounds", "1"], "64-token stream"),
        ("store.py", ["--alone", "--seconds", "0.02", "--sizes", "4KiB,1MiB"], "shm get / memcpy"),
        ("kvevents.py", ["--quick"], "x msgspec on maps"),
        ("index.py", ["--quick"], "answers that differ from a naive walk: 0"),
        pytest.param(
            "overload.py",
            ["--modes", "predictive", "--clients", "4", "--seconds", "1"],
            "| other statuses, broken connections | 0, 0 |",
            marks=pytest.mark.model,
        ),
    ],
)
def test_a_benchmark_runs_and_prints_its_ratios(script: str, args: list[str], word: str) -> None:
    """Each script ends well, without a traceback, and prints what it is for."""
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert word in done.stdout

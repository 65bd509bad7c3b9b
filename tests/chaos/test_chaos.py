"""Faults in and between real processes, under 32 streams that are checked token by token.

The gate runs a short form. `make test-chaos` runs 200 faults on a gateway of one process, then
fewer on one with two fronts whose processes are killed too, and on a machine with little shared
memory. CHAOS_SEED and CHAOS_FAULTS change the draw and the count.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.chaos.campaign import Options, Report, campaign
from tests.chaos.cluster import WORKERS
from tests.chaos.rolling import rolling

SEED = int(os.environ.get("CHAOS_SEED", "1"))
FAULTS = int(os.environ.get("CHAOS_FAULTS", "200"))
LITTLE_MEMORY = 'mount -t tmpfs -o size=3m tmpfs /dev/shm && exec "$@"'
"""Room for two segments of 1 MiB of four; the others must be in the temporary folder."""
pytestmark = [
    pytest.mark.model,  # for its tokenizer
    pytest.mark.skipif(
        sys.platform != "linux", reason="uses all of 127.0.0.0/8, /proc and prlimit"
    ),
]


def run(options: Options) -> Report:
    """Run a campaign, and print what came of it."""
    report = asyncio.run(campaign(options, say=False))
    print(f"\n{report.summary}")
    assert not report.wrong, "\n".join([report.summary, *report.wrong, report.output[-20_000:]])
    return report


def test_streams_outlive_faults() -> None:
    """A few faults of the main kinds: every stream ends whole, and nothing is left."""
    kinds = ("cut a link", "kill a worker", "half-open a link", "stop a process")
    run(Options(seed=SEED, kinds=kinds, spacing_s=2.0, most_tokens=600, longest_s=2.0))


def test_a_rolling_restart_loses_nothing() -> None:
    """A worker of each role is drained and started again: no stream has an error, is refused, or
    waits for one that is away."""
    roll(rounds=1, fronts=1, clients=6, workers=("p0", "d0"))


@pytest.mark.chaos
def test_a_rolling_restart_of_every_process_loses_nothing() -> None:
    """Workers, both fronts and the Conductor, three times over."""
    roll(rounds=3, fronts=2, clients=16, workers=WORKERS)


def roll(rounds: int, fronts: int, clients: int, workers: Sequence[str]) -> None:
    """Run a rolling restart, and print what came of it."""
    rolled = asyncio.run(rolling(rounds, fronts, clients, 3.0, 40, workers))
    print("", *rolled.lines(), sep="\n")
    assert rolled.steps == rounds * (len(workers) + (0 if fronts == 1 else 1 + fronts))
    assert not rolled.wrong, "\n".join([*rolled.wrong, rolled.output[-20_000:]])


@pytest.mark.chaos
def test_streams_outlive_many_faults() -> None:
    """Every stream that began ends right, or with an error that names what no retry could mend."""
    run(Options(seed=SEED, faults=FAULTS))


@pytest.mark.chaos
def test_streams_outlive_faults_of_one_gateway_of_several_processes() -> None:
    """Two fronts and a Conductor, which are killed too: only what a killed front served is cut."""
    run(Options(seed=SEED, faults=FAULTS // 4, fronts=2, gateways=True))


@pytest.mark.chaos
def test_streams_outlive_a_killed_gateway() -> None:
    """A gateway of one process is killed among the other faults; its workers join the next one."""
    run(Options(seed=SEED, faults=FAULTS // 8, gateways=True, spacing_s=6.0))


@pytest.mark.chaos
def test_streams_outlive_faults_with_little_shared_memory() -> None:
    """Where /dev/shm has room for half of the segments only."""
    wrap = ("unshare", "--mount", "sh", "-c", LITTLE_MEMORY, "sh")
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system of its own here")
    run(Options(seed=SEED, faults=FAULTS // 8, wrap=wrap, args=("--shared-memory", "auto")))

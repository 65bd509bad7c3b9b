"""What every figure of the paper needs: traces, simulations on all cores, and a page to write."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moonserve.cli.jobs import Failed, run_jobs
from moonserve.core.schedule.policies import POLICIES
from moonserve.sim.sweep import grid
from moonserve.sim.trace import Trace, head, read_trace, write_trace

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
POLICY_NAMES = {
    "random": "random",
    "least_loaded": "load balancing",
    "cache_aware": "local cache aware",
    "kvcache_centric": "KVCache-centric",
}
"""What the papers call four of our policies."""


class Lab:
    """Where figures are measured."""

    def __init__(
        self, traces: Path, jobs: int, quick: bool, out: Path, only: Sequence[str] = ()
    ) -> None:
        self._traces = traces
        self._jobs = jobs
        self.quick = quick
        self._out = out
        self._only = only

    def policies(self) -> Sequence[str]:
        """Those to be measured."""
        return self._only or self.some(list(POLICIES))

    def with_others(self, before: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """Rows by policy: where only some are measured again, the others' of before as well."""
        return [row for row in before if row["policy"] not in self._only] + list(rows)

    def before(self, name: str) -> Any:
        """What a figure found when it was measured before; None where all is measured anew."""
        path = self._out / f"{name}.json"
        return json.loads(path.read_text())["found"] if self._only and path.exists() else None

    def path(self, name: str) -> Path:
        """A public trace's file; where it has to be quick, of its first requests."""
        path = self._traces / f"mooncake_{name}.jsonl"
        if not path.is_file():
            sys.exit(f"{path} is missing; --traces names the folder of the public traces")
        if not self.quick:
            return path
        short = self._out / f"{name}.jsonl"
        if not short.exists():
            with short.open("w") as file:
                write_trace(head(read_trace(path), 300), file)
        return short

    def trace(self, name: str) -> Trace:
        """A public trace, read."""
        return read_trace(self.path(name))

    def some(self, values: Sequence[T]) -> Sequence[T]:
        """The values, or the outer two where it has to be quick."""
        return [values[0], values[-1]] if self.quick else values

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What the calls give, in their order."""
        results: dict[int, T] = {}
        for at, outcome in run_jobs(calls, self._jobs):
            if isinstance(outcome, Failed):
                sys.exit(f"{calls[at]} failed: {outcome.reason}")
            results[at] = outcome
            print(f"\r  {len(results)}/{len(calls)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return [results[at] for at in range(len(calls))]

    def sweep(self, axes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One simulation for every combination."""
        return self.run(cell_calls(axes))


def cell_calls(axes: Mapping[str, Any]) -> list[Callable[[], dict[str, Any]]]:
    """The simulations of a grid, as calls."""
    return [partial(cell.run, time.process_time) for cell in grid(axes)]


def where() -> dict[str, str]:
    """Which commit was measured, and on what class of machine."""
    commit = _git("describe", "--always", "--exclude=*") or "unknown"
    changed = _git("status", "--porcelain", "--", "src", "bench")
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "commit": f"{commit}, changed since" if changed else commit,
        "machine": f"{os.cpu_count()} cores, Python {python}",
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip()


class Page:
    """One figure's page: text, tables and a plot."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.lines = [f"# {title}", ""]

    def say(self, text: str) -> None:
        """A paragraph."""
        self.lines += [text, ""]

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; numbers come formatted."""
        self.lines.append("| " + " | ".join(heads) + " |")
        self.lines.append("|---" + "|---:" * (len(heads) - 1) + "|")
        self.lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
        self.lines.append("")

    def text(self) -> str:
        """The page."""
        return "\n".join(self.lines).rstrip() + "\n"

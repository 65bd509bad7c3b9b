"""`moonserve sweep`: one simulation for every combination of settings, on all cores.

A thin layer over sim/sweep; no other module imports it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from moonserve.cli.output import check_apart, check_writable, json_option, print_json, write_csv
from moonserve.config import NotYaml, read_yaml
from moonserve.core.errors import ConfigError

_SHOWN = {
    "ttft_mean_s": ".2f",
    "ttft_p90_s": ".2f",
    "tbt_p90_ms": ".0f",
    "attainment": ".4f",
    "goodput_rps": ".2f",
    "hit_rate_tokens": ".4f",
}


@click.command()
@click.argument("grid", required=False, type=click.File())
@click.option("--trace", metavar="FILE,…", help="Traces of requests.")
@click.option("--policy", metavar="NAME,…", help="Placement policies.")
@click.option("--speed", metavar="X,…", help="Replay speeds; 2 is twice as fast.")
@click.option("--split", metavar="P+D,…", help="Prefill and decode instances; 16 is mixed ones.")
@click.option("--admission", metavar="MODE,…", help="none, ttft, early or predictive.")
@click.option("--admission-low", metavar="MODE,…", help="The same for priorities below 0.")
@click.option("--admission-high", metavar="MODE,…", help="The same for priorities above 0.")
@click.option("--seed", metavar="N,…", help="Seeds.")
@click.option("--set", "more", multiple=True, metavar="NAME=V,…", help="Any other axis.")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="How many run at a time.  [default: all cores]"
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write .csv or .json here.")
@json_option
def sweep(
    grid: TextIO | None,
    more: Sequence[str],
    jobs: int | None,
    output: Path | None,
    as_json: bool,
    **flags: str | None,
) -> None:
    """Simulate every combination of the values given, and tabulate what came out.

    GRID is a YAML file of axes: a name, and one value or a list. Flags replace axes of GRID. An
    axis is trace, speed, split, profile, ttft_slo, tbt_slo, or any setting of the simulated
    cluster, such as cache_blocks, eviction, pooled, chunk_tokens or kvcache_balancing_threshold;
    a wrong name prints them all. Times have units, such as ttft_slo=30s. Defaults: 8+8 instances of
    profile a800-loaded, 30s to the first token, 200ms between tokens, admission none.

    All values are checked before the first run. A cell that fails is reported and named in the
    table; the others go on. Ctrl-C keeps the results so far.

    \b
    Example:
      moonserve sweep --trace t.jsonl --policy kvcache_centric,late_binding --speed 1,1.5,2
    """
    from moonserve.sim.sweep import check
    from moonserve.sim.sweep import grid as make

    if output is not None:
        if output.suffix not in (".csv", ".json"):
            raise ConfigError(f"{output} must end in .csv or .json", "output")
        check_writable(output, "--output")
    axes = _read(grid) if grid else {}
    axes |= {name: text.split(",") for name, text in flags.items() if text is not None}
    axes |= dict(_axis(text) for text in more)
    cells = make(axes)
    traces = {f"trace {cell.values['trace']}": cell.values["trace"] for cell in cells}
    check_apart({"GRID": grid.name if grid else None, **traces}, output=output)
    check(cells)
    varied = [n for n in cells[0].values if len({str(c.values[n]) for c in cells}) > 1]
    done: dict[int, dict[str, Any]] = {}
    try:
        _run(cells, jobs or os.cpu_count() or 1, varied, done)
    finally:  # also if it is interrupted
        rows = [done[at] for at in sorted(done)]
        if len(rows) < len(cells):
            click.echo(f"stopped, {len(rows)} of {len(cells)} done", err=True)
        if rows:
            _output(rows, varied, as_json, output)
    if any("error" in row for row in rows):
        click.get_current_context().exit(1)


def _read(file: TextIO) -> dict[str, Any]:
    """The axes of a YAML file."""
    try:
        read = read_yaml(file.read())
    except (NotYaml, UnicodeDecodeError) as err:
        raise ConfigError(f"is not valid YAML: {err}", file.name) from None
    if not isinstance(read, dict):
        raise ConfigError("must map axes to values, such as speed: [1, 2]", file.name)
    return read


def _axis(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} must have the form cache_blocks=1000,5000", "set")
    return name.replace("-", "_"), values.split(",")


def _run(
    cells: Sequence[Any], jobs: int, varied: Sequence[str], done: dict[int, dict[str, Any]]
) -> None:
    """Fill `done`, by number of the cell, and print each result on stderr."""
    from moonserve.cli.jobs import Failed, run_jobs

    calls = [partial(cell.run, time.process_time) for cell in cells]
    for at, outcome in run_jobs(calls, jobs):
        values = cells[at].values
        if isinstance(outcome, Failed):
            done[at] = {**values, "error": outcome.reason}
            result = f"failed: {outcome.reason}"
        else:
            done[at] = outcome
            result = f"attainment {outcome['attainment']:.4f}, {outcome['cpu_s']:.1f} CPU s"
        what = " ".join(f"{name}={_said(values, name)}" for name in varied)
        click.echo(f"{len(done)}/{len(cells)}  {what}  {result}", err=True)


def _output(
    rows: Sequence[Mapping[str, Any]], varied: Sequence[str], as_json: bool, output: Path | None
) -> None:
    """Print the finished rows, and write them; write them even if no process reads stdout."""
    try:
        if as_json:
            print_json(rows)
        else:
            _print(rows, varied)
    finally:
        if output is not None:
            _write(rows, output)


def _write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        if path.suffix == ".json":
            json.dump(rows, file, indent=1)
        else:
            blocks = "cache_blocks"
            write_csv(
                [{**row, blocks: _said(row, blocks)} if blocks in row else row for row in rows],
                file,
            )


def _said(row: Mapping[str, Any], name: str) -> str:
    """A cell's value for people."""
    value = row[name]
    if value is None:
        return "infinite" if name == "cache_blocks" else "none"
    return str(value)


def _print(rows: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> None:
    from moonserve.show.table import table

    lines = [[*varied, *_SHOWN]]
    for row in rows:
        figures = [
            "" if "error" in row else "-" if row[name] is None else f"{row[name]:{form}}"
            for name, form in _SHOWN.items()
        ]
        lines.append([*(_said(row, name) for name in varied), *figures])
    for row, line in zip([{}, *rows], table(lines, words=len(varied)), strict=True):
        click.echo(f"{line}  {row['error']}" if "error" in row else line)

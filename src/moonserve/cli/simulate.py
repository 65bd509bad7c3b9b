"""`moonserve simulate`: a trace against the Conductor, with instances, links and time made up.

A thin layer over sim/cluster, sim/metrics and sim/report; no other module imports it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from time import process_time
from typing import IO, TYPE_CHECKING, Any, TextIO

import click
from click.core import ParameterSource

from moonserve.cli.figures import (
    comparison,
    costs_of,
    explanation_of,
    setup_of,
    story,
    table,
    titles,
    unusual,
)
from moonserve.cli.output import OutputFile, check_apart, input_path, print_json, write_csv
from moonserve.cli.settings import size_of
from moonserve.cli.simulated import simulated
from moonserve.core.errors import ConfigError
from moonserve.quantity import parse_duration_us

if TYPE_CHECKING:
    from cProfile import Profile as Profiler

    from moonserve.sim.cluster import Simulation
    from moonserve.sim.compared import Compared
    from moonserve.sim.recording import Recording
    from moonserve.sim.setup import Breakdown, Pace, Setup

_SOME = click.IntRange(min=1)
_FAULT = re.compile(r"(kill|join|slow):([\w-]+)@([^x]+)(?:x(\d+(?:\.\d+)?))?")
_SAMPLES = 200

_option = partial(click.option, show_default=True)


def _values(
    *,
    prefill: int | None,
    decode: int | None,
    mixed: int,
    threshold: float,
    spread_bytes: str,
    cache_blocks: str,
    pool: str,
    chunk_tokens: int | None,
    no_overlap: bool,
    fault: tuple[str, ...],
    **same: Any,
) -> dict[str, Any]:
    """The options' values as sim.axes takes them. Raises ConfigError that names the option."""
    if not 0 < threshold < float("inf"):
        raise ConfigError(f"{threshold} must be a number above 0", "--threshold")
    if cache_blocks != "infinite" and not cache_blocks.isdecimal():
        raise ConfigError(f"{cache_blocks} is neither a count nor infinite", "--cache-blocks")
    if chunk_tokens is not None:
        same["chunk_tokens"] = chunk_tokens
    apart = 0 if mixed else 8
    return {
        **same,
        "split": (
            apart if prefill is None else prefill,
            apart if decode is None else decode,
            mixed,
        ),
        "kvcache_balancing_threshold": threshold,
        "spread_bytes": size_of(spread_bytes, "--spread-bytes"),
        "cache_blocks": None if cache_blocks == "infinite" else int(cache_blocks),
        "pooled": pool == "global",
        "overlap": not no_overlap,
    }


_AXIS = {
    "prefill": "split",
    "decode": "split",
    "mixed": "split",
    "threshold": "kvcache_balancing_threshold",
    "pool": "pooled",
    "no_overlap": "overlap",
}
"""Options whose values sim.axes knows by another name."""


def _as_recorded(
    recording: Recording, options: Mapping[str, Any], compare: bool, speed: float
) -> tuple[dict[str, Any], tuple[Pace, ...]]:
    """The values that describe the cluster of a recording, but for the options that were given, and
    how fast its machine was, unless the costs are others.

    Raises ConfigError that names the option: to compare, the cluster must be the recorded one.
    """
    from moonserve.sim.axes import read_profile, values_of

    source = click.get_current_context().get_parameter_source
    given = {name for name in options if source(name) is not ParameterSource.DEFAULT}
    paces: tuple[Pace, ...] = ()
    if "profile" in given:
        profile = read_profile(options["profile"])
    else:
        fitted = recording.fitted()
        profile, paces = fitted.profile, fitted.paces_since(recording.start_us, speed)
    recorded = values_of(recording.setup(profile))
    prefill, decode, mixed = recorded["split"]
    counts = {"prefill": prefill, "decode": decode, "mixed": mixed}
    if "mixed" in given:
        counts |= {"prefill": 0, "decode": 0}
    elif given & {"prefill", "decode"}:
        counts["mixed"] = 0
    options = counts | {
        name: value for name, value in options.items() if name in given or name not in counts
    }
    axes = {name: _AXIS.get(name, name) for name in sorted(given - {"profile"})}
    asked = {axis: it for axis, it in _values(**options).items() if axis in axes.values()}
    for name, axis in axes.items():
        if compare and axis in asked and asked[axis] != recorded[axis]:
            option = "--" + name.replace("_", "-")
            what = "makes another cluster than the recorded one; leave it or --compare out"
            raise ConfigError(what, option)
    return recorded | asked, paces


def _options_of(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """These options with the values that were simulated; the profile stays as it was given."""
    prefill, decode, mixed = values["split"]
    simulated = {
        **values,
        "prefill": prefill,
        "decode": decode,
        "mixed": mixed,
        "threshold": values["kvcache_balancing_threshold"],
        "pool": "global" if values["pooled"] else "local",
        "no_overlap": not values["overlap"],
        "profile": options["profile"],
    }
    return {name: simulated.get(name, given) for name, given in options.items()}


def _check_comparable(path: Path, recording: Recording | None, speed: float) -> None:
    """Raise ConfigError if there is nothing to compare a simulation with."""
    from moonserve.core.schedule.recorded import CLUSTER_FILE
    from moonserve.sim.trace import is_recording

    if recording is None and is_recording(path):
        what = f"{path} has no {CLUSTER_FILE}, which says what served it; record again"
    elif recording is None:
        what = f"{path} is no recording; name a folder that a gateway wrote with --record"
    elif recording.why_not:
        what = f"the recorded cluster {recording.why_not}"
    elif speed != 1.0:
        what = "a recording has its own speed; leave --speed out"
    else:
        return
    raise ConfigError(what, "--compare")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@simulated()
@_option("--speed", default=1.0, metavar="X", help="How many times as fast arrivals come.")
@_option("--limit", type=_SOME, metavar="ROWS", help="Only the first requests of TRACE.")
@_option("--block-size", type=_SOME, default=512, metavar="N", help="Tokens of one block in TRACE.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--report", type=OutputFile(), help="Write a page with plots.")
@click.option("--rows", type=OutputFile(), help="Write a CSV of all requests.")
@click.option("--compare", is_flag=True, help="Print recorded and simulated times side by side.")
@click.option(
    "--explain", metavar="REQUEST", help="Show why a request was placed as it was; r000042."
)
@click.option("--cprofile", type=OutputFile("wb"), help="Write a CPU profile (pstats).")
def simulate(
    trace: Path,
    speed: float,
    limit: int | None,
    block_size: int,
    as_json: bool,
    report: TextIO | None,
    rows: TextIO | None,
    compare: bool,
    explain: str | None,
    cprofile: IO[bytes] | None,
    **cluster: Any,
) -> None:
    """Serve TRACE by the real Conductor on a made-up cluster, and measure it.

    The code of the live gateway decides. Engines, links, loads and faults, which take time, are
    made up. TRACE has a format that `moonserve trace` reads; - is stdin. The same inputs give
    the same digest. docs/explanation/simulator.md says what is modelled, and what is not.

    If TRACE is a recording of a gateway, its cluster is simulated: its instances, its settings,
    and costs that are fitted from the recorded times. Options that are given change that.

    \b
    Examples:
      moonserve simulate conversation.jsonl --speed 1.5 --report run.html
      moonserve simulate conversation.jsonl --policy random --limit 1000 --json
      moonserve simulate conversation.jsonl --mixed 16 --chunk-tokens 2048
      moonserve simulate conversation.jsonl --limit 300 --explain r000042
      moonserve simulate ~/recordings --compare
    """
    import msgspec

    from moonserve.sim.axes import setup_of as setup_from
    from moonserve.sim.cluster import Simulation
    from moonserve.sim.compared import compare as compare_with
    from moonserve.sim.metrics import measure, queues
    from moonserve.sim.recording import read_recording
    from moonserve.sim.trace import read_trace, scale

    check_apart(
        {"TRACE": trace, "--profile": cluster["profile"]},
        report=report,
        rows=rows,
        cprofile=cprofile,
    )
    path = input_path(trace)
    recording = read_recording(path)
    if recording is None:
        read = read_trace(path, limit, block_size)
    else:
        read = recording.trace(limit, block_size)
    if compare:
        _check_comparable(path, recording, speed)
    if recording is not None and recording.why_not:
        click.echo(f"warning: the recorded cluster {recording.why_not}; see the options", err=True)
        recording = None
    options = cluster
    paces: tuple[Pace, ...] = ()
    if recording is None:
        values = _values(**cluster)
    else:
        values, paces = _as_recorded(recording, cluster, compare, speed)
        options = _options_of(values, cluster)
    setup = setup_from(values, tuple(map(_breakdown, cluster["fault"])))
    setup = msgspec.structs.replace(setup, paces=paces)
    for idle in _idle(setup, **cluster):
        click.echo(f"warning: {idle}", err=True)
    described = setup_of(read, setup, {"speed": speed, "limit": limit, **options})
    read = scale(read, speed)
    if explain is not None and explain not in (f"r{at:06}" for at in range(len(read.rows))):
        raise ConfigError(f"{explain} is none of r000000 to r{len(read.rows) - 1:06}", "--explain")
    span_us = read.rows[-1].at_us - read.rows[0].at_us
    sample_us = min(60_000_000, max(100_000, span_us // _SAMPLES))
    sim = Simulation(read, msgspec.structs.replace(setup, sample_us=sample_us))
    result = measure(sim, _run(sim, cprofile))
    result.summary = {"trace": read.name, "speed": speed, **result.summary}
    more = unusual(click.get_current_context())
    if report is not None:
        from moonserve.sim.report import report as page

        report.write(page(sim, result, *titles(sim, speed, more)))
    if rows is not None:
        write_csv([msgspec.structs.asdict(row) for row in result.rows], rows)
    compared: list[Compared] = []
    if compare and recording is not None:
        pairs = zip(recording.rows[: len(sim.served)], sim.served, strict=True)
        compared = compare_with(pairs)
    asked = [one for one in sim.served if one.id == explain]
    if as_json:
        further: dict[str, Any] = {"lost": result.lost, "setup": described, "queues": queues(sim)}
        if recording is not None:
            described["recorded"] = setup
        if compare:
            further["compared"] = [it.as_json() for it in compared]
        if asked:
            further["explanation"] = explanation_of(asked[0])
        print_json(result.summary | further)
        return
    click.echo(table(sim, result, titles(sim, speed, more)))
    if recording is not None:
        click.echo("\n".join(costs_of(setup.profile)))
    if compare:
        click.echo("\n" + "\n".join(comparison(compared)))
    for one in asked:
        click.echo("\n" + story(explanation_of(one), one))


def _idle(
    setup: Setup,
    *,
    threshold: float,
    keep_output: bool,
    no_overlap: bool,
    prefill_seqs: int,
    eviction: str,
    cpp: int,
    **_: object,
) -> Iterator[str]:
    """Options that were given but change nothing in combination with the others."""
    from moonserve.core.schedule.policies import policy_of

    fetches = policy_of(setup.tuning.policy).fetch
    if threshold != 1.0 and fetches != "threshold":
        yield f"--threshold changes nothing: policy {setup.tuning.policy} does not use it"
    if setup.cache_blocks is None and eviction != "lru":
        yield "--eviction changes nothing: an infinite cache never evicts"
    if cpp > 1 and not setup.profile.layers:
        yield f"--cpp changes nothing: profile {setup.profile.name} does not say its layers"
    elif cpp > 1 and setup.mixed:
        yield "--cpp plans for --mixed instances as if they did not decode: it plans too fast"
    for option, given in (
        ("--no-overlap", no_overlap),
        ("--keep-output", keep_output),
        ("--prefill-seqs", prefill_seqs != 1),
    ):
        if setup.mixed and given:
            yield f"{option} changes nothing: --mixed instances decode where they prefill"


def _breakdown(text: str) -> Breakdown:
    from moonserve.sim.setup import Breakdown

    found = _FAULT.fullmatch(text)
    if found is None or (found[1] == "slow") != (found[4] is not None):
        form = "kill:INSTANCE@TIME, join:INSTANCE@TIME or slow:INSTANCE@TIMExTIMES"
        raise ConfigError(f"{text} is not {form}", "--fault")
    factor = float(found[4] or 1)
    if not 0.001 <= factor <= 1_000:
        raise ConfigError(f"{text}: from 0.001 to 1000 times as slow is possible", "--fault")
    try:
        return Breakdown(found[1], found[2], parse_duration_us(found[3]), factor)
    except ValueError as err:
        raise ConfigError(f"{text}: {err}", "--fault") from None


# Running.


def _run(sim: Simulation, out: IO[bytes] | None) -> float:
    """Run it and return CPU seconds. On a terminal, print the progress."""
    if sys.stderr.isatty():
        rows = sim.trace.rows
        for percent in range(1, 101):
            at_us = rows[(len(rows) - 1) * percent // 100].at_us
            sim.clock.at(at_us, partial(_progress, percent))
    started_s = process_time()
    if out is None:
        sim.run()
    else:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(sim.run)
        _write_profile(profiler, out)
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    return process_time() - started_s


def _progress(percent: int) -> None:
    click.echo(f"\r{percent}% of requests have arrived", nl=False, err=True)


def _write_profile(profiler: Profiler, out: IO[bytes]) -> None:
    """Write a pstats file; print the ten functions with the most time of their own on stderr."""
    import marshal
    import pstats

    profiler.create_stats()
    marshal.dump(profiler.stats, out)
    name = getattr(out, "name", "FILE")
    pstats.Stats(profiler, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(10)
    click.echo(f"python -m pstats {name} shows more (sort cumtime, stats 30, callers)", err=True)

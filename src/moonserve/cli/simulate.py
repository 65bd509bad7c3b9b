"""`moonserve simulate`: a trace against the Conductor, with instances, links and time made up.

A thin layer over sim/cluster, sim/metrics and sim/report; no other module imports it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import process_time
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar, get_args

import click

from moonserve.cli.figures import (
    explanation_of,
    setup_of,
    story,
    table,
    titles,
    unusual,
)
from moonserve.cli.output import Output, check_apart, input_path, print_json, write_csv
from moonserve.cli.settings import size_of
from moonserve.core.errors import ConfigError
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.profiles import PROFILES
from moonserve.core.schedule.residency import PredictorName
from moonserve.core.schedule.tuning import Admission
from moonserve.core.store.evict import EVICTIONS

if TYPE_CHECKING:
    from cProfile import Profile as Profiler

    from moonserve.sim.cluster import Simulation
    from moonserve.sim.setup import Breakdown, Setup

_Command = TypeVar("_Command", bound=Callable[..., object])
_COUNT = click.IntRange(min=0)
_SOME = click.IntRange(min=1)
_MODE = click.Choice(get_args(Admission))
_FAULT = re.compile(r"(kill|join|slow):([\w-]+)@(\d+(?:\.\d+)?)(?:x(\d+(?:\.\d+)?))?")
_SAMPLES = 200
_LATEST_S = 1e12

_option = partial(click.option, show_default=True)

_KINDS: Mapping[str, dict[str, Any]] = {
    "prefill": {"type": _COUNT},
    "decode": {"type": _COUNT},
    "mixed": {"type": _COUNT, "default": 0},
    "policy": {"type": click.Choice(list(POLICIES)), "default": "kvcache_centric"},
    "threshold": {"default": 1.0},
    "spread-bytes": {"default": "8GiB"},
    "ttft-slo": {"default": 30.0},
    "tbt-slo": {"default": 200.0},
    "admission": {"type": _MODE, "default": "none"},
    "admission-low": {"type": _MODE},
    "admission-high": {"type": _MODE},
    "predictor": {"type": click.Choice(get_args(PredictorName)), "default": "survival"},
    "cpp": {"type": _SOME, "default": 1},
    "profile": {"default": "a800-loaded"},
    "cache-blocks": {"default": "5859"},
    "eviction": {"type": click.Choice(list(EVICTIONS)), "default": "lru"},
    "pool": {"type": click.Choice(["local", "global"]), "default": "local"},
    "keep-output": {"is_flag": True},
    "prefill-seqs": {"type": _SOME, "default": 1},
    "chunk-tokens": {"type": _SOME},
    "first-token": {"type": click.Choice(["prefill", "decode"]), "default": "prefill"},
    "no-overlap": {"is_flag": True},
    "racks": {"type": _COUNT, "default": 0},
    "seed": {"default": 0},
    "fault": {"multiple": True},
}
_HELP = {
    "--prefill N": "Prefill instances.  [default: 8]",
    "--decode N": "Decode instances.  [default: 8]",
    "--mixed N": "Instances that do both, instead.",
    "--policy NAME": f"Placement policy: {', '.join(POLICIES)}.",
    "--threshold RATIO": "Fetch a prefix that is this many times as long as the local one "
    "(Algorithm 1).",
    "--spread-bytes SIZE": "Copy hot prefixes to idle instances, at most this much at a time; "
    "0: none.",
    "--ttft-slo S": "Goal for the first token.",
    "--tbt-slo MS": "Goal between tokens.",
    "--admission": "Refuse requests that are predicted to miss a goal. ttft: by the predicted "
    "TTFT; early: also by decode's load now; predictive: by its load when prefill will have ended.",
    "--admission-low": "The same for requests of a priority below 0.",
    "--admission-high": "The same for requests of a priority above 0.",
    "--predictor": "How predictive admission estimates the lengths of outputs.",
    "--cpp N": "Most prefill instances that share a prompt for which one alone would be late.",
    "--profile NAME": f"What instances cost and hold: {', '.join(PROFILES)}, or a file.",
    "--cache-blocks N": "KV blocks that each prefill instance's cache holds, or infinite.",
    "--eviction": "Order of eviction.",
    "--pool": "One cache for each instance, or one for all of them.",
    "--keep-output": "Decode instances keep KV for the next turns.",
    "--prefill-seqs N": "Prompts that a prefill instance computes at a time.",
    "--chunk-tokens N": "Most tokens of one pass (chunked prefill).  [default: no limit]",
    "--first-token": "Which instance streams the first token; decode makes it again, as behind "
    "vLLM.",
    "--no-overlap": "KV moves only after its prefill has ended.",
    "--racks N": "Number of racks, in which instances stand in turn; 0: unknown.",
    "--seed N": "Seed for policies that draw at random.",
    "--fault WHAT": "A fault at a time in seconds: kill:p003@600, join:p003@660, or "
    "slow:d001@600x2 for twice as slow. May be given again.",
}
"""Flag and the name of its value -> help text."""


def _cluster_options(command: _Command) -> _Command:
    """Add the options that `_setup` takes."""
    for shown, text in reversed(_HELP.items()):
        flag, _, value = shown.partition(" ")
        command = _option(flag, metavar=value or None, help=text, **_KINDS[flag[2:]])(command)
    return command


def _setup(
    *,
    prefill: int | None,
    decode: int | None,
    mixed: int,
    threshold: float,
    spread_bytes: str,
    ttft_slo: float,
    tbt_slo: float,
    cache_blocks: str,
    pool: str,
    chunk_tokens: int | None,
    no_overlap: bool,
    fault: tuple[str, ...],
    **same: Any,
) -> Setup:
    """The simulation's setup, from the options' values. Raises ConfigError that names the
    option."""
    from moonserve.sim.axes import setup_of

    for name, value in (("threshold", threshold), ("ttft-slo", ttft_slo), ("tbt-slo", tbt_slo)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{value} must be a number above 0", f"--{name}")
    if cache_blocks != "infinite" and not cache_blocks.isdecimal():
        raise ConfigError(f"{cache_blocks} is neither a count nor infinite", "--cache-blocks")
    if chunk_tokens is not None:
        same["chunk_tokens"] = chunk_tokens
    apart = 0 if mixed else 8
    values = {
        **same,
        "split": (
            apart if prefill is None else prefill,
            apart if decode is None else decode,
            mixed,
        ),
        "kvcache_balancing_threshold": threshold,
        "spread_bytes": size_of(spread_bytes, "--spread-bytes"),
        "ttft_slo_s": ttft_slo,
        "tbt_slo_ms": tbt_slo,
        "cache_blocks": None if cache_blocks == "infinite" else int(cache_blocks),
        "pooled": pool == "global",
        "overlap": not no_overlap,
    }
    return setup_of(values, tuple(map(_breakdown, fault)))


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@_cluster_options
@_option("--speed", default=1.0, metavar="X", help="How many times as fast arrivals come.")
@_option("--limit", type=_SOME, metavar="ROWS", help="Only the first requests of TRACE.")
@_option("--block-size", type=_SOME, default=512, metavar="N", help="Tokens of one block in TRACE.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--report", type=Output(), help="Write a page with plots.")
@click.option("--rows", type=Output(), help="Write a CSV of all requests.")
@click.option(
    "--explain", metavar="REQUEST", help="Show why a request was placed as it was; r000042."
)
@click.option("--cprofile", type=Output("wb"), help="Write a CPU profile (pstats).")
def simulate(
    trace: Path,
    speed: float,
    limit: int | None,
    block_size: int,
    as_json: bool,
    report: TextIO | None,
    rows: TextIO | None,
    explain: str | None,
    cprofile: IO[bytes] | None,
    **cluster: Any,
) -> None:
    """Serve TRACE by the real Conductor on a made-up cluster, and measure it.

    The code of the live gateway decides. Engines, links, loads and faults, which take time, are
    made up. TRACE has a format that `moonserve trace` reads; - is stdin. The same inputs give
    the same digest. docs/explanation/simulator.md says what is modelled, and what is not.

    \b
    Examples:
      moonserve simulate conversation.jsonl --speed 1.5 --report run.html
      moonserve simulate conversation.jsonl --policy random --limit 1000 --json
      moonserve simulate conversation.jsonl --mixed 16 --chunk-tokens 2048
      moonserve simulate conversation.jsonl --limit 300 --explain r000042
    """
    import msgspec

    from moonserve.sim.cluster import Simulation
    from moonserve.sim.metrics import measure, queues
    from moonserve.sim.trace import read_trace, scale

    check_apart(
        {"TRACE": trace, "--profile": cluster["profile"]},
        report=report,
        rows=rows,
        cprofile=cprofile,
    )
    setup = _setup(**cluster)
    for idle in _idle(setup, **cluster):
        click.echo(f"warning: {idle}", err=True)
    read = read_trace(input_path(trace), limit, block_size)
    described = setup_of(read, setup, {"speed": speed, "limit": limit, **cluster})
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
    asked = [one for one in sim.served if one.id == explain]
    if as_json:
        further: dict[str, Any] = {"lost": result.lost, "setup": described, "queues": queues(sim)}
        if asked:
            further["explanation"] = explanation_of(asked[0])
        print_json(result.summary | further)
        return
    click.echo(table(sim, result, titles(sim, speed, more)))
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
    **_: object,
) -> Iterator[str]:
    """Options that were given but change nothing in combination with the others."""
    from moonserve.core.schedule.policies import policy_of

    fetches = policy_of(setup.tuning.policy).fetch
    if threshold != 1.0 and fetches != "threshold":
        yield f"--threshold changes nothing: policy {setup.tuning.policy} does not use it"
    if setup.cache_blocks is None and eviction != "lru":
        yield "--eviction changes nothing: an infinite cache never evicts"
    if setup.tuning.cpp > 1 and not setup.profile.layers:
        yield f"--cpp changes nothing: profile {setup.profile.name} does not say its layers"
    elif setup.tuning.cpp > 1 and setup.mixed:
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
        form = "kill:INSTANCE@SECONDS, join:INSTANCE@SECONDS or slow:INSTANCE@SECONDSxTIMES"
        raise ConfigError(f"{text} is not {form}", "--fault")
    at_s, factor = float(found[3]), float(found[4] or 1)
    if not 0.001 <= factor <= 1_000:
        raise ConfigError(f"{text}: from 0.001 to 1000 times as slow is possible", "--fault")
    if at_s > _LATEST_S:
        raise ConfigError(f"{text}: no trace lasts {_LATEST_S:.0e} seconds", "--fault")
    return Breakdown(found[1], found[2], round(at_s * 1e6), factor)


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

"""`moonserve plan`: how to divide instances for a trace, and how fast the trace may come.

A thin layer over sim/plan; no other module imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moonserve.cli.output import input_path, json_option, print_json
from moonserve.cli.simulated import simulated
from moonserve.core.errors import ConfigError, MoonserveError

if TYPE_CHECKING:
    from moonserve.sim.plan import Split, Try
    from moonserve.sim.trace import Trace

_option = partial(click.option, show_default=True)


@click.command()
@click.option(
    "--trace", required=True, type=click.Path(path_type=Path), help="Requests; - is stdin."
)
@_option(
    "--nodes",
    default=16,
    type=click.IntRange(2, 10_000),
    metavar="N",
    help="Instances to divide between prefill and decode.",
)
@simulated(
    "ttft-slo", "tbt-slo", "policy", "admission", "profile", "cache-blocks", policy="late_binding"
)
@_option(
    "--attainment",
    default=0.99,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of all requests that must meet both objectives.",
)
@_option(
    "--tolerance",
    default=0.05,
    type=click.FloatRange(0.001, 10),
    metavar="X",
    help="Speeds are tried in steps of this.",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="How many run at a time.  [default: all cores]"
)
@json_option
def plan(
    trace: Path,
    ttft_slo: str,
    tbt_slo: str,
    nodes: int,
    attainment: float,
    tolerance: float,
    jobs: int | None,
    as_json: bool,
    **settings: str | int | None,
) -> None:
    """Search how to divide --nodes between prefill and decode, and how fast the trace may come.

    A speed is met if the share --attainment of all requests meets both objectives. The search
    begins with the split that the costs alone suggest, and moves to a neighbour while that one is
    faster. A run that has missed too many requests is not simulated to its end. For each split, the
    output says what binds above its speed: one more instance of that kind would serve more, by
    simulation. It also gives the bound for an endless load. A trace may be faster than that, above
    all a short one: requests that still wait when the last one has arrived have time until their
    objective.

    A request's TBT is the mean of its longest tenth of gaps here, as in `moonserve simulate`. A
    gateway judges by the mean of all gaps, which is never longer.
    """

    from moonserve.sim.axes import setup_of, value_of
    from moonserve.sim.plan import plan as search
    from moonserve.sim.plan import requests_needed
    from moonserve.sim.trace import read_trace

    for name, value in (("attainment", attainment), ("tolerance", tolerance)):
        if value != value:  # no range of click refuses NaN
            raise ConfigError(f"{value} is not a number", f"--{name}")
    goals = {"ttft_slo": ttft_slo, "tbt_slo": tbt_slo}
    settings["cache_blocks"] = value_of("cache_blocks", settings["cache_blocks"])
    setup = setup_of({**settings, **goals})
    read = read_trace(input_path(trace))

    def tell(split: Split) -> None:
        click.echo(_line(split), err=True)

    at_once = jobs or os.cpu_count() or 1
    several = partial(_side_by_side, at_once) if at_once > 1 else None
    splits = search(read, setup, nodes, attainment, tolerance, tell, several)
    best = splits[0]
    needed = requests_needed(read, setup, attainment, best.speed)
    if as_json:
        asked = {"trace": read.name, **settings, **goals, "nodes": nodes, "attainment": attainment}
        found = {"best": best, "requests_per_s": _rps(read, best), "splits": splits}
        counts = {"requests": len(read.rows), "requests_needed": needed}
        print_json({**asked, **found, **counts})
    else:
        click.echo(_verdict(read, best))
    if len(read.rows) < needed:
        click.echo(_too_few(len(read.rows), needed, attainment, ttft_slo), err=True)


def _side_by_side(at_once: int, calls: Sequence[Callable[[], Try]]) -> list[Try]:
    """Run simulations in processes of their own; each takes longer than its process to start."""
    from moonserve.cli.jobs import Failed, run_jobs

    if len(calls) == 1:
        return [calls[0]()]
    found: dict[int, Try] = {}
    for at, outcome in run_jobs(calls, at_once):
        if isinstance(outcome, Failed):
            raise MoonserveError(f"a simulation failed: {outcome.reason}")
        found[at] = outcome
    return [found[at] for at in range(len(calls))]


def _too_few(requests: int, needed: int, attainment: float, ttft_slo: str) -> str:
    """What to say where a trace is too short for its answer."""
    share = max(0.0, 1 - attainment)
    return (
        f"warning: the trace has {requests:,} requests, and this answer needs {needed:,} or more:"
        f" so many that one is no more than {share:.2g} of all, and that they come for longer than"
        f" the TTFT objective of {ttft_slo}. As it is, the speed is that of one burst."
        " Record for longer, or write a longer trace with `moonserve trace`."
    )


def _rps(trace: Trace, split: Split) -> float | None:
    """Requests a second at the split's speed; None if no speed is met, or all arrive at once."""
    span_s = (trace.rows[-1].at_us - trace.rows[0].at_us) / 1e6
    return split.speed * len(trace.rows) / span_s if split.speed and span_s else None


def _line(split: Split) -> str:
    speed = "none" if split.speed is None else f"{split.speed:.2f}x"
    if split.not_above is not None:
        speed = f"not above {split.not_above:.2f}x"
    bounds = f"prefill {split.prefill_bound:.2f}x, decode {split.decode_bound:.2f}x"
    name = f"{split.prefill:>3} + {split.decode:<3}"
    return f"{name} {speed:>16}  {_bound(split)}; endless load: {bounds}"


def _bound(split: Split) -> str:
    return "prefill and decode bind" if split.binds == "both" else f"{split.binds} binds"


def _verdict(trace: Trace, best: Split) -> str:
    from moonserve.sim.metrics import percent

    name = f"{best.prefill} prefill + {best.decode} decode"
    missed = best.missed
    if missed is None:
        why = "no speed is too high"
    else:
        shares = [missed.attainment, missed.attainment_ttft, missed.attainment_tbt]
        verb = "meet both objectives"
        if not missed.whole:  # what comes later may miss too: no share that was met is known
            shares = [1 - share for share in shares]
            verb = "of all had missed an objective when its run was stopped early"
        both, ttft, tbt = (percent(share, 2) for share in shares)
        why = f"at {missed.speed:.2f}x {both} {verb}"
        why += f" ({ttft} their TTFT, {tbt} their TBT by the longest tenth of gaps)"
    if best.speed is None:
        return f"no speed meets the objectives; {name} is nearest: {why}"
    rps = _rps(trace, best)
    rate = "" if rps is None else f", {rps:.2f} requests/s"
    return f"{name}: {best.speed:.2f}x{rate}; {_bound(best)}: {why}"

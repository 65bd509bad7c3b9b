"""`moonserve plan`: how to divide instances for a trace, and how fast it may come.

A face over sim/plan; nothing else imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moonserve.sim.plan import Split
    from moonserve.sim.trace import Trace


@click.command(short_help="Search the best split of instances, and its highest speed.")
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="Requests.")
@click.option("--ttft-slo", default=30.0, show_default=True, help="Seconds to the first token.")
@click.option("--tbt-slo", default=200.0, show_default=True, help="ms between tokens.")
@click.option("--nodes", default=16, show_default=True, type=click.IntRange(min=2))
@click.option("--policy", default="late_binding", show_default=True, help="Who is placed where.")
@click.option("--refuse", default="none", show_default=True, help="none, ttft or both.")
@click.option("--profile", default="a800-loaded", show_default=True, help="Or a file of one.")
@click.option(
    "--cache-blocks",
    default="5859",
    show_default=True,
    metavar="INTEGER",
    help="Per prefill instance.",
)
@click.option(
    "--attainment",
    default=0.99,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of all requests that must meet both objectives.",
)
@click.option(
    "--tolerance",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Steps of speed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    trace: Path,
    ttft_slo: float,
    tbt_slo: float,
    nodes: int,
    attainment: float,
    tolerance: float,
    as_json: bool,
    **settings: str | int | None,
) -> None:
    """Search how to divide --nodes between prefill and decode, and how fast the trace may come.

    A speed is met if --attainment of all requests meet both objectives. The search begins with the
    split that the costs alone suggest, and goes on to a neighbour while that is faster; runs that
    missed too many are not seen to their end. Each split says what binds it: prefill, where first
    tokens come too late above its speed, or decode, where tokens come too slowly.
    """
    import msgspec

    from moonserve.sim.plan import plan as search
    from moonserve.sim.sweep import setup_of, value_of
    from moonserve.sim.trace import read_trace

    goals = {"ttft_slo_s": ttft_slo, "tbt_slo_ms": tbt_slo}
    settings["cache_blocks"] = value_of("cache_blocks", settings["cache_blocks"])
    setup = setup_of({**settings, **goals})
    read = read_trace(trace)

    def tell(split: Split) -> None:
        click.echo(_line(split), err=True)

    splits = search(read, setup, nodes, attainment, tolerance, tell)
    best = splits[0]
    if as_json:
        asked = {**settings, **goals, "nodes": nodes, "attainment": attainment}
        found = {"best": best, "requests_per_s": _rps(read, best), "splits": splits}
        click.echo(msgspec.json.encode({**asked, **found}))
    else:
        click.echo(_verdict(read, best))


def _rps(trace: Trace, split: Split) -> float | None:
    """Requests a second at the split's speed."""
    span_s = max(1, trace.rows[-1].at_us - trace.rows[0].at_us) / 1e6
    return None if split.speed is None else split.speed * len(trace.rows) / span_s


def _line(split: Split) -> str:
    speed = "-" if split.speed is None else f"{split.speed:.2f}x"
    bounds = f"fluid bounds: prefill {split.prefill_bound:.2f}x, decode {split.decode_bound:.2f}x"
    return f"{split.prefill:>3} + {split.decode:<3} {speed:>7}  {split.binds} binds; {bounds}"


def _verdict(trace: Trace, best: Split) -> str:
    name = f"{best.prefill} prefill + {best.decode} decode"
    missed = best.missed
    if missed is None:
        why = "no speed is too high"
    else:
        most = "" if missed.whole else "at most "
        ttft, tbt = missed.attainment_ttft, missed.attainment_tbt
        why = f"at {missed.speed:.2f}x {most}{ttft:.2%} meet their TTFT and {tbt:.2%} their TBT"
    if best.speed is None:
        return f"no speed meets the objectives; {name} is nearest: {why}"
    return (
        f"{name}: {best.speed:.2f}x, {_rps(trace, best):.2f} requests/s; {best.binds} binds: {why}"
    )

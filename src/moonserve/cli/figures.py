"""The result of a simulation as text: its title, its figures, and one request's story.

`moonserve simulate` prints them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

import msgspec

from moonserve import __version__
from moonserve.core.schedule.profiles import OVERHEADS, PROFILES, Profile

if TYPE_CHECKING:
    import click

    from moonserve.core.schedule.explain import Explanation
    from moonserve.sim.cluster import Simulation
    from moonserve.sim.compared import Compared
    from moonserve.sim.metrics import Result
    from moonserve.sim.served import Served
    from moonserve.sim.setup import Setup
    from moonserve.sim.trace import Trace


_SAID = {
    *("prefill", "decode", "mixed", "policy", "profile", "cache_blocks", "eviction", "pool"),
    *("admission", "fault", "speed", "ttft_slo", "tbt_slo", "trace", "explain", "as_json"),
    *("report", "rows", "cprofile", "compare"),
}
"""Options that the titles and the table show already, and those that do not change the simulation.
"""


def setup_of(read: Trace, setup: Setup, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that is needed to repeat a run: the trace as it was read, and the options' values."""
    given = dict(options)
    given["prefill"], given["decode"] = setup.prefill, setup.decode
    given["cache_blocks"] = "infinite" if setup.cache_blocks is None else setup.cache_blocks
    if setup.profile.name not in PROFILES:
        given["profile"] = setup.profile
    rows = hashlib.sha256(msgspec.msgpack.encode(read.rows))
    return {
        "moonserve": __version__,
        "trace": read.name,
        "trace_rows": len(read.rows),
        "trace_digest": rows.hexdigest()[:16],
        "block_size": read.block_size,
        **given,
    }


def unusual(ctx: click.Context) -> list[str]:
    """Options that differ from their defaults and that nothing else shows."""
    return [
        param.opts[0].lstrip("-") + ("" if ctx.params[param.name] is True else f" {value}")
        for param in ctx.command.params
        if param.name is not None and param.name not in _SAID
        for value in [ctx.params[param.name]]
        if value not in (None, False, param.default)
    ]


def titles(sim: Simulation, speed: float, more: Sequence[str] = ()) -> tuple[str, str]:
    """What was simulated: the trace, and the cluster; `more` is what differs from the defaults."""
    setup = sim.setup
    nodes = f"{setup.prefill} prefill + {setup.decode} decode"
    nodes = f"{setup.mixed} mixed" if setup.mixed else nodes
    count = "infinite" if setup.cache_blocks is None else f"{setup.cache_blocks:,} blocks"
    cache = f"one cache of {len(sim.prefills)} x {count}" if setup.pooled else f"caches of {count}"
    unsure = "not validated" in setup.profile.source.lower()
    parts = [
        nodes,
        setup.tuning.policy,
        setup.profile.name + (" (not validated)" if unsure else ""),
        f"{cache} ({setup.eviction})",
        f"admission {setup.tuning.admission}",
        *(
            f"{it.what} {it.instance}{f' x{it.factor:g}' if it.what == 'slow' else ''} "
            f"at {it.at_us / 1e6:g} s"
            for it in setup.breakdowns
        ),
        *more,
    ]
    return f"{sim.trace.name} at {speed:g}x", ", ".join(parts)


class Form(Formatter):
    """Shows a missing value as a dash."""

    def format_field(self, value: object, spec: str) -> str:
        """See Formatter. Percentages are rounded down."""
        from moonserve.sim.metrics import percent

        if isinstance(value, float) and spec.endswith("%"):
            return percent(value, int(spec[1:-1]))
        return "-" if value is None else str(super().format_field(value, spec))


def table(sim: Simulation, result: Result, above: Sequence[str]) -> str:
    """The figures as lines for people, below the titles."""
    found = result.summary
    goal = sim.setup.goal
    ttft_goal = "" if goal.ttft_us is None else _goal(f"{goal.ttft_us / 1e6:g} s", "ttft")
    tbt_goal = "" if goal.tbt_us is None else _goal(f"{goal.tbt_us / 1e3:g} ms", "tbt")
    prefill = "mixed" if sim.setup.mixed else "prefill"
    lines = [
        "requests   {requests:,} in {span_s:,.0f} s: {completed:,} completed, "
        "{rejected:,} refused, {failed:,} failed",
        *(
            f"           {one.count:,} {one.outcome} as {one.first}: {_literal(one.why)}"
            for one in result.lost
        ),
        "TTFT       mean {ttft_mean_s:.2f} s, p50 {ttft_p50_s:.2f}, p90 {ttft_p90_s:.2f}, "
        f"p99 {{ttft_p99_s:.2f}}{ttft_goal}",
        "TBT        p50 {tbt_p50_ms:,.0f} ms, p90 {tbt_p90_ms:,.0f}, p99 {tbt_p99_ms:,.0f}"
        + tbt_goal,
        "gaps       p50 {gap_p50_ms:,.0f} ms, p90 {gap_p90_ms:,.0f}, p99 {gap_p99_ms:,.0f}",
        "both goals {attainment:.1%} of requests; goodput {goodput_rps:.2f} requests/s, "
        "{goodput_tokens_per_s:,.0f} tokens/s",
        "reuse      {hit_rate_tokens:.1%} of input tokens, {hit_rate_blocks:.1%} of blocks; "
        "{hit_rate_available:.1%} of tokens were held by an instance",
        f"{prefill:<11}busy {{busy_prefill:.0%}}, {{prefill_gpu_s_mean:.2f}} s a request, "
        "{wasted_prefill_s:,.0f} s wasted; busiest {imbalance:.2f} times the mean",
        "decode     busy {busy_decode:.0%}; busiest {imbalance_decode:.2f} times the mean; "
        "{preemptions:,} preemptions",
        "refused    {rejected_ttft_slo:,} for TTFT, {rejected_tbt_slo:,} for TBT, "
        "{dropped_tbt_slo:,} when prefill had ended; with hindsight "
        "{could_have_been_served:,} of all fit in; pools' loads correlate by "
        "{seesaw_correlation:.2f}",
        f"network    {{transfers:,}} transfers, {found['transfer_bytes'] / 1e9:,.1f} GB; "
        "{migrations:,} fetched blocks kept, {spread_copies:,} copies of hot prefixes",
        "groups     {shared_prompts:,} prompts, each prefilled by several instances",
        "hindsight  TTFT off by {ttft_error_mean_s:.2f} s; the best place was "
        "{regret_mean_s:.2f} s sooner (means)",
        "digest     {digest}, in {cpu_s:.1f} CPU s",
    ]
    if sim.setup.tuning.admission == "none":
        lines = [line for line in lines if not line.startswith("refused")]
    if sim.setup.tuning.cpp < 2:
        lines = [line for line in lines if not line.startswith("groups")]
    form = Form()
    return "\n".join(above) + "\n\n" + "\n".join(form.vformat(line, (), found) for line in lines)


def _goal(shown: str, name: str) -> str:
    return f"; goal {shown} met by {{attainment_{name}:.1%}}"


def costs_of(profile: Profile) -> list[str]:
    """What a fitted profile says, in milliseconds, for people."""
    base, new, _, _, step, seq, context = (us / 1e3 for us in profile.pass_us)
    ms = {name: getattr(profile, name).base_us / 1e3 for name in OVERHEADS}
    lines = [
        f"costs      {profile.source}",
        f"           a prefill pass {base:.1f} ms and {1e3 * new:,.0f} for 1,000 tokens; a decode "
        f"step {step:.1f} ms, {seq:.2f} for each request and {1e3 * context:.1f} for 1,000 tokens",
        f"           beside them: arrival {ms['arrive']:.1f} ms, prefill call {ms['call']:.1f}, "
        f"turn {ms['turn']:.1f}, load {ms['own_load']:.1f}, publishing {ms['publish']:.1f}, decode "
        f"call {ms['decode_call']:.1f}",
    ]
    if profile.cold_after_us:
        cold_us = profile.wake_us + sum(getattr(profile, name).cold_us for name in OVERHEADS)
        lines.append(
            f"           after an idle time up to {cold_us / 1e3:,.0f} ms more, half of it after "
            f"{profile.cold_after_us / 1e6:g} s"
        )
    if profile.cores:
        lines.append(f"           {profile.cores:g} instances compute at full speed at a time")
    return lines


def comparison(compared: Sequence[Compared]) -> list[str]:
    """Recorded and simulated figures side by side, then whether the goals are met."""
    from moonserve.show.table import table as aligned
    from moonserve.sim.compared import SHOWN

    statistics = ("mean", "p50", "p90")
    rows = [["", *(f"{name} {side}" for name in statistics for side in ("rec.", "sim.", ""))]]
    for it in compared:
        errors = it.errors()
        cells = [f"{SHOWN[it.name]}, ms" if it.name in SHOWN else it.name]
        for name in statistics:
            error = f"{errors[name]:+.1%}" if name in errors else "-"
            before, after = getattr(it.recorded, name), getattr(it.simulated, name)
            cells += [f"{before:,.1f}", f"{after:,.1f}", error]
        rows.append(cells)
    return [*aligned(rows, words=1), "", *(line for it in compared for line in _verdict(it))]


def _verdict(compared: Compared) -> list[str]:
    if compared.goal is None:
        return []
    from moonserve.sim.compared import SHOWN

    name = SHOWN[compared.name]
    goal = f"{compared.goal:.0%}"
    errors, missed = compared.errors(), compared.missed()
    if not missed:
        return [f"{name} within {goal} in mean, p50 and p90"]
    by = ", ".join(f"{statistic} by {errors[statistic]:+.1%}" for statistic in missed)
    return [f"{name} NOT within {goal}: {by}"]


def _literal(text: str) -> str:
    """Escape text for use in a format string."""
    return text.replace("{", "{{").replace("}", "}}")


def explanation_of(served: Served) -> Explanation:
    """The decision for a request, and its result."""
    from moonserve.core.schedule.explain import explanation, why, why_spread

    decision = served.judged
    first_us = served.first_us
    ended_us = served.ended_us
    candidates = served.judged_among
    because = served.why
    if decision is not None and served.attempts:
        because = why(decision, candidates)
    told = explanation(served.id, served.outcome, decision, candidates, because)
    told.attempts = served.attempts
    told.error = served.why or None
    told.spread = None if served.spread is None else why_spread(served.spread)
    if first_us is not None:
        told.actual_ttft_ms = (first_us - served.arrived_us) / 1e3
        told.actual_cached_tokens = served.cached
        gaps = served.row.output_tokens - 1
        if gaps and ended_us is not None and served.outcome == "completed":
            told.actual_tbt_ms = (ended_us - first_us) / 1e3 / gaps
    return told


def story(told: Explanation, served: Served) -> str:
    """The decision and its result, for people, with the best place in hindsight."""
    from moonserve.show.explain import lines
    from moonserve.sim.metrics import counterfactual_s

    said = list(lines(told))
    best = counterfactual_s(served)
    if best is not None and told.actual_ttft_ms is not None:
        sooner_ms = told.actual_ttft_ms - best[1] * 1e3
        gain = f"{sooner_ms:,.0f} ms sooner" if sooner_ms >= 0.5 else "no sooner"
        said.append(f"with hindsight: {best[0]} after {best[1] * 1e3:,.0f} ms, {gain}")
    return "\n".join(said)

"""`moonserve replay`: a trace against a running cluster, measured as its clients see it.

A thin layer over live/replay, and with --compare over sim; no other module imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TextIO

import click

from moonserve.cli.client import Client, url_option
from moonserve.cli.figures import Form, comparison, costs_of
from moonserve.cli.output import OutputFile, check_apart, input_path, print_json, write_csv
from moonserve.cli.tls import client_trust
from moonserve.cli.token import credential_for
from moonserve.core.errors import EngineFailed

if TYPE_CHECKING:
    from moonserve.live.replay import ReplayResult, TimedRequest
    from moonserve.sim.trace import Row, Trace

_SOME = click.IntRange(min=1)
_IDS = range(1_000, 8_000)
"""Token ids for prompts: they are words in the vocabulary of every model that is served."""


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@url_option("The gateway.")
@click.option("--model", metavar="NAME", help="Default: the first the gateway serves.")
@click.option("--limit", type=_SOME, metavar="ROWS", help="Only the first requests of TRACE.")
@click.option("--scale", type=_SOME, default=1, metavar="N", help="Divide lengths by this.")
@click.option("--speed", default=1.0, metavar="X", help="How many times as fast arrivals come.")
@click.option("--block-size", type=_SOME, default=512, metavar="N", help="Tokens of one block.")
@click.option(
    "--concurrency",
    type=_SOME,
    default=1024,
    show_default=True,
    metavar="N",
    help="Most requests at one time; further ones are sent late, and their wait counts.",
)
@click.option(
    "--seed",
    default=0,
    metavar="N",
    help="Another seed gives other tokens, of which nothing is cached.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--rows", type=OutputFile(), help="Write a CSV of all requests.")
@click.option(
    "--profile-out",
    type=OutputFile(),
    help="Write a profile for `moonserve simulate`, fitted from this run.",
)
@click.option("--compare", is_flag=True, help="Then simulate the same, and print both.")
def replay(
    trace: Path,
    url: str,
    model: str | None,
    limit: int | None,
    scale: int,
    speed: float,
    block_size: int,
    concurrency: int,
    seed: int,
    as_json: bool,
    rows: TextIO | None,
    profile_out: TextIO | None,
    compare: bool,
) -> None:
    """Send the requests of TRACE to a running cluster when they are due, and measure.

    Equal block ids become equal tokens, so requests that share a prefix in TRACE share it here.
    --scale 16 turns blocks of 512 tokens into blocks of 32, the cluster's own size. Outputs have
    the trace's length, whatever the model would do. --profile-out and --compare need a moonserve
    gateway.

    \b
    Examples:
      moonserve replay conversation.jsonl --limit 200 --scale 16 --speed 0.4
      moonserve replay conversation.jsonl --limit 200 --scale 16 --profile-out mine.json --compare
    """
    import msgspec

    from moonserve.sim.trace import read_trace
    from moonserve.sim.trace import scale as scaled

    check_apart({"TRACE": trace}, rows=rows, profile_out=profile_out)
    read = scaled(read_trace(input_path(trace), limit, block_size), speed, scale)
    client = Client(url)
    model = model or client.first_model()
    watch = None
    if profile_out or compare:
        from moonserve.cli.mirror import ClusterWatch

        watch = ClusterWatch(client, read.block_size)
    answers = _run(url.rstrip("/"), model, read, concurrency, seed)
    found: dict[str, Any] = {"trace": read.name, "speed": speed, "model": model}
    found |= summary(read, answers)
    if rows is not None:
        _write_rows(read, answers, rows)
    if watch is not None:
        watch.end(read.name, answers)
        for doubt in watch.doubts:
            click.echo(f"warning: the fitted profile: {doubt}", err=True)
        if profile_out is not None:
            profile_out.write(msgspec.json.format(msgspec.json.encode(watch.profile)).decode())
    compared = watch.compare(read) if compare and watch is not None else []
    if as_json:
        if compare:
            found["compared"] = [it.as_json() for it in compared]
        print_json(found)
        return
    click.echo(_table(found))
    if watch is not None:
        click.echo("\n".join(costs_of(watch.profile)))
    if compare:
        click.echo("\n" + "\n".join(comparison(compared)))
    failures = sorted({answer.error for answer in answers if answer.outcome == "failed"})
    for error in failures[:3]:
        click.echo(f"failed: {error}", err=True)


def prompt_of(row: Row, block_size: int, seed: int) -> tuple[int, ...]:
    """Token ids for a row: the block id seeds the tokens of its block, so equal blocks are equal.

    A partial last block has the beginning of the whole block's tokens.
    """
    tokens: list[int] = []
    for block in row.blocks:
        tokens += Random(f"{seed}/{block}").choices(_IDS, k=block_size)
    return tuple(tokens[: row.input_tokens])


def _run(url: str, model: str, trace: Trace, bound: int, seed: int) -> list[ReplayResult]:
    """Replay the trace; print the progress on stderr."""
    from moonserve.live.replay import TimedRequest
    from moonserve.live.replay import replay as run

    first_us = trace.rows[0].at_us
    tag = f"replay-{Random().getrandbits(32):08x}"

    def dues() -> Iterator[TimedRequest]:
        for number, row in enumerate(trace.rows):
            prompt = prompt_of(row, trace.block_size, seed)
            yield TimedRequest(
                f"{tag}-{number:06}", row.at_us - first_us, prompt, row.output_tokens
            )

    count = len(trace.rows)
    ended = {"completed": 0, "refused": 0, "failed": 0}

    def told(answer: ReplayResult) -> None:
        ended[answer.outcome] += 1
        done = sum(ended.values())
        if sys.stderr.isatty() or done % max(1, count // 10) == 0:
            said = ", ".join(f"{n} {outcome}" for outcome, n in ended.items() if n)
            line = f"{done} of {count} requests: {said}"
            click.echo(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, nl=False, err=True)
            click.echo(nl=not sys.stderr.isatty() or done == count, err=True)

    import asyncio

    answers = asyncio.run(
        run(url, model, dues(), bound, told, client_trust(url), credential_for(url))
    )
    if all(answer.outcome == "failed" for answer in answers):
        raise EngineFailed(f"no request was answered; the first: {answers[0].error}")
    return answers


def gaps_ms(answer: ReplayResult) -> list[float]:
    """Milliseconds from each token to the next."""
    times = answer.tokens_us
    return [(after - before) / 1e3 for before, after in pairwise(times)]


def summary(trace: Trace, answers: Sequence[ReplayResult]) -> dict[str, Any]:
    """The figures, with the names that `moonserve simulate` uses if they mean the same."""
    import numpy as np

    from moonserve.sim.metrics import mean, paper_tbt_ms, quantiles

    done = [answer for answer in answers if answer.outcome == "completed" and answer.tokens_us]
    gaps = [np.array(gaps_ms(answer)) for answer in done]
    tbts = [tbt for own in gaps if (tbt := paper_tbt_ms(own)) is not None]
    ends_us = [
        row.at_us + answer.tokens_us[-1]
        for row, answer in zip(trace.rows, answers, strict=True)
        if answer.tokens_us
    ]
    span_s = max(1e-9, (max(ends_us, default=0) - trace.rows[0].at_us) / 1e6)
    output = sum(len(answer.tokens_us) for answer in done)
    lates = np.array([answer.late_us / 1e6 for answer in answers])
    tokens = sum(row.input_tokens for row in trace.rows)
    return {
        "requests": len(answers),
        "completed": len(done),
        "rejected": sum(answer.outcome == "refused" for answer in answers),
        "failed": sum(answer.outcome == "failed" for answer in answers),
        "span_s": span_s,
        **quantiles("ttft", np.array([a.tokens_us[0] / 1e6 for a in done]), "s", with_mean=True),
        "tbt_mean_ms": mean(np.array(tbts)),
        **quantiles("tbt", np.array(tbts), "ms"),
        **quantiles("gap", np.concatenate(gaps) if gaps else np.zeros(0), "ms"),
        "hit_rate_tokens": sum(answer.cached_tokens for answer in done) / tokens,
        "output_tokens_per_s": output / span_s,
        "late_p99_s": float(np.percentile(lates, 99)),
    }


def _table(found: dict[str, Any]) -> str:
    lines = [
        "{trace} at {speed:g}x on {model}",
        "",
        "requests   {requests:,} in {span_s:,.0f} s: {completed:,} completed, "
        "{rejected:,} refused, {failed:,} failed; sent {late_p99_s:.3f} s late (p99)",
        "TTFT       mean {ttft_mean_s:.3f} s, p50 {ttft_p50_s:.3f}, p90 {ttft_p90_s:.3f}, "
        "p99 {ttft_p99_s:.3f}",
        "TBT        mean {tbt_mean_ms:,.0f} ms, p50 {tbt_p50_ms:,.0f}, p90 {tbt_p90_ms:,.0f}, "
        "p99 {tbt_p99_ms:,.0f}",
        "gaps       p50 {gap_p50_ms:,.0f} ms, p90 {gap_p90_ms:,.0f}, p99 {gap_p99_ms:,.0f}",
        "reuse      {hit_rate_tokens:.1%} of input tokens",
    ]
    return "\n".join(Form().vformat(line, (), found) for line in lines)


def _write_rows(trace: Trace, answers: Sequence[ReplayResult], out: TextIO) -> None:
    import numpy as np

    from moonserve.sim.metrics import paper_tbt_ms

    rows = [
        {
            "id": answer.id,
            "arrived_s": row.at_us / 1e6,
            "input_tokens": row.input_tokens,
            "output_tokens": row.output_tokens,
            "outcome": answer.outcome,
            "cached_tokens": answer.cached_tokens,
            "late_s": answer.late_us / 1e6,
            "ttft_s": times[0] / 1e6 if times else None,
            "tbt_ms": paper_tbt_ms(np.array(gaps_ms(answer))),
            "ended_s": (row.at_us + times[-1]) / 1e6 if times else None,
            "error": answer.error,
        }
        for row, answer in zip(trace.rows, answers, strict=True)
        for times in [answer.tokens_us]
    ]
    write_csv(rows, out)

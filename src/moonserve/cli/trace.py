"""`moonserve trace`: look at traces of requests, check them, cut and make them.

A thin layer over sim/trace, sim/stats and sim/synthesize; no other module imports it. Traces go to
stdout unless --output names a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

import click

from moonserve.cli.output import OutputFile, check_apart, input_path, json_option, print_json
from moonserve.core.errors import ConfigError
from moonserve.core.store.evict import EVICTIONS

if TYPE_CHECKING:
    from moonserve.sim.foreign import Foreign
    from moonserve.sim.stats import Hits, Stats
    from moonserve.sim.trace import Trace

_CAPACITIES = (1_000, 10_000, 30_000, 50_000)  # arXiv 2407.00079, Table 1
_COUNT = click.IntRange(min=1)

_file = click.argument("file", type=click.Path(path_type=Path))
_block_size = click.option(
    "--block-size", default=512, show_default=True, help="Tokens of one block in FILE."
)
_output = click.option(
    "-o", "--output", type=click.File("w"), default="-", help="Write here, not to stdout."
)
_requests = click.option(
    "-n", "--requests", type=_COUNT, default=1_000, show_default=True, help="How many."
)


_SHAPE = {
    "turns": (3.0, "Mean requests of a session."),
    "open-sessions": (256, "Sessions that may still go on."),
    "system-prompts": (16, "How many are shared."),
    "zipf": (1.0, "Skew of the system prompts' popularity."),
    "system-tokens": (1024, "Median length of system prompts."),
    "hot-share": (0.0, "Share of sessions that begin with one more, common prompt."),
    "hot-tokens": (8_192, "Length of that common prompt."),
    "user-tokens": (800, "Median tokens that a turn adds."),
    "output-tokens": (300, "Median of answers."),
    "sigma": (1.0, "Spread of the log of lengths."),
    "most-tokens": (131_072, "The longest input."),
}
"""Fields of sim.synthesize.Shape as options: their defaults and help texts."""


def _shape_options(command: Callable[..., None]) -> Callable[..., None]:
    for name, (default, text) in reversed(_SHAPE.items()):
        command = click.option(f"--{name}", default=default, show_default=True, help=text)(command)
    return command


@click.group()
def trace() -> None:
    """Look at traces of requests; check, cut, scale and make them.

    A trace has the arrival times of requests, their lengths, and the KV blocks that they share.
    Three formats can be read. Mooncake's JSONL: timestamp in ms, input_length, output_length, and
    hash_ids, one id for each block of 512 input tokens; ids are equal if all tokens up to the end
    of the block are. A CSV of timestamp_ms, input_length, output_length and perhaps hash_ids, which
    are separated by spaces. Azure's LLM CSV. A CSV without ids shares nothing. FILE may be -, for
    stdin. Traces are written as JSONL.

    \b
    Examples:
      moonserve trace stats conversation.jsonl --lru 10000
      moonserve trace scale conversation.jsonl --speed 2 | moonserve trace stats -
    """


@trace.command()
@_file
@click.option("--lru", multiple=True, metavar="N", type=int, help="Hits of an LRU of N blocks.")
@click.option(
    "--policy",
    multiple=True,
    type=click.Choice(list(EVICTIONS)),
    help="Hits under this order of eviction; may be given again.",
)
@click.option(
    "--capacity",
    multiple=True,
    metavar="N",
    type=int,
    default=_CAPACITIES,
    help="Blocks for --policy; may be given again.  [default: 1000 10000 30000 50000]",
)
@_block_size
@json_option
def stats(
    file: Path,
    lru: tuple[int, ...],
    policy: tuple[str, ...],
    capacity: tuple[int, ...],
    block_size: int,
    as_json: bool,
) -> None:
    """Show what FILE holds, and how much of it a cache gives back.

    One cache serves all requests. A request hits the longest leading run of its blocks that the
    cache holds; then all its blocks are used, the deepest first. Infinite hits are those of a cache
    that never evicts: no cache gives more.
    """
    from moonserve.sim import stats as count

    if not policy and capacity != _CAPACITIES:
        raise ConfigError("is the size of a cache of --policy; give --policy too", "--capacity")
    read = _read(file, block_size)
    found = count.stats(read)
    curve = [count.hits(read, size) for size in lru]
    curve += [count.hits(read, size, name) for name in policy for size in capacity]
    if as_json:
        _print_json(found, curve, lru)
    else:
        _print_table(found, curve)


@trace.command()
@_file
@click.option(
    "--at-most", type=_COUNT, default=20, show_default=True, help="Stop after so many faults."
)
@_block_size
@json_option
def validate(file: Path, at_most: int, block_size: int, as_json: bool) -> None:
    """Check every row of FILE, and name each fault by line and field.

    Ends with code 1 if there is a fault. Times must not go back, lengths must be at least 1, and
    hash_ids must have one id for each block of the input, none twice.
    """

    from moonserve.sim.trace import place_of
    from moonserve.sim.trace import validate as check

    good, faults = check(input_path(file), at_most, block_size)
    if as_json:
        print_json({"good_rows": good, "faults": faults})
    else:
        for fault in faults:
            place = place_of(file, fault.line)
            click.echo(f"{place}: {fault.field}: {fault.message}")
        more = " (stopped there)" if len(faults) >= at_most else ""
        click.echo(f"{good} good rows, {len(faults)} faults{more}")
    if faults:
        raise SystemExit(1)


@trace.command()
@_file
@_requests
@_block_size
@_output
def head(file: Path, requests: int, block_size: int, output: TextIO) -> None:
    """Write the first requests of FILE."""
    from moonserve.sim.trace import read_trace, write_trace

    check_apart({"FILE": file}, output=output)
    write_trace(read_trace(input_path(file), requests, block_size), output)


@trace.command()
@_file
@click.option(
    "--speed", default=1.0, show_default=True, help="How many times as fast arrivals come."
)
@click.option("--lengths", default=1, show_default=True, help="Divide lengths by this.")
@_block_size
@_output
def scale(file: Path, speed: float, lengths: int, block_size: int, output: TextIO) -> None:
    """Write FILE with faster (or slower) arrivals, or with shorter requests.

    Lengths are rounded up and the block size is divided too, so every request keeps its blocks and
    its hits. --lengths 16 makes a trace of 32-token blocks; read it with --block-size 32.
    """
    from moonserve.sim import trace as traces

    check_apart({"FILE": file}, output=output)
    traces.write_trace(traces.scale(_read(file, block_size), speed, lengths), output)


@trace.command()
@click.option("--seed", default=0, show_default=True, help="The same seed, the same trace.")
@_requests
@click.option("--rps", default=1.0, show_default=True, help="Requests a second, in the mean.")
@_shape_options
@click.option("--block-size", default=512, show_default=True, help="Tokens of one block.")
@_output
def synthesize(
    seed: int, requests: int, rps: float, block_size: int, output: TextIO, **shape: float
) -> None:
    """Make up a trace of chat sessions under shared system prompts.

    Arrivals are Poisson. Each request begins a session or continues an open one; then the session's
    earlier turns, answers included, are its prefix. Lengths are log-normal.
    """
    import msgspec

    from moonserve.sim.synthesize import Shape
    from moonserve.sim.synthesize import synthesize as make
    from moonserve.sim.trace import write_trace

    write_trace(make(seed, requests, rps, msgspec.convert(shape, Shape), block_size), output)


@trace.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--from",
    "form",
    type=click.Choice(["dynamo", "bailian"]),
    required=True,
    help="dynamo: rows of dynamo.request.trace.v1, also compressed; bailian: Alibaba's"
    " qwen-bailian-usagetraces-anon.",
)
@_output
def convert(files: tuple[Path, ...], form: Foreign, output: TextIO) -> None:
    """Write traces that other systems have recorded as JSONL of Mooncake.

    Several FILES, such as the shards of one recording, become one trace. Rows that are no request,
    and requests without output, are left out; stderr says how many.
    """
    from moonserve.sim.foreign import read_foreign
    from moonserve.sim.trace import write_trace

    made = read_foreign([input_path(file) for file in files], form)
    write_trace(made.trace, output)
    count = f"{len(made.trace.rows):,} requests, blocks of {made.trace.block_size} tokens"
    left_out = f"; {made.left_out:,} other rows left out" if made.left_out else ""
    click.echo(count + left_out, err=True)


@trace.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.option("-n", "--requests", type=_COUNT, help="Only the latest so many.")
@click.option(
    "-o", "--output", type=OutputFile("wb"), required=True, metavar="FILE", help="Write here."
)
def perfetto(recording: Path, requests: int | None, output: BinaryIO) -> None:
    """Draw the requests of RECORDING as a Chrome trace, which ui.perfetto.dev opens.

    RECORDING is a folder of `--record`, or one of its files. Each instance has a track for every
    request that it had at one time, with a bar for each stage.
    """
    from collections import deque

    from moonserve.show.perfetto import chrome_trace
    from moonserve.sim.trace import lines_of, recorded_requests

    drawn = deque(recorded_requests(recording, lines_of(recording)), maxlen=requests)
    output.write(chrome_trace(drawn))
    click.echo(f"{len(drawn):,} requests drawn; open the file at ui.perfetto.dev", err=True)


def _read(file: Path, block_size: int) -> Trace:
    from moonserve.sim.trace import read_trace

    return read_trace(input_path(file), block_size=block_size)


def _print_json(found: Stats, curve: list[Hits], lru: Iterable[int]) -> None:
    import msgspec

    whole = msgspec.structs.asdict(found)
    whole["lru_hits"] = {size: hit.block_hits for size, hit in zip(lru, curve, strict=False)}
    whole["hits"] = curve
    print_json(whole)


def _print_table(found: Stats, curve: list[Hits]) -> None:
    def share(blocks: int, tokens: int) -> str:
        of_blocks, of_tokens = blocks / found.block_touches, tokens / found.input_tokens
        return f"{blocks:>14,}  {of_blocks:.4f} of blocks, {of_tokens:.4f} of tokens"

    for name in ("requests", "span_ms", "input_tokens", "output_tokens"):
        click.echo(f"{name:<24}{getattr(found, name):>14,}")
    for name in ("block_touches", "unique_blocks"):
        click.echo(f"{name:<24}{getattr(found, name):>14,}  blocks of {found.block_size} tokens")
    for name in ("input_quantiles", "output_quantiles"):
        values = getattr(found, name)
        click.echo(f"{name:<24}" + "  ".join(f"p{p} {values[p]:,}" for p in values))
    click.echo(f"{'infinite_hits':<24}" + share(found.infinite_hits, found.infinite_hit_tokens))
    for hit in curve:
        label = f"{hit.policy} {hit.capacity:,}" if hit.capacity is not None else hit.policy
        click.echo(f"{label:<24}" + share(hit.block_hits, hit.token_hits))

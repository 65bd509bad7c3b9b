"""One campaign: a cluster, checked streams, faults one after the other, and the reckoning.

Run it by hand with a seed and a count:

    python -m tests.chaos.campaign --faults 200 --seed 7 [--workers 2] [--gateways]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Faults
from tests.chaos.streams import Load

_MOST_GROWTH_BYTES = 64 << 20
"""A process may hold so much more at the end than after the first streams: its index, its parts of
the interpreter that were not loaded before. A leak of bodies or streams is larger."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What one campaign does. The same options make the same faults in the same order."""

    seed: int = 1
    faults: int = 200
    kinds: tuple[str, ...] = ()
    """These, one after the other, instead of `faults` drawn ones."""
    spacing_s: float = 4.0
    """From the start of one fault to the next."""
    longest_s: float = 8.0
    """Of one fault that lasts."""
    clients: int = 32
    most_tokens: int = 1_600
    """Of one stream."""
    fronts: int = 1
    """Gateway processes that serve clients."""
    gateways: bool = False
    """Whether they are killed too."""
    args: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ()


class Report(msgspec.Struct):
    """What came of it."""

    summary: str
    wrong: list[str]
    output: str
    """What the cluster printed."""


async def campaign(options: Options, say: bool = True) -> Report:
    """Run one campaign to its end."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        disk = ("--disk-bytes", "4MiB", "--disk-dir", str(folder / "disk"))
        sizes = ("--segment-bytes", "1MiB", "--decode-kv", "4")
        if "--shared-memory" not in options.args:
            sizes += ("--shared-memory", "never")
        cluster = Cluster(
            folder, *sizes, *disk, *options.args, fronts=options.fronts, wrap=options.wrap
        )
        wrong: list[str] = []
        try:
            await cluster.start()
            summary = await _disturb(cluster, options, wrong, say)
        finally:
            left = await cluster.end()
        wrong += [f"left behind: {it}" for it in left]
        wrong += tracebacks(cluster.up.lines)
        return Report(summary, wrong, cluster.up.output)


async def _disturb(cluster: Cluster, options: Options, wrong: list[str], say: bool) -> str:
    faults = Faults(cluster, options.seed, options.gateways, options.longest_s)
    load = Load(cluster.url, options.seed, lambda: faults.fronts_lost, options.most_tokens)
    load.start(options.clients)
    await load.until_streams(options.clients)
    before = cluster.use()
    loop = asyncio.get_running_loop()
    for kind in options.kinds or ("",) * options.faults:
        if cluster.up.process.poll() is not None:
            wrong.append(f"the whole cluster has ended: {cluster.up.lines[-5:]}")
            break
        next_s = loop.time() + options.spacing_s
        made = await faults.one(kind)
        if say:
            print(f"{faults.made.total():4} {made}: {load.outcomes}", flush=True)
        await asyncio.sleep(next_s - loop.time())
    cluster.heal()
    cluster.step_clock(0)
    await load.stop()
    wrong += load.outcomes.wrong
    wrong += [f"{name}: {count} at the end" for name, count in (await cluster.settled()).items()]
    for name, use in cluster.use().items():
        grown = use.rss_bytes - before[name].rss_bytes if name in before else 0
        if grown > _MOST_GROWTH_BYTES:
            wrong.append(f"{name} grew by {grown >> 20} MiB")
    kinds = ", ".join(f"{count}x {kind}" for kind, count in faults.made.most_common())
    return f"{faults.made.total()} faults ({kinds}); {load.outcomes}"


def tracebacks(lines: Sequence[str]) -> list[str]:
    """The last lines of the tracebacks that a cluster printed."""
    found: list[str] = []
    within = ""
    for line in lines:
        name, _, text = line.rstrip().partition(" | ")
        if "Traceback (most recent call last)" in text:
            one_line = " | " in text  # the log's form of it
            found += [f"traceback of {name.strip()}: {text[-300:]}"] if one_line else []
            within = "" if one_line else name
        elif within == name and text and not text.startswith(" "):
            found.append(f"traceback of {name.strip()}: {text}")
            within = ""
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run it from the command line; 1: something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kinds", type=lambda given: tuple(given.split(",")), default=())
    parser.add_argument("--spacing-s", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--most-tokens", type=int, default=1_600)
    parser.add_argument("--workers", dest="fronts", type=int, default=1)
    parser.add_argument("--gateways", action="store_true")
    parser.add_argument("--log", type=Path, help="file for what the cluster prints")
    given = vars(parser.parse_args(words))
    log = given.pop("log")
    report = asyncio.run(campaign(Options(**given)))
    if log is not None:
        log.write_text(report.output)
    print(report.summary)
    for line in report.wrong:
        print("WRONG:", line)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

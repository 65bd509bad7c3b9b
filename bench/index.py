"""The prefix index: look-ups, stores and removals, beside dynamo's RadixTree on the same work.

    python bench/index.py [--dynamo PYTHON] [--quick]

PYTHON is an interpreter that has `ai-dynamo-runtime` (1.6.1 was measured). Both run in one process
each, pinned to one core, and take turns round by round; ratios are medians over rounds. Two
figures for each: the look-up alone (for dynamo find_matches, for us `match`), and with every
holder's run as a Python dict (`.scores`, `.by_holder`). Answers are compared.

`Adapter` has the interface of a harness outside this repository: prepare, build, remove, query.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also when imported as bench.index

from common import machine_line

LENGTHS = (64, 512, 2_048)
Event = tuple[int, int, list[int]]
"""(worker, parent node or -1, nodes)."""


class Adapter:
    """PrefixIndex; keys are the 64-bit hashes of whole prefixes."""

    name = "moonserve.PrefixIndex"
    failed = 0

    def __init__(self) -> None:
        from moonserve.core.kv.index import PrefixIndex

        self.index = PrefixIndex()

    def prep_events(self, events: Sequence[Event], local: Any, seq: Any) -> list[Any]:
        """Arguments of `stored`."""
        return [(str(w), [seq[n] for n in ns], None if p < 0 else seq[p]) for w, p, ns in events]

    def prep_removes(self, events: Sequence[tuple[int, list[int]]], local: Any, seq: Any) -> Any:
        """Arguments of `removed`."""
        return [(str(w), [seq[n] for n in ns]) for w, ns in events]

    def prep_query(self, nodes: Sequence[int], local: Any, seq: Any) -> list[int]:
        """The key chain."""
        return [seq[n] for n in nodes]

    def build(self, event: Any) -> None:
        """Take one store event."""
        self.index.stored(*event)

    def remove(self, event: Any) -> None:
        """Take one removal."""
        self.index.removed(*event)

    def query(self, keys: list[int]) -> Any:
        """Look a chain up."""
        return self.index.match(keys)

    def whole(self, keys: list[int]) -> dict[Any, int]:
        """The same, with every holder's run as a dict."""
        return self.index.match(keys).by_holder

    def result(self, match: Any) -> dict[Any, int]:
        """{worker: run}."""
        return {int(name): run for name, run in match.by_holder.items()}

    def flush(self) -> None:
        """Nothing is done in the background."""


class Dynamo:
    """dynamo.llm.RadixTree; events are JSON bytes, the only form that its binding takes."""

    name = "dynamo.RadixTree"

    def __init__(self) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found]

        self.tree = RadixTree()
        self.failed = 0

    def prep_events(self, events: Sequence[Event], local: Any, seq: Any) -> list[Any]:
        """Encoded store events."""
        return [
            (
                w,
                _json(
                    stored={
                        "parent_hash": None if p < 0 else seq[p],
                        "blocks": [{"block_hash": seq[n], "tokens_hash": local[n]} for n in ns],
                    }
                ),
            )
            for w, p, ns in events
        ]

    def prep_removes(self, events: Sequence[tuple[int, list[int]]], local: Any, seq: Any) -> Any:
        """Encoded removals."""
        return [(w, _json(removed={"block_hashes": [seq[n] for n in ns]})) for w, ns in events]

    def prep_query(self, nodes: Sequence[int], local: Any, seq: Any) -> list[int]:
        """The hashes of the blocks by themselves."""
        return [local[n] for n in nodes]

    def build(self, event: Any) -> None:
        """Hand over one event."""
        self.tree.apply_event(*event)

    def remove(self, event: Any) -> None:
        """Hand over one removal; after one in mid-chain, it may not find what came behind."""
        try:
            self.tree.apply_event(*event)
        except RuntimeError:
            self.failed += 1

    def query(self, keys: list[int]) -> Any:
        """Look a chain up."""
        return self.tree.find_matches(keys)

    def whole(self, keys: list[int]) -> dict[Any, int]:
        """The same, with every worker's run as a dict."""
        return self.tree.find_matches(keys).scores

    def result(self, match: Any) -> dict[Any, int]:
        """{worker: run}."""
        return {worker: run for (worker, _), run in match.scores.items()}

    def flush(self) -> None:
        """Wait for the background thread."""
        self.tree.find_matches([1])


def _json(**data: Any) -> bytes:
    return json.dumps({"event_id": 0, "dp_rank": 0, "data": data}, separators=(",", ":")).encode()


class Work:
    """Chains of a template, a document of it (both by Zipf) and a tail of their own.

    One in ten goes on for up to eight turns of 256 blocks on the same worker. A store event has
    the blocks that the worker lacks, at most 256. With `holes`, one removal in four takes blocks
    out of the middle of a chain.
    """

    def __init__(self, workers: int, entries: int, queries: int, holes: bool) -> None:
        self.random = random = Random(7)
        self.nodes = 0
        self.events: list[Event] = []
        held: list[set[int]] = [set() for _ in range(workers)]
        templates = [self.fresh(64) for _ in range(200)]
        documents = [[self.fresh(96) for _ in range(40)] for _ in range(200)]
        chains: list[tuple[int, list[int]]] = []
        while sum(map(len, held)) < entries:
            which, worker = self.zipf(200), random.randrange(workers)
            chain = templates[which] + documents[which][self.zipf(40)] + self.fresh(96)
            for turn in range(random.randint(1, 9) if random.random() < 0.1 else 1):
                if turn:
                    chain = chain + self.fresh(256)
                self.store(worker, held[worker], chain)
            chains.append((worker, chain))
        self.removes = [(w, c[-96:][::-1]) for w, c in random.sample(chains, len(chains) // 3)]
        if holes:
            for at, (worker, chain) in enumerate(random.sample(chains, len(self.removes) // 4)):
                start = random.randrange(len(chain) - 16)
                self.removes[at * 4] = (worker, chain[start : start + 16])
        for worker, nodes in self.removes:  # none is removed twice
            nodes[:] = [node for node in nodes if node in held[worker]]
            held[worker].difference_update(nodes)
        self.held = held
        self.queries = {n: [self.query(chains, n) for _ in range(queries)] for n in LENGTHS}
        self.local = [random.getrandbits(64) for _ in range(self.nodes)]
        self.seq = [random.getrandbits(64) for _ in range(self.nodes)]

    def fresh(self, count: int) -> list[int]:
        """New nodes."""
        self.nodes += count
        return list(range(self.nodes - count, self.nodes))

    def zipf(self, count: int) -> int:
        """A rank below `count`, by Zipf's law with exponent 1.1."""
        sums = _SUMS.setdefault(count, list(accumulate(n**-1.1 for n in range(1, count + 1))))
        return bisect(sums, self.random.random() * sums[-1])

    def store(self, worker: int, held: set[int], chain: list[int]) -> None:
        """Events for what is missing at the chain's end."""
        at = next((i for i, node in enumerate(chain) if node not in held), len(chain))
        for start in range(at, len(chain), 256):
            nodes = chain[start : start + 256]
            self.events.append((worker, chain[start - 1] if start else -1, nodes))
            held.update(nodes)

    def query(self, chains: list[tuple[int, list[int]]], length: int) -> list[int]:
        """7 in 10 a known chain as long as may be, 2 one cut anywhere, 1 unknown; then unknown."""
        kind, random = self.random.random(), self.random
        known = random.choice(chains)[1]
        if random.random() < 0.5:
            known = max((random.choice(chains)[1] for _ in range(64)), key=len)
        known = known[:length] if kind < 0.9 else []
        if 0.7 <= kind < 0.9:
            known = known[: random.randint(1, len(known))]
        return known + self.fresh(length - len(known))


_SUMS: dict[int, list[float]] = {}


def timed_us(call: Callable[[Any], object], queries: Sequence[Any]) -> float:
    """Median microseconds of a call."""
    times = []
    clock = time.perf_counter_ns
    for query in queries:
        began = clock()
        call(query)
        times.append(clock() - began)
    return median(times) / 1_000


def rate(call: Callable[[Any], None], flush: Callable[[], None], events: Any, blocks: int) -> float:
    """Million blocks per CPU second, background threads included."""
    began = time.process_time()
    for event in events:
        call(event)
    flush()
    return blocks / (time.process_time() - began) / 1e6


def naive(held: list[set[int]], nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Every worker's run, by walking."""
    runs = [next((i for i, node in enumerate(nodes) if node not in h), len(nodes)) for h in held]
    return [(worker, run) for worker, run in enumerate(runs) if run]


def serve(kind: type[Any], args: Sequence[str]) -> None:
    """A child: build; one round of look-ups per line of input; then removals. JSON lines out.

    With holes, removals come first, and answers are also compared with a naive walk.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    workers, entries, queries, holes = map(int, args)
    work, side = Work(workers, entries, queries, bool(holes)), kind()
    events = side.prep_events(work.events, work.local, work.seq)
    removes = side.prep_removes(work.removes, work.local, work.seq)
    asked = {
        n: [side.prep_query(q, work.local, work.seq) for q in qs] for n, qs in work.queries.items()
    }
    gc.collect()
    gc.disable()

    def remove() -> float:
        return rate(side.remove, side.flush, removes, sum(len(k) for _, k in work.removes))

    told = {"store": rate(side.build, side.flush, events, sum(len(e[2]) for e in work.events))}
    if holes:
        told["remove"] = remove()
    print(json.dumps(told), flush=True)
    for _ in sys.stdin:
        times = {}
        for n, chains in asked.items():
            timed_us(side.query, chains)  # the other side had the caches meanwhile
            times[f"{n}"] = timed_us(side.query, chains)
            times[f"{n} as dict"] = timed_us(side.whole, chains)
        print(json.dumps(times), flush=True)
    answers = [sorted(side.result(side.query(q)).items()) for qs in asked.values() for q in qs]
    if not holes:
        told["remove"] = remove()
    else:
        truth = [naive(work.held, q) for qs in work.queries.values() for q in qs]
        told["wrong"] = sum(a != b for a, b in zip(answers, truth, strict=True))
    digest = sha256(repr(answers).encode()).hexdigest()
    print(json.dumps(told | {"answers": digest, "failed": side.failed}), flush=True)


SIDES = {"moonserve": Adapter, "dynamo": Dynamo}


class Child:
    """One side in a process of its own."""

    def __init__(
        self,
        python: str,
        script: str,
        side: str,
        args: Sequence[object],
        env: Mapping[str, str] | None = None,
    ) -> None:
        command = [python, script, "--serve", side, *map(str, args)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DYN_LOG": "off", **(env or {})},
        )
        self.read()

    def read(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"index.py: a child ended early, status {self.process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def round(self) -> dict[str, Any]:
        """One round of look-ups."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.read()

    def end(self) -> dict[str, Any]:
        """Removals, and what it found."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        told = self.read()
        self.process.wait()
        return told


def bench(pythons: dict[str, str], args: tuple[int, int, int, int], rounds: int) -> None:
    """Print the lines of one size: both sides' figures, and how many times better ours are."""
    sides = {side: Child(python, __file__, side, args) for side, python in pythons.items()}
    times: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for _ in range(rounds):
        for side, child in sides.items():
            for what, us in child.round().items():
                times[side].setdefault(what, []).append(us)
    ends = {side: child.end() for side, child in sides.items()}
    print(f"{args[0]} holders, {args[1]} entries{', chains with holes' if args[3] else ''}")
    for what in times["moonserve"]:
        cells = [f"{side} {median(of[what]):6.2f} us" for side, of in times.items()]
        if len(sides) == 2:
            pairs = zip(times["dynamo"][what], times["moonserve"][what], strict=True)
            cells.append(f"{median(theirs / ours for theirs, ours in pairs):5.2f}x faster")
        print(f"  look-up, blocks: {what:12}  {'  '.join(cells)}")
    for what in ("store", "remove"):
        cells = [f"{side} {end[what]:6.2f} M blocks/s" for side, end in ends.items()]
        if len(sides) == 2:
            cells.append(f"{ends['moonserve'][what] / ends['dynamo'][what]:5.2f}x its rate")
        print(f"  {what:29}  {'  '.join(cells)}")
    for side, end in ends.items():
        if args[3]:
            print(
                f"  {side}: answers that differ from a naive walk: {end['wrong']}; "
                f"removals that failed: {end['failed']}"
            )
    if len(sides) == 2 and not args[3]:
        same = ends["moonserve"]["answers"] == ends["dynamo"]["answers"]
        print(f"  answers are {'the same' if same else 'DIFFERENT'}")


def asked(about: str, needs: str) -> tuple[dict[str, str], bool]:
    """The command line: each side's interpreter, and whether to be quick; names the machine."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--dynamo", metavar="PYTHON", help=f"interpreter with {needs}")
    parser.add_argument("--quick", action="store_true", help="small, few rounds")
    options = parser.parse_args()
    print(machine_line())
    theirs = {"dynamo": options.dynamo} if options.dynamo else {}
    return {"moonserve": sys.executable, **theirs}, options.quick


def main() -> None:
    """Run all sizes."""
    pythons, quick = asked(str(__doc__), "ai-dynamo-runtime")
    entries, queries, rounds = (30_000, 50, 2) if quick else (1_000_000, 1_000, 7)
    for workers in (64, 1_024):
        for holes in (0, 1):
            bench(pythons, (workers, entries, queries, holes), rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(SIDES[sys.argv[2]], sys.argv[3:])
    else:
        main()

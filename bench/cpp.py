"""A long prompt on one and on several single-thread prefill workers: chunked pipeline parallelism.

    python bench/cpp.py [--tokens 6000] [--rounds 3] [--prefill 2] [--dtype auto]

One `moonserve up` with a thread for each worker, a real model, a fresh prompt of random tokens for
each request, the two arms in turns: without an objective one worker has the prompt; with one that
it would miss, the planner shares it out. TTFT is the gateway's, from arrival to the first token,
all KV in the store; beside it the planner's prediction, which learns from pass to pass. Of parts,
the passes are shown by the workers' own notes (/debug/stages).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics

from common import machine_line
from overlap import WORDS, Cluster

OBJECTIVE = {"x-moonserve-ttft-slo-ms": "1"}


def turn(cluster: Cluster, id: str, tokens: int, heads: dict[str, str]) -> tuple[float, float]:
    """TTFT in milliseconds, as it was and as it was predicted."""
    prompt = random.Random(id).choices(WORDS, k=tokens)
    cluster.complete(cluster.url, id, prompt, heads, max_tokens=2)
    told = cluster.get(f"{cluster.url}/api/decisions/{id}")
    actual, predicted = told["actual_ttft_ms"], told["predicted_ttft_ms"]
    print(f"{id}: {actual:.0f} ms, predicted {predicted:.0f}")
    noted = cluster.stages(f"{id}/1").items()
    passes = [(who, stage) for who, all in noted for stage in all if stage["what"] == "computed"]
    for who, stage in passes:
        zero_us = min(stage["began_us"] for _, stage in passes)
        began, ended = (1e-3 * (stage[key] - zero_us) for key in ("began_us", "ended_us"))
        print(f"  {who} computes {stage['blocks']:>4} blocks from {began:6.0f} to {ended:6.0f} ms")
    return actual, predicted


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(machine_line())
    os.environ["OMP_NUM_THREADS"] = "1"
    flags = ["--dtype", args.dtype, "--segment-bytes", "512MiB", "--admission", "none"]
    cluster = Cluster("--prefill", str(args.prefill), *flags)
    try:
        for at in range(2 * args.prefill):
            turn(cluster, f"unmeasured{at}", args.tokens // 2, {})  # all have run long passes
        arms: dict[str, tuple[dict[str, str], list[tuple[float, float]]]] = {
            "one": ({}, []),
            "parts": (OBJECTIVE, []),
        }
        for at in range(args.rounds):
            for name, (heads, turns) in arms.items():
                turns.append(turn(cluster, f"{name}{at}", args.tokens, heads))
        ones, parts = (turns for _, turns in arms.values())
        ratio, foretold = (
            statistics.median(
                one[which] / shared[which] for one, shared in zip(ones, parts, strict=True)
            )
            for which in (0, 1)
        )
        print(
            f"{args.tokens} tokens on {args.prefill} workers: {ratio:.2f} times as fast as on one,"
            f" predicted {foretold:.2f}; medians of {args.rounds} rounds"
        )
    finally:
        cluster.end()


if __name__ == "__main__":
    main()

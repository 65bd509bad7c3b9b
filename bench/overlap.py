"""What is left of the KV's way to decode when prefill ends, on a real model by real processes.

    python bench/overlap.py [--tokens 4096] [--rounds 3] [--dtype auto]

One prefill and one decode worker of `moonserve up`. Two arms in turns, each with fresh prompts:
through the gateway, which tells decode at assignment, and as a router that does not (prefill call,
then decode call). Timestamps are the workers' own (/debug/stages), by one machine's clock.
transfer = puts by prefill and reads by decode, summed; left = from the end of prefill's last pass
until decode has all KV.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import urllib.request
from typing import Any

from common import machine_line

TOKEN = "bench"
MODEL = "smollm2-135m-instruct"
WORDS = range(2_000, 40_000)


class Cluster:
    """One `moonserve up`, and its workers' addresses."""

    def __init__(self, *more: str) -> None:
        flags = ["--port", "0", *more]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moonserve", "up", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MOONSERVE_TOKEN": TOKEN},
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ready := re.match(r"Ready at (http\S+)", line):
                self.url = ready[1]
                break
        else:
            raise SystemExit("the cluster did not start")
        self.workers = {it["id"]: it["url"] for it in self.get(self.url + "/api/instances")}

    def get(self, url: str) -> Any:
        """Its JSON."""
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def complete(
        self,
        base: str,
        id: str,
        prompt: list[int],
        heads: dict[str, str] | None = None,
        **more: Any,
    ) -> Any:
        """A greedy completion of token ids; heads: more headers."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {TOKEN}",
            "x-request-id": id,
            **(heads or {}),
        }
        request = urllib.request.Request(
            base + "/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)

    def stages(self, lease: str) -> dict[str, list[dict[str, Any]]]:
        """What each worker noted under a lease."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name, url in self.workers.items():
            noted = self.get(url + "/debug/stages")
            found[name] = [stage for stage in noted if stage["lease"] == lease]
        return found

    def end(self) -> None:
        """Stop it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def told(cluster: Cluster, id: str, prompt: list[int]) -> str:
    """Through the gateway; the lease."""
    cluster.complete(cluster.url, id, prompt, max_tokens=4)
    return f"{id}/1"


def untold(cluster: Cluster, id: str, prompt: list[int]) -> str:
    """As a router that speaks to decode when prefill has ended; the lease."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "lease": id}
    base, more = cluster.workers["p0"], {"max_tokens": 1, "return_token_ids": True}
    reply = cluster.complete(base, id, prompt, kv_transfer_params=params, **more)
    params = reply["kv_transfer_params"]
    cluster.complete(cluster.workers["d0"], id, prompt, max_tokens=4, kv_transfer_params=params)
    return id


def figures(stages: dict[str, list[dict[str, Any]]], show: bool) -> tuple[float, float]:
    """Milliseconds of transfer, and of those left after prefill's last pass."""
    rows = [(who, s) for who, noted in stages.items() for s in noted]
    zero_us = min(s["began_us"] for _, s in rows)
    if show:
        for who, s in sorted(rows, key=lambda row: int(row[1]["ended_us"])):
            began, ended = (1e-3 * (s[key] - zero_us) for key in ("began_us", "ended_us"))
            print(f"  {who} {s['what']:<12}{s['blocks']:>4} blocks {began:9.1f} to {ended:9.1f} ms")
    moves = [s for who, s in rows if s["what"] in (("put",) if who == "p0" else ("ahead", "read"))]
    [end_us] = [s["began_us"] for _, s in rows if s["what"] == "handed_over"]
    [here_us] = [s["ended_us"] for who, s in rows if s["what"] == "loaded" and who == "d0"]
    moved_us = sum(s["ended_us"] - s["began_us"] for s in moves)
    return moved_us / 1e3, (here_us - end_us) / 1e3


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(machine_line())
    draw = random.Random(1)
    cluster = Cluster("--dtype", args.dtype, "--segment-bytes", "2GiB")
    try:
        shares: dict[str, list[float]] = {"told at assignment": [], "told at the end": []}
        for turn in range(args.rounds):
            for name, arm in zip(shares, (told, untold), strict=True):
                prompt = draw.choices(WORDS, k=args.tokens)
                lease = arm(cluster, f"{arm.__name__}{turn}", prompt)
                moved_ms, left_ms = figures(cluster.stages(lease), turn == 0)
                share = left_ms / moved_ms
                shares[name].append(share)
                print(f"{name}: transfer {moved_ms:.0f} ms, left {left_ms:.0f} ms, {share:.1%}")
        for name, turns in shares.items():
            print(f"{name}: {statistics.median(turns):.1%} left, median of {args.rounds}")
    finally:
        cluster.end()


if __name__ == "__main__":
    main()

"""Engine speed: prefill and decode tokens/s in bfloat16 and float32, beside llama.cpp.

    python bench/engine.py [--quick] [--model REF] [--threads N] [--chunk N]

One model file for all; contestants take turns within each round, and medians over the rounds are
printed with their ratio to llama.cpp's. llama.cpp (the `xllamacpp` wheel, if installed) runs in a
child process, so that neither's OpenMP settings touch the other. Nothing else should run beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

CONTEXT = 128
"""Tokens before the first decode step."""

Measure = Callable[[str, int], float]
"""("prefill", tokens) or ("decode", batch) to tokens/s."""


def token(index: int) -> int:
    """A fixed, unrepetitive prompt."""
    return index * 7919 % 40_000 + 100


def ours(path: Path, dtype: str, threads: int, chunk: int, steps: int) -> Measure:
    """Measure TorchEngine by its own clock: passes only, as a worker runs them."""
    from moonserve.core.engine.batch import Chunk, Pass
    from moonserve.core.request import Sampling
    from moonserve.core.units import RequestId
    from moonserve.live.engine.torch_engine import TorchEngine

    greedy = Sampling(temperature=0.0)
    engine = TorchEngine.load(path, dtype=dtype, num_blocks=160, threads=threads)  # type: ignore[arg-type]
    size = engine.shape.block_size
    assert engine.shape.max_len >= 4096, "the benchmark needs a context of 4,096 tokens"

    def prefill(tokens: int) -> float:
        blocks = tuple(range(-(-tokens // size)))
        elapsed = 0
        for start in range(0, tokens, chunk):
            end = min(start + chunk, tokens)
            ids = tuple(map(token, range(start, end)))
            sampling = greedy if end == tokens else None
            work = Pass((Chunk(RequestId("r"), ids, start, blocks, sampling),))
            elapsed += engine.run_now(work).elapsed_us
        return tokens / elapsed * 1e6

    def decode(batch: int) -> float:
        per = -(-(CONTEXT + steps) // size)
        tables = [tuple(range(row * per, (row + 1) * per)) for row in range(batch)]
        names = [RequestId(str(row)) for row in range(batch)]
        prompt = tuple(map(token, range(CONTEXT)))
        for name, table in zip(names, tables, strict=True):
            engine.run_now(Pass((Chunk(name, prompt, 0, table),)))
        last = dict.fromkeys(names, 100)
        elapsed = 0
        for step in range(steps):
            rows = zip(names, tables, strict=True)
            work = Pass(tuple(Chunk(n, (last[n],), CONTEXT + step, t, greedy) for n, t in rows))
            result = engine.run_now(work)
            last = result.sampled
            elapsed += result.elapsed_us
        return batch * steps / elapsed * 1e6

    return lambda what, size: prefill(size) if what == "prefill" else decode(size)


class Peer:
    """llama.cpp in a child process, asked by lines of JSON."""

    def __init__(self, path: Path, threads: int, steps: int) -> None:
        arguments = [sys.executable, __file__, "--serve-peer", f"--model={path}"]
        arguments += [f"--threads={threads}", f"--steps={steps}"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
        self.child = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean,
        )

    def __call__(self, what: str, size: int) -> float:
        """Measure one case; the child answers with tokens/s."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps([what, size]) + "\n")
        self.child.stdin.flush()
        for line in self.child.stdout:
            if line.startswith("tokens/s "):
                return float(line.split()[1])
        raise SystemExit("the llama.cpp child ended; run it alone with --serve-peer to see why")

    def close(self) -> None:
        """End the child."""
        self.child.terminate()
        self.child.wait(10)


def serve_peer(path: Path, threads: int, steps: int) -> None:
    """Answer the parent's questions with llama.cpp, by llama.cpp's own timings."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.kv_unified = 8192, 16, True
    # Else an idle slot's KV is dropped, and "decode" would measure its prompt a second time.
    params.cache_idle_slots, params.cache_ram_mib = False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def complete(prompt: list[int], count: int, slot: int, reuse: bool) -> dict[str, Any]:
        settings = {"n_predict": count, "id_slot": slot, "cache_prompt": reuse}
        fixed = {"temperature": 0, "ignore_eos": True}
        reply = server.handle_completions({"prompt": prompt} | settings | fixed)
        timings: dict[str, Any] = reply["timings"]
        return timings

    def decode(batch: int) -> float:
        prompts = [[row + 5, *map(token, range(CONTEXT - 1))] for row in range(batch)]
        for row, prompt in enumerate(prompts):  # prefill each slot, so that only decode is left
            complete(prompt, 1, row, True)
        with ThreadPoolExecutor(batch) as pool:
            asked = [
                pool.submit(complete, prompt, steps, row, True)
                for row, prompt in enumerate(prompts)
            ]
            times = [future.result() for future in asked]
        assert all(t["cache_n"] == CONTEXT - 1 for t in times), "a slot lost its prompt's KV"
        made = sum(int(t["predicted_n"]) for t in times)
        return made / max(float(t["predicted_ms"]) for t in times) * 1e3

    for line in sys.stdin:
        what, size = json.loads(line)
        if what == "prefill":
            timings = complete([token(i) for i in range(size)], 1, 0, False)
            speed = timings["prompt_n"] / timings["prompt_ms"] * 1e3
        else:
            speed = decode(size)
        print(f"tokens/s {speed}", flush=True)


def machine() -> str:
    """The processor, its cores, and the commit that was measured."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} CPUs, load {os.getloadavg()[0]:.1f}; commit {commit or 'unknown'}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quick", action="store_true", help="one round, smaller cases")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chunk", type=int, default=1024, help="prompt tokens a pass")
    parser.add_argument("--steps", type=int, default=32, help="decode steps a case")
    parser.add_argument("--rounds", type=int, default=0, help="0: 3, or 1 with --quick")
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    from moonserve.live.model.catalog import resolve

    path = resolve(args.model).path
    if args.serve_peer:
        serve_peer(path, args.threads, args.steps)
        return
    runners: dict[str, Measure] = {
        dtype: ours(path, dtype, args.threads, args.chunk, args.steps)
        for dtype in ("bfloat16", "float32")
    }
    peer = None
    if find_spec("xllamacpp") is None:
        print("xllamacpp is not installed: no llama.cpp column (pip install xllamacpp)")
    elif path.suffix != ".gguf":
        print("llama.cpp reads no safetensors: no llama.cpp column (give a .gguf)")
    else:
        peer = runners["llama.cpp"] = Peer(path, args.threads, args.steps)
    cases = [("prefill", 512), ("decode", 1), ("decode", 4)]
    if not args.quick:
        more = [("prefill", 2048), ("prefill", 4096), ("decode", 16)]
        cases = sorted(cases + more, key=lambda case: (case[0] != "prefill", case[1]))
    print(f"{path.name}, {args.threads} threads, chunks of {args.chunk}; {machine()}")
    speeds: dict[tuple[str, tuple[str, int]], list[float]] = {}
    for _ in range(args.rounds or (1 if args.quick else 3)):
        for what, size in cases:
            for name, measure in runners.items():
                speeds.setdefault((name, (what, size)), []).append(measure(what, size))
    if peer is not None:
        peer.close()
    for what, size in cases:
        parts = []
        for name in runners:
            speed = median(speeds[name, (what, size)])
            ratio = ""
            if peer is not None and name != "llama.cpp":
                ratio = f" ({speed / median(speeds['llama.cpp', (what, size)]):.2f}x)"
            parts.append(f"{name} {speed:8.1f}{ratio}")
        label = f"{size} tokens" if what == "prefill" else f"batch {size}"
        print(f"{what:8} {label:12} tokens/s: " + "   ".join(parts))


if __name__ == "__main__":
    main()

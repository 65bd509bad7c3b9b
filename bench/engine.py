"""Engine speed: prefill and decode in each number type, beside llama.cpp and vLLM for CPUs.

    python bench/engine.py [--quick] [--avx2] [--model REF] [--types A,B] [--threads N] [--chunk N]
                           [--vllm PYTHON]

One model file for all; contestants take turns within each round. Each case is printed when it is
done: medians over its rounds of tokens/s, of CPU milliseconds per token, and their ratios to
llama.cpp's. CPU time says more than tokens/s if other work runs beside. Progress goes to stderr.
llama.cpp (the `xllamacpp` wheel, if installed; it uses AVX2) runs in a child process, so that
neither's OpenMP settings touch the other. So does vLLM, once for each number type, if --vllm names
an interpreter that has it (`make test-vllm` makes one): it gets the same weights as a Hugging Face
folder, and the time of its engine's steps is measured, without its HTTP server. --avx2 keeps ours
from instructions beyond AVX2. A type is a --dtype, and after a colon --kernels: float32:torch is
float32 without compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from moonserve.core.engine.batch import Pass, PassResult
    from moonserve.live.engine.torch_engine import TorchEngine

LLAMA = "llama.cpp"
VLLM = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment in which vLLM runs its steps in the process that asks for them."""
CONTEXT = 128
"""Tokens before the first decode step."""

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "CFLAGS": "-march=haswell",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""The environment that keeps torch, MKL, oneDNN and our kernels from instructions beyond AVX2."""


class Speed(NamedTuple):
    """What one measurement gave."""

    tokens_s: float
    cpu_ms: float
    """CPU milliseconds of the whole process per token."""


Measure = Callable[[str, int], Speed]
"""("prefill", tokens) or ("decode", batch) to the speed."""


class Clock:
    """Adds up the wall and the CPU time of the passes that it runs."""

    def __init__(self) -> None:
        self._elapsed_us = 0
        self._cpu_s = 0.0

    def run(self, engine: TorchEngine, work: Pass) -> PassResult:
        """Run a pass and count its time."""
        begun_s = time.process_time()
        result = engine.run_now(work)
        self._cpu_s += time.process_time() - begun_s
        self._elapsed_us += result.elapsed_us
        return result

    def speed(self, tokens: int) -> Speed:
        """Return the speed, if the passes had so many tokens."""
        return Speed(tokens / self._elapsed_us * 1e6, self._cpu_s / tokens * 1e3)


def token(index: int) -> int:
    """A fixed, unrepetitive prompt."""
    return index * 7919 % 40_000 + 100


def ours(path: Path, kind: str, threads: int, chunk: int, steps: int) -> Measure:
    """Measure TorchEngine by its own clock: passes only, as a worker runs them."""
    from moonserve.core.engine.batch import Chunk, Pass
    from moonserve.core.request import Sampling
    from moonserve.core.units import RequestId
    from moonserve.live.engine.torch_engine import TorchEngine

    greedy = Sampling(temperature=0.0)
    dtype, _, kernels = kind.partition(":")
    engine = TorchEngine.load(
        path,
        dtype=dtype,  # type: ignore[arg-type]
        kernels=kernels or "auto",  # type: ignore[arg-type]
        num_blocks=160,
        threads=threads,
    )
    size = engine.shape.block_size
    assert engine.shape.max_len >= 4096, "the benchmark needs a context of 4,096 tokens"

    def prefill(tokens: int) -> Speed:
        blocks = tuple(range(-(-tokens // size)))
        clock = Clock()
        for start in range(0, tokens, chunk):
            end = min(start + chunk, tokens)
            ids = tuple(map(token, range(start, end)))
            sampling = greedy if end == tokens else None
            clock.run(engine, Pass((Chunk(RequestId("r"), ids, start, blocks, sampling),)))
        return clock.speed(tokens)

    def decode(batch: int) -> Speed:
        per = -(-(CONTEXT + steps) // size)
        tables = [tuple(range(row * per, (row + 1) * per)) for row in range(batch)]
        names = [RequestId(str(row)) for row in range(batch)]
        prompt = tuple(map(token, range(CONTEXT)))
        for name, table in zip(names, tables, strict=True):
            engine.run_now(Pass((Chunk(name, prompt, 0, table),)))
        last = dict.fromkeys(names, 100)
        clock = Clock()
        for step in range(steps):
            rows = zip(names, tables, strict=True)
            work = Pass(tuple(Chunk(n, (last[n],), CONTEXT + step, t, greedy) for n, t in rows))
            last = clock.run(engine, work).sampled
        return clock.speed(batch * steps)

    return lambda what, size: prefill(size) if what == "prefill" else decode(size)


class Peer:
    """Another engine in a child process, asked by lines of JSON."""

    def __init__(self, python: str, what: str, path: Path, args: argparse.Namespace) -> None:
        """what: llama.cpp, or vLLM with a number type."""
        self.what = what
        arguments = [python, __file__, f"--serve-peer={what}", f"--model={path}"]
        arguments += [f"--threads={args.threads}", f"--steps={args.steps}", f"--chunk={args.chunk}"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
        if what != LLAMA:
            clean.pop("PYTHONPATH", None)
            clean |= VLLM | {"OMP_NUM_THREADS": str(args.threads)}
        self.child = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean,
        )

    def __call__(self, what: str, size: int) -> Speed:
        """Measure one case; the child answers with its speed."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps([what, size]) + "\n")
        self.child.stdin.flush()
        for line in self.child.stdout:
            if line.startswith("speed "):
                return Speed(*map(float, line.split()[1:]))
        raise SystemExit(
            f"the child of {self.what} ended; run it alone to see why: {self.child.args}"
        )

    def close(self) -> None:
        """End the child."""
        self.child.terminate()
        self.child.wait(10)


def serve_llama(path: Path, threads: int, steps: int) -> None:
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

    def decode(batch: int) -> Speed:
        prompts = [[row + 5, *map(token, range(CONTEXT - 1))] for row in range(batch)]
        for row, prompt in enumerate(prompts):  # prefill each slot, so that only decode is left
            complete(prompt, 1, row, True)
        begun_s = time.process_time()
        with ThreadPoolExecutor(batch) as pool:
            asked = [
                pool.submit(complete, prompt, steps, row, True)
                for row, prompt in enumerate(prompts)
            ]
            times = [future.result() for future in asked]
        cpu_s = time.process_time() - begun_s
        assert all(t["cache_n"] == CONTEXT - 1 for t in times), "a slot lost its prompt's KV"
        made = sum(int(t["predicted_n"]) for t in times)
        elapsed_ms = max(float(t["predicted_ms"]) for t in times)
        return Speed(made / elapsed_ms * 1e3, cpu_s / made * 1e3)

    def prefill(tokens: int) -> Speed:
        begun_s = time.process_time()
        timings = complete([token(i) for i in range(tokens)], 1, 0, False)
        cpu_s = time.process_time() - begun_s
        return Speed(timings["prompt_n"] / timings["prompt_ms"] * 1e3, cpu_s / tokens * 1e3)

    answer(prefill, decode)


def serve_vllm(folder: Path, dtype: str, chunk: int, steps: int) -> None:
    """Answer the parent's questions with vLLM, by the time of its engine's steps, which it makes
    in this process."""
    from vllm import EngineArgs, LLMEngine, SamplingParams  # type: ignore[import-not-found]

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype=dtype,
            block_size=32,
            max_model_len=8192,
            max_num_batched_tokens=chunk,
            max_num_seqs=16,
            enable_prefix_caching=False,
            disable_log_stats=True,
            distributed_executor_backend="uni",
        )
    )
    numbers = count()

    def ask(first: int, length: int, tokens: int) -> str:
        name = str(next(numbers))
        prompt = {"prompt_token_ids": [first, *map(token, range(length - 1))]}
        fixed = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, prompt, fixed)
        return name

    def timed(tokens: int) -> Speed:
        """Run until all requests have ended."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        while engine.has_unfinished_requests():
            engine.step()
        cpu_s = time.process_time() - begun_cpu_s
        return Speed(tokens / (time.perf_counter() - begun_s), cpu_s / tokens * 1e3)

    def prefill(tokens: int) -> Speed:
        ask(5, tokens, 1)
        return timed(tokens)

    def decode(batch: int) -> Speed:
        waiting = {ask(row + 5, CONTEXT, 1 + steps) for row in range(batch)}
        done = dict.fromkeys(waiting, 0)
        while waiting:  # prefill, so that only decode is left
            for output in engine.step():
                done[output.request_id] = len(output.outputs[0].token_ids)
                waiting.discard(output.request_id)
        return timed(sum(1 + steps - made for made in done.values()))

    prefill(64)
    decode(1)
    answer(prefill, decode)


def answer(prefill: Callable[[int], Speed], decode: Callable[[int], Speed]) -> None:
    """Measure what the parent asks for, a line for each case."""
    for line in sys.stdin:
        what, size = json.loads(line)
        speed = prefill(size) if what == "prefill" else decode(size)
        print("speed", *speed, flush=True)


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
    parser.add_argument("--types", default="bfloat16,float32,float32:torch")
    parser.add_argument("--avx2", action="store_true", help="torch without AVX512 and AMX")
    parser.add_argument("--quick", action="store_true", help="one round, smaller cases")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chunk", type=int, default=1024, help="prompt tokens a pass")
    parser.add_argument("--steps", type=int, default=32, help="decode steps a case")
    parser.add_argument("--rounds", type=int, default=0, help="0: 3, or 1 with --quick")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM for CPUs")
    parser.add_argument("--serve-peer", help=argparse.SUPPRESS)
    return parser.parse_args()


def contestants(path: Path, args: argparse.Namespace, folder: Path) -> dict[str, Measure]:
    """Load an engine for each number type, and start the others that are there.

    folder: for the weights as vLLM reads them.
    """
    runners: dict[str, Measure] = {}
    for kind in args.types.split(","):
        report(f"loading {kind}")
        runners[kind] = ours(path, kind, args.threads, args.chunk, args.steps)
    if find_spec("xllamacpp") is None:
        report("xllamacpp is not installed: no llama.cpp column (pip install xllamacpp)")
    elif path.suffix != ".gguf":
        report("llama.cpp reads no safetensors: no llama.cpp column (give a .gguf)")
    else:
        runners[LLAMA] = Peer(sys.executable, LLAMA, path, args)
    for dtype in dict.fromkeys(kind.partition(":")[0] for kind in args.types.split(",")):
        if args.vllm and dtype in ("bfloat16", "float32"):
            runners[f"vLLM:{dtype}"] = vllm(path, dtype, args, folder / dtype)
    return runners


def vllm(path: Path, dtype: str, args: argparse.Namespace, at: Path) -> Peer:
    """Write the weights in a type that vLLM reads, and start it."""
    from moonserve.live.engine.export import export_folder

    report(f"starting vLLM:{dtype}")
    export_folder(path, at, dtype)
    return Peer(args.vllm, f"vLLM:{dtype}", at, args)


def line(label: str, speeds: dict[str, list[Speed]]) -> str:
    """The medians of one case, and their ratios to llama.cpp's, or else to vLLM's first."""
    medians = {
        name: Speed(median(s.tokens_s for s in those), median(s.cpu_ms for s in those))
        for name, those in speeds.items()
    }
    peer = next((medians[name] for name in medians if name.startswith((LLAMA, "vLLM"))), None)
    parts = []
    for name, speed in medians.items():
        faster = f" ({speed.tokens_s / peer.tokens_s:.2f}x)" if peer else ""
        costs = f" ({speed.cpu_ms / peer.cpu_ms:.2f}x)" if peer else ""
        parts.append(f"{name} {speed.tokens_s:.1f}/s{faster} {speed.cpu_ms:.2f} ms CPU{costs}")
    return f"{label:20} " + "   ".join(parts)


def report(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def main() -> None:
    args = arguments()
    if args.avx2 and not AVX2.items() <= os.environ.items():  # libraries read it at their start
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | AVX2)
    if args.serve_peer == LLAMA:
        serve_llama(Path(args.model), args.threads, args.steps)
        return
    if args.serve_peer:
        serve_vllm(Path(args.model), args.serve_peer.partition(":")[2], args.chunk, args.steps)
        return
    from moonserve.live.model.catalog import resolve

    path = resolve(args.model).path
    limit = "AVX2 at most" if args.avx2 else "all instructions"
    print(f"{path.name}, {args.threads} threads, chunks of {args.chunk}, {limit}; {machine()}")
    folder = tempfile.TemporaryDirectory()
    runners = contestants(path, args, Path(folder.name))
    cases = [("prefill", 512), ("decode", 1), ("decode", 4)]
    if not args.quick:
        more = [("prefill", 2048), ("prefill", 4096), ("decode", 16)]
        cases = sorted(cases + more, key=lambda case: (case[0] != "prefill", case[1]))
    rounds = args.rounds or (1 if args.quick else 3)
    for what, size in cases:
        label = f"{what} {size} tokens" if what == "prefill" else f"{what} batch {size}"
        speeds: dict[str, list[Speed]] = {}
        for number in range(rounds):
            for name, measure in runners.items():
                report(f"{label}, round {number + 1} of {rounds}: {name}")
                speeds.setdefault(name, []).append(measure(what, size))
        print(line(label, speeds), flush=True)
    for runner in runners.values():
        if isinstance(runner, Peer):
            runner.close()
    folder.cleanup()


if __name__ == "__main__":
    main()

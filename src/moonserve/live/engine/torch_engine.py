"""TorchEngine: the Engine port over a torch model on this machine's CPU.

The worker, benchmarks and equality tests use it. It computes on one thread of its own, so the event
loop never waits for a pass; that thread also measures the time of a pass.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import Literal

import torch

from moonserve.core.engine.batch import Chunk, Pass, PassResult
from moonserve.core.errors import ConfigError
from moonserve.core.request import Sampling, TokenLogprobs
from moonserve.core.units import Bytes, RequestId, Tokens
from moonserve.live.engine.inputs import (
    Inputs,
    Layout,
    Singles,
    build_inputs,
    build_singles,
    layout_name,
)
from moonserve.live.engine.kernels import FEW_ROWS, KernelChoice, Kernels
from moonserve.live.engine.model import Model
from moonserve.live.engine.sampler import logprobs, sample, shape
from moonserve.live.engine.weights import load_weights
from moonserve.live.model.config import ModelConfig, weights_revision
from moonserve.live.ports import EngineShape, Layers

DType = Literal["auto", "float32", "bfloat16"]

DEFAULT_KV_BYTES: Bytes = 384 << 20
"""The default size of the KV pool. The system provides the memory only as the pool fills."""


def native_bfloat16() -> str | None:
    """Return the CPU's instructions for bfloat16 matrices; None: it has none.

    It asks for the capability and measures no time: two workers on equal machines need the same
    answer, otherwise they cannot exchange KV.
    """
    probes = {"AMX": "_is_amx_tile_supported", "AVX512-BF16": "_is_avx512_bf16_supported"}
    for name, probe in probes.items():
        supported = getattr(torch.cpu, probe, None)
        if supported is not None and supported():
            return name
    return None


def _pick_dtype(dtype: DType, progress: Callable[[str], None]) -> torch.dtype:
    if dtype == "float32":
        return torch.float32
    if dtype == "bfloat16":
        return torch.bfloat16
    native = native_bfloat16()
    if native is None:
        progress("dtype float32: this CPU has neither AMX nor AVX512-BF16")
        return torch.float32
    progress(f"dtype bfloat16: this CPU has {native}")
    return torch.bfloat16


def _pick_kernels(
    choice: KernelChoice, dtype: torch.dtype, threads: int, progress: Callable[[str], None]
) -> Kernels | None:
    if choice == "native" and dtype != torch.float32:
        raise ConfigError("native computes in float32; use --dtype float32, or auto", "kernels")
    if choice == "torch" or dtype != torch.float32:
        return None
    try:
        return Kernels.load(threads)
    except ConfigError as error:
        if choice == "native":
            raise
        progress(f"decode will be slow: {error}")
        return None


class TorchEngine:
    """One model and its block pool. `load` makes it; the caller closes it."""

    def __init__(self, config: ModelConfig, model: Model, shape: EngineShape, threads: int) -> None:
        self.config = config
        self._model = model
        self.shape = shape
        self._bytes = model.pool.view(shape.num_blocks, -1).view(torch.uint8).numpy()
        # With OpenMP, torch's thread count is per calling thread, so the engine's thread sets it.
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="engine",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        self._profile: torch.profiler.profile | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: DType = "auto",
        block_size: Tokens = 32,
        num_blocks: int | None = None,
        kv_memory_bytes: Bytes | None = None,
        threads: int | None = None,
        kernels: KernelChoice = "auto",
        progress: Callable[[str], None] = lambda line: None,
    ) -> TorchEngine:
        """Load a GGUF file or a safetensors folder; a small model takes seconds.

        The pool has num_blocks blocks, or as many as fit into kv_memory_bytes (default: 384 MiB).
        threads: None for every CPU that this process may use. kernels: compiled ones for quantised
        weights in float32, if this machine has a C compiler ("auto"), in any case ("native"), or
        never ("torch"). progress receives lines for the user.
        """
        kind = _pick_dtype(dtype, progress)
        threads = threads or len(os.sched_getaffinity(0))
        compiled = _pick_kernels(kernels, kind, threads, progress)
        config, weights = load_weights(path, kind, progress, compiled)
        if block_size <= 0:
            raise ConfigError(f"must be larger than 0, not {block_size}; use 32", "block_size")
        per_token = 2 * config.layers * config.kv_heads * config.head_dim * kind.itemsize
        block_bytes = per_token * block_size
        if num_blocks is None:
            memory = DEFAULT_KV_BYTES if kv_memory_bytes is None else kv_memory_bytes
            num_blocks = memory // block_bytes
        _check_memory(num_blocks, block_bytes)
        layout = Layout(num_blocks, config.layers, block_size, kind)
        progress(
            f"KV pool: {num_blocks} blocks of {block_size} tokens,"
            f" {num_blocks * block_bytes / 2**20:.0f} MiB"
        )
        shape = EngineShape(
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            vocab_size=config.vocab_size,
            max_len=config.max_len,
            layout=layout_name(config, kind),
            revision=weights_revision(path),
            eos_token_ids=config.eos_token_ids,
            layers=config.layers,
        )
        return cls(config, Model(config, weights, layout, compiled), shape, threads)

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Run one pass on the engine's thread. See ports.Engine."""
        loop = asyncio.get_running_loop()

        def reached(layer: int) -> None:
            assert layers is not None
            asyncio.run_coroutine_threadsafe(layers.reached(layer), loop).result()

        hook = None if layers is None else reached
        run = self._run if self._profile is None else self._run_marked
        return await loop.run_in_executor(self._thread, run, work, hook)

    def run_now(self, work: Pass) -> PassResult:
        """Run one pass and wait for it. Benchmarks and tests use it, never on an event loop."""
        return self._thread.submit(self._run, work).result()

    def _run(self, work: Pass, reached: Callable[[int], None] | None = None) -> PassResult:
        begun_ns = time.perf_counter_ns()
        with torch.inference_mode():
            inputs: Inputs | Singles
            if self._decodes(work) and reached is None:
                inputs = build_singles(work.chunks, self._model.layout)
                logits = self._model.decode(inputs)
            else:
                inputs = build_inputs(work.chunks, self._model.layout)
                logits = self._model.forward(inputs, reached)
            wanted = [
                (chunk.sampling, chunk.start + len(chunk.tokens))
                for chunk in inputs.sampling
                if chunk.sampling is not None
            ]
            reported = None
            if any(how.shaping is not None for how, _ in wanted):
                tokens, reported = _shaped(inputs.sampling, logits, wanted)
            else:
                tokens = sample(logits, wanted) if wanted else []
        sampled = {
            chunk.request: token for chunk, token in zip(inputs.sampling, tokens, strict=True)
        }
        return PassResult(sampled, (time.perf_counter_ns() - begun_ns) // 1000, reported)

    def _run_marked(self, work: Pass, reached: Callable[[int], None] | None = None) -> PassResult:
        """Run a pass as one bar of the profile: compiled kernels show nothing there themselves."""
        count = sum(len(chunk.tokens) for chunk in work.chunks)
        with torch.profiler.record_function(f"pass: {len(work.chunks)} requests, {count} tokens"):
            return self._run(work, reached)

    async def start_profile(self) -> None:
        """See ports.Engine. The profiler sees the thread that starts it only: the engine's."""
        assert self._profile is None, "one profile at a time"
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )
        await asyncio.to_thread(_load_profiler)
        await asyncio.get_running_loop().run_in_executor(self._thread, profile.start)
        self._profile = profile

    async def stop_profile(self, file: Path) -> None:
        """See ports.Engine."""
        profile, self._profile = self._profile, None
        assert profile is not None, "a profile has started"
        await asyncio.get_running_loop().run_in_executor(self._thread, profile.stop)
        await asyncio.to_thread(profile.export_chrome_trace, str(file))

    def _decodes(self, work: Pass) -> bool:
        """Return whether the model's decoder runs this pass."""
        if self._model.decoder is None or len(work.chunks) > FEW_ROWS:
            return False
        return all(len(chunk.tokens) == 1 for chunk in work.chunks)

    def block(self, index: int) -> memoryview:
        """Return the writable bytes of one pool block. See ports.Engine."""
        return memoryview(self._bytes[index])

    async def close(self) -> None:
        """End the engine's thread, after the running pass."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _shaped(
    chunks: Sequence[Chunk], logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]]
) -> tuple[list[int], dict[RequestId, TokenLogprobs]]:
    """Sample rows of which some have a Shaping; return the tokens and the wanted log
    probabilities."""
    plain = shape(logits, wanted)
    tokens = sample(logits, wanted)
    reported = {
        chunks[row].request: logprobs(before, tokens[row], most)
        for row, (before, most) in plain.items()
    }
    return tokens, reported


def _load_profiler() -> None:
    """Have torch load what a first profile needs. That takes a second: no pass need wait."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass


def _check_memory(num_blocks: int, block_bytes: Bytes) -> None:
    """Refuse a pool that is too large: the kernel would kill the process when the pool fills."""
    if num_blocks <= 0:
        raise ConfigError(
            "the KV pool has no block; use a larger num_blocks, or at least"
            f" {block_bytes} for kv_memory_bytes",
            "num_blocks",
        )
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_blocks * block_bytes > present * 0.9:
        most = int(present * 0.9) // block_bytes
        raise ConfigError(
            f"{num_blocks} blocks need {num_blocks * block_bytes / 2**30:.1f} GiB, but this machine"
            f" has {present / 2**30:.1f} GiB; use at most {most}",
            "num_blocks",
        )


def greedy_reference(engine: TorchEngine, prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy tokens of one prompt that runs alone.

    The prompt is one pass, and each token is one. Tests compare the cluster's answers with it. It
    uses blocks 0, 1, 2, ... of the pool and overwrites them. It does not stop at an end token.
    """
    blocks = tuple(range(ceil((len(prompt) + count) / engine.shape.block_size)))
    request = RequestId("reference")
    tokens: list[int] = []
    new: tuple[int, ...] = tuple(prompt)
    start = 0
    while len(tokens) < count:
        chunk = Chunk(request, new, start, blocks, Sampling(temperature=0.0))
        token = engine.run_now(Pass((chunk,))).sampled[request]
        tokens.append(token)
        start += len(new)
        new = (token,)
    return tokens

"""The worker's own cost: CPU time per token of its loop and of its wire, per block of its KV path.

    python bench/worker.py [--rounds N]

One worker in this process, on an engine that computes nothing and with a store that is a dict. CPU
time of the process is measured, so that a busy machine disturbs little; the median of the rounds
is printed. The figure of the wire includes the client, which reads chunks and parses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

from common import machine_line
from moonserve.core.engine.batch import Pass, PassResult
from moonserve.core.request import Sampling, Stopping
from moonserve.core.store.words import Found
from moonserve.core.units import BlockKey, LeaseId, RequestId, SegmentId
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.ports import Layers
from moonserve.live.process.worker import Worker
from moonserve.live.worker.config import WorkerConfig
from moonserve.live.worker.job import Job

TOKEN = "secret"
SEQS = 16
DECODED = 512
PROMPT = 2_048
BLOCK = 32


class NoEngine(FakeEngine):
    """Samples the same token for everybody, at once."""

    async def run(self, work: Pass, layers: Layers | None = None) -> PassResult:
        """Give way once, as an engine with a thread does."""
        await asyncio.sleep(0)
        chunks = [chunk for chunk in work.chunks if chunk.sampling is not None]
        return PassResult({chunk.request: 1_000 for chunk in chunks}, 1)


class DictStore:
    """A KVStore without bytes: only the keys are kept."""

    def __init__(self) -> None:
        self.keys: set[BlockKey] = set()

    async def find(self, keys: Sequence[BlockKey], lease: LeaseId) -> list[Found]:
        """The leading run of known keys."""
        size = BLOCK * 8
        count = next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))
        return [Found(key, size, 0, 1, ()) for key in keys[:count]]

    async def read(self, found: Sequence[Found], into: Sequence[memoryview]) -> int:
        """Nothing to copy."""
        return len(found)

    async def put(
        self,
        items: Sequence[tuple[BlockKey, memoryview]],
        lease: LeaseId | None,
        parent: BlockKey | None = None,
        near: SegmentId | None = None,
    ) -> int:
        """Keep the keys."""
        self.keys.update(key for key, _ in items)
        return len(items)

    async def release(self, lease: LeaseId) -> None:
        """Nothing is leased."""

    async def close(self) -> None:
        """Nothing to close."""


def job(name: str, prompt: tuple[int, ...], new: int, **more: Any) -> Job:
    """A greedy job under a lease of its own."""
    return Job(
        RequestId(name), prompt, Sampling(temperature=0.0), Stopping(new, ignore_eos=True),
        LeaseId(name), **more,
    )  # fmt: skip


async def generate(worker: Worker, jobs: Sequence[Job]) -> None:
    """Serve all of them at once."""

    async def one(each: Job) -> None:
        async for _ in worker.runner.generate(each):
            pass

    await asyncio.gather(*map(one, jobs))


async def stream(worker: Worker, http: HttpClient) -> None:
    """The same number of tokens as events over HTTP."""
    body = {
        "prompt": [7] * 16, "max_tokens": DECODED, "stream": True, "ignore_eos": True,
        "temperature": 0, "return_token_ids": True,
    }  # fmt: skip

    async def one() -> None:
        async with http.stream(
            "POST",
            worker.info.url + "/v1/completions",
            body=json.dumps(body).encode(),
            headers={"content-type": "application/json"} | bearer(TOKEN),
            timeout_s=60,
            idle_timeout_s=60,
        ) as reply:
            async for _ in reply:
                pass

    await asyncio.gather(*(one() for _ in range(SEQS)))


async def cpu_us(work: Callable[[], Awaitable[None]]) -> float:
    """CPU microseconds of this process."""
    began = time.process_time()
    await work()
    return (time.process_time() - began) * 1e6


async def measure(rounds: int) -> None:
    """Print the medians."""
    config = WorkerConfig(
        name="w", role="both", model="m", engine="fake", max_seqs=SEQS, token=TOKEN
    )
    engine = NoEngine(block_size=BLOCK, num_blocks=8_192)
    worker = await Worker.start(config, engine, DictStore(), model="m")
    http = HttpClient(max_per_host=SEQS)
    took: dict[str, list[float]] = {}
    for at in range(rounds):
        short = [job(f"{at}.{n}", (7,) * 16, DECODED) for n in range(SEQS)]
        us = await cpu_us(lambda jobs=short: generate(worker, jobs))  # type: ignore[misc]
        took.setdefault("loop, us per token", []).append(us / SEQS / DECODED)
        us = await cpu_us(lambda: stream(worker, http))
        took.setdefault("wire, us per token", []).append(us / SEQS / DECODED)
        prompts = [tuple(range(at * 100 + n, at * 100 + n + PROMPT)) for n in range(SEQS)]
        for kind in ("publish", "load"):
            jobs = [
                job(f"{kind}{at}.{n}", prompt, 1, send_kv=kind == "publish",
                    take_kv=kind == "load", first_token=7 if kind == "load" else None)
                for n, prompt in enumerate(prompts)
            ]  # fmt: skip
            us = await cpu_us(lambda jobs=jobs: generate(worker, jobs))  # type: ignore[misc]
            took.setdefault(f"{kind}, us per block", []).append(us / SEQS / (PROMPT // BLOCK))
    await http.close()
    await worker.stop(0)
    for what, values in took.items():
        print(f"{what:24}{median(values):8.2f}   ({min(values):.2f} to {max(values):.2f})")


def main() -> None:
    """Parse options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(machine_line())
    asyncio.run(measure(args.rounds))


if __name__ == "__main__":
    main()

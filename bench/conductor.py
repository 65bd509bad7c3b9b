"""What a request costs in the Conductor: key chain, and arrival to end, beside plain SHA-256.

    python bench/conductor.py [--quick]

The limit for the key chain is hashing the prompt's bytes in one go; the Conductor's step is shown
as a multiple of the key chain, since every request pays for both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from hashlib import sha256
from statistics import median

from common import machine_line
from moonserve.core.actions import Prefill
from moonserve.core.conductor import Conductor
from moonserve.core.facts import (
    Arrived,
    BlocksStored,
    DecodeEnded,
    InstanceInfo,
    Joined,
    PrefillEnded,
    Role,
)
from moonserve.core.prefix import Namespace, chain_keys, token_bytes
from moonserve.core.request import Request
from moonserve.core.units import InstanceId, RequestId, SegmentId

BLOCK = 32
SPACE = Namespace("m", "r", "l", BLOCK)


def instance(name: str, role: Role) -> InstanceInfo:
    """One instance with a segment of its own."""
    return InstanceInfo(
        id=InstanceId(name),
        epoch=1,
        role=role,
        url="",
        model="m",
        namespace=SPACE,
        kv_blocks=2_000,
        block_bytes=1 << 20,
        max_seqs=64,
        chunk_tokens=512,
        max_len=1 << 20,
        segment=SegmentId(name),
    )


def timed_us(call: Callable[[int], object], rounds: int) -> float:
    """Median microseconds of one call."""
    times = []
    for i in range(rounds):
        began_ns = time.perf_counter_ns()
        call(i)
        times.append((time.perf_counter_ns() - began_ns) / 1_000)
    return median(times)


def bench(instances: int, tokens: int, rounds: int) -> None:
    """Print one line: a prompt of `tokens`, half of it held by every instance."""
    conductor = Conductor()
    half = instances // 2
    conductor.step(0, [Joined(instance(f"p{i:03}", "prefill")) for i in range(half)])
    conductor.step(0, [Joined(instance(f"d{i:03}", "decode")) for i in range(half)])
    prompt = tuple(range(tokens))
    keys = tuple(chain_keys(SPACE.root(), prompt, BLOCK))
    for i in range(half):
        held = keys[: len(keys) * (i + 1) // (2 * half)]
        conductor.step(0, [BlocksStored(SegmentId(f"p{i:03}"), held, None, "dram", 1)])
    raw = token_bytes(prompt)

    def life(i: int) -> None:
        request = Request(RequestId(str(i)), "m", prompt)
        [action] = conductor.step(i, [Arrived(request, keys)])
        assert isinstance(action, Prefill)
        [decode] = conductor.step(i, [PrefillEnded(request.id, action.number, final=False)])
        conductor.step(i, [DecodeEnded(request.id, decode.number)])  # type: ignore[union-attr]

    limit_us = timed_us(lambda _: sha256(raw).digest(), rounds)
    chain_us = timed_us(lambda _: chain_keys(SPACE.root(), prompt, BLOCK), rounds)
    life_us = timed_us(life, rounds)
    print(
        f"{instances:4} instances, {tokens:6} tokens: sha256 {limit_us:7.1f} us, "
        f"key chain {chain_us:7.1f} us ({chain_us / limit_us:4.1f}x), "
        f"one life in the Conductor {life_us:7.1f} us ({life_us / chain_us:4.2f}x the chain)"
    )


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 30 if parser.parse_args().quick else 300
    print(machine_line())
    for instances in (2, 16, 128):
        for tokens in (2_048, 32_768):
            bench(instances, tokens, rounds)


if __name__ == "__main__":
    main()

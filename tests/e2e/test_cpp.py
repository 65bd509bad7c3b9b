"""A long prompt in parts on the real model, by real processes: equality, and a kill in the middle.

One cluster of two prefill workers and one decode worker, float32; the reference is one process
that computes the whole prompt at once.
"""

from __future__ import annotations

import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import Any

import pytest

from moonserve.live.engine.torch_engine import TorchEngine, greedy_reference
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from tests.support.up import Up, get

pytestmark = [pytest.mark.model]

BLOCK = 32
NEW_TOKENS = 8
LENGTHS = (1_003, 1_600, 1_601)
"""Of prompts that share nothing; one ends with a block."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Random tokens: whatever KV went wrong would show."""
    return [random.Random(length).choices(range(2_000, 40_000), k=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of one process, before the cluster takes the cores."""
    blocks = ceil((max(LENGTHS) + NEW_TOKENS) / BLOCK)
    alone = TorchEngine.load(
        resolve(DEFAULT_MODEL).path, dtype="float32", block_size=BLOCK, num_blocks=blocks
    )
    return [greedy_reference(alone, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def up(reference: list[list[int]]) -> Iterator[Up]:
    """Room for a few such prompts, a thread for each worker; nobody is refused for objectives that
    cannot be met.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        cluster = Up(
            "--prefill", "2", "--dtype", "float32", "--block-size", str(BLOCK), "--admission",
            "none", "--segment-bytes", "256MiB", "--kv-memory-bytes", "256MiB", "--start-s", "600",
        )  # fmt: skip
    cluster.until(lambda: "Ready at" in cluster.output, 600)
    yield cluster
    cluster.end()


def tokens(up: Up, name: str, prompt: list[int]) -> list[int]:
    """Through the gateway, with an objective that one instance would miss."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"x-request-id": name, "x-moonserve-ttft-slo-ms": "1"}
    reply = up.post("/v1/completions", body, **headers)
    return list(reply["choices"][0]["token_ids"])


def noted(up: Up, what: str) -> dict[str, list[dict[str, Any]]]:
    """The workers' notes of this kind."""
    found = {}
    for instance in up.get("/api/instances"):
        stages = get(instance["url"] + "/debug/stages")
        found[instance["id"]] = [it for it in stages if it["what"] == what]
    return found


def group(up: Up, name: str) -> list[str]:
    """Who prefills this request, in order; skips where the planner found nothing to be gained."""

    def decided() -> bool:
        try:
            return bool(up.get(f"/api/decisions/{name}")["prefill"])
        except urllib.error.HTTPError:
            return False

    up.until(decided)
    decision = up.get(f"/api/decisions/{name}")
    if not decision["group"]:
        pytest.skip(f"by what was measured here, no group is worth it: {decision['why']}")
    return [part["instance"] for part in decision["group"]]


def test_tokens_equal_one_process(
    up: Up, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """Both workers compute a part, at the same time, and the tokens are those of one process."""
    assert tokens(up, "parts", prompts[0]) == reference[0]
    up.settle()
    first, second = (noted(up, "computed")[who][-1] for who in group(up, "parts"))
    assert first["blocks"] + second["blocks"] == ceil(LENGTHS[0] / BLOCK)
    assert second["began_us"] < first["ended_us"]


@pytest.mark.parametrize("at", [0, 1])
def test_a_worker_killed_in_the_middle_costs_one_retry(
    up: Up, prompts: list[list[int]], reference: list[list[int]], at: int
) -> None:
    """SIGKILL of either worker amid its pass: equal tokens after one retry, all ledgers zero."""
    up.until(lambda: len(up.get("/api/instances")) == 3)
    name = f"killed-{at}"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(tokens, up, name, prompts[1 + at])
        members = group(up, name)
        urls = {it["id"]: it["url"] for it in up.get("/api/instances")}

        def used(who: str) -> bool:
            return bool(get(urls[who] + "/debug/ledger")["blocks_used"])

        up.until(lambda: all(map(used, members)))
        os.kill(up.children()[members[at]], signal.SIGKILL)
        assert asked.result() == reference[1 + at]
    assert up.get(f"/api/decisions/{name}")["attempts"] == 2
    up.until(lambda: len(up.get("/api/instances")) == 3)
    up.settle()

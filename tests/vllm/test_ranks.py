"""The gateway before a real vLLM engine of two data-parallel ranks.

Opt-in, by `make test-vllm`. The engines of a module end with it: there is memory for few.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.clusters import SENTENCE, alone
from tests.vllm.engines import Engine, running
from tests.vllm.gateways import described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]


def test_ranks_are_instances_of_their_own(python: Path, folder: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks behind one URL: what begins like a prompt goes to the prefill rank
    that has it, which reuses what was predicted; texts are one engine's."""
    one = Engine("p0", folder, python, tmp_path).by_mooncake("kv_producer")
    one.having("--data-parallel-size", "2")
    two = Engine("d0", folder, python, tmp_path).by_mooncake("kv_consumer")
    with running(one, two):
        instances = [
            described(one, "prefill", "mooncake", folder, dp_size=2),
            described(two, "decode", "mooncake", folder),
        ]
        with gateway(instances, tmp_path) as front:
            words = ("otter", "heron", "lynx", "stoat")
            prefixes = [SENTENCE.format(word) * 40 for word in words]  # long beside what is fitted
            with ThreadPoolExecutor(len(words)) as at_once:
                firsts = list(at_once.map(front.complete, [it + "First." for it in prefixes]))
            decisions = [front.decision(first) for first in firsts]
            assert {it["prefill"] for it in decisions} == {"p0/dp0", "p0/dp1"}
            front.until(front.idle)
            for prefix, first in zip(prefixes, decisions, strict=True):
                prompt = prefix + "Second, and more."
                reply = front.complete(prompt)
                assert front.decision(reply)["prefill"] == first["prefill"]
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached > 400
                assert front.decision(reply)["reused_tokens"] == cached
                assert reply["choices"][0]["text"] == alone(two, prompt)
            front.until(front.idle)

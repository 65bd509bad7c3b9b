"""The gateway before a real vLLM engine that puts what it evicts into Mooncake's store.

Opt-in, by `make test-vllm`. The engines of a module end with it: there is memory for few.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.clusters import SENTENCE
from tests.vllm.engines import Engine, free_port, running
from tests.vllm.gateways import Gateway, described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]


@pytest.fixture(scope="module")
def store(
    python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Gateway]]:
    """One engine with room for two prompts, and Mooncake's store behind it."""
    logs = tmp_path_factory.mktemp("store")
    port = free_port()
    flags = (f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--metrics_port=0", "--logtostderr")
    master = subprocess.Popen(
        [str(python.with_name("mooncake_master")), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    settings = {
        "mode": "embedded",
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 512 << 20,
        "local_buffer_size": 128 << 20,
    }
    config = logs / "mooncake.json"
    config.write_text(json.dumps(settings))
    engine = Engine("e0", folder, python, logs).with_store(config)
    engine.having("--num-gpu-blocks-override", "24", "--max-model-len", "640")
    try:
        with running(engine):
            instances = [described(engine, "both", "none", folder, shared_store=True)]
            with gateway(instances, logs) as front:
                yield engine, front
    finally:
        master.kill()
        master.wait()


def test_the_store_keeps_what_the_engine_evicts(store: tuple[Engine, Gateway]) -> None:
    """What the engine has evicted comes back from Mooncake's store, as the index predicted."""
    _, front = store
    prompts = [SENTENCE.format(word) * 26 + "The end." for word in ("fox", "cat", "owl")]
    texts = [front.complete(prompt, 8)["choices"][0]["text"] for prompt in prompts]
    reply = front.complete(prompts[0], 8)
    assert reply["choices"][0]["text"] == texts[0]
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 300
    assert front.decision(reply)["reused_tokens"] == cached
    front.until(front.idle)

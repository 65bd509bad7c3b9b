"""The gateway before real vLLM engines: what they compute apart is what one computes alone.

Opt-in, by `make test-vllm`: MOONSERVE_VLLM_PYTHON names the interpreter of a virtual environment
that has vLLM. Engines start once for each connector; the tests of one share them, in their order.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from moonserve.live.engine.export import export_folder
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from tests.vllm.engines import MODEL, Engine, free_port, post, running
from tests.vllm.gateways import Gateway, described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]

SENTENCE = "The quick brown {} jumps over the lazy dog near the old bridge. "
PROMPTS = [
    SENTENCE.format("fox") * 12 + "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived a fisherman who",
    "def fibonacci(n):\n    ",
]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter that has vLLM."""
    named = os.environ.get("MOONSERVE_VLLM_PYTHON")
    if not named:
        pytest.skip("MOONSERVE_VLLM_PYTHON names no interpreter with vLLM: see make test-vllm")
    return Path(named)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in the form that vLLM reads."""
    at = tmp_path_factory.mktemp("model") / "smollm2"
    export_folder(resolve(DEFAULT_MODEL).path, at, "float32")
    return at


class Cluster(NamedTuple):
    """Engines and the gateway before them."""

    prefills: tuple[Engine, ...]
    decode: Engine
    front: Gateway

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them."""
        return (*self.prefills, self.decode)


def alone(engine: Engine, prompt: str, tokens: int = 16) -> str:
    """What one engine says by itself, whole request, greedily."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return str(post(engine.url + "/v1/completions", body)["choices"][0]["text"])


def same_as_one_engine(cluster: Cluster, fresh: bool) -> None:
    """Each prompt: the gateway's text is one engine's, whole and streamed, usage included.

    fresh: whether these prompts are new to the engines.
    """
    for prompt in PROMPTS:
        want = alone(cluster.prefills[0], prompt)
        reply = cluster.front.complete(prompt)
        assert reply["choices"][0]["text"] == want
        decision = cluster.front.decision(reply)
        assert decision["decode"] == cluster.decode.name
        # What decode has all but the end of, of some blocks, it gets without a prefill elsewhere.
        held = not fresh and prompt is PROMPTS[0]
        apart = {it.name for it in cluster.prefills}
        assert decision["prefill"] in ({cluster.decode.name} if held else apart)
        usage = reply["usage"]
        assert usage["completion_tokens"] == 16
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert cached < usage["prompt_tokens"]
        assert streamed(cluster.front, prompt) == want


def streamed(front: Gateway, prompt: str) -> str:
    """The same as a stream, put together."""
    import urllib.request

    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
    head = {"content-type": "application/json"}
    url = front.url + "/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as reply:
        events = [line[6:] for line in reply.read().decode().split("\n") if line[:6] == "data: "]
    assert events.pop() == "[DONE]"
    return "".join(choice["text"] for it in events for choice in json.loads(it)["choices"])


def frees_both(cluster: Cluster) -> None:
    """Who hangs up in mid-stream leaves no work on any engine and no promise in the ledger."""
    before = cluster.decode.count("vllm:generation_tokens_total")
    cluster.front.leave(SENTENCE.format("hare") * 20, after=3)
    assert all(engine.idle() for engine in cluster.engines)
    assert cluster.decode.count("vllm:generation_tokens_total") - before < 900
    cluster.front.until(cluster.front.idle)


@pytest.fixture(scope="module")
def mooncake(
    python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two engines that prefill and one that decodes, by the Mooncake connector."""
    logs = tmp_path_factory.mktemp("mooncake")
    one, two, three = (Engine(name, folder, python, logs) for name in ("p0", "p1", "d0"))
    one.by_mooncake("kv_producer")
    two.by_mooncake("kv_producer")
    three.by_mooncake("kv_consumer")
    with running(one, two, three):
        instances = [
            described(one, "prefill", "mooncake", folder),
            described(two, "prefill", "mooncake", folder),
            described(three, "decode", "mooncake", folder),
        ]
        # Prompts go to prefill first, even where decode has all that they begin with.
        with gateway(instances, logs, alone_tokens=0) as front:
            yield Cluster((one, two), three, front)


def test_mooncake_gives_what_one_engine_gives(mooncake: Cluster) -> None:
    """By the Mooncake connector, greedy output equals one engine's."""
    same_as_one_engine(mooncake, fresh=True)


def test_mooncake_prefix_goes_to_its_holder(mooncake: Cluster) -> None:
    """What shares a prefix is prefilled where it is, and the engine reuses what was predicted."""
    front = mooncake.front
    for word in ("otter", "heron", "lynx"):
        prefix = SENTENCE.format(word) * 12
        first = front.decision(front.complete(prefix + "First."))
        front.until(lambda: front.instance(first["prefill"])["queue_ms"] == 0)  # noqa: B023
        holder = first["prefill"]
        reply = front.complete(prefix + "Second, and more.")
        second = front.decision(reply)
        assert second["prefill"] == holder
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 100
        assert second["reused_tokens"] == cached


def test_mooncake_decode_alone(mooncake: Cluster, folder: Path, tmp_path: Path) -> None:
    """A decode engine that has the prompt by then gets it without a prefill elsewhere."""
    prompt = SENTENCE.format("marten") * 12
    instances = [described(it, "prefill", "mooncake", folder) for it in mooncake.prefills]
    instances.append(described(mooncake.decode, "decode", "mooncake", folder))
    with gateway(instances, tmp_path, alone_tokens=256) as front:
        replies = [front.complete(prompt)]
        assert front.decision(replies[0])["prefill"] != mooncake.decode.name

        def goes_alone() -> bool:
            replies.append(front.complete(prompt))
            decision = front.decision(replies[-1])
            return bool(decision["prefill"] == decision["decode"] == mooncake.decode.name)

        front.until(goes_alone)
        texts = {reply["choices"][0]["text"] for reply in replies}
        assert texts == {alone(mooncake.prefills[0], prompt)}
        assert replies[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_mooncake_frees_both_sides(mooncake: Cluster) -> None:
    """A client that leaves is let go of by both engines."""
    frees_both(mooncake)


def test_mooncake_prefill_restarts(mooncake: Cluster) -> None:
    """A prefill engine killed and started again at its address is a new one: nothing is expected
    of it that the old one held, its connector is asked anew, and requests go on meanwhile."""
    front, (one, two) = mooncake.front, mooncake.prefills
    prefix = SENTENCE.format("badger") * 12
    holder = front.decision(front.complete(prefix + "First."))["prefill"]
    lost = next(it for it in (one, two) if it.name == holder)
    epoch = front.instance(holder)["epoch"]
    lost.kill()
    want = alone(one if lost is two else two, prefix + "Now.")
    assert front.complete(prefix + "Now.")["choices"][0]["text"] == want
    front.until(lambda: front.instance(holder) is None)
    lost.start().ready()
    front.until(lambda: front.instance(holder) is not None)
    assert front.instance(holder)["epoch"] > epoch
    for number in range(6):  # some of them go to the one that came back
        prompt = SENTENCE.format(f"stoat {number}") * 12
        assert front.complete(prompt)["choices"][0]["text"] == alone(mooncake.decode, prompt)
    assert lost.count("vllm:prompt_tokens_total") > 0
    front.until(front.idle)


@pytest.fixture(scope="module")
def nixl(python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One engine that prefills and one that decodes, by NIXL."""
    logs = tmp_path_factory.mktemp("nixl")
    one = Engine("p0", folder, python, logs).by_nixl("kv_producer")
    two = Engine("d0", folder, python, logs).by_nixl("kv_consumer")
    with running(one, two):
        instances = [
            described(one, "prefill", "nixl", folder),
            described(two, "decode", "nixl", folder),
        ]
        with gateway(instances, logs, alone_tokens=256) as front:
            yield Cluster((one,), two, front)


def test_nixl_gives_what_one_engine_gives(nixl: Cluster) -> None:
    """By NIXL, greedy output equals one engine's, the second time too."""
    same_as_one_engine(nixl, fresh=True)
    same_as_one_engine(nixl, fresh=False)


def test_nixl_frees_both_sides(nixl: Cluster) -> None:
    """A client that leaves is let go of by both engines."""
    frees_both(nixl)


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
            prefixes = [SENTENCE.format(word) * 12 for word in words]
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
                assert cached > 100
                assert front.decision(reply)["reused_tokens"] == cached
                assert reply["choices"][0]["text"] == alone(two, prompt)
            front.until(front.idle)

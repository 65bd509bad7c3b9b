"""The gateway before real vLLM engines that hand KV over by the Mooncake connector.

Opt-in, by `make test-vllm`. The engines of a module end with it: there is memory for few.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.clusters import SENTENCE, Cluster, alone, frees_both, same_as_one_engine
from tests.vllm.engines import Engine, running
from tests.vllm.gateways import described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]


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

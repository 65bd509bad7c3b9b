"""The gateway before two real vLLM engines that each serve whole requests.

Opt-in, by `make test-vllm`. The engines of a module end with it: there is memory for few.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm.clusters import PROMPTS, SENTENCE, alone
from tests.vllm.engines import MODEL, Engine, get, post, running
from tests.vllm.gateways import Gateway, described, gateway
from tests.vllm.recorded import record

pytestmark = [pytest.mark.vllm, pytest.mark.model]


class Pair(NamedTuple):
    """Two engines of role both, and the gateway before them."""

    engines: dict[str, Engine]
    front: Gateway


@pytest.fixture(scope="module")
def pair(python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines without a connector, and a gateway that records."""
    logs = tmp_path_factory.mktemp("whole")
    engines = {name: Engine(name, folder, python, logs) for name in ("e0", "e1")}
    with running(*engines.values()):
        instances = [described(it, "both", "none", folder) for it in engines.values()]
        with gateway(instances, logs, recorded=True) as front:
            yield Pair(engines, front)


def drain(front: Gateway, *argv: str) -> str:
    """What `moonserve drain` prints last."""
    command = [sys.executable, "-m", "moonserve", "drain", *argv, "--url", front.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()[-1]


def test_a_drained_engine_ends_its_stream_and_gets_nothing_new(pair: Pair) -> None:
    """Its stream has all its tokens, the other engine serves what comes meanwhile, and then it is
    idle. Taken back, it serves again."""
    front = pair.front
    prompt, long = SENTENCE.format("ibex") * 20, {"max_tokens": 200, "ignore_eos": True}
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "stream": True, **long}
    events = front.events("/v1/completions", body, "drained")
    said = [next(events)["choices"][0]["text"]]
    name = get(f"{front.url}/api/decisions/drained")["decode"]
    with ThreadPoolExecutor(1) as beside:
        waits = beside.submit(drain, front, name, "--wait")
        front.until(lambda: get(f"{front.url}/api/instances/{name}")["state"] != "serving")
        for tail in ("First.", "Second."):
            assert front.decision(front.complete(prompt + tail, 4))["decode"] != name
        said += [choice["text"] for event in events for choice in event["choices"]]
        assert waits.result() == f"{name} is idle and may be stopped"
    assert pair.engines[name].idle()
    assert "".join(said) == alone(pair.engines[name], prompt, 200, ignore_eos=True)
    drain(front, name, "--resume")
    # Several at a time: one alone goes to the engine that was measured as faster.
    others = map("Number {}. ".format, count())
    with ThreadPoolExecutor(4) as beside:
        front.until(lambda: name in _decoded_by(front, beside, islice(others, 4)))


def _decoded_by(front: Gateway, beside: ThreadPoolExecutor, prompts: Iterable[str]) -> set[str]:
    """Where completions of these prompts decode that are asked for at the same time."""
    replies = beside.map(front.complete, prompts)
    return {front.decision(reply)["decode"] for reply in replies}


def test_tokenizers_are_the_engines(pair: Pair) -> None:
    """What the gateway answers at both paths is what an engine answers."""
    engine, front = pair.engines["e0"].url, pair.front.url
    asked = {"model": MODEL, "prompt": PROMPTS[2]}
    found = post(front + "/tokenize", asked)
    assert found == post(engine + "/tokenize", asked)
    ids = {"model": MODEL, "tokens": found["tokens"]}
    assert post(front + "/detokenize", ids)["prompt"] == PROMPTS[2]


def test_a_recording_is_simulated(pair: Pair, tmp_path: Path) -> None:
    """The recording of a made-up load is simulated on the cluster that served it; both are printed.

    How near they are is asserted nowhere: other programs run on this machine.
    """
    said = record(pair.front, tmp_path, 20, 2.0)
    print(said)
    assert "2 mixed, " in said
    assert "fitted from " in said
    assert "\nTTFT, ms " in said

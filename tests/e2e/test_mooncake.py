"""A cluster on the real Mooncake Store: its master's life, and deaths; and one on our store whose
bytes go by Mooncake's Transfer Engine. Fake engine.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonserve.live.transfer import mooncake_master
from tests.support.up import PROGRAM, TOKEN, Up, children_of, gone

pytestmark = [pytest.mark.model, pytest.mark.mooncake]  # model: for its tokenizer
FAKE = ("--engine", "fake", "--segment-bytes", "64MiB")
FLAGS = (*FAKE, "--store", "mooncake")
BY_ENGINE = (*FAKE, "--transport", "mooncake", "--shared-memory", "never")
PROMPT = list(range(1000, 1600))
CACHED = 576  # whole blocks of 32


@contextmanager
def cluster(*flags: str, base: tuple[str, ...] = FLAGS) -> Iterator[Up]:
    """One that is ended, whatever happens."""
    up = Up(*base, *flags)
    try:
        yield up
    finally:
        up.end()


def complete(up: Up, prompt: list[int]) -> tuple[list[int], int]:
    """Token ids, and how many of the prompt were cached."""
    body: dict[str, Any] = {
        "model": up.get("/v1/models")["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = up.post("/v1/completions", body)
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["token_ids"], cached


def test_what_only_mooncake_knows_is_said_to_be_so() -> None:
    """The store's commands name whom to ask, in one line, and do not tell of an empty pool."""
    with cluster() as up:
        for argv in (("stat",), ("ls",), ("get", "00"), ("evict", "p0", "1MiB")):
            done = subprocess.run(
                [*PROGRAM, "store", *argv, "--url", up.url],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "MOONSERVE_TOKEN": TOKEN},
            )
            assert done.returncode in (1, 2)
            assert done.stdout == ""
            assert "only mooncake_master knows where: ask it at /metrics" in done.stderr
            assert len(done.stderr.splitlines()) == 1
        assert up.get("/api/stats")["store"] == {"backend": "mooncake"}


def test_a_prefix_outlives_neither_its_master_nor_its_owner_and_is_computed_again() -> None:
    """With the master or the owner killed, requests are answered alike, and hits come back."""
    with cluster("--prefill", "2") as up:
        tokens, cached = complete(up, PROMPT)
        assert cached == 0
        up.until(lambda: complete(up, PROMPT) == (tokens, CACHED))
        for victim in ("mooncake", "p0"):
            os.kill(up.children()[victim], signal.SIGKILL)
            assert complete(up, PROMPT)[0] == tokens
            up.until(lambda: complete(up, PROMPT) == (tokens, CACHED))
        up.settle()


def test_nothing_is_left_of_a_killed_cluster() -> None:
    """Mooncake's master ends with the supervisor, even when that is killed."""
    with cluster() as up:
        assert up.url
        pids = up.children()
        assert set(pids) == {"mooncake", "gateway", "p0", "d0"}
        up.process.kill()
        up.until(lambda: all(gone(pid) for pid in pids.values()))


def test_a_master_that_is_there_already_is_used() -> None:
    """--mooncake-master names one; the cluster starts none, and leaves it running."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    argv = mooncake_master.command("127.0.0.1", port)
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as master:
        try:
            with cluster("--mooncake-master", f"127.0.0.1:{port}") as up:
                tokens, _ = complete(up, PROMPT)
                up.until(lambda: complete(up, PROMPT) == (tokens, CACHED))
                assert "mooncake" not in up.children()
            assert master.poll() is None
        finally:
            master.kill()


def carried(up: Up, worker: str) -> Counter[str]:
    """The bytes that a worker read and wrote by Mooncake's engine, by segment."""
    (url,) = [it["url"] for it in up.get("/api/instances") if it["id"] == worker]
    with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    counts: Counter[str] = Counter()
    for sample in (it for family in families for it in family.samples):
        name, transport = sample.name, sample.labels.get("transport")
        if name == "moonserve_transfer_bytes_total" and transport == "mooncake" and sample.value:
            counts[sample.labels["peer"].partition(":")[2]] += int(sample.value)
    return counts


def test_bytes_of_our_store_go_by_mooncakes_engine() -> None:
    """With --transport mooncake decode's reads are counted under it; a killed owner costs its KV
    alone, and is reached again by it when it is back.
    """
    with cluster("--prefill", "2", "--policy", "random", base=BY_ENGINE) as up:
        tokens, cached = complete(up, PROMPT)
        assert cached == 0
        fresh = itertools.count(2000)

        def brought(segment: str) -> int:
            """What came to decode from there, after one prompt more."""
            complete(up, [next(fresh)] * len(PROMPT))
            return carried(up, "d0")[segment]

        up.until(lambda: brought("p0"))
        up.until(lambda: complete(up, PROMPT) == (tokens, CACHED))
        before = carried(up, "d0")["p0"]
        os.kill(up.children()["p0"], signal.SIGKILL)
        assert complete(up, PROMPT)[0] == tokens
        up.until(lambda: complete(up, PROMPT) == (tokens, CACHED))
        up.until(lambda: brought("p0") > before)  # the dead bring nothing
        up.settle()


@pytest.mark.parametrize("flags", [FLAGS, BY_ENGINE], ids=["store", "transport"])
def test_without_the_wheel_up_says_what_to_install(flags: tuple[str, ...]) -> None:
    """One line, exit code 2, and no process was started."""
    code = (
        "import importlib.util as u, runpy, sys; u.find_spec = (lambda f: lambda name, *a:"
        " None if name == 'mooncake' else f(name, *a))(u.find_spec);"
        f" sys.argv = ['moonserve', 'up', '--port', '0', *{flags!r}];"
        " runpy.run_module('moonserve', run_name='__main__')"
    )
    ended = subprocess.run(
        [PROGRAM[0], "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "pip install 'moonserve[mooncake]'" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert children_of(os.getpid()) == []

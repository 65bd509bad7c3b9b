"""A gateway of ours as a process of its own, before real engines, for the tests marked `vllm`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.vllm.engines import BLOCK, MODEL, Engine, Json, get, post

READY_S = 60.0
_LEDGER = ("requests", "prefills_promised", "prefill_us_promised", "decodes_promised")


class Gateway:
    """One running gateway."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.recording = log.with_name("recording")
        """Where it records, if it does."""
        self._log = log

    def complete(self, prompt: str, tokens: int = 16, **more: object) -> Json:
        """A greedy completion through it."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return post(self.url + "/v1/completions", body | more)

    def decision(self, reply: Json) -> Json:
        """What the Conductor decided for a reply's request, and what became of it."""
        request = reply["id"].removeprefix("cmpl-").removeprefix("chatcmpl-")
        return get(f"{self.url}/api/decisions/{request}")

    def events(self, path: str, body: Json, request: str) -> Iterator[Json]:
        """The events of a streamed request with this id, as they come."""
        head = {"content-type": "application/json", "x-request-id": request}
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def leave(self, prompt: str, after: int) -> None:
        """Ask for a long stream and hang up after so many events."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1_000, "stream": True}
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        seen = 0
        while seen < after:
            seen += reply.readline().startswith(b"data:")
        reply.close()
        connection.close()

    def count(self, metric: str) -> float:
        """One of its metrics that has no labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return next(float(it.split()[1]) for it in lines if it.startswith(metric + " "))

    def idle(self) -> bool:
        """Whether its ledger is all zero."""
        stats = get(self.url + "/api/stats")
        return not any(stats[name] for name in _LEDGER)

    def instance(self, name: str) -> Json | None:
        """What it says of one instance; None: it does not use it."""
        rows = get(self.url + "/api/instances")
        return next((it for it in rows if it["id"] == name and it["state"] == "up"), None)

    def until(self, true: Callable[[], object], within_s: float = 30.0) -> None:
        """Poll until it holds, or fail with the end of its log."""
        end_s = time.monotonic() + within_s
        while not true():
            tail = self._log.read_text(errors="replace")[-2_000:]
            assert time.monotonic() < end_s, f"waited in vain; the gateway said:\n{tail}"
            time.sleep(0.2)


def described(engine: Engine, role: str, connector: str, tokenizer: Path, **more: object) -> Json:
    """An engine as the cluster file names it."""
    return {
        "name": engine.name,
        "url": engine.url,
        "role": role,
        "connector": connector,
        "block_size": BLOCK,
        "tokenizer": str(tokenizer),
        "events": f"tcp://127.0.0.1:{engine.events_port}",
        "replay": f"tcp://127.0.0.1:{engine.replay_port}",
        **({"bootstrap": engine.bootstrap} if connector == "mooncake" else {}),
        **more,
    }


@contextlib.contextmanager
def gateway(
    instances: list[Json], folder: Path, alone_tokens: int = 0, recorded: bool = False
) -> Iterator[Gateway]:
    """A gateway over these instances, all of them in use; ended and its log kept in `folder`.

    alone_tokens: 0, so that every prompt of a pair is handed over. recorded: it records there too.
    """
    config, log = folder / "cluster.yaml", folder / "gateway.log"
    settings: Json = {"instances": instances, "alone_tokens": alone_tokens}
    if recorded:
        settings["record"] = str(log.with_name("recording"))
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "moonserve", "gateway", "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--config", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        end_s = time.monotonic() + READY_S
        found = None
        while found is None:
            said = log.read_text(errors="replace")
            assert process.poll() is None, said[-3_000:]
            assert time.monotonic() < end_s, said[-3_000:]
            found = re.search(r"listening on (http\S+)", said)
            time.sleep(0.1)
        one = Gateway(found[1], log)
        names = [
            f"{it['name']}/dp{rank}" if "dp_size" in it else it["name"]
            for it in instances
            for rank in range(it.get("dp_size", 1))
        ]
        one.until(lambda: all(map(one.instance, names)), READY_S)
        yield one
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()

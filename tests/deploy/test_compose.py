"""The processes of the compose file without containers: its own commands, on loopback."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from moonserve.live.http.client import HttpClient
from tests.deploy.test_deploy import FILE, Run, compose
from tests.support.store_processes import Process

pytestmark = [pytest.mark.model]


def words(run: Run, file: Path, url: str) -> list[str]:
    """A service's command for this machine: other hosts, ports and paths, the same flags."""
    hosts = {"0.0.0.0": "127.0.0.1", "prefill": "127.0.0.1", "decode": "127.0.0.1"}
    found = list(run.argv)
    for at, word in enumerate(found):
        flag = found[at - 1]
        if flag in ("--host", "--advertise-host"):
            found[at] = hosts[word]
        elif flag == "--listen":
            found[at] = "0"
    return [it.replace(FILE, str(file)).replace("http://gateway:8000", url) for it in found]


def test_the_compose_files_processes_serve_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers join the gateway, a completion passes both, and SIGTERM ends all with 0."""
    runs = compose()
    file = tmp_path / "moonserve.yaml"
    file.write_text(runs["gateway"].settings)
    monkeypatch.setenv("MOONSERVE_PORT", "0")

    async def body() -> None:
        with ExitStack() as stack:

            def start(name: str, url: str = "") -> Process:
                process = Process(*words(runs[name], file, url))
                stack.callback(process.close)
                return process

            gateway = start("gateway")
            url = await gateway.says(r"listening on (\S+)")
            workers = [start("prefill", url), start("decode", url)]
            for worker in workers:
                await worker.says("joined")
            asked = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 3}
            http = HttpClient()
            reply = await http.request(
                "POST",
                f"{url}/v1/completions",
                headers={"content-type": "application/json"},
                body=json.dumps(asked).encode(),
                timeout_s=20,
            )
            await http.close()
            assert json.loads(reply.body)["usage"]["completion_tokens"] == 3, reply.body
            for process in (*workers, gateway):
                process.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.process.wait, 30) == 0

    asyncio.run(body())

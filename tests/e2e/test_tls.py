"""A cluster by TLS: clients, joins, calls of workers, the store and its bytes."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.schedule.facts import InstanceLoad
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.process.gateway import Gateway
from moonserve.live.tls.authority import init
from moonserve.live.tls.contexts import trusting
from moonserve.live.worker.join import ConductorClient, ConductorMember
from tests.support import inproc
from tests.support import up as ups
from tests.support.certificates import tls_of
from tests.support.engines import QUICK
from tests.support.fake_vllm import FakeVllm
from tests.support.inproc import BLOCK, site
from tests.support.up import PROGRAM, Up

pytestmark = pytest.mark.model  # for its tokenizer and chat template


def test_tokens_are_the_same_by_tls(tmp_path: Path) -> None:
    """Prefill, decode and the store's bytes go by mutual TLS, and no token changes."""

    async def main() -> None:
        init(tmp_path)
        async with site(tls=tls_of(tmp_path, "gateway"), tls_client_auth="optional") as here:
            prefill = await here.add("p0", "prefill")
            await here.add("d0", "decode")
            prompt = list(range(1_000, 1_000 + 8 * BLOCK))
            for _ in range(2):
                assert await here.tokens(prompt, 40) == here.reference(prompt, 40)
            await here.settle()
            lanes = here.stores["d0"].transfer.stats()
            assert {it.path.transport for it in lanes} == {"tcp"}
            stranger = HttpClient(trusting(str(tmp_path / "ca.crt")))
            member = ConductorMember(
                ConductorClient(stranger, here.url, inproc.TOKEN), prefill.info, InstanceLoad
            )
            with pytest.raises(ConfigError, match="needs a client certificate"):
                await member.run(lambda: None)
            await stranger.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_engines_are_called_by_https(tmp_path: Path) -> None:
    """A gateway trusts its engines by --engine-ca, its clients need no certificate, and an engine
    of another authority stays away, with the reason in /health."""
    init(tmp_path / "ours")
    init(tmp_path / "theirs")

    async def main() -> None:
        engine = FakeVllm("e0")
        engine.tls = tls_of(tmp_path / "theirs", "worker")
        await engine.start()
        spec = InstanceSpec(name="e0", url=engine.url, events="off")
        stranger = HttpClient(trusting(str(tmp_path / "ours" / "ca.crt")))
        for ca, status in (("theirs", 200), ("ours", 503)):
            config = GatewayConfig(
                model="",
                port=0,
                tls=tls_of(tmp_path / "ours", "gateway"),
                engine_ca=str(tmp_path / ca / "ca.crt"),
                wait_ready=1,
            )
            gateway = await Gateway.start(config, [spec], QUICK)
            url = f"https://127.0.0.1:{gateway.port}/v1/completions"
            for _ in range(40):
                body = b'{"model": "m", "prompt": "Why?", "max_tokens": 4}'
                reply = await stranger.request("POST", url, body=body, timeout_s=5)
                if reply.status == 200:
                    break
                await asyncio.sleep(0.01)
            assert reply.status == status, reply.body
            health = await stranger.request(
                "GET", f"https://127.0.0.1:{gateway.port}/health", timeout_s=5
            )
            assert (b"certificate verify failed" in health.body) == (status == 503), health.body
            await gateway.stop(0)
        await stranger.close()
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_up_serves_by_tls_with_several_fronts(tmp_path: Path) -> None:
    """`up --tls-dir` with two fronts: https only, and commands find the authority by a variable."""
    folder = tmp_path / "tls"
    subprocess.run([*PROGRAM, "tls", "init", str(folder)], check=True, capture_output=True)
    flags = ("--tls-dir", str(folder), "--workers", "2", "--shared-memory", "never")
    up = Up("--engine", "fake", "--segment-bytes", "64MiB", *flags)
    try:
        url = up.url
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        asked = urllib.request.Request(
            f"{url}/api/instances", headers={"authorization": f"Bearer {ups.TOKEN}"}
        )
        with urllib.request.urlopen(asked, timeout=10, context=context) as reply:
            workers = json.load(reply)
        assert all(it["url"].startswith("https://") for it in workers)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{url}/health", timeout=10)
        with pytest.raises(OSError, match=r"."):  # a worker asks for a certificate
            urllib.request.urlopen(f"{workers[0]['url']}/health", timeout=10, context=context)
        known = {"MOONSERVE_TLS_CA": str(folder / "ca.crt"), "MOONSERVE_TOKEN": ups.TOKEN}
        answer = subprocess.run(
            [*PROGRAM, "ask", "Why?", "--max-tokens", "5", "--url", url],
            env={**os.environ, **known},
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stderr
    finally:
        up.end()

"""The picker's process: with its own Conductor, before another one, and what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.cli.fronts import _reserved, conductor_and_fronts
from moonserve.config import Settings
from moonserve.core.errors import ConfigError
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.picker.server import PickerServer
from moonserve.live.process.fronts import ConductorProcess, FrontProcess
from moonserve.live.process.gateway import Gateway
from moonserve.live.process.parts import Process
from moonserve.live.tls.authority import init
from tests.support.certificates import tls_of
from tests.support.fake_vllm import FakeVllm
from tests.support.picker_proxy import Exchange, destinations, reply_head
from tests.support.picker_site import completion

TOKEN = "the-secret-of-this-test"
CONFIG = GatewayConfig(model="", port=0, token=TOKEN, picker_port=0)


def server_of(process: Process) -> PickerServer:
    """The picker's gRPC server."""
    [found] = [part for part in process._parts if isinstance(part, PickerServer)]
    return found


def specs_of(*engines: FakeVllm) -> list[InstanceSpec]:
    """Descriptions of these."""
    return [InstanceSpec(name=it.name, url=it.url, events="off") for it in engines]


async def ready(http: HttpClient, process: Process) -> None:
    """Wait until it can place requests."""
    async with asyncio.timeout(10):
        url = f"http://127.0.0.1:{process.port}/ready"
        while (await http.request("GET", url, timeout_s=5)).status != 200:
            await asyncio.sleep(0.01)


async def pick(process: Process) -> list[str]:
    """The endpoints for one request, which then ends."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server_of(process).port}") as channel:
        exchange = Exchange(channel)
        found = destinations(await exchange.ask(completion("Once upon a time " * 30)))
        await exchange.reply()  # the body
        await exchange.send(reply_head())
        await exchange.reply()
        exchange.cancel()
        return found


def test_a_picker_with_its_own_conductor() -> None:
    """It has readiness, metrics and the admin API over HTTP, and no route for clients."""

    async def main() -> None:
        engine = await FakeVllm("e0").start()
        http = HttpClient()
        process = await Gateway.start(CONFIG, specs_of(engine))
        try:
            await ready(http, process)
            assert await pick(process) == [engine.url.removeprefix("http://")]
            url = f"http://127.0.0.1:{process.port}"
            counted = b'moonserve_requests_total{route="/v1/completions",status="200"} 1.0'
            async with asyncio.timeout(5):
                page = b""
                while counted not in page:
                    page = (await http.request("GET", url + "/metrics", timeout_s=5)).body
            about = (await http.request("GET", url + "/", timeout_s=5)).body.decode()
            assert "This is a moonserve endpoint picker." in about
            assert process.proxies_at == f"127.0.0.1:{server_of(process).port}"
            chat = await http.request("POST", url + "/v1/completions", body=b"{}", timeout_s=5)
            assert chat.status == 404
        finally:
            await process.stop(1)
            await http.close()
            await engine.stop()

    asyncio.run(main())


def test_several_pickers_before_one_conductor(tmp_path: Path) -> None:
    """What one picker's request left in an engine draws the next request of another picker."""

    async def main() -> None:
        engines = [await FakeVllm(name).start() for name in ("e0", "e1", "e2")]
        http = HttpClient()
        link = str(tmp_path / "link")
        alone = msgspec.structs.replace(CONFIG, picker_port=None, socket=link)
        conductor = await ConductorProcess.start(alone, specs_of(*engines))
        behind = msgspec.structs.replace(CONFIG, conductor=link)
        pickers = [await FrontProcess.start(behind) for _ in range(2)]
        try:
            for it in pickers:
                await ready(http, it)
            first = await pick(pickers[0])
            async with asyncio.timeout(5):
                while conductor.conductor.promised().requests:
                    await asyncio.sleep(0.005)
            for it in (*pickers, *pickers):
                found = await pick(it)
                assert found[0] == first[0]
                assert len(set(found)) == 3
        finally:
            for it in (*pickers, conductor):
                await it.stop(1)
            await http.close()
            for engine in engines:
                await engine.stop()

    asyncio.run(main())


def test_pickers_that_share_a_port(tmp_path: Path) -> None:
    """One that leaves refuses new calls and lets old ones end; connections made from then on reach
    the others."""

    async def main() -> None:
        engine = await FakeVllm("e0").start()
        http = HttpClient()
        link = str(tmp_path / "link")
        alone = msgspec.structs.replace(CONFIG, picker_port=None, socket=link)
        conductor = await ConductorProcess.start(alone, specs_of(engine))
        with _reserved("127.0.0.1", 0) as port, _reserved("127.0.0.1", 0, "picker_port") as at:
            behind = msgspec.structs.replace(CONFIG, conductor=link, port=port, picker_port=at)
            leaves = await FrontProcess.start(behind, shared=True)
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{at}") as channel:
                    await ready(http, leaves)
                    exchange = Exchange(channel)
                    assert destinations(await exchange.ask(completion()))
                    await exchange.reply()  # the body
                    stays = await FrontProcess.start(behind, shared=True)
                    try:
                        stopping = asyncio.create_task(leaves.stop(10))
                        async with asyncio.timeout(10):
                            while server_of(leaves)._listener.is_serving():
                                await asyncio.sleep(0.005)
                            await ready(http, stays)
                            assert await pick(stays)
                            assert await pick(stays)
                        assert not stopping.done()
                        await exchange.send(reply_head())
                        assert (await exchange.reply()).HasField("response_headers")
                        exchange.cancel()
                        await stopping
                    finally:
                        await stays.stop(0)
            finally:
                await leaves.stop(0)
                await conductor.stop(0)
                await http.close()
                await engine.stop()

    asyncio.run(main())


def test_a_picker_needs_external_engines(tmp_path: Path) -> None:
    """A Conductor with workers of ours is no Conductor for a picker."""

    async def main() -> None:
        link = str(tmp_path / "link")
        model = "smollm2-135m-instruct"
        alone = msgspec.structs.replace(CONFIG, picker_port=None, socket=link, model=model)
        conductor = await ConductorProcess.start(alone)
        try:
            behind = msgspec.structs.replace(CONFIG, conductor=link, model=model)
            with pytest.raises(ConfigError, match="conductor: has workers of moonserve"):
                await FrontProcess.start(behind)
        finally:
            await conductor.stop(0)

    asyncio.run(main())


def test_a_picker_with_tls_takes_proxies_with_a_certificate(tmp_path: Path) -> None:
    """With the cluster's authority and client certificates required, a proxy must show one."""

    async def main() -> None:
        init(tmp_path)
        tls = tls_of(tmp_path, "gateway")
        config = msgspec.structs.replace(CONFIG, tls=tls, tls_client_auth="required")
        process = await Gateway.start(config, [])
        files = tls.files
        assert files.ca is not None
        ca, key, cert = [it.read_bytes() for it in (files.ca, files.key, files.cert)]
        try:
            for shown, status in (((key, cert), 503), ((None, None), None)):
                trust = grpc.ssl_channel_credentials(ca, *shown)
                where = f"localhost:{server_of(process).port}"
                async with grpc.aio.secure_channel(where, trust) as channel:
                    exchange = Exchange(channel)
                    if status is None:
                        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                            await exchange.ask(completion(), path="/v1/models")
                        continue
                    reply = await exchange.ask(completion(), path="/v1/models")
                    assert reply.immediate_response.status.code == status
        finally:
            await process.stop(0)

    asyncio.run(main())


def test_a_taken_port_is_named() -> None:
    """The error says which setting to change, and nothing is left."""

    async def main() -> None:
        first = await Gateway.start(CONFIG, [])
        taken = server_of(first).port
        try:
            again = msgspec.structs.replace(CONFIG, picker_port=taken)
            with pytest.raises(ConfigError, match=f"picker_port: .*:{taken} is in use"):
                await Gateway.start(again, [])
        finally:
            await first.stop(0)

    asyncio.run(main())


def test_the_processes_of_several_pickers(tmp_path: Path) -> None:
    """A Conductor and pickers at both ports, each with the file of the settings."""
    here = Settings(workers=2, port=81, picker_port=82)
    words = ["--config", "a.yaml", "--url", "http://a"]
    first, *pickers = conductor_and_fronts("picker", "secret", words).children(here, tmp_path)
    assert first.argv[3:8] == ("conductor", *words)
    assert {it.argv[3:] for it in pickers} == {("picker", "--shared", "--config", "a.yaml")}
    ports = {(it.env["MOONSERVE_PORT"], it.env["MOONSERVE_PICKER_PORT"]) for it in pickers}
    assert (len(pickers), ports) == (2, {("81", "82")})


def test_the_command_needs_engines_and_refuses_flags_of_the_conductor() -> None:
    """Both errors name what to give."""
    alone = CliRunner().invoke(cli, ["picker"])
    assert alone.exit_code == 2
    assert "instances: is missing: a picker picks among external engines" in alone.output
    twice = CliRunner().invoke(cli, ["picker", "--port", "9363", "--picker-port", "9363"])
    assert twice.exit_code == 2
    assert "picker_port: is 9363, which is --port too; give the two" in twice.output
    nowhere = CliRunner().invoke(cli, ["picker", "--url", "http://a", "--keys", "registry"])
    assert nowhere.exit_code == 2
    assert "keys: is `registry`, so set `registry` too" in nowhere.output
    both = CliRunner().invoke(cli, ["picker", "--conductor", "a:1", "--policy", "random"])
    assert both.exit_code == 2
    assert "policy: is for the process that has the Conductor" in both.output

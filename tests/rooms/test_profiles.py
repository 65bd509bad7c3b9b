"""Profiles of running processes: one at a time, bounded, each a file that others can open."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.errors import ConfigError
from moonserve.core.request import Sampling
from moonserve.core.units import RequestId
from moonserve.live.control.config import GatewayConfig
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, json_response
from moonserve.live.http.server import App, serve
from moonserve.live.process import profiles as module
from moonserve.live.process.gateway import Gateway
from moonserve.live.process.profiles import PassProfiler, Profiles
from tests.support import inproc
from tests.support.tiny import write_folder

TOKEN = "the-secret-of-this-test"


class Noted:
    """A profiler that notes what is asked of it, and writes when the test lets it."""

    suffix = ".txt"

    def __init__(self) -> None:
        self.started = 0
        self.ending = asyncio.Event()
        self.write = asyncio.Event()
        self.write.set()
        self.error: OSError | None = None

    async def start(self) -> None:
        """See Profiler."""
        self.started += 1

    async def stop(self, file: Path) -> None:
        """See Profiler."""
        self.ending.set()
        await self.write.wait()
        if self.error is not None:
            raise self.error
        await asyncio.to_thread(file.write_text, "profile")


class Asked:
    """A process with these profiles, and a client of it."""

    def __init__(self, url: str, http: HttpClient) -> None:
        self._url, self._http = url, http

    async def post(self, path: str, status: int, token: str = TOKEN) -> dict[str, Any]:
        """The JSON of a reply that has this status."""
        headers = {"authorization": f"Bearer {token}"}
        reply = await self._http.request("POST", self._url + path, headers=headers, timeout_s=20)
        assert reply.status == status, reply.body
        found: dict[str, Any] = json.loads(reply.body)
        return found


@contextlib.asynccontextmanager
async def asked(profiles: Profiles) -> AsyncIterator[Asked]:
    """A process that has nothing else."""
    async with asyncio.timeout(30):
        server = await serve(App(profiles.routes()), "127.0.0.1", 0)
        http = HttpClient()
        try:
            yield Asked(f"http://127.0.0.1:{server.port}", http)
        finally:
            await http.close()
            await profiles.stop()
            await server.stop(0)


def read(reply: dict[str, Any]) -> bytes:
    """The file that a reply names."""
    return Path(reply["file"]).read_bytes()


def test_a_second_start_is_a_conflict_and_each_profile_has_a_file(tmp_path: Path) -> None:
    """The conflict names the file of the first one; a stop without a start is a conflict too."""

    async def body() -> None:
        noted = Noted()
        async with asked(Profiles(str(tmp_path / "new"), "p0", noted)) as it:
            first = await it.post("/start_profile?seconds=50", 200)
            assert first["seconds"] == 50
            said = (await it.post("/start_profile", 409))["error"]["message"]
            assert first["file"] in said
            assert await it.post("/stop_profile", 200) == first
            assert read(first) == b"profile"
            assert "no profile runs" in (await it.post("/stop_profile", 409))["error"]["message"]
            second = await it.post("/start_profile", 200)
            assert second["file"] != first["file"]
            assert noted.started == 2

    asyncio.run(body())


def test_a_profile_ends_by_itself(tmp_path: Path) -> None:
    """Another one may start when its file is written, and not before."""

    async def body() -> None:
        noted = Noted()
        profiles = Profiles(str(tmp_path), "p0", noted)
        async with asked(profiles) as it:
            noted.write.clear()
            first = await it.post("/start_profile?seconds=0.01", 200)
            await noted.ending.wait()
            await it.post("/start_profile", 409)
            assert profiles._running is not None
            assert profiles._running.writing is not None
            noted.write.set()
            await profiles._running.writing
            assert read(first) == b"profile"
            await it.post("/start_profile", 200)

    asyncio.run(body())


def test_the_end_of_the_process_ends_a_profile(tmp_path: Path) -> None:
    """What was measured by then is written."""

    async def body() -> None:
        async with asked(Profiles(str(tmp_path), "p0", Noted())) as it:
            begun = await it.post("/start_profile", 200)
        assert read(begun) == b"profile"

    asyncio.run(body())


def test_a_file_that_cannot_be_written_ends_the_profile(tmp_path: Path) -> None:
    """The reply says why, and the next one may start."""

    async def body() -> None:
        noted = Noted()
        noted.error = OSError(28, "No space left on device")
        async with asked(Profiles(str(tmp_path), "p0", noted)) as it:
            await it.post("/start_profile", 200)
            said = await it.post("/stop_profile", 502)
            assert "No space left" in said["error"]["message"]
            await it.post("/start_profile", 200)

    asyncio.run(body())


@pytest.mark.parametrize("given", ["0", "-1", "61", "nan", "inf", "soon", ""])
def test_a_profile_is_bounded(given: str, tmp_path: Path) -> None:
    """It is kept in memory, so it may not run for long."""

    async def body() -> None:
        async with asked(Profiles(str(tmp_path), "p0", Noted())) as it:
            said = await it.post(f"/start_profile?seconds={given}", 400)
            assert said["error"]["param"] == "seconds"

    asyncio.run(body())


def test_without_a_folder_the_error_names_the_flag(tmp_path: Path) -> None:
    """So it does for a folder that cannot be made."""

    async def body() -> None:
        async with asked(Profiles("", "p0", Noted())) as it:
            said = await it.post("/start_profile", 400)
            assert "--profile-folder" in said["error"]["message"]
        (tmp_path / "file").touch()
        async with asked(Profiles(str(tmp_path / "file" / "x"), "p0", Noted())) as it:
            said = await it.post("/start_profile", 400)
            assert "--profile-folder" in said["error"]["message"]

    asyncio.run(body())


def test_a_process_does_not_start_with_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the setting."""
    (tmp_path / "file").touch()

    async def body() -> None:
        folder = str(tmp_path / "file" / "x")
        config = GatewayConfig(model="", port=0, token=TOKEN, profile_folder=folder)
        with pytest.raises(ConfigError, match=r"^profile_folder: .*profiles cannot be written"):
            await Gateway.start(config, [])

    asyncio.run(body())


def test_a_gateway_is_profiled_by_its_token_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows what the event loop ran. Without the package the error names the extra."""

    async def busy_for_the_profile() -> None:
        for _ in range(200):
            sum(range(20_000))
            await asyncio.sleep(0)

    async def body() -> None:
        config = GatewayConfig(model="", port=0, token=TOKEN, profile_folder=str(tmp_path))
        gateway = await Gateway.start(config, [])
        http = HttpClient()
        it = Asked(f"http://127.0.0.1:{gateway.port}", http)
        try:
            await it.post("/start_profile", 401, token="wrong")
            with monkeypatch.context() as patched:
                patched.setattr(module, "find_spec", lambda name: None)
                said = await it.post("/start_profile", 400)
                assert "pip install 'moonserve[profile]'" in said["error"]["message"]
            begun = await it.post("/start_profile", 200)
            await asyncio.create_task(busy_for_the_profile())
            assert await it.post("/stop_profile", 200) == begun
        finally:
            await http.close()
            await gateway.stop(0)
        file = Path(begun["file"])
        assert file.name.startswith("gateway-")
        assert file.suffix == ".html"
        assert b"busy_for_the_profile" in read(begun)

    asyncio.run(body())


@pytest.mark.model  # for its tokenizer
def test_the_command_profiles_the_gateway_and_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints where the files will be. Processes that cannot be profiled say why."""
    monkeypatch.setenv("MOONSERVE_TOKEN", inproc.TOKEN)

    async def body() -> None:
        async with asyncio.timeout(60), inproc.site(profile_folder=str(tmp_path)) as it:
            await it.add("p0", "prefill")
            await it.add("d0", "decode", profile_folder=str(tmp_path))
            words = ["profile", "--url", it.url, "--seconds", "30"]
            done = await asyncio.to_thread(CliRunner().invoke, cli, words)
            assert done.exit_code == 0, done.stderr
            assert f"gateway: {tmp_path}/gateway-" in done.stdout
            said = dict(line.split(": ", 1) for line in done.stderr.splitlines())
            assert "--profile-folder" in said["p0"]
            assert "--engine torch" in said["d0"]
            again = await asyncio.to_thread(CliRunner().invoke, cli, words)
            assert again.exit_code != 0
            assert "409 a profile runs already" in again.stderr

    asyncio.run(body())


def test_the_command_starts_all_profiles_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process answers before all are asked: one after the other would never end."""
    monkeypatch.setenv("MOONSERVE_TOKEN", TOKEN)

    async def body() -> None:
        asked: list[str] = []
        all_asked = asyncio.Event()

        async def instances(request: HttpRequest) -> Response:
            url = f"http://127.0.0.1:{server.port}"
            return json_response([{"id": name, "url": url} for name in ("p0", "d0")])

        async def start(request: HttpRequest) -> Response:
            asked.append(request.query["seconds"])
            if len(asked) == 3:
                all_asked.set()
            await all_asked.wait()
            return json_response({"file": "/f", "seconds": 5})

        routes = {("GET", "/api/instances"): instances, ("POST", "/start_profile"): start}
        server = await serve(App(routes), "127.0.0.1", 0)
        try:
            words = ["profile", "--url", f"http://127.0.0.1:{server.port}", "--seconds", "5"]
            async with asyncio.timeout(20):
                done = await asyncio.to_thread(CliRunner().invoke, cli, words)
        finally:
            all_asked.set()
            await server.stop(0)
        assert done.stdout.splitlines()[:3] == ["gateway: /f", "p0: /f", "d0: /f"]
        assert asked == ["5"] * 3

    asyncio.run(body())


def test_the_fake_engine_has_nothing_to_profile(tmp_path: Path) -> None:
    """The error says which engine has."""

    async def body() -> None:
        async with asked(Profiles(str(tmp_path), "p0", PassProfiler(FakeEngine()))) as it:
            said = await it.post("/start_profile", 400)
            assert "--engine torch" in said["error"]["message"]

    asyncio.run(body())


def test_a_worker_writes_a_chrome_trace_of_its_passes(tmp_path: Path) -> None:
    """Each pass is a bar with what torch did in it; passes before and after are not there."""
    pytest.importorskip("torch")
    from moonserve.live.engine.torch_engine import TorchEngine

    def prompt(count: int) -> Pass:
        chunk = Chunk(RequestId("r"), tuple(range(count)), 0, (0, 1, 2), Sampling(temperature=0.0))
        return Pass((chunk,))

    async def body() -> None:
        folder = write_folder(tmp_path / "model")
        engine = TorchEngine.load(folder, dtype="float32", block_size=16, num_blocks=8, threads=1)
        try:
            async with asked(Profiles(str(tmp_path), "p0", PassProfiler(engine))) as it:
                await engine.run(prompt(7))
                begun = await it.post("/start_profile", 200)
                await engine.run(prompt(20))
                await it.post("/stop_profile", 200)
                await engine.run(prompt(9))
        finally:
            await engine.close()
        events = json.loads(gzip.decompress(read(begun)))["traceEvents"]
        names = {event.get("name", "") for event in events}
        passes = {name for name in names if name.startswith("pass:")}
        assert passes == {"pass: 1 requests, 20 tokens"}
        assert any(name.startswith("aten::") for name in names)

    asyncio.run(body())

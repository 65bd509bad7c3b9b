"""A worker that joins a gateway, and its whole process, against a gateway that only records."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonserve.core.errors import ConfigError, EngineFailed
from moonserve.core.kv.keys import Namespace
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad, PassSample, TransferSample
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import InstanceId, SegmentId
from moonserve.live.clock import LoopClock
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.process.worker import run_worker
from moonserve.live.store.local import LocalPool
from moonserve.live.store.server import MasterService
from moonserve.live.store.settings import StoreSettings
from moonserve.live.transfer.region import folders
from moonserve.live.worker.config import WorkerConfig
from moonserve.live.worker.join import BeatTimes, ConductorClient, ConductorMember, with_unsent

TOKEN = "a-secret-of-the-cluster"
INFO = InstanceInfo(
    id=InstanceId("p0"),
    epoch=7,
    role="prefill",
    url="http://127.0.0.1:1",
    model="m",
    namespace=Namespace("m", "r", "l", 4),
    kv_blocks=1,
    block_bytes=1,
    max_seqs=1,
    chunk_tokens=1,
    max_len=1,
)


class Gateway:
    """Records joins, beats and leaves; runs a real master."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.answer = 200
        self.joined = False
        self.master = MasterService(Master(Terms(), 1), LoopClock().now_us)
        self.server: Server | None = None

    async def start(self, port: int = 0) -> str:
        routes = {("POST", f"/internal/{what}"): self._note for what in ("join", "beat", "leave")}
        store = LocalPool(self.master, lambda events: None)
        self.server = await serve(App(store.routes() | routes), "127.0.0.1", port)
        return f"http://127.0.0.1:{self.server.port}"

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(0)

    async def _note(self, request: HttpRequest) -> Response:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return Response(401)
        what = request.path.rpartition("/")[2]
        self.said.append((what, msgspec.msgpack.decode(await request.body())))
        self.joined |= what == "join"
        return Response(self.answer if self.joined else 404, b"because")

    async def hears(self, what: str) -> Any:
        """Wait for the next message of this kind; all before it are dropped."""
        for _ in range(500):
            for i, (word, body) in enumerate(self.said):
                if word == what:
                    del self.said[: i + 1]
                    return body
            await asyncio.sleep(0.01)
        raise AssertionError(f"never heard {what}")


FAST = BeatTimes(beat_s=0.02, backoff_s=(0.02,))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test, with a deadline."""
    asyncio.run(asyncio.wait_for(main, 60))


def test_joins_beats_and_joins_again() -> None:
    """After a 404 or an absence of the gateway the worker joins again; at the end it leaves."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        url = await gateway.start()
        port = int(url.rpartition(":")[2])
        member = ConductorMember(
            ConductorClient(http, url, TOKEN),
            INFO,
            lambda: InstanceLoad(running=3, free_blocks=5),
            FAST,
        )
        task = asyncio.create_task(member.run(lambda: None))
        joined = await gateway.hears("join")
        assert msgspec.convert(joined, InstanceInfo) == INFO
        beat = await gateway.hears("beat")
        assert (beat["id"], beat["epoch"], beat["load"]["running"]) == ("p0", 7, 3)
        await gateway.stop()
        gateway = Gateway()  # knows no instance: answers the next beat with 404
        await gateway.start(port)
        assert (await gateway.hears("join"))["id"] == "p0"
        await gateway.hears("beat")
        task.cancel()
        await member.leave()
        assert await gateway.hears("leave") == {"id": "p0", "epoch": 7}
        await gateway.stop()
        await http.close()

    run(main())


def test_samples_survive_a_failed_beat() -> None:
    """Samples of a failed beat come with the next one that succeeds, once, newest last."""

    class EverySecond(Gateway):
        async def _note(self, request: HttpRequest) -> Response:
            self.answer = 503 if len(self.said) % 2 else 200
            return await super()._note(request)

    async def main() -> None:
        gateway, http = EverySecond(), HttpClient()
        url = await gateway.start()
        counted = itertools.count()

        def load() -> InstanceLoad:
            n = next(counted)
            transfer = TransferSample(n, 1)
            return InstanceLoad(passes=(PassSample(n, 0, 0, 0, 0, 1),), transfers=(transfer,))

        member = ConductorMember(ConductorClient(http, url, TOKEN), INFO, load, FAST)
        task = asyncio.create_task(member.run(lambda: None))
        while len(gateway.said) < 8:
            await asyncio.sleep(0.01)
        got: list[int] = []
        for _, body in gateway.said[2:8:2]:
            told = [it["prefill_new"] for it in body["load"]["passes"]]
            assert told == [it["size_bytes"] for it in body["load"]["transfers"]]
            got += told
        assert got == list(range(7)), "one from before the join, then two by two"
        task.cancel()
        await gateway.stop()
        await http.close()

    run(main())


def test_a_gateway_knows_what_was_measured_from_the_join_on() -> None:
    """The first beat follows the join at once; a restarted gateway gets the samples as well."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        url = await gateway.start()
        warm = [InstanceLoad(passes=(PassSample(7, 49, 0, 0, 0, 1),))]
        slow = BeatTimes(beat_s=0.3, backoff_s=(0.02,))
        load = lambda: warm.pop() if warm else InstanceLoad()  # noqa: E731
        member = ConductorMember(ConductorClient(http, url, TOKEN), INFO, load, slow)
        task = asyncio.create_task(member.run(lambda: None))
        await gateway.hears("join")
        joined_s = asyncio.get_running_loop().time()
        beat = await gateway.hears("beat")
        assert asyncio.get_running_loop().time() - joined_s < 0.2
        assert [it["prefill_new"] for it in beat["load"]["passes"]] == [7]
        assert (await gateway.hears("beat"))["load"]["passes"] == []
        gateway.joined = False  # knows no instance: answers the next beat with 404
        await gateway.hears("join")
        beat = await gateway.hears("beat")
        assert [it["prefill_new"] for it in beat["load"]["passes"]] == [7]
        task.cancel()
        await gateway.stop()
        await http.close()

    run(main())


def test_unsent_samples_are_bounded() -> None:
    """While the gateway is away for long, the newest samples are kept."""
    unsent = InstanceLoad()
    for n in range(1_000):
        unsent = with_unsent(InstanceLoad(passes=(PassSample(n, 0, 0, 0, 0, 1),)), unsent)
    assert [it.prefill_new for it in unsent.passes] == list(range(744, 1_000))


def test_a_refusal_is_final_and_says_why() -> None:
    """A wrong token or a wrong description ends the worker at once, with the gateway's reason."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        url = await gateway.start()
        with pytest.raises(ConfigError, match="token"):
            await ConductorMember(ConductorClient(http, url, "x"), INFO, InstanceLoad, FAST).run(
                lambda: None
            )
        for gateway.answer in (400, 403):
            with pytest.raises(ConfigError, match=r"40[03] because"):
                await ConductorMember(
                    ConductorClient(http, url, TOKEN), INFO, InstanceLoad, FAST
                ).run(lambda: None)
        await gateway.stop()
        await http.close()

    run(main())


@pytest.mark.parametrize("status", [404, 408, 409, 413, 429, 500, 503])
def test_a_refusal_that_may_pass_is_tried_again(status: int) -> None:
    """A worker joins as soon as the gateway takes it, whatever it answered for a while."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        gateway.answer = status
        url = await gateway.start()
        member = ConductorMember(ConductorClient(http, url, TOKEN), INFO, InstanceLoad, FAST)
        task = asyncio.create_task(member.run(lambda: None))
        for _ in range(5):
            await gateway.hears("join")
        gateway.answer = 200
        await gateway.hears("beat")
        task.cancel()
        await gateway.stop()
        await http.close()

    run(main())


def test_a_conflict_that_lasts_is_final() -> None:
    """A worker whose name or KV stands against another instance's gives up after a while."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        gateway.answer = 409
        url = await gateway.start()
        times = BeatTimes(beat_s=0.02, backoff_s=(0.02,), conflict_s=0.3)
        member = ConductorMember(ConductorClient(http, url, TOKEN), INFO, InstanceLoad, times)
        with pytest.raises(ConfigError, match="409 because"):
            await member.run(lambda: None)
        assert len(gateway.said) > 3
        await gateway.stop()
        await http.close()

    run(main())


def test_a_broken_worker_ends_its_membership() -> None:
    """An error of the load function ends the process."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        url = await gateway.start()

        def load() -> InstanceLoad:
            raise EngineFailed("hung")

        with pytest.raises(EngineFailed, match="hung"):
            await ConductorMember(ConductorClient(http, url, TOKEN), INFO, load, FAST).run(
                lambda: None
            )
        await gateway.stop()
        await http.close()

    run(main())


@pytest.mark.model
def test_the_whole_process() -> None:
    """A worker waits for its gateway, mounts, joins, serves, and on SIGTERM leaves nothing."""

    async def main() -> None:
        gateway, http, lines = Gateway(), HttpClient(), list[str]()
        port = await _free_port()
        config = WorkerConfig(
            name="p0",
            role="prefill",
            model=DEFAULT_MODEL,
            engine="fake",
            gateway=f"http://127.0.0.1:{port}",
            token=TOKEN,
        )
        share = StoreSettings(
            segment=SegmentId("p0"), epoch=1, capacity_bytes=1 << 20, token=TOKEN.encode()
        )
        task = asyncio.create_task(run_worker(config, share, lines.append))
        await asyncio.sleep(0.2)
        await gateway.start(port)
        info = msgspec.convert(await gateway.hears("join"), InstanceInfo)
        for name in ("one", "two"):
            reply = await http.request(
                "POST",
                f"{info.url}/v1/completions",
                headers={"x-request-id": name, "authorization": f"Bearer {TOKEN}"},
                body=msgspec.json.encode({"prompt": "hello " * 100, "max_tokens": 4}),
                timeout_s=10,
            )
            assert reply.status == 200
            while (await gateway.hears("beat"))["load"]["free_blocks"] < info.kv_blocks:
                pass  # still publishing
        usage = msgspec.json.decode(reply.body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 96
        assert gateway.master.master.stats().objects == 3
        name = gateway.master.master.addresses()[SegmentId("p0")].region
        assert _is_there(name)
        os.kill(os.getpid(), signal.SIGTERM)
        await task
        await gateway.hears("leave")
        assert gateway.master.master.stats().segments == ()
        assert not _is_there(name)
        assert lines[-1] == "stopped"
        await gateway.stop()
        await http.close()

    run(main())


def test_a_hung_engine_ends_the_process() -> None:
    """A thread that hangs in a pass cannot keep the process; its memory is unlinked before. The
    process reports to its supervisor each second that its loop works."""

    async def main() -> None:
        gateway, http = Gateway(), HttpClient()
        url = await gateway.start()
        root = Path(__file__).parents[2]
        supervisors, stdin = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.hung", url, TOKEN, cwd=root,
            stdin=stdin.fileno(), stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "MOONSERVE_LIFELINE": "stdin"},
        )  # fmt: skip
        stdin.close()
        try:
            info = msgspec.convert(await gateway.hears("join"), InstanceInfo)
            name = gateway.master.master.addresses()[SegmentId("h0")].region
            assert _is_there(name)
            supervisors.settimeout(10)
            assert supervisors.recv(1)
            reply = await http.request(
                "POST",
                f"{info.url}/v1/completions",
                headers={"authorization": f"Bearer {TOKEN}"},
                body=b'{"prompt": [1, 2, 3]}',
                timeout_s=10,
            )
            assert reply.status == 502
            said, _ = await asyncio.wait_for(process.communicate(), 20)
        finally:
            supervisors.close()
            if process.returncode is None:
                process.kill()
        assert process.returncode == 1
        assert b"the engine hangs" in said
        assert not _is_there(name)
        await gateway.hears("leave")
        await gateway.stop()
        await http.close()

    run(main())


def _is_there(region: str) -> bool:
    return any((folder / region).exists() for folder in folders())


async def _free_port() -> int:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    async with server:
        return int(server.sockets[0].getsockname()[1])

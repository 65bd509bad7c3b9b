"""What two members that do not get along see of a pool of real processes: names and quotas."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moonserve.core.errors import BadRequest, StoreError
from moonserve.core.store.words import PutOptions
from moonserve.core.units import SegmentId
from moonserve.live.http.server import App, serve
from moonserve.live.store.objects import Objects
from tests.support.store_processes import TOKEN, Pool, Process, content, put, replicas, run


def test_a_name_has_one_holder() -> None:
    """A second segment of a name says who holds it and ends, and the first goes on; killed, the
    first is back under its name at once, its old memory gone.
    """

    async def test(it: Pool) -> None:
        client = await it.client("writer")
        on_a = PutOptions(preferred=SegmentId("a"), blocks=False)
        await put(client, "x", on_a)
        argv = ("segment", "--name", "a", "--store-url", it.url, "--segment-bytes", "1MiB")
        second = it.start(*argv)
        at = await second.says(r"error: name: a is held by (127.0.0.1:\d+); choose another")
        assert second.process.wait(5) == 2
        address = client.link.addresses[SegmentId("a")]
        assert at == f"{address.host}:{address.port}"
        assert await Objects(client).get([b"x"]) == [content("x")]
        it.segments["a"].kill()
        await it.start_segment("a")
        await put(client, "y", on_a)
        assert await replicas(client) == {"y": ["a"]}

    run(test)


def test_the_documents_program_runs_as_it_stands() -> None:
    """The Python of docs/how-to/store.md puts, reads, removes and ends without complaint."""
    page = (Path(__file__).parents[2] / "docs/how-to/store.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    async def test(it: Pool) -> None:
        child = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-W",
                "error",
                "-c",
                program.replace("http://127.0.0.1:8100", it.url),
            ),
            env={**os.environ, "MOONSERVE_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert await child.communicate() == (b"bytearray(b'any bytes')\n", b"")
        assert child.returncode == 0
        assert await (await it.client("looker")).exists([b"name"]) == [False]

    run(test, None, ("--recover-s", "0"))


def test_a_quota_is_kept() -> None:
    """A tenant's oldest objects go for its newest, copies counted; what can never be is said."""

    async def test(it: Pool) -> None:
        client = await it.client("writer")
        mine = PutOptions(tenant="t", blocks=False)
        for number in range(4):
            await put(client, f"o{number}", mine)
        await put(client, "other", PutOptions(blocks=False))
        assert sorted(await replicas(client)) == ["o2", "o3", "other"]
        with pytest.raises(StoreError, match=r"'t' has a quota of 120000 .* for 3 of 50000 bytes"):
            await put(client, "more", PutOptions(tenant="t", replicas=3, blocks=False))
        with pytest.raises(BadRequest, match="no segment 'nope'; mounted segments: "):
            await put(client, "lost", PutOptions(preferred=SegmentId("nope"), blocks=False))

    run(test, None, ("--recover-s", "0", "--quota", "t=120000"))


def test_a_store_url_without_a_master_ends_a_segment_and_an_absent_one_is_waited_for() -> None:
    """Another server there is named with its setting; that nobody is there is said now and then."""

    async def test() -> None:
        other = await serve(App({}), "127.0.0.1", 0)
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            ports = (other.port, nobody.getsockname()[1])
            wrong, early = (
                Process("segment", "--name", "s", "--store-url", f"http://127.0.0.1:{port}")
                for port in ports
            )
            try:
                await wrong.says(rf"error: store_url: http://127.0.0.1:{other.port} is no store's")
                assert await asyncio.to_thread(wrong.process.wait, 5) == 2
                await early.says("waiting to mount: .*cannot connect")
                await asyncio.sleep(1.2)
                assert len(early.lines) == 1
            finally:
                wrong.close()
                early.close()
                await other.stop(0)

    asyncio.run(asyncio.wait_for(test(), 60))

"""`moonserve key --keys registry` with a real etcd, and a process that follows the keys there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.live.access.keys import Keys
from moonserve.live.access.sources import RegistrySource
from moonserve.live.registry.entries import open_registry
from tests.support.etcd import Etcd


async def until(true: Callable[[], object]) -> None:
    """Poll until it holds; at most ten seconds."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


def test_a_key_lives_in_etcd_from_its_making_to_its_revocation(tmp_path: Path) -> None:
    """A front that follows the keys knows it at once, and no more once it is revoked. etcd has its
    hash only. A name that is taken, and a name that is not there, are errors."""

    async def main(etcd: Etcd) -> None:
        async def key(*words: str, code: int = 0) -> str:
            argv = ["key", *words, "--keys", "registry", "--registry", etcd.url]
            done = await asyncio.to_thread(CliRunner().invoke, cli, argv)
            assert done.exit_code == code, done.output
            return done.stdout.strip() if code == 0 else done.stderr

        registry = await open_registry(etcd.url, None)
        assert registry is not None
        keys = Keys()
        source = RegistrySource(keys, registry)
        await source.prepare()
        await source.start(0)
        secret = await key("create", "alice", "--tenant", "team-a", "--under-way", "3")
        await until(lambda: keys.find(secret))
        found = keys.find(secret)
        assert found is not None
        assert (found.name, found.tenant, found.limits.under_way) == ("alice", "team-a", 3)
        [kept] = (await registry.read("keys/")).values()
        assert secret.encode() not in kept
        assert [it["name"] for it in json.loads(await key("list", "--json"))] == ["alice"]
        assert "there is a key 'alice' already" in await key("create", "alice", code=2)
        assert await key("revoke", "alice") == "revoked: alice"
        await until(lambda: keys.find(secret) is None)
        assert "there is no key 'alice'" in await key("revoke", "alice", code=2)
        await source.stop()
        await registry.close()

    with contextlib.closing(Etcd(tmp_path)) as etcd:
        asyncio.run(main(etcd))

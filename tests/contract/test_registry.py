"""ports.Registry over every implementation: memory, and etcd where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

import pytest

from moonserve.core.errors import ConfigError, RegistryError
from moonserve.live.ports import Registry
from moonserve.live.registry import etcd as registry_etcd
from moonserve.live.registry.etcd import (
    EtcdRegistry,
    LeaderEntry,
    RegistryAddress,
    leader_of,
    parse,
)
from moonserve.live.tls.authority import init
from tests.support.certificates import tls_of
from tests.support.etcd import Etcd
from tests.support.registry import MemoryRegistry, Shared

TTL_S = 2.0
Join = Callable[[], Awaitable[Registry]]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd for all tests of this file; each has keys of its own."""
    it = Etcd(tmp_path_factory.mktemp("etcd"))
    yield it
    it.close()


@pytest.fixture(params=["memory", "etcd"])
def members(request: pytest.FixtureRequest) -> Callable[[], Join]:
    """Gives, inside a running loop, what makes members of one registry that is empty."""
    if request.param == "memory":

        def in_memory() -> Join:
            shared = Shared()

            async def join() -> Registry:
                return MemoryRegistry(shared)

            return join

        return in_memory
    etcd: Etcd = request.getfixturevalue("etcd")
    address = parse(f"{etcd.url}/{time.time_ns()}")

    def in_etcd() -> Join:
        async def join() -> Registry:
            return await EtcdRegistry.open(address, TTL_S)

        return join

    return in_etcd


def run(test: Callable[[Join], Awaitable[None]], members: Callable[[], Join]) -> None:
    """Run one test; every member it made is closed."""

    async def main() -> None:
        join, made = members(), list[Registry]()

        async def joined() -> Registry:
            made.append(await join())
            return made[-1]

        try:
            async with asyncio.timeout(30):
                await test(joined)
        finally:
            for one in made:
                await one.close()

    asyncio.run(main())


async def sees(watch: AsyncIterator[Mapping[str, bytes]], wanted: dict[str, bytes]) -> None:
    """Wait until a watch tells just this."""
    async with asyncio.timeout(15):
        async for now in watch:
            if now == wanted:
                return


@contextlib.asynccontextmanager
async def members_of(etcd: Etcd, prefix: str, count: int) -> AsyncIterator[list[EtcdRegistry]]:
    """So many members of one etcd, under keys of their own; closed at the end."""
    address = parse(f"{etcd.url}/{prefix}")
    made: list[EtcdRegistry] = []
    try:
        while len(made) < count:
            made.append(await EtcdRegistry.open(address, TTL_S))
        yield made
    finally:
        for one in made:
            await one.close()


class Views:
    """All that a watch has told so far."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, bytes]] = []

    @property
    def now(self) -> Mapping[str, bytes]:
        """The latest; empty before the first."""
        return self.told[-1] if self.told else {}

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for it, a little."""
        async with asyncio.timeout(15):
            while not done():
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def followed(registry: Registry, prefix: str) -> AsyncIterator[Views]:
    """Watch, and keep what is told; begins with the first of it."""
    views = Views()

    async def follow() -> None:
        async for view in registry.watch(prefix):
            views.told.append(view)

    following = asyncio.create_task(follow())
    try:
        await views.until(lambda: bool(views.told))
        yield views
    finally:
        following.cancel()


def test_what_is_registered_is_read_by_others_until_it_is_closed(
    members: Callable[[], Join],
) -> None:
    """register: there for all when it returns, in the order of keys; gone when it was closed."""

    async def test(join: Join) -> None:
        one, other = await join(), await join()
        b = await one.register("x/b", b"1")
        await one.register("x/a", b"2")
        await one.register("y", b"3")
        assert list((await other.read("x/")).items()) == [("x/a", b"2"), ("x/b", b"1")]
        await b.close()
        await b.close()
        assert await other.read("x/") == {"x/a": b"2"}
        await one.close()
        assert await other.read("") == {}

    run(test, members)


def test_the_latest_to_register_a_key_has_it(members: Callable[[], Join]) -> None:
    """A second owner replaces the first, whose close takes nothing away."""

    async def test(join: Join) -> None:
        one, other = await join(), await join()
        first = await one.register("x", b"1")
        mine = await other.register("x", b"2")
        assert await one.read("x") == {"x": b"2"}
        await first.close()
        assert await one.read("x") == {"x": b"2"}
        again = await other.register("x", b"3")
        await mine.close()
        assert await one.read("x") == {"x": b"3"}
        await again.close()
        assert await one.read("x") == {}

    run(test, members)


def test_what_is_put_stays_until_it_is_removed(members: Callable[[], Join]) -> None:
    """put and remove: entries that nobody's life holds."""

    async def test(join: Join) -> None:
        one, other = await join(), await join()
        await one.put("x", b"1")
        await one.close()
        assert await other.read("x") == {"x": b"1"}
        assert await other.remove("x")
        assert not await other.remove("x")
        assert await other.read("x") == {}

    run(test, members)


def test_a_watch_tells_what_is_there_and_then_what_changed(members: Callable[[], Join]) -> None:
    """watch: a snapshot at once, an empty one too; then the whole anew after each change."""

    async def test(join: Join) -> None:
        one, other = await join(), await join()
        watch = other.watch("x/")
        assert await anext(watch) == {}
        entry = await one.register("x/a", b"1")
        await sees(watch, {"x/a": b"1"})
        await one.put("z", b"elsewhere")
        await one.put("x/b", b"2")
        await sees(watch, {"x/a": b"1", "x/b": b"2"})
        await entry.close()
        await sees(watch, {"x/b": b"2"})
        late = one.watch("x/")
        assert await anext(late) == {"x/b": b"2"}
        for it in (watch, late):
            await it.aclose()  # type: ignore[attr-defined]

    run(test, members)


class Said:
    """The terms of one candidate, as it heard them."""

    def __init__(self) -> None:
        self.terms: list[int] = []

    async def until(self, true: Callable[[list[int]], bool], within_s: float = 10.0) -> None:
        """Wait until it holds of the terms."""
        async with asyncio.timeout(within_s):
            while not true(self.terms):
                await asyncio.sleep(0.02)


def test_each_holder_of_a_duty_has_a_higher_term(members: Callable[[], Join]) -> None:
    """elect: the first has it; when it stands down the next one does; another duty is another's."""

    async def test(join: Join) -> None:
        one, other = await join(), await join()
        first_said, other_said, else_said = Said(), Said(), Said()
        first = await one.elect("d", "one", first_said.terms.append)
        await other.elect("d", "other", other_said.terms.append)
        await other.elect("e", "other", else_said.terms.append)
        [term] = first_said.terms
        assert term > 0
        assert (len(else_said.terms), other_said.terms) == (1, [])
        assert leader_of((await other.read("leaders/d"))["leaders/d"]) == LeaderEntry("one", term)
        await first.close()
        await other_said.until(bool)
        assert first_said.terms == [term, 0]
        assert other_said.terms[0] > term
        await other.close()
        assert (other_said.terms[1:], else_said.terms[1:]) == ([0], [0])

    run(test, members)


def test_a_lost_holder_is_deposed(members: Callable[[], Join]) -> None:
    """depose: the next term begins at once; it names the holder, so that no later one is hit."""

    async def test(join: Join) -> None:
        one, other = await join(), await join()
        first_said, other_said = Said(), Said()
        first = await one.elect("d", "one", first_said.terms.append)
        second = await other.elect("d", "other", other_said.terms.append)
        [term] = first_said.terms
        await second.depose(term - 1)
        assert other_said.terms == []
        await second.depose(term)
        assert other_said.terms[0] > term
        await first_said.until(lambda terms: terms == [term, 0])
        await first.depose(term)
        assert first_said.terms == [term, 0]
        assert len(other_said.terms) == 1

    run(test, members)


def test_a_process_that_dies_goes_within_its_time_to_live(etcd: Etcd) -> None:
    """Nothing renews its lease: its entries and its duty go to nobody and to the next one, which
    waits for its patience first."""

    async def test() -> None:
        address = parse(f"{etcd.url}/dies")
        dying, other = await EtcdRegistry.open(address, TTL_S), await EtcdRegistry.open(address)
        said, took = Said(), Said()
        try:
            watch = other.watch("x")
            await dying.register("x", b"1")
            await dying.elect("d", "dying", said.terms.append)
            await sees(watch, {"x": b"1"})
            await other.elect("d", "other", took.terms.append, patience_s=0.5)
            assert dying._keeping is not None
            dying._keeping.cancel()
            async with asyncio.timeout(TTL_S + 6):
                await sees(watch, {})
                await took.until(bool, TTL_S + 5)
            assert took.terms[0] > said.terms[0]
            await dying.stand()
            assert said.terms[1:] == [0], "it has read of the higher term"
        finally:
            await dying.close()
            await other.close()

    asyncio.run(test())


async def there_again(member: Registry, key: str) -> bytes:
    """The value of a key that is put again soon; etcd may not answer yet."""
    async with asyncio.timeout(15):
        while True:
            with contextlib.suppress(RegistryError):
                if (found := await member.read(key)).get(key) is not None:
                    return found[key]
            await asyncio.sleep(0.05)


def test_while_etcd_is_away_nothing_is_told_and_then_all_is_registered_again(etcd: Etcd) -> None:
    """Lost with all it knew: watchers keep their view, the holder of a duty keeps its term, and all
    comes back."""

    async def test() -> None:
        async with members_of(etcd, "away", 2) as (one, other):
            said: list[int] = []
            await one.register("x", b"1")
            await one.elect("d", "one", said.append)
            await other.elect("d", "other", said.append, patience_s=5.0)
            async with followed(other, "") as views:
                await asyncio.to_thread(etcd.lose_all)
                with pytest.raises(RegistryError, match="etcd 127"):
                    await one.register("y", b"2")
                await asyncio.to_thread(etcd.start)
                found = await there_again(other, "leaders/d")
                assert leader_of(found) == LeaderEntry("one", said[0])
                assert await there_again(other, "x") == b"1"
                assert len(said) == 1
            assert all("x" in view for view in views.told), views.told

    asyncio.run(test())


def test_an_etcd_that_lost_all_takes_nobody_away(etcd: Etcd) -> None:
    """What was put stays as it was, with an alarm, until it is there again, as it was or as one has
    put it since; what was removed, before or since, stays away. Who comes later finds all of it."""

    async def test() -> None:
        async with members_of(etcd, "lost", 1) as (it,):
            for name in "abcde":
                await it.put(f"e/{name}", b"1")
            await it.remove("e/e")
            async with followed(it, "e/") as views:
                await views.until(lambda: len(views.now) == 4)
                assert it.alarms() == []
                await asyncio.to_thread(etcd.lose_all)
                await views.until(
                    lambda: it.alarms() == [f"etcd 127.0.0.1:{etcd.port} does not answer"]
                )
                await asyncio.to_thread(etcd.start)
                await views.until(lambda: "e/a, e/b, e/c, e/d; they stay" in "".join(it.alarms()))
                await it.put("e/a", b"2")
                assert not await it.remove("e/d")
                await it.put("e/c", b"3")
                await it.remove("e/c")
                await views.until(lambda: it.alarms() == [])
                async with members_of(etcd, "lost", 1) as (late,):
                    kept = {"e/a": b"2", "e/b": b"1"}
                    assert await late.read("e/") == kept
                await views.until(lambda: views.now == kept)
                await it.remove("e/a")
                await views.until(lambda: list(views.now) == ["e/b"])
            assert all("e/b" in view for view in views.told), "nobody was taken away"

    asyncio.run(test())


def test_another_history_is_known_whatever_its_revision(etcd: Etcd) -> None:
    """An etcd that lost all, and was told more since than it knew, while a gateway was cut off from
    it: its revision and the identity of its cluster say nothing."""

    async def test() -> None:
        async with members_of(etcd, "passed", 1) as (it,), followed(it, "e/") as views:
            await it.put("e/a", b"1")
            await views.until(lambda: views.now == {"e/a": b"1"})
            before = await it._read(it._client, "e/")
            await asyncio.to_thread(etcd.lose_all)
            with etcd.elsewhere():
                await asyncio.to_thread(etcd.start)
                async with members_of(etcd, "passed", 1) as (other,):
                    for number in range(before.revision):
                        await other.put("e/b", b"%d" % number)
                    assert (await other._read(other._client, "e/")).revision > before.revision
                await asyncio.to_thread(etcd.kill)
            await asyncio.to_thread(etcd.start)
            await views.until(lambda: "e/b" in views.now)
            assert views.now["e/a"] == b"1"
            await views.until(lambda: it.alarms() == [])
            assert list(await it.read("e/")) == ["e/a", "e/b"]

    asyncio.run(test())


def test_an_etcd_that_hangs_costs_deadlines_and_no_view(etcd: Etcd) -> None:
    """Every call ends in time with RegistryError, and a duty is kept; what expired meanwhile is
    registered again before anybody is told that it was gone."""

    async def test() -> None:
        async with members_of(etcd, "hangs", 2) as (one, other):
            said: list[int] = []
            await one.register("x", b"1")
            await one.elect("d", "one", said.append)
            async with followed(other, "x") as views:
                try:
                    etcd.freeze()
                    with pytest.raises(RegistryError):
                        async with asyncio.timeout(8):
                            await one.put("y", b"1")
                    await asyncio.sleep(TTL_S)
                finally:
                    etcd.thaw()
                await views.until(lambda: one.alarms() == [])
                assert len(said) == 1
            assert views.told == [{"x": b"1"}]

    asyncio.run(test())


def test_a_wrong_address_is_said_at_once_and_an_absent_etcd_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """open and parse raise ConfigError in one line that names the remedy."""
    monkeypatch.setattr(registry_etcd, "_OPEN_S", 1.0)
    for text in ("http://x:1", "etcd://", "etcd://:1", "etcd://a:b", "etcd://u:p@a:1", "127.0.0.1"):
        with pytest.raises(ConfigError, match="etcd://127"):
            parse(text)
    assert parse("etcd://a,[::1]:5/p/") == RegistryAddress((("a", 2379), ("::1", 5)), "/p/")
    assert parse("etcd://a").root == "/moonserve/"
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"no etcd answers at 127\.0\.0\.1:9") as said:
        asyncio.run(EtcdRegistry.open(parse("etcd://127.0.0.1:9")))
    assert time.monotonic() - begin < 15
    assert "\n" not in str(said.value)


def test_another_member_is_asked_when_one_is_away(etcd: Etcd) -> None:
    """Several addresses: whoever answers is enough."""

    async def test() -> None:
        port = etcd.port
        one = await EtcdRegistry.open(parse(f"etcd://127.0.0.1:9,127.0.0.1:{port}/many"), TTL_S)
        async with contextlib.aclosing(one.watch("x")) as watch:  # type: ignore[type-var]
            assert await anext(watch) == {}
        await one.close()

    asyncio.run(test())


def test_a_connection_that_was_just_closed_is_a_registry_that_is_away(etcd: Etcd) -> None:
    """A call on it, as at the change to another member, is tried again like any that failed."""

    async def test() -> None:
        one = await EtcdRegistry.open(parse(f"{etcd.url}/closed"), TTL_S)
        await one._client.channel.close()
        with pytest.raises(RegistryError):
            await one.put("x", b"1")
        await one.close()

    asyncio.run(test())


def test_etcd_by_tls_knows_members_only(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries, watches and new certificates by mutual TLS; a stranger gets a ConfigError."""
    monkeypatch.setattr(registry_etcd, "_OPEN_S", 1.0)
    folder, foreign = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    init(folder)
    init(foreign)
    files = tls_of(folder, "gateway").files
    etcd = Etcd(tmp_path_factory.mktemp("etcd"), folder)

    async def test() -> None:
        address = parse(etcd.url)
        with pytest.raises(ConfigError, match="etcds:// needs a certificate: set --tls-dir"):
            await EtcdRegistry.open(address)
        stranger = tls_of(foreign, "gateway").files
        with pytest.raises(ConfigError, match=r"it must speak TLS with a certificate of --tls-ca"):
            await EtcdRegistry.open(address, files=stranger)
        one = await EtcdRegistry.open(address, TTL_S, files)
        async with contextlib.aclosing(one.watch("x")) as watch:  # type: ignore[type-var]
            assert await anext(watch) == {}
            await one.put("x", b"1")
            assert await anext(watch) == {"x": b"1"}
        init(folder, renew=True)
        two = await EtcdRegistry.open(address, TTL_S, files)
        assert await two.read("x") == {"x": b"1"}
        for it in (one, two):
            await it.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        etcd.close()


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd without aetcd: ConfigError names what to install."""
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ConfigError, match=r"moonserve\[etcd\]"):
        asyncio.run(EtcdRegistry.open(parse("etcd://127.0.0.1:9")))

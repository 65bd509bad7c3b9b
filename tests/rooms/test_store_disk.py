"""A segment on disk: whole objects come back, incomplete ones do not; the tiers work together."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from moonserve.core.errors import ConfigError
from moonserve.core.store.words import Gone, Held, PutOptions, Terms
from moonserve.core.units import LeaseId, SegmentId
from moonserve.live.store import disk
from moonserve.live.store.client import StoreClient
from moonserve.live.store.disk import open_disk
from moonserve.live.store.objects import Objects
from moonserve.live.store.settings import StoreSettings
from moonserve.live.transfer.client import Transfer
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer
from tests.support.pools import ROOM, Pool, blocks, key, read_all

SIZE = 5000
CAPACITY = 1 << 20


def held(number: int, memory: memoryview, id: int | None = None) -> Held:
    """Object `number` as written by put `id` (its number), at its own place."""
    checksum = xxhash.xxh3_64_intdigest(memory)
    id = number if id is None else id
    return Held(key(number), SIZE, checksum, 7, id, number * 8192, None, PutOptions())


def write(folder: Path, *numbers: int) -> list[Held]:
    """Own the folder, write these objects, and release it."""
    region, journal = open_disk(folder, CAPACITY)
    made = []
    for number in numbers:
        memory = region.view[number * 8192 : number * 8192 + SIZE]
        memory[:] = os.urandom(SIZE)
        made.append(held(number, memory))
    journal.flush(made)
    journal.write(made)
    journal.close()
    region.close()
    return made


def kept(folder: Path, capacity: int = CAPACITY) -> list[Held]:
    """The objects that an owner finds when it starts."""
    region, journal = open_disk(folder, capacity)
    found = sorted(journal.held.values(), key=lambda it: it.key)
    journal.close()
    region.close()
    return found


def test_what_is_whole_is_kept(tmp_path: Path) -> None:
    """All objects come back as they were, also after the second start, except removed ones."""
    made = write(tmp_path, 1, 2, 3)
    assert kept(tmp_path) == made
    region, journal = open_disk(tmp_path, CAPACITY)
    journal.write([Gone(key(2), 2), Gone(key(3), 2)])
    journal.close()
    region.close()
    assert kept(tmp_path) == [made[0], made[2]]


def test_what_was_written_over_is_not_kept(tmp_path: Path) -> None:
    """One flipped bit in an object, or an extent beyond a smaller disk: that object is gone."""
    made = write(tmp_path, 1, 2, 30)
    with (tmp_path / "data").open("r+b") as file:
        file.seek(4096 + 8192 + 17)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert kept(tmp_path) == made[1:]
    assert kept(tmp_path, 100_000) == [made[1]]


@pytest.mark.parametrize("cut", [1, 5, 20, 60])
def test_an_incomplete_journal_ends_before_its_incomplete_record(tmp_path: Path, cut: int) -> None:
    """A record that is half written or changed, and all after it, do not count."""
    made = write(tmp_path, 1, 2, 3)
    path = tmp_path / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert kept(tmp_path) == made[:2]
    path.write_bytes(whole[: -cut - 1] + bytes([whole[-cut - 1] ^ 1]) + whole[len(whole) - cut :])
    assert kept(tmp_path) == made[:2]
    path.write_bytes(b"something else")
    assert kept(tmp_path) == []


def test_the_journal_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rewritten once it is far larger than its objects need."""
    monkeypatch.setattr(disk, "_ROOM_TO_GROW", 1000)
    (made,) = write(tmp_path, 1)
    region, journal = open_disk(tmp_path, CAPACITY)
    for id in range(2, 500):
        journal.write([_again(made, id)])
        assert (tmp_path / "journal").stat().st_size < 3000
    journal.close()
    region.close()
    assert [it.id for it in kept(tmp_path)] == [499]


def test_a_long_record_ends_no_journal(tmp_path: Path) -> None:
    """An object whose tenant has a long name is kept, and so is a later record."""
    made = write(tmp_path, 1, 2, 3)
    long = msgspec.structs.replace(made[1], id=9, options=PutOptions(tenant="t" * 5000))
    region, journal = open_disk(tmp_path, CAPACITY)
    journal.write([long, Gone(key(1), 1)])
    journal.close()
    region.close()
    assert kept(tmp_path) == [long, made[2]]


def test_bytes_are_synced_once_a_batch_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call that lets go of the interpreter's lock (mmap.flush does not); so is a journal
    that is written anew at the start, before it takes the old one's place."""
    synced: list[str] = []
    sync, data_sync = os.fsync, os.fdatasync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(_file(fd)), sync(fd)))
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(_file(fd)), data_sync(fd)))
    write(tmp_path, 1, 2, 3)
    assert synced == ["journal.new", "data"]


def _file(fd: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{fd}")).name


def _again(it: Held, id: int) -> Held:
    return Held(it.key, it.size, it.checksum, it.version, id, it.offset, None, it.options)


def test_a_folder_has_one_owner_and_errors_name_the_setting(tmp_path: Path) -> None:
    """A second owner is refused; so is an impossible folder, and more bytes than the disk has."""
    region, journal = open_disk(tmp_path, CAPACITY)
    with pytest.raises(ConfigError, match=r"disk_dir: .* belongs to a process that runs"):
        open_disk(tmp_path, CAPACITY)
    journal.close()
    region.close()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").write_text("results of a year")
    with pytest.raises(ConfigError, match=r"disk_dir: .*theirs: its file data is another"):
        open_disk(tmp_path / "theirs", CAPACITY)
    assert (tmp_path / "theirs" / "data").read_text() == "results of a year"
    assert os.listdir(tmp_path / "theirs") == ["data"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_dir: .*file: File exists; choose a folder that"):
        open_disk(tmp_path / "file", CAPACITY)
    with pytest.raises(ConfigError, match=r"disk_bytes: .* no room for .*: the disk has \d+ free"):
        open_disk(tmp_path / "huge", 1 << 55)


def test_only_this_user_reads_the_folder_and_its_files(tmp_path: Path) -> None:
    """What is made has no rights for others, and an old journal loses those that it has."""
    folder = tmp_path / "p0"
    write(folder, 1)
    (folder / "journal").chmod(0o644)
    assert len(kept(folder)) == 1
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "data": 0o600,
        "journal": 0o600,
        "lock": 0o600,
    }
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["data", "lock", "journal.new"])
def test_a_link_in_the_folder_leads_nowhere(tmp_path: Path, name: str) -> None:
    """A file elsewhere is not written by a link that another user has put into the folder."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "p0"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    if name == "journal.new":
        assert kept(folder) == []
    else:
        with pytest.raises(ConfigError, match="choose a folder that can be written"):
            open_disk(folder, CAPACITY)
    assert victim.read_text() == "precious"


def test_what_is_refused_leaves_nothing_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new folder and no new file stays; old contents stay, also if a smaller file cannot be
    mapped, or the journal not written."""
    made = write(tmp_path / "old", 1, 30)
    with pytest.raises(ConfigError, match="disk_bytes"):
        open_disk(tmp_path / "old", 1 << 55)
    with pytest.raises(ConfigError, match="disk_bytes"):
        open_disk(tmp_path / "deep" / "er", 1 << 55)
    with monkeypatch.context() as patch:
        patch.setattr(disk.mmap, "mmap", _full)
        with pytest.raises(ConfigError, match="disk_bytes"):
            open_disk(tmp_path / "old", 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(disk.DiskJournal, "_append", _full)
        for name in ("old", "new"):
            with pytest.raises(ConfigError, match=r"disk_dir: .*No space left"):
                open_disk(tmp_path / name, CAPACITY)
    assert os.listdir(tmp_path) == ["old"]
    assert kept(tmp_path / "old") == made


def test_a_member_that_cannot_own_its_disk_leaves_nothing_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second segment's server cannot listen, the first one's ends, and both free their
    memory."""
    made: list[TransferServer] = []

    class Scarce(TransferServer):
        def __init__(self, *args: Any, **more: Any) -> None:
            if made:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(*args, **more)
            made.append(self)

    async def nobody(op: str, body: bytes, end_s: float) -> bytes:
        raise AssertionError

    monkeypatch.setattr("moonserve.live.store.owner.TransferServer", Scarce)
    name = SegmentId("a")
    settings = StoreSettings(
        segment=name, epoch=1, capacity_bytes=CAPACITY, token=b"", disk_dir=tmp_path,
        disk_bytes=CAPACITY,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="Too many open files"):
        asyncio.run(StoreClient.open(nobody, settings))
    assert not made[0]._region.path.exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", made[0].port))
    assert kept(tmp_path) == []


def test_a_member_whose_memory_mooncake_does_not_take_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is Mooncake's, and region and listener are gone."""
    refused: list[Region] = []

    def refuse(transfer: Transfer, region: Region) -> None:
        refused.append(region)
        raise ConfigError("not so much", "transport")

    async def nobody(op: str, body: bytes, end_s: float) -> bytes:
        raise AssertionError

    monkeypatch.setattr(Transfer, "offer", refuse)
    before = set(threading.enumerate())
    settings = StoreSettings(segment=SegmentId("a"), epoch=1, capacity_bytes=CAPACITY, token=b"")
    with pytest.raises(ConfigError, match="not so much"):
        asyncio.run(StoreClient.open(nobody, settings))
    assert not refused[0].path.exists()
    assert set(threading.enumerate()) <= before


def _full(*args: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_busy_disk_delays_no_write_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes and rewrites the journal."""
    made = write(tmp_path, 1, 2)
    region, journal = open_disk(tmp_path, CAPACITY)
    monkeypatch.setattr(journal, "_limit", 0)
    gate, synced = threading.Event(), threading.Event()
    sync = os.fsync

    def slow(fd: int) -> None:
        gate.wait(5)
        synced.set()
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    journal.write([Gone(key(1), 1)])
    journal.write([Gone(key(2), 1)])
    assert not synced.is_set()
    gate.set()
    journal.close()
    journal.write([Gone(key(2), 2)])
    region.close()
    assert kept(tmp_path) == made[1:]


@pytest.mark.parametrize("room_again", [True, False])
def test_a_full_disk_brings_back_nothing_that_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_again: bool
) -> None:
    """A failed write deletes the journal; once there is room again, it has all objects."""
    made = write(tmp_path, 1, 2, 3)
    region, journal = open_disk(tmp_path, CAPACITY)
    with monkeypatch.context() as patch:
        patch.setattr(disk.DiskJournal, "_append", _full)
        journal.write([Gone(key(1), 1)])
        if not room_again:
            journal.close()
        journal._writer.shutdown()
    if room_again:
        journal._writer = ThreadPoolExecutor(1)
        journal.write([Gone(key(2), 2)])
        journal.close()
    region.close()
    assert kept(tmp_path) == (made[2:] if room_again else [])


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_memory_spills_to_disk_and_comes_back(kind: str, tmp_path: Path) -> None:
    """More than memory holds is read whole, from disk and then from memory; the disk survives its
    owner."""

    async def test() -> None:
        pool = Pool(kind, Terms(segment_ttl_us=40_000, high=0.5, low=0.3))
        settings = {"disk_dir": tmp_path, "disk_bytes": 4 * ROOM}
        owner = await pool.client("a", **settings)
        reader = await pool.client("r", room=4096)
        owner.start_beats()
        items = blocks(*[60_000] * 32)
        names = [name for name, _ in items]
        for number, item in enumerate(items):
            parent = names[number - 1] if number else None
            assert await owner.put([item], None, parent) == 1
            await settle(pool)
        stats = {it.id: it for it in pool.service.master.stats().segments}
        assert stats[SegmentId("a-disk")].node == stats[SegmentId("a")].node == "a"
        assert stats[SegmentId("a-disk")].objects > 10
        contents = [bytes(memory) for _, memory in items]
        assert await read_all(reader, names) == contents
        assert await read_all(owner, names[-1:]) == contents[-1:]
        gone = next(iter(owner.owners[1].catalogue.held))
        assert [it.outcome for it in await reader.remove([gone], force=True)] == ["removed"]
        await owner.close()
        again = await pool.client("a", **settings)
        again.start_beats()
        on_disk = {it.key for it in again.owners[1].catalogue.held.values()}
        assert len(on_disk) > 10
        assert gone not in on_disk
        got = await Objects(reader).get(names)
        assert [memory is not None for memory in got] == [name in on_disk for name in names]
        assert all(memory in (None, content) for memory, content in zip(got, contents, strict=True))
        (some, *_) = on_disk
        assert await again.get([some], LeaseId("x")) != [None]
        await settle(pool)
        found = pool.service.master.locate(some)
        assert found is not None
        assert found.replicas[0].segment == "a"
        await again.close()
        await reader.close()

    asyncio.run(asyncio.wait_for(test(), 40))


def test_evicting_a_segment_with_a_disk_loses_nothing(tmp_path: Path) -> None:
    """More objects than are copied at once go to disk, and are read from there."""

    async def test() -> None:
        pool = Pool("shm", Terms(segment_ttl_us=40_000))
        owner = await pool.client("a", disk_dir=tmp_path, disk_bytes=CAPACITY)
        owner.start_beats()
        items = blocks(*[1000] * 200)
        assert await owner.put(items, None) == 200
        async with asyncio.timeout(10):
            assert await owner.evict(SegmentId("a"), 200 * 1024) == 200 * 1024
        await settle(pool)
        memory, on_disk = pool.service.master.stats().segments
        assert (memory.objects, on_disk.objects) == (0, 200)
        assert await read_all(owner, [name for name, _ in items]) == [bytes(m) for _, m in items]
        await owner.close()

    asyncio.run(asyncio.wait_for(test(), 20))


async def settle(pool: Pool) -> None:
    """Wait until no copy is to be made."""
    pool.service.reap()
    async with asyncio.timeout(5):
        while pool.service.master.stats().pending_copies:
            await asyncio.sleep(0.005)


def test_what_was_removed_before_its_put_was_answered_does_not_come_back(tmp_path: Path) -> None:
    """The owner learns first of the removal: then its journal must not have the object either."""

    async def body() -> None:
        pool = Pool("shm")
        client = await pool.client("a", disk_dir=tmp_path, disk_bytes=CAPACITY)
        owner, handle = client.owners[1], pool.service.handle

        async def rpc(op: str, call: bytes, end_s: float) -> bytes:
            reply = handle(op, call)
            if op == "put_end":
                pool.service.master.remove(0, [key(1)], True)
                await owner.catch_up()
            return reply

        client.link.rpc = rpc
        options = PutOptions(preferred=owner.mounting.id)
        await client.write([(key(1), memoryview(bytes(SIZE)))], None, None, options)
        await client.close()

    asyncio.run(asyncio.wait_for(body(), 20))
    assert kept(tmp_path) == []

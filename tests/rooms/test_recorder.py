"""Recordings: rows on disk that the simulator reads, bounded, and never in a request's way."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.cli.client import Client
from moonserve.core.errors import BadRequest, ConfigError
from moonserve.core.request import Request
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import DecodeEnded, Joined, PrefillEnded
from moonserve.core.schedule.record import Measured
from moonserve.core.schedule.recorded import CLUSTER_FILE, RecordedCluster, RecordedInstance
from moonserve.core.units import BlockKey, Bytes, RequestId
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.health import Health
from moonserve.live.record import recorder as module
from moonserve.live.record.files import RecordingFiles
from moonserve.live.record.recorder import Recorder
from moonserve.sim.trace import read_trace
from tests.support.cluster import exact, info

SIZE = info("p0", "prefill").namespace.block_size
Serve = Callable[[str, int], None]


def run(folder: Path | str, test: Callable[[Recorder, Serve], Any]) -> Health:
    """Run a test with a recorder at a Conductor of two instances; the recorder is stopped at the
    end."""
    health = Health()

    async def main() -> None:
        async with asyncio.timeout(20):
            loop = ConductorLoop(Conductor(cost_of=exact), lambda lease: None)
            loop.core.step(0, [Joined(info("p0", "prefill")), Joined(info("d0", "decode"))])
            recorder = Recorder(loop, health, str(folder), 1 << 20)
            await recorder.prepare()

            def serve(name: str, blocks: int) -> None:
                keys = [BlockKey(f"k{n}".encode()) for n in range(blocks)]
                who = RequestId(name)
                loop.open(Request(who, "m", blocks * SIZE + 1), keys, asyncio.Queue())
                loop.settle()
                loop.tell(PrefillEnded(who, 1, final=False))
                loop.settle()
                loop.tell(DecodeEnded(who, 2, 5))
                loop.settle()
                loop.close(who, "length", Measured(tokens=5))

            try:
                await test(recorder, serve)
            finally:
                await recorder.stop()
                loop.stop()

    asyncio.run(main())
    return health


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows, in the order of the files."""
    files = sorted(folder.glob("*.jsonl.gz"))
    lines = b"".join(gzip.decompress(file.read_bytes()) for file in files)
    return [json.loads(line) for line in lines.splitlines()]


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    """The simulator reads the folder or its file; equal prefixes are equal blocks."""

    async def test(recorder: Recorder, serve: Serve) -> None:
        serve("a", 50)
        serve("b", 48)

    run(tmp_path / "new" / "folder", test)
    folder = tmp_path / "new" / "folder"
    [a, b] = rows_of(folder)
    assert (a["request"], a["outcome"], a["prefill"], a["decode"]) == ("a", "length", "p0", "d0")
    assert a["stages"]["total_ms"] >= 0
    assert a["candidates"][0]["instance"] == "p0"
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    cluster, file = sorted(folder.iterdir())
    assert cluster.name == CLUSTER_FILE
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    for path in (folder, file):
        trace = read_trace(path)
        assert trace.block_size == b["block_size"] >= 32
        first, second = trace.rows
        assert (first.at_us, first.input_tokens, first.output_tokens) == (0, 50 * SIZE + 1, 5)
        shared = 48 * SIZE // trace.block_size
        assert first.blocks[:shared] == second.blocks[:shared]
        assert not set(first.blocks[shared:]) & set(second.blocks[shared:])


def test_the_cluster_that_served_is_recorded_beside_the_rows(tmp_path: Path) -> None:
    """It has the sizes of the instances, and no addresses."""

    async def test(recorder: Recorder, serve: Serve) -> None:
        serve("a", 2)

    run(tmp_path, test)
    text = (tmp_path / CLUSTER_FILE).read_bytes()
    found = msgspec.json.decode(text, type=RecordedCluster)
    joined = [info("d0", "decode"), info("p0", "prefill")]
    assert found.instances == [RecordedInstance.of(it) for it in joined]
    assert found.instances[0].block_size == SIZE
    assert b"http" not in text


def test_rows_are_in_order_of_arrival_when_read(tmp_path: Path) -> None:
    """They are written in the order in which requests ended."""
    row = {"input_length": 3, "output_length": 1, "hash_ids": [1], "block_size": 8}
    lines = [json.dumps(row | {"timestamp": at}) for at in (5_000, 4_000, 4_500)]
    (tmp_path / "requests-1.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    trace = read_trace(tmp_path)
    assert ([it.at_us for it in trace.rows], trace.block_size) == ([0, 500_000, 1_000_000], 8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no recording"),
        (b"no gzip", "is damaged"),
        (gzip.compress(b"{}" * 50, mtime=0)[:-9], "is damaged"),
    ],
)
def test_a_bad_recording_is_an_error_that_names_it(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    """No traceback, and no row of it is taken for a trace."""
    if content is not None:
        (tmp_path / "requests-1.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_trace(tmp_path)


def test_recordings_of_different_block_sizes_are_not_mixed(tmp_path: Path) -> None:
    """The error names the field and the remedy."""
    row = {"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [1]}
    lines = [json.dumps(row | {"block_size": size}) for size in (8, 16)]
    (tmp_path / "requests-1.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    with pytest.raises(ConfigError, match="another folder") as caught:
        read_trace(tmp_path)
    assert "block_size" in str(caught.value)


def test_a_fault_names_the_file_of_the_folder(tmp_path: Path) -> None:
    """Lines count through all files, and the error says which one it is."""
    row = {"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [1]}
    for name, rows in (("1", [row, row]), ("2", [row, {"timestamp": 1}])):
        text = "\n".join(map(json.dumps, rows)) + "\n"
        (tmp_path / f"requests-{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ConfigError, match=r"requests-2.jsonl.gz:2: input_length"):
        read_trace(tmp_path)
    done = CliRunner().invoke(cli, ["trace", "validate", str(tmp_path)])
    assert "requests-2.jsonl.gz:2: input_length" in done.stdout


def test_an_outage_leaves_the_block_size_as_it_was(tmp_path: Path) -> None:
    """What is recorded while no instance is there can be read with the rest. What came before any
    instance had joined is not recorded."""

    async def test(recorder: Recorder, serve: Serve) -> None:
        loop = recorder._conductor
        joined, there = loop.instances(), False
        loop.instances = lambda: joined if there else []  # type: ignore[method-assign]
        serve("early", 3)
        there = True
        serve("a", 3)
        there = False
        serve("late", 3)
        assert (await status(recorder))["dropped"] == 1

    run(tmp_path, test)
    a, late = rows_of(tmp_path)
    assert (a["request"], late["request"]) == ("a", "late")
    assert a["block_size"] == late["block_size"]
    assert len(read_trace(tmp_path).rows) == 2


def test_a_block_size_that_contradicts_the_rows_is_an_error(tmp_path: Path) -> None:
    """It would be ignored else."""

    async def test(recorder: Recorder, serve: Serve) -> None:
        serve("a", 1)

    run(tmp_path, test)
    with pytest.raises(ConfigError, match="leave --block-size out"):
        read_trace(tmp_path, block_size=99)


def test_a_file_that_somebody_has_deleted_is_begun_anew(tmp_path: Path) -> None:
    """Another process went over its bound, or an operator removed the folder."""
    files = RecordingFiles(tmp_path / "r", 1 << 20)
    files.append(b"1\n")
    shutil.rmtree(tmp_path / "r")
    files.append(b"2\n")
    files.append(b"3\n")
    [file] = (tmp_path / "r").iterdir()
    assert gzip.decompress(file.read_bytes()) == b"2\n3\n"


def test_what_is_stopped_records_nothing_until_it_is_started(tmp_path: Path) -> None:
    """The status says so; rows that wait are still written."""
    said: list[Any] = []

    async def test(recorder: Recorder, serve: Serve) -> None:
        serve("a", 1)
        said.append(await status(recorder, "DELETE"))
        serve("b", 1)
        said.append(await status(recorder, "POST"))
        serve("c", 1)

    run(tmp_path, test)
    assert [it["recording"] for it in said] == [False, True]
    assert [row["request"] for row in rows_of(tmp_path)] == ["a", "c"]


async def status(recorder: Recorder, method: str = "GET") -> dict[str, Any]:
    """What the API answers."""
    reply: Any = await recorder.routes()[method, module.PATH](None)  # type: ignore[arg-type]
    said: dict[str, Any] = json.loads(reply.body)
    return said


def test_without_a_folder_nothing_can_be_started() -> None:
    """The error names the flag."""

    async def test(recorder: Recorder, serve: Serve) -> None:
        serve("a", 1)
        assert not (await status(recorder))["recording"]
        with pytest.raises(BadRequest, match="--record FOLDER"):
            await status(recorder, "POST")

    run("", test)


def test_a_folder_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    """The error names the setting, the folder and the reason."""
    file = tmp_path / "file"
    file.touch()

    async def test(recorder: Recorder, serve: Serve) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match="cannot be written there"):
        run(file / "below", test)


def test_a_full_disk_is_an_alarm_and_loses_only_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted. What was written before can be read, and later rows are written again."""
    files = RecordingFiles(tmp_path, 1 << 20)
    files.append(b"before\n")
    real = os.write

    def half(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", full)
        return real(fd, data[: len(data) // 2])

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):  # the second time in a file of its own, which goes
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            files.append(b"lost\n")
    monkeypatch.setattr(os, "write", real)
    files.append(b"after\n")
    texts = [gzip.decompress(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert texts == [b"before\n", b"after\n"]

    async def test(recorder: Recorder, serve: Serve) -> None:
        monkeypatch.setattr(os, "write", full)
        serve("a", 1)
        while not (await status(recorder))["dropped"]:
            await asyncio.sleep(0.01)
        assert (await status(recorder))["failure"] == "No space left on device"
        monkeypatch.setattr(os, "write", real)

    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    health = run(tmp_path / "of-it", test)
    assert health.alarms() == ["requests are not recorded: No space left on device"]


def test_a_queue_that_is_full_drops_rows_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits for the disk."""
    monkeypatch.setattr(module, "_MOST_WAITING", 2)

    async def test(recorder: Recorder, serve: Serve) -> None:
        for name in "abcd":
            serve(name, 1)
        assert (await status(recorder))["dropped"] == 2

    run(tmp_path, test)
    assert [row["request"] for row in rows_of(tmp_path)] == ["a", "b"]


def test_the_oldest_files_go_and_no_others(tmp_path: Path) -> None:
    """The folder stays within its bound; a file has at most an eighth of it."""
    bound: Bytes = 1 << 20
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / "requests-20200101T000000Z-1-0000.jsonl.gz").write_bytes(bytes(bound // 4))
    files = RecordingFiles(tmp_path, bound)
    for _ in range(40):
        files.append(os.urandom(50_000) + b"\n")
    files.close()
    recordings = sorted(tmp_path.glob("requests-*"))
    assert "20200101" not in recordings[0].name
    sizes = [path.stat().st_size for path in recordings]
    assert max(sizes) <= bound // 8
    assert bound // 2 < sum(sizes) <= bound
    assert files.written_bytes > 40 * 50_000
    assert (tmp_path / "mine.txt").exists()


def test_the_commands_show_and_change_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line for people says where, one how much; failures are said too."""
    said = {"recording": True, "folder": "/r", "file": None, "rows": 1_200, "dropped": 3}
    said |= {"bytes": 2_500_000, "failure": "No space left on device"}
    calls: list[tuple[str, str]] = []

    def send(self: Client, method: str, path: str, shape: Any) -> Any:
        calls.append((method, path))
        return msgspec.convert(said, shape)

    monkeypatch.setattr(Client, "send", send)
    done = [CliRunner().invoke(cli, ["record", verb]) for verb in ("status", "start", "stop")]
    assert calls == [(method, module.PATH) for method in ("GET", "POST", "DELETE")]
    assert done[0].stdout.splitlines() == [
        "recording to /r",
        "1,200 requests, 2.5 MB since the start; 3 dropped",
        "rows cannot be written now: No space left on device",
    ]
    said["folder"] = ""
    assert "--record FOLDER" in CliRunner().invoke(cli, ["record", "status"]).stdout


def test_a_recording_can_be_drawn(tmp_path: Path) -> None:
    """One bar for each stage; a file that is no recording is an error that names its line."""

    async def test(recorder: Recorder, serve: Serve) -> None:
        serve("a", 1)
        serve("b", 1)

    run(tmp_path, test)
    drawn = tmp_path / "drawn.json"
    argv = ["trace", "perfetto", str(tmp_path), "-o", str(drawn)]
    assert CliRunner().invoke(cli, [*argv, "-n", "1"]).exit_code == 0
    names = [it["name"] for it in json.loads(drawn.read_bytes())["traceEvents"]]
    assert [name for name in names if name.startswith("b: ")]
    assert not [name for name in names if name.startswith("a: ")]
    other = tmp_path / "trace.jsonl"
    other.write_text('{"timestamp": 0}\n')
    done = CliRunner().invoke(cli, ["trace", "perfetto", str(other), "-o", str(drawn)])
    assert done.exit_code == 2
    assert "trace.jsonl:1: is no row that --record" in done.stderr

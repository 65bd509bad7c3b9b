"""Traces of other systems become ours: in order, from the first request on, or an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli
from moonserve.sim.trace import read_trace


def dynamo(at_ms: int, blocks: list[int], output: int = 16, **replay: Any) -> dict[str, Any]:
    """A row as Dynamo documents it."""
    shape = {"trace_block_size": 64, "input_length": 64 * len(blocks)} | replay
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at_ms + 1_000,
        "request": {
            "request_id": "r",
            "request_received_ms": at_ms,
            "output_tokens": output,
            "replay": shape | {"input_sequence_hashes": blocks},
        },
    }


def bailian(at_s: float, length: int, blocks: list[int]) -> dict[str, Any]:
    """A row as Alibaba documents it."""
    row: dict[str, Any] = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
    row |= {"timestamp": at_s, "input_length": length, "output_length": 7}
    return row | {"hash_ids": blocks}


def file_of(path: Path, *rows: dict[str, Any]) -> str:
    """Write rows, compressed where the name says so."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def convert(*argv: str) -> Result:
    """Run `moonserve trace convert`."""
    return CliRunner().invoke(cli, ["trace", "convert", *argv])


def test_shards_of_dynamo_become_one_trace(tmp_path: Path) -> None:
    """Rows are written when requests end. What is no request, or has no output, is left out."""
    large = (1 << 64) - 1
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}
    first = file_of(tmp_path / "a.000000.jsonl.gz", dynamo(2_000, [large, 2]), tool)
    wrapped = {"timestamp": 5, "event": dynamo(1_500, [large])}
    second = file_of(tmp_path / "b.jsonl", wrapped, dynamo(3_000, [9], output=0))
    out = tmp_path / "out.jsonl"
    done = convert("--from", "dynamo", first, second, "-o", str(out))
    assert done.exit_code == 0, done.output
    assert done.stderr == "2 requests, blocks of 64 tokens; 2 other rows left out\n"
    trace = read_trace(out)
    assert trace.block_size == 64
    assert [(row.at_us, row.input_tokens, row.output_tokens, row.blocks) for row in trace.rows] == [
        (0, 64, 16, (large,)),
        (500_000, 128, 16, (large, 2)),
    ]


def test_a_trace_of_alibaba(tmp_path: Path) -> None:
    """Its times are seconds, its blocks have 16 tokens, the last one may be partial."""
    path = file_of(tmp_path / "a.jsonl", bailian(1.25, 20, [5, 6]), bailian(2.0, 32, [5, 7]))
    out = tmp_path / "out.jsonl"
    assert convert("--from", "bailian", path, "-o", str(out)).exit_code == 0
    trace = read_trace(out)
    assert trace.block_size == 16
    assert [(row.at_us, row.blocks) for row in trace.rows] == [(0, (5, 6)), (750_000, (5, 7))]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (dynamo(1, [1, 1]), ":2: input_sequence_hashes: an id comes twice"),
        (dynamo(1, [1, 2], input_length=64), ":2: input_sequence_hashes: 2 blocks for 64 input"),
        (dynamo(1, [1], output=-1), ":2: output_tokens: -1 must be between"),
        (dynamo(1, [1], trace_block_size=32), ":2: block size: is 32, and 64 before"),
        (dynamo(1, [1]) | {"request": {}}, ":2: is no row of this form"),
    ],
)
def test_a_bad_row_is_an_error_that_names_it(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The file, the line, the field in the file's own words; no traceback, nothing written."""
    path = file_of(tmp_path / "a.jsonl", dynamo(1, [3]), row)
    out = tmp_path / "out.jsonl"
    done = convert("--from", "dynamo", path, "-o", str(out))
    assert done.exit_code == 2
    assert said in done.stderr
    assert not out.exists() or not out.read_text()


def test_files_without_a_request(tmp_path: Path) -> None:
    """The other form of trace, an empty file, and a missing one."""
    other = file_of(tmp_path / "a.jsonl", bailian(1.0, 16, [1]))
    empty = file_of(tmp_path / "b.jsonl")
    for path, said in (
        (other, "no request of the form dynamo is there"),
        (empty, "no request of the form dynamo is there"),
        (str(tmp_path / "c.jsonl"), "cannot be read: No such file"),
    ):
        done = convert("--from", "dynamo", path)
        assert (done.exit_code, said in done.stderr) == (2, True), done.output

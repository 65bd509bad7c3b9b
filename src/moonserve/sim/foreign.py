"""Traces that other systems have recorded, read as ours: NVIDIA Dynamo's and Alibaba's.

`moonserve trace convert` calls it. The rows go through the checks of sim.trace, so what is written
can be read. Nothing is repaired: an error names the file, line and field of a bad row. Rows of
another kind than a request are left out, and so are requests without a token of output.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.core.units import MICROS_PER_SECOND, Tokens
from moonserve.sim.trace import (
    Fault,
    Row,
    Trace,
    TraceFormat,
    by_arrival,
    checked,
    lines_of,
)

Foreign: TypeAlias = Literal["dynamo", "bailian"]
"""dynamo: rows of `dynamo.request.trace.v1`. bailian: Alibaba's qwen-bailian-usagetraces-anon."""

T = TypeVar("T")

_SCHEMA = "dynamo.request.trace.v1"
_REQUEST_END = "request_end"
_BAILIAN_BLOCK: Tokens = 16


class _Replay(msgspec.Struct):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: tuple[int, ...]


class _DynamoRequest(msgspec.Struct):
    request_received_ms: int | float
    output_tokens: int
    replay: _Replay


class _DynamoRow(msgspec.Struct):
    """What is read of a row of Dynamo. Some sinks wrap it in `event`."""

    schema: str = ""
    event_type: str = ""
    request: msgspec.Raw = msgspec.Raw(b"null")
    event: _DynamoRow | None = None


class _BailianRow(msgspec.Struct):
    timestamp: int | float
    """In seconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class Converted(msgspec.Struct, frozen=True):
    """A trace, and how many rows were left out."""

    trace: Trace
    left_out: int


_DYNAMO = TraceFormat(
    "request_received_ms", "input_length", "output_tokens", "input_sequence_hashes"
)
_BAILIAN = TraceFormat("timestamp", "input_length", "output_length", "hash_ids")

_One: TypeAlias = tuple[Tokens, Row]
"""The block size of a row, and the row."""


def read_foreign(paths: Sequence[Path], form: Foreign) -> Converted:
    """Read all rows of some files, in order of arrival, with times from the first one on.

    Raises ConfigError: it names the file, line and field of the first fault.
    """
    read, names = (_dynamo, _DYNAMO) if form == "dynamo" else (_bailian, _BAILIAN)
    rows: list[Row] = []
    block_size: Tokens = 0
    left_out = 0
    for path in paths:
        for line, text in enumerate(lines_of(path), 1):
            if not text.strip():
                continue
            place = f"{path}:{line}"
            found = read(text, place)
            if found is None or not found[1].output_tokens:
                left_out += 1
                continue
            size, row = found
            block_size = block_size or size
            if size != block_size:
                what = f"is {size}, and {block_size} before; convert such files apart"
                raise ConfigError(what, f"{place}: block size")
            _check(row, names, size, place)
            rows.append(row)
    if not rows:
        raise ConfigError(f"no request of the form {form} is there", str(paths[0]))
    ordered = [row for _, row in by_arrival(enumerate(rows, 1)) if isinstance(row, Row)]
    return Converted(Trace(paths[0].stem, block_size, ordered), left_out)


def _check(row: Row, names: TraceFormat, size: Tokens, place: str) -> None:
    """Raise ConfigError if the row breaks a rule."""
    for found in checked([(1, row)], names, size):
        if isinstance(found, Fault):
            raise ConfigError(found.message, f"{place}: {found.field}")


def _dynamo(text: str, place: str) -> _One | None:
    """None: the row is not about a request, or has nothing to replay."""
    row = _decoded(text, _DynamoRow, place)
    if row.event is not None:
        row = row.event
    if row.schema != _SCHEMA or row.event_type != _REQUEST_END:
        return None
    request = _decoded(row.request, _DynamoRequest, place)
    replay = request.replay
    at_us = round(request.request_received_ms * 1_000)
    blocks = replay.input_sequence_hashes
    return replay.trace_block_size, Row(at_us, replay.input_length, request.output_tokens, blocks)


def _bailian(text: str, place: str) -> _One | None:
    row = _decoded(text, _BailianRow, place)
    at_us = round(row.timestamp * MICROS_PER_SECOND)
    return _BAILIAN_BLOCK, Row(at_us, row.input_length, row.output_length, row.hash_ids)


def _decoded(text: str | msgspec.Raw, shape: type[T], place: str) -> T:
    try:
        return msgspec.json.decode(text, type=shape)
    except UNREADABLE as error:
        raise ConfigError(f"is no row of this form: {error}", place) from None

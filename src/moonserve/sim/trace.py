"""Traces: what arrived when, how long it was, and which KV blocks it shares with others.

The simulator, the replayer and `moonserve trace` use it. It reads Mooncake's JSONL, Azure's LLM
CSV, a simple CSV, and recordings of a gateway: a folder, or one of its files. Reading and
validating share one checker, so a file that validates can be read. Nothing is repaired or reordered
silently: an error names the file, line and field of a bad row.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, count, islice
from pathlib import Path
from typing import TextIO

import msgspec

from moonserve.core.errors import UNREADABLE, ConfigError
from moonserve.core.schedule.recorded import RecordedRequest
from moonserve.core.units import Micros, Tokens

BLOCK_SIZE: Tokens = 512
"""Tokens of one block in the public traces."""
MOST_TOKENS: Tokens = 1 << 24  # longer than any context; bounds the blocks made for one row
_RECORDED = ".jsonl.gz"
_LAST_ID = (1 << 64) - 1  # keys of blocks are made of 8 bytes
_MOST_PRIORITY = 100
_EMPTY = "no requests in this file"
_TOO_LATE_MS = 10**15  # 30,000 years, so no time in ms, even where it counts from 1970
_TOO_LATE_US = _TOO_LATE_MS * 1000


class Row(msgspec.Struct, frozen=True, gc=False):
    """One request. `blocks` names every block of its input, the last, partial one included.

    Equal ids mean the same tokens after the same prefix, so no id comes twice in a row. An id is
    from 0 to 2^64 - 1. For n blocks, block_size * (n - 1) < input_tokens <= block_size * n. Both
    lengths are >= 1. priority, from -100 to 100, and tenant are as in core.request; only JSONL has
    them.
    """

    at_us: Micros
    input_tokens: Tokens
    output_tokens: Tokens
    blocks: tuple[int, ...]
    priority: int = 0
    tenant: str = ""


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival; equal times keep the file's order."""

    name: str
    block_size: Tokens
    rows: list[Row]


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with one field of one line (counted from 1), and what to do."""

    line: int
    field: str
    message: str


def read_trace(
    path: Path,
    limit: int | None = None,
    block_size: Tokens = BLOCK_SIZE,
    lines: Iterable[str] | None = None,
) -> Trace:
    """Read the first `limit` rows of a trace file or recording, or all.

    block_size: if the rows do not say it. lines: what lines_of has read of it; None: it is read
    now. ConfigError names the file, line and field of the first
    fault, unsorted rows included.
    """
    rows: list[Row] = []
    most = None if limit is None else min(limit, sys.maxsize)
    size, found = _read(path, block_size, lines_of(path) if lines is None else lines)
    for row in islice(found, most):
        if isinstance(row, Fault):
            raise ConfigError(row.message, f"{place_of(path, row.line)}: {row.field}")
        rows.append(row)
    if not rows:
        raise ConfigError(_EMPTY, str(path))
    return Trace(path.stem, size, rows)


def validate(path: Path, at_most: int, block_size: Tokens = BLOCK_SIZE) -> tuple[int, list[Fault]]:
    """Check a whole file: the number of good rows, and the first `at_most` faults."""
    good = 0
    faults: list[Fault] = []
    for row in _read(path, block_size, lines_of(path))[1]:
        if isinstance(row, Row):
            good += 1
        else:
            faults.append(row)
            if len(faults) == at_most:
                break
    if not good and not faults:
        faults.append(Fault(1, "file", _EMPTY))
    return good, faults


def write_trace(trace: Trace, out: TextIO) -> None:
    """Write Mooncake's JSONL: times in ms, whole where they are whole.

    Rows say the block size where it is not that of the public traces.
    """
    size = 0 if trace.block_size == BLOCK_SIZE else trace.block_size
    for row in trace.rows:
        ms, rest = divmod(row.at_us, 1000)
        at_ms = ms if rest == 0 else row.at_us / 1000
        lengths = (row.input_tokens, row.output_tokens)
        line = _Json(at_ms, *lengths, row.blocks, row.priority, row.tenant, size)
        out.write(msgspec.json.encode(line).decode() + "\n")


def head(trace: Trace, n: int) -> Trace:
    """The first `n` requests."""
    return Trace(trace.name, trace.block_size, trace.rows[:n])


def recorded_requests(path: Path, lines: Iterable[str]) -> Iterator[RecordedRequest]:
    """The rows of a recording with all that is known of each request. Raises ConfigError.

    lines: what lines_of reads of it.
    """
    decode = msgspec.json.Decoder(RecordedRequest).decode
    for line, text in enumerate(lines, 1):
        try:
            yield decode(text)
        except UNREADABLE as err:
            what = f"is no row that --record of this version has written: {err}"
            raise ConfigError(what, place_of(path, line)) from None


def place_of(path: Path, line: int) -> str:
    """The file and line of a line of a trace: lines of a recording count through all its files."""
    for file in _files(path):
        count = sum(1 for _ in lines_of(file)) if path.is_dir() else line
        if line <= count:
            return f"{file}:{line}"
        line -= count
    return f"{path}:{line}"


def scale(trace: Trace, speed: float = 1.0, lengths: int = 1) -> Trace:
    """Make arrivals `speed` times as fast; divide lengths and block size by `lengths`.

    Lengths are rounded up, so they stay >= 1, and a divided length still ends in the same block:
    512 (n-1) < x <= 512 n gives 32 (n-1) < ceil(x / 16) <= 32 n. So ids and hits stay as they are.
    Raises ConfigError if `speed` is not positive, or so low that the last request would come in
    30,000 years, or if `lengths` does not divide the block size.
    """
    if not 0 < speed < float("inf"):
        raise ConfigError(f"{speed} must be above 0, as 1.5 for half as fast again", "speed")
    least = trace.rows[-1].at_us / _TOO_LATE_US if trace.rows else 0.0
    if speed <= least:
        raise ConfigError(
            f"{speed} is too slow for {trace.name}: must be above {least:.3g}", "speed"
        )
    if lengths < 1 or trace.block_size % lengths:
        raise ConfigError(
            f"{lengths} must divide the block size of {trace.block_size} tokens", "lengths"
        )
    rows = [
        msgspec.structs.replace(
            row,
            at_us=round(row.at_us / speed),
            input_tokens=-(-row.input_tokens // lengths),
            output_tokens=-(-row.output_tokens // lengths),
        )
        for row in trace.rows
    ]
    return Trace(trace.name, trace.block_size // lengths, rows)


class _Json(msgspec.Struct, gc=False, omit_defaults=True):
    """A line of Mooncake's JSONL; further fields are ignored."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    priority: int = 0
    tenant: str = ""
    block_size: int = 0
    """Tokens of one block; 0: the row does not say it."""


_decode_json = msgspec.json.Decoder(_Json).decode


class TraceFormat(msgspec.Struct, frozen=True):
    """What a file calls its four fields; faults use the file's own words."""

    at: str
    input: str
    output: str
    blocks: str


_KINDS = {
    "timestamp": "a number of milliseconds",
    "input_length": "a whole number of tokens",
    "output_length": "a whole number of tokens",
    "hash_ids": "a list of whole numbers",
    "priority": "a whole number",
    "tenant": "a text",
    "block_size": "a whole number of tokens",
}
_MOONCAKE = TraceFormat("timestamp", "input_length", "output_length", "hash_ids")
_AZURE = TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", "")
_SIMPLE = TraceFormat("timestamp_ms", "input_length", "output_length", "hash_ids")

Parsed = tuple[int, Row | Fault]


def _read(
    path: Path, block_size: Tokens, lines: Iterable[str]
) -> tuple[Tokens, Iterator[Row | Fault]]:
    """The block size, and every row, checked."""
    if block_size < 1:
        raise ConfigError(f"{block_size} must be at least 1", "block_size")
    rest = iter(lines)
    first = next(rest, "")
    whole = chain([first], rest)  # no seek: a pipe has none
    if first.lstrip().startswith("{"):
        size = _said_block_size(first) or block_size
        if block_size not in (BLOCK_SIZE, size):
            what = f"{block_size} is not what the rows say: {size}; leave --block-size out"
            raise ConfigError(what, "block_size")
        rows = _json_rows(whole, size)
        if is_recording(path):
            rows = by_arrival(rows)
        return size, checked(rows, _MOONCAKE, size)
    header = [name.strip() for name in first.split(",")]
    for form, to_us in ((_AZURE, _iso_us), (_SIMPLE, _ms_us)):
        if header[:3] == [form.at, form.input, form.output]:
            rows = _csv_rows(whole, form, to_us, block_size)
            return block_size, checked(rows, form, block_size)
    raise ConfigError(
        "not a trace: the first line must be a JSON object (timestamp, input_length, "
        "output_length, hash_ids), or a CSV header: timestamp_ms,input_length,output_length"
        "[,hash_ids] or Azure's TIMESTAMP,ContextTokens,GeneratedTokens",
        str(path),
    )


def is_recording(path: Path) -> bool:
    """Whether it is a recording of a gateway, or one of its files."""
    return path.is_dir() or path.name.endswith(_RECORDED)


def _files(path: Path) -> list[Path]:
    """The files of a trace, which is a recording if it is a folder. Raises ConfigError."""
    files = sorted(path.glob(f"*{_RECORDED}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"has no recording (*{_RECORDED})", str(path))
    return files


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file, or of all files of a recording. Raises ConfigError."""
    for file in _files(path):
        try:
            if file.name.endswith(_RECORDED):
                with gzip.open(file, "rt", encoding="utf-8", errors="replace") as text:
                    yield from text
            else:
                with file.open(encoding="utf-8-sig", errors="replace", newline="") as text:
                    yield from text
        except (EOFError, gzip.BadGzipFile, zlib.error) as err:
            what = f"is damaged: {err}; move it to another folder"
            raise ConfigError(what, str(file)) from None
        except OSError as err:
            raise ConfigError(f"cannot be read: {err.strerror}", str(file)) from err


def by_arrival(rows: Iterable[Parsed]) -> Iterator[Parsed]:
    """Recordings are in the order in which requests ended, with times since 1970."""
    good: list[tuple[int, Row]] = []
    for line, row in rows:
        if isinstance(row, Fault):
            yield line, row
        else:
            good.append((line, row))
    good.sort(key=lambda it: it[1].at_us)
    start_us = good[0][1].at_us if good else 0
    for line, row in good:
        yield line, msgspec.structs.replace(row, at_us=row.at_us - start_us)


def checked(rows: Iterable[Parsed], form: TraceFormat, size: Tokens) -> Iterator[Row | Fault]:
    """Pass good rows on, and turn rows that break a rule of Row, or go back in time, into
    faults."""
    before_us: Micros = 0
    for line, row in rows:
        if isinstance(row, Fault):
            yield row
            continue
        n = len(row.blocks)
        if not (
            before_us <= row.at_us < _TOO_LATE_US
            and 0 < row.input_tokens <= MOST_TOKENS
            and 0 < row.output_tokens <= MOST_TOKENS
            and size * (n - 1) < row.input_tokens <= size * n
            and len(set(row.blocks)) == n
            and (min(row.blocks) >= 0 and max(row.blocks) <= _LAST_ID)
            and abs(row.priority) <= _MOST_PRIORITY
        ):
            yield _why(row, line, form, size, before_us)
        else:
            before_us = row.at_us
            yield row


def _why(row: Row, line: int, form: TraceFormat, size: Tokens, before_us: Micros) -> Fault:
    """Find the rule that a row breaks."""
    if row.at_us < 0:
        return Fault(line, form.at, "must not be negative; count from the first request")
    if row.at_us < before_us:
        back_ms = (before_us - row.at_us) / 1000
        return Fault(line, form.at, f"goes back by {back_ms:g} ms; sort the rows by time")
    if row.at_us >= _TOO_LATE_US:
        return Fault(line, form.at, "is too large to be a time in ms; correct or drop the row")
    for name, tokens in ((form.input, row.input_tokens), (form.output, row.output_tokens)):
        if not 0 < tokens <= MOST_TOKENS:
            what = f"{tokens} must be between 1 and {MOST_TOKENS} tokens; correct or drop the row"
            return Fault(line, name, what)
    n, need = len(row.blocks), -(-row.input_tokens // size)
    if n != need:
        what = (
            f"{n} blocks for {row.input_tokens} input tokens, which are {need} blocks of {size}; "
            "correct the row, or name the block size this trace was made with"
        )
        return Fault(line, form.blocks, what)
    if abs(row.priority) > _MOST_PRIORITY:
        what = f"must be from -{_MOST_PRIORITY} to {_MOST_PRIORITY}, as for a gateway"
        return Fault(line, "priority", what)
    for block in row.blocks:
        if not 0 <= block <= _LAST_ID:
            what = f"{str(block)[:40]} is no id: ids are from 0 to 2^64 - 1; number the blocks anew"
            return Fault(line, form.blocks, what)
    return Fault(line, form.blocks, "an id comes twice; ids must name the block and its prefix")


def _said_block_size(text: str) -> Tokens:
    """The block size that a row names; 0: it names none, or is no row."""
    try:
        return max(0, _decode_json(text).block_size)
    except UNREADABLE:
        return 0


def _json_rows(file: Iterable[str], block_size: Tokens) -> Iterator[Parsed]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            it = _decode_json(text)
        except UNREADABLE as err:
            yield line, _not_json(line, err)
            continue
        if it.block_size not in (0, block_size):
            what = f"is {it.block_size}, and {block_size} before; move such files to another folder"
            if it.block_size < 0:
                what = f"is {it.block_size}, and must be at least 1; correct or drop the row"
            yield line, Fault(line, "block_size", what)
            continue
        at_ms = max(-_TOO_LATE_MS, min(it.timestamp, _TOO_LATE_MS))  # a product stays finite
        at_us = round(at_ms * 1000)
        yield (
            line,
            Row(at_us, it.input_length, it.output_length, it.hash_ids, it.priority, it.tenant),
        )


def _not_json(line: int, err: Exception) -> Fault:
    """What is wrong with a line of JSON; the decoder's own text names Python types."""
    said = str(err)
    named = re.search(r"(\$\.|required field `)(\w+)", said)
    if named is None:
        what = "no JSON object" if isinstance(err, msgspec.ValidationError) else "no JSON"
        return Fault(line, "row", f"is {what}; write one object with four fields a line")
    if named[1] != "$.":
        return Fault(line, named[2], f"is missing; it is {_KINDS[named[2]]}")
    return Fault(line, named[2], f"is not {_KINDS[named[2]]}; correct or drop the row")


def _csv_rows(
    file: Iterable[str], form: TraceFormat, to_us: Callable[[str], Micros], block_size: Tokens
) -> Iterator[Parsed]:
    """Rows of a CSV file. If it names no blocks, every request has blocks of its own.

    ISO times count from the file's first good row.
    """
    table = csv.reader(file)
    width = len(next(table))
    fresh = count()
    start_us: Micros | None = None
    for cells in table:
        line = table.line_num
        if not any(cells):
            continue
        if len(cells) != width:
            yield line, Fault(line, "row", f"{len(cells)} columns where the header has {width}")
            continue
        field = form.at
        try:
            at_us = to_us(cells[0].strip())
            field = form.input
            inputs = int(cells[1])
            field = form.output
            outputs = int(cells[2])
            field = form.blocks
            if width > 3 and form.blocks:
                blocks = tuple(map(int, cells[3].split()))
            else:
                blocks = tuple(islice(fresh, -(-min(inputs, MOST_TOKENS) // block_size)))
        except (ValueError, OverflowError):
            kind = "a time" if field == form.at else "a whole number"
            yield line, Fault(line, field, f"is not {kind}; correct or drop the row")
            continue
        if start_us is None:
            start_us = at_us if form is _AZURE else 0
        yield line, Row(at_us - start_us, inputs, outputs, blocks)


def _iso_us(text: str) -> Micros:
    at = datetime.fromisoformat(text)
    since = at.replace(tzinfo=at.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _ms_us(text: str) -> Micros:
    return round(float(text) * 1000)

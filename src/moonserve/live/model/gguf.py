"""A reader of GGUF files (versions 2 and 3): metadata, tensor directory, dequantised tensors.

live/model reads the configuration by it, live/text the tokenizer and the chat template, live/engine
the weights. It never writes, contacts no model hub, and never imports torch or llama.cpp. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the block layouts are in ggml-common.h.
A file that is not GGUF, cut off or inconsistent raises ConfigError and no other error.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonserve.core.errors import ConfigError
from moonserve.live.model.errors import BadModel

Floats = NDArray[np.float32]
Bytes1 = NDArray[np.uint8]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING = 8
_ARRAY = 9
_MAX_DIMS = 4


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor in the directory: row-major shape (outermost first), type, place in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    """ggml's name, such as "Q4_1"; "type 99" if this reader does not know the number."""
    offset: int
    """Bytes from the start of the file."""
    size: int
    """Bytes; 0 for a type whose size this reader does not know."""


class _Quant(msgspec.Struct, frozen=True):
    """A tensor type: `weights` elements take `size` bytes; `decode` takes rows of `size` bytes."""

    name: str
    weights: int
    size: int
    decode: Callable[[Bytes1], Floats]


def _half(raw: Bytes1) -> Floats:
    """Return two bytes per row, little-endian float16, as a float32 column."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes1) -> Floats:
    """Return 32 values from 16 bytes per row: first the low nibbles, then the high ones."""
    values = np.empty((len(raw), 32), np.float32)
    values[:, :16] = raw & 15
    values[:, 16:] = raw >> 4
    return values


def _f32(raw: Bytes1) -> Floats:
    return raw.view("<f4").astype(np.float32, copy=False)


def _bf16(raw: Bytes1) -> Floats:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(raw: Bytes1) -> Floats:
    return raw[:, 2:].view(np.int8) * _half(raw[:, :2])


def _q4_0(raw: Bytes1) -> Floats:
    values = _nibbles(raw[:, 2:])
    values -= 8
    values *= _half(raw[:, :2])
    return values


def _q4_1(raw: Bytes1) -> Floats:
    values = _nibbles(raw[:, 4:])
    values *= _half(raw[:, :2])
    values += _half(raw[:, 2:4])
    return values


_QUANTS = {
    0: _Quant("F32", 1, 4, _f32),
    1: _Quant("F16", 1, 2, _half),
    2: _Quant("Q4_0", 32, 18, _q4_0),
    3: _Quant("Q4_1", 32, 20, _q4_1),
    8: _Quant("Q8_0", 32, 34, _q8_0),
    30: _Quant("BF16", 1, 2, _bf16),
}
_BY_NAME = {quant.name: quant for quant in _QUANTS.values()}
# Types that are not supported; the names are for error messages.
_OTHER = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}


class Quants(msgspec.Struct, frozen=True):
    """A quantised matrix: weight[i, j] = codes[i, j] * scale[i, j // 32] + least[i, j // 32].

    codes: of 4 or 8 bits, as uint8 [rows, columns]. scale and least: float32 [rows, columns / 32].
    """

    codes: Bytes1
    scale: Floats
    least: Floats
    bits: Literal[4, 8]


class _Cursor:
    """Reads little-endian values one after another; a read past the end raises ConfigError."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.at = 0

    def fail(self, what: str) -> ConfigError:
        return BadModel(f"{self.path}: {what}; download the file again")

    def take(self, size: int) -> bytes:
        if size > len(self.buffer) - self.at:
            raise self.fail(f"the file is cut off at byte {len(self.buffer)}")
        self.at += size
        return self.buffer[self.at - size : self.at]

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self) -> object:
        kind = self.number("I")
        if kind == _ARRAY:
            return self.array()
        if kind == _STRING:
            return self.string()
        code = "<" + self.scalar(kind)
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.fail(f"the metadata has a value of unknown type {kind}")
        return _SCALARS[kind]

    def array(self) -> list[object]:
        kind = self.number("I")
        count = self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = self.scalar(kind)
        raw = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", raw))


class Gguf(msgspec.Struct, frozen=True, eq=False):
    """An open file. Its mapping is shared and loaded page by page; it ends with this object."""

    path: Path
    buffer: mmap.mmap
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]

    def load(self, name: str) -> Floats:
        """Return a tensor as a new float32 array with its row-major shape.

        Raises ConfigError if it is missing, or has a type that this reader cannot dequantise.
        """
        info = self.tensors.get(name)
        if info is None:
            raise BadModel(f"{self.path} has no tensor {name}; is it a llama-like model?")
        quant = _BY_NAME.get(info.type)
        if quant is None:
            raise BadModel(
                f"{self.path}: tensor {name} is {info.type}, which is not supported; use a file"
                f" with only {', '.join(sorted(_BY_NAME))} tensors"
            )
        raw = np.frombuffer(self.buffer, np.uint8, info.size, info.offset)
        # Unquantised types decode to a view; the result must be writable, so it is a copy.
        values = quant.decode(raw.reshape(-1, quant.size))
        return np.array(values, np.float32, copy=quant.weights == 1).reshape(info.shape)

    def quants(self, name: str) -> Quants | None:
        """Return a Q4_0, Q4_1 or Q8_0 matrix as it is stored; None: it is missing or not one."""
        info = self.tensors.get(name)
        if info is None or info.type not in ("Q4_0", "Q4_1", "Q8_0") or len(info.shape) != 2:
            return None
        raw = np.frombuffer(self.buffer, np.uint8, info.size, info.offset)
        raw = raw.reshape(-1, _BY_NAME[info.type].size)
        scale = _half(raw[:, :2])
        groups = (info.shape[0], -1)
        if info.type == "Q8_0":
            codes = (raw[:, 2:] ^ np.uint8(128)).reshape(info.shape)  # from -128..127 to 0..255
            least = scale * np.float32(-128)
            return Quants(codes, scale.reshape(groups), least.reshape(groups), 8)
        least = scale * np.float32(-8) if info.type == "Q4_0" else _half(raw[:, 2:4])
        nibbles = raw[:, -16:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).reshape(info.shape)
        return Quants(codes, scale.reshape(groups), least.reshape(groups), 4)


def open_gguf(path: Path) -> Gguf:
    """Map the file and read its metadata and tensor directory (about 0.1 s for 50k tokens)."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise BadModel(f"cannot read {path}: {error}") from error
    cursor = _Cursor(buffer, path)
    if buffer[:4] != b"GGUF":
        raise BadModel(f"{path} is not a GGUF file: its first bytes are not GGUF")
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise BadModel(f"{path} is GGUF version {version}; convert it to version 3")
    tensor_count = cursor.number("Q")
    pair_count = cursor.number("Q")
    metadata: dict[str, object] = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value()
    return Gguf(path, buffer, metadata, _directory(cursor, tensor_count, metadata))


def _directory(cursor: _Cursor, count: int, metadata: dict[str, object]) -> dict[str, TensorInfo]:
    """Read the tensor directory, and check that each tensor is inside the file."""
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.string()
        dims = cursor.number("I")
        if dims > _MAX_DIMS:
            raise cursor.fail(f"tensor {name} has {dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        if 0 in shape:
            raise cursor.fail(f"tensor {name} has the shape {shape}, which is empty")
        entries.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise cursor.fail(f"general.alignment is {alignment!r}")
    data = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        quant = _QUANTS.get(kind)
        size = 0
        if quant is not None:
            if quant.weights > 1 and (not shape or shape[-1] % quant.weights):
                raise cursor.fail(f"tensor {name}: its rows {shape[-1:]} are not whole blocks")
            size = prod(shape) // quant.weights * quant.size
        if data + offset + size > len(cursor.buffer):
            raise cursor.fail(f"tensor {name} is outside the file")
        known = quant.name if quant else _OTHER.get(kind, f"type {kind}")
        tensors[name] = TensorInfo(name, shape, known, data + offset, size)
    return tensors

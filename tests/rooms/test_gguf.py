"""The GGUF reader: dequantisation against a per-element formula, and refusal of broken files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from moonserve.core.errors import ConfigError
from moonserve.live.model.gguf import open_gguf
from tests.support.tiny import write_gguf


def _half_at(raw: bytes, at: int) -> float:
    return float(np.frombuffer(raw, "<f2", 1, at)[0])


def _naive(kind: str, raw: bytes, count: int) -> list[float]:
    """The formulas of ggml-quants.c, one element at a time."""
    if kind == "F32":
        return [struct.unpack_from("<f", raw, 4 * i)[0] for i in range(count)]
    if kind == "F16":
        return [_half_at(raw, 2 * i) for i in range(count)]
    if kind == "BF16":
        return [struct.unpack("<f", b"\0\0" + raw[2 * i : 2 * i + 2])[0] for i in range(count)]
    size, quants = {"Q8_0": (34, 2), "Q4_0": (18, 2), "Q4_1": (20, 4)}[kind]
    values = []
    for i in range(count):
        block, j = raw[i // 32 * size :][:size], i % 32
        scale = _half_at(block, 0)
        if kind == "Q8_0":
            values.append(scale * struct.unpack_from("b", block, quants + j)[0])
            continue
        nibble = block[quants + j % 16] >> 4 * (j // 16) & 15
        if kind == "Q4_0":
            values.append(scale * (nibble - 8))
        else:
            values.append(scale * nibble + _half_at(block, 2))
    return values


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("version", [2, 3])
def test_dequantise(tmp_path: Path, kind: str, version: int) -> None:
    """Every supported type gives what the per-element formula gives, in row-major shape."""
    rng = np.random.default_rng(5)
    rows, columns = 3, 64
    if kind in ("F32", "F16", "BF16"):
        width = {"F32": "<f4"}.get(kind, "<f2")
        raw = rng.standard_normal(rows * columns).astype(width).tobytes()
    else:
        size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
        scales = 4 if kind == "Q4_1" else 2
        raw = b"".join(
            rng.standard_normal(scales // 2).astype("<f2").tobytes() + rng.bytes(size - scales)
            for _ in range(rows * columns // 32)
        )
    tensors = {"pad": ("F32", (3,), bytes(12)), "t": (kind, (rows, columns), raw)}
    got = open_gguf(write_gguf(tmp_path / "m.gguf", {}, tensors, version)).load("t")
    assert got.shape == (rows, columns)
    assert got.dtype == np.float32
    assert got.flags.writeable
    np.testing.assert_allclose(got.ravel(), _naive(kind, raw, rows * columns), rtol=1e-6)


@pytest.mark.parametrize("shape", [(64,), (1, 1, 64)])
def test_only_a_matrix_is_kept_as_its_quants(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A vector of a quantised type, such as a norm, is decoded like any tensor."""
    raw = np.random.default_rng(6).bytes(2 * 18)
    write_gguf(tmp_path / "a.gguf", {}, {"t": ("Q4_0", shape, raw)})
    found = open_gguf(tmp_path / "a.gguf")
    assert found.quants("t") is None
    assert found.load("t").shape == shape


def test_metadata_round_trip(tmp_path: Path) -> None:
    """Strings, numbers and string arrays come back as Python values."""
    metadata = {"general.architecture": "llama", "n": 7, "eps": 0.5, "tokens": ["a", "é", "月"]}
    assert open_gguf(write_gguf(tmp_path / "m.gguf", metadata, {})).metadata == metadata


def test_unsupported_type_names_tensor_and_type(tmp_path: Path) -> None:
    """A tensor of an unknown type opens, and its load names tensor, type and remedy."""
    file = open_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": ("Q6_K", (256,), bytes(210))}))
    with pytest.raises(ConfigError, match=r"w is Q6_K.*use a file.*Q4_1"):
        file.load("w")
    with pytest.raises(ConfigError, match="no tensor x"):
        file.load("x")


def test_every_truncation_is_a_config_error(tmp_path: Path) -> None:
    """A file cut at any byte is a ConfigError, never another exception."""
    whole = write_gguf(
        tmp_path / "m.gguf", {"a": "x", "t": ["b", "c"]}, {"w": ("F32", (8,), bytes(32))}
    ).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            open_gguf(cut)


def test_flipped_bytes_never_escape(tmp_path: Path) -> None:
    """Any one damaged header byte gives a readable file or a ConfigError, nothing else."""
    whole = write_gguf(
        tmp_path / "m.gguf", {"a": "x", "n": 3, "t": ["b"]}, {"w": ("Q4_1", (1, 32), bytes(20))}
    ).read_bytes()
    bad = tmp_path / "bad.gguf"
    refused = 0
    for at in range(len(whole) - 32):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            open_gguf(bad)
        except ConfigError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("shape", [(0, 32), (0,), (2**62, 0)])
def test_an_empty_tensor_is_a_config_error(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    """A tensor without elements is refused at once, with its name and its shape."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"w": (kind, shape, b"")})
    with pytest.raises(ConfigError, match=r"w .*shape .*empty"):
        open_gguf(path)


def test_missing_file(tmp_path: Path) -> None:
    """A path that is not there, a folder, or another format is a ConfigError that names it."""
    with pytest.raises(ConfigError, match="absent"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ConfigError):
        open_gguf(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ConfigError, match="not a GGUF"):
        open_gguf(tmp_path / "x.gguf")

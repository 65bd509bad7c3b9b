"""The 4-bit form of a matrix: what it holds, when it computes, and how close it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moonserve.live.engine.matrix import FEW_ROWS, Matrix, pack  # noqa: E402
from moonserve.live.engine.weights import GgufSource  # noqa: E402
from moonserve.live.model.config import config_of_gguf  # noqa: E402
from moonserve.live.model.gguf import Quants, open_gguf  # noqa: E402
from tests.support.tiny import DIM, HEADS, HIDDEN, quantise, tiny_metadata, write_gguf  # noqa: E402

ROWS = HEADS * DIM
NAMES = ("q_proj", "o_proj")


@pytest.fixture(params=["Q4_0", "Q4_1"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> GgufSource:
    """A file with two random 4-bit matrices; llama.cpp would have permuted the first."""
    rng = np.random.default_rng(4)
    scales = 1 if request.param == "Q4_0" else 2
    tensors = {}
    for name in ("attn_q", "attn_output"):
        blocks = [
            (0.1 * rng.standard_normal(scales)).astype("<f2").tobytes() + rng.bytes(16)
            for _ in range(ROWS * HIDDEN // 32)
        ]
        tensors[f"blk.0.{name}.weight"] = (request.param, (ROWS, HIDDEN), b"".join(blocks))
    file = open_gguf(write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors))
    return GgufSource(file, config_of_gguf(file))


def test_quants_of_8_bits_are_the_tensor(tmp_path: Path) -> None:
    """Q8_0's signed codes, shifted to 0..255, give exactly the decoded matrix."""
    values = np.random.default_rng(2).standard_normal((ROWS, HIDDEN)).astype(np.float32)
    tensors = {"blk.0.attn_output.weight": ("Q8_0", (ROWS, HIDDEN), quantise(values, "Q8_0"))}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", tiny_metadata(), tensors))
    quants = file.quants("blk.0.attn_output.weight")
    assert quants is not None
    assert quants.bits == 8
    groups = quants.codes.reshape(ROWS, -1, 32).astype(np.float32)
    decoded = (groups * quants.scale[..., None] + quants.least[..., None]).reshape(ROWS, HIDDEN)
    np.testing.assert_allclose(decoded, file.load("blk.0.attn_output.weight"), atol=1e-5)
    np.testing.assert_allclose(decoded, values, atol=0.03)


def test_quants_are_the_tensor(source: GgufSource) -> None:
    """Codes, scales and offsets, rows in Hugging Face order, give exactly the decoded matrix."""
    for name in NAMES:
        full = f"model.layers.0.self_attn.{name}.weight"
        quants = source.quants(full)
        assert quants is not None
        assert quants.codes.max() <= 15
        groups = quants.codes.reshape(ROWS, -1, 32).astype(np.float32)
        decoded = groups * quants.scale[..., None] + quants.least[..., None]
        np.testing.assert_allclose(
            decoded.reshape(ROWS, HIDDEN), source.tensor(full).numpy(), rtol=1e-6, atol=1e-6
        )


def test_packed_is_as_close_as_dense(source: GgufSource) -> None:
    """Stacked and packed, a few rows come out as near to float32 as bfloat16's dense ones do."""
    full = [f"model.layers.0.self_attn.{name}.weight" for name in NAMES]
    exact = torch.cat([source.tensor(name) for name in full])
    packed = pack([source.quants(name) for name in full], torch.bfloat16)
    assert packed is not None
    matrix = Matrix(exact.bfloat16(), packed=packed)
    rows = torch.randn(FEW_ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = rows.float() @ exact.T
    dense_error = (Matrix(exact.bfloat16())(rows).float() - wanted).pow(2).mean()
    packed_error = (matrix(rows).float() - wanted).pow(2).mean()
    assert packed_error < 2 * dense_error
    bias = torch.arange(len(exact)).bfloat16()
    biased = Matrix(exact.bfloat16(), bias, packed)(rows).float()
    torch.testing.assert_close(biased, matrix(rows).float() + bias.float(), rtol=0.01, atol=0.5)
    many = torch.cat([rows, rows[:1]])
    assert torch.equal(matrix(many), Matrix(exact.bfloat16())(many))


def test_float32_and_mixed_files_stay_dense(source: GgufSource) -> None:
    """Nothing is packed for float32 engines, nor where one part is not in 4 bits."""
    quants = source.quants("model.layers.0.self_attn.q_proj.weight")
    assert pack([quants], torch.float32) is None
    assert pack([quants, None], torch.bfloat16) is None
    assert quants is not None
    eight = Quants(quants.codes, quants.scale, quants.least, 8)
    assert pack([quants, eight], torch.bfloat16) is None

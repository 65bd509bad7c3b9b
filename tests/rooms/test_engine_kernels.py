"""Compiled kernels: what a matrix gives, what a pass gives, and what happens without a compiler."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moonserve.core.engine.batch import Chunk, Pass  # noqa: E402
from moonserve.core.errors import ConfigError, EngineFailed  # noqa: E402
from moonserve.core.request import Sampling  # noqa: E402
from moonserve.core.units import RequestId  # noqa: E402
from moonserve.live.engine.kernels import FEW_ROWS, Kernels, Tiles, tile  # noqa: E402
from moonserve.live.engine.torch_engine import TorchEngine, greedy_reference  # noqa: E402
from moonserve.live.model.gguf import Quants  # noqa: E402
from tests.support.tiny import VOCAB, write_folder, write_gguf_model  # noqa: E402

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
GREEDY = Sampling(temperature=0.0)
OUTPUTS, INPUTS = 96, 160
BLOCK = 16
DRAW = random.Random(4)
PROMPTS = [tuple(DRAW.choices(range(VOCAB), k=length)) for length in (3, 16, 17, 70, 200)]


@pytest.fixture(params=[4, 8])
def matrix(request: pytest.FixtureRequest) -> tuple[Tiles, torch.Tensor]:
    """A random matrix of 4 or 8 bits in two parts with a bias, and the same as dense float32."""
    rng = np.random.default_rng(request.param)
    parts = []
    for rows in (32, 64):
        codes = rng.integers(0, 1 << request.param, (rows, INPUTS), dtype=np.uint8)
        scale, least = rng.standard_normal((2, rows, INPUTS // 32)).astype(np.float32)
        parts.append(Quants(codes, scale / 10, least, request.param))
    dense = np.concatenate(
        [
            part.codes * part.scale.repeat(32, axis=1) + part.least.repeat(32, axis=1)
            for part in parts
        ]
    )
    bias = torch.arange(OUTPUTS).float()
    tiles = tile(Kernels.load(threads=2), parts, bias)
    assert tiles is not None
    return tiles, torch.from_numpy(dense)


def engine(path: Path, kernels: str, threads: int = 1) -> TorchEngine:
    """A float32 engine."""
    return TorchEngine.load(
        path,
        dtype="float32",
        block_size=BLOCK,
        num_blocks=128,
        threads=threads,
        kernels=kernels,  # type: ignore[arg-type]
    )


def table(row: int) -> tuple[int, ...]:
    """The blocks of a request, in no order."""
    return tuple((row * 20 + i) * 37 % 128 for i in range(20))


def compute(engine: TorchEngine, batch: Sequence[tuple[int, Sequence[int], int]]) -> list[int]:
    """Run one pass of (row, known tokens, how many are computed); return the next tokens."""
    chunks = [
        Chunk(RequestId(str(row)), tuple(known[done:]), done, table(row), GREEDY)
        for row, known, done in batch
    ]
    sampled = engine.run_now(Pass(tuple(chunks))).sampled
    return [sampled[RequestId(str(row))] for row, _, _ in batch]


@needs_compiler
@pytest.mark.parametrize("count", [1, 2, 5, FEW_ROWS + 1])
def test_tiles_are_the_dense_matrix(matrix: tuple[Tiles, torch.Tensor], count: int) -> None:
    """Few rows and many, bias and both parts: the product is that of the dense matrix."""
    tiles, dense = matrix
    rows = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(count))
    wanted = torch.nn.functional.linear(rows, dense, torch.arange(OUTPUTS).float())
    torch.testing.assert_close(tiles(rows), wanted, rtol=1e-4, atol=1e-3)


@needs_compiler
def test_rows_do_not_touch_each_other(matrix: tuple[Tiles, torch.Tensor]) -> None:
    """A row's product is the same to the last bit, whatever other rows stand beside it."""
    tiles, _ = matrix
    rows = torch.randn(7, INPUTS, generator=torch.Generator().manual_seed(1))
    together = tiles(rows)
    for at, row in enumerate(rows):
        assert torch.equal(tiles(row[None])[0], together[at])


@needs_compiler
def test_tiles_as_embeddings(matrix: tuple[Tiles, torch.Tensor]) -> None:
    """Rows by id are those of the dense matrix."""
    tiles, dense = matrix
    ids = torch.tensor([95, 0, 33, 33])
    torch.testing.assert_close(tiles[ids], dense[ids])


@needs_compiler
def test_shapes_that_do_not_fit() -> None:
    """Mixed bits, a part that is not quantised, and odd outputs are left to dense matrices."""
    kernels = Kernels.load(threads=1)
    ones = np.ones((32, 64), np.uint8)
    scale = np.ones((32, 2), np.float32)
    four = Quants(ones, scale, scale, 4)
    assert tile(kernels, [four], None) is not None
    assert tile(kernels, [four, Quants(ones, scale, scale, 8)], None) is None
    assert tile(kernels, [four, None], None) is None
    assert tile(kernels, [Quants(ones[:20], scale[:20], scale[:20], 4)], None) is None


@needs_compiler
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_decode_is_that_of_torch(tmp_path: Path, kind: str, threads: int) -> None:
    """Requests of many lengths, decoded together: tokens and KV are those of torch's kernels."""
    path = write_gguf_model(tmp_path / "m.gguf", kind=kind)
    native, plain = engine(path, "native", threads), engine(path, "torch")
    assert native.shape == plain.shape
    known = [list(prompt) for prompt in PROMPTS]
    for row, prompt in enumerate(PROMPTS):
        token = compute(native, [(row, prompt, 0)])
        assert token == compute(plain, [(row, prompt, 0)])
        known[row] += token
    for _ in range(BLOCK + 1):
        batch = [(row, tokens, len(tokens) - 1) for row, tokens in enumerate(known)]
        batch = batch[::-1]
        following = compute(native, batch)
        assert following == compute(plain, batch)
        for (row, _, _), token in zip(batch, following, strict=True):
            known[row].append(token)
    for block in range(128):
        ours, theirs = (np.frombuffer(it.block(block), np.float32) for it in (native, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_decode_alone_is_decode_in_a_batch(tmp_path: Path) -> None:
    """A request's blocks after decode are the same to the last bit, alone and beside others."""
    path = write_gguf_model(tmp_path / "m.gguf", kind="Q4_1")
    alone, beside = engine(path, "native"), engine(path, "native")
    for it in (alone, beside):
        for row, prompt in enumerate(PROMPTS):
            compute(it, [(row, prompt, 0)])
    for step in range(5):
        tokens = [*PROMPTS[3], *range(step + 1)]
        compute(alone, [(3, tokens, len(tokens) - 1)])
        others = [(row, [*PROMPTS[row], 7], len(PROMPTS[row])) for row in (0, 1, 4)]
        compute(beside, [*others[:2], (3, tokens, len(tokens) - 1), others[2]])
    for block in table(3)[:5]:
        assert bytes(alone.block(block)) == bytes(beside.block(block))


@needs_compiler
def test_damaged_kv_is_an_engine_failure(tmp_path: Path) -> None:
    """Keys that are not numbers end in EngineFailed, never in a token."""
    damaged = engine(write_gguf_model(tmp_path / "m.gguf", kind="Q4_1"), "native")
    compute(damaged, [(3, PROMPTS[3], 0)])
    damaged.block(table(3)[2])[:] = b"\xff" * damaged.shape.block_bytes
    with pytest.raises(EngineFailed, match="not finite"):
        compute(damaged, [(3, [*PROMPTS[3], 1], 70)])


@needs_compiler
def test_a_file_without_quants_stays_with_torch(tmp_path: Path) -> None:
    """A folder's float32 matrices are used as they are, also where kernels are demanded."""
    path = write_folder(tmp_path)
    one, two = engine(path, "native"), engine(path, "torch")
    assert greedy_reference(one, PROMPTS[2], 4) == greedy_reference(two, PROMPTS[2], 4)
    for block in range(2):
        assert bytes(one.block(block)) == bytes(two.block(block))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-cc", "there is no C compiler no-such-cc"), ("false", "failed")],
)
def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    """auto goes on with torch and reports why; native is an error with a remedy."""
    path = write_gguf_model(tmp_path / "m.gguf", kind="Q4_1")
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(ConfigError, match=rf"kernels.*{reason}.*--kernels torch"):
        engine(path, "native")
    lines: list[str] = []
    plain = TorchEngine.load(
        path, dtype="float32", block_size=BLOCK, num_blocks=128, threads=1, progress=lines.append
    )
    assert any(reason in line for line in lines)
    assert greedy_reference(plain, PROMPTS[1], 4) == greedy_reference(
        engine(path, "torch"), PROMPTS[1], 4
    )


def test_kernels_are_for_float32(tmp_path: Path) -> None:
    """To demand compiled kernels for bfloat16 is an error that names the setting."""
    with pytest.raises(ConfigError, match=r"kernels.*float32"):
        TorchEngine.load(write_folder(tmp_path), dtype="bfloat16", kernels="native")


@needs_compiler
def test_a_folder_of_others_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is loaded from a folder into which other users can write."""
    monkeypatch.setenv("MOONSERVE_CACHE", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(ConfigError, match=r"kernels.*others may write.*chmod 700"):
        Kernels.load(threads=1)


@needs_compiler
def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine finds the first one's library; other flags make another one."""
    monkeypatch.setenv("MOONSERVE_CACHE", str(tmp_path))
    Kernels.load(threads=1)
    (first,) = (tmp_path / "kernels").iterdir()
    made_ns = first.stat().st_mtime_ns
    Kernels.load(threads=1)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "kernels").iterdir()] == [made_ns]
    monkeypatch.setenv("CFLAGS", "-O1")
    Kernels.load(threads=1)
    assert len(list((tmp_path / "kernels").iterdir())) == 2

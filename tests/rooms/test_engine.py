"""TorchEngine on a tiny random model: chunks, batches, tables, bytes, files, refusals."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moonserve.core.engine.batch import Chunk, Pass  # noqa: E402
from moonserve.core.errors import ConfigError, EngineFailed  # noqa: E402
from moonserve.core.request import Sampling  # noqa: E402
from moonserve.core.units import RequestId  # noqa: E402
from moonserve.live.engine import inputs  # noqa: E402
from moonserve.live.engine.torch_engine import TorchEngine, greedy_reference  # noqa: E402
from tests.support.tiny import (  # noqa: E402
    DIM,
    EOS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    tiny_metadata,
    write_folder,
    write_gguf,
    write_gguf_model,
)

BLOCK = 16
GREEDY = Sampling(temperature=0.0)
PROMPT = tuple(random.Random(3).choices(range(VOCAB), k=100))
LIKE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama as a Hugging Face folder."""
    return write_folder(tmp_path_factory.mktemp("tiny"))


def load(path: Path, num_blocks: int = 64) -> TorchEngine:
    """A float32 engine on one thread."""
    return TorchEngine.load(
        path, dtype="float32", block_size=BLOCK, num_blocks=num_blocks, threads=1
    )


def table(first: int, tokens: int) -> tuple[int, ...]:
    """Consecutive blocks for so many tokens."""
    return tuple(range(first, first - (-tokens // BLOCK)))


def compute(
    engine: TorchEngine, tokens: Sequence[int], start: int, step: int, blocks: tuple[int, ...]
) -> int:
    """Run tokens[start:] in chunks of `step`; return the token that follows."""
    while True:
        end = min(start + step, len(tokens))
        sampling = GREEDY if end == len(tokens) else None
        result = engine.run_now(
            Pass((Chunk(RequestId("r"), tuple(tokens[start:end]), start, blocks, sampling),))
        )
        if sampling is not None:
            return result.sampled[RequestId("r")]
        start = end


def kv(engine: TorchEngine, blocks: Sequence[int], tokens: int) -> np.ndarray:
    """The KV of the first `tokens` positions: [tokens, layers, 2, kv_heads, dim]."""
    shape = (LAYERS, 2, BLOCK, KV_HEADS, DIM)
    parts = [np.frombuffer(engine.block(block), np.float32).reshape(shape) for block in blocks]
    return np.concatenate([part.transpose(2, 0, 1, 3, 4) for part in parts])[:tokens]


@pytest.mark.parametrize("step", [1, 7, 32, 100])
def test_chunked_prefill_is_whole_prefill(folder: Path, step: int) -> None:
    """Chunks of any size write the KV of one whole prefill, and the same tokens follow."""
    whole, chunked = load(folder), load(folder)
    expected = greedy_reference(whole, PROMPT, 8)
    blocks = table(5, 108)
    known = [*PROMPT]
    start = 0
    for _ in range(8):
        token = compute(chunked, known, start, step, blocks)
        start = len(known)
        known.append(token)
    assert known[100:] == expected
    np.testing.assert_allclose(kv(chunked, blocks, 107), kv(whole, table(0, 107), 107), **LIKE)


@pytest.mark.parametrize("shift", [-1, 1])
def test_kv_shows_an_off_by_one_position(folder: Path, shift: int) -> None:
    """A chunk one position off, which tokens alone may hide, differs in its KV far over noise."""
    engine = load(folder)
    compute(engine, PROMPT, 0, 100, table(0, 100))
    compute(engine, PROMPT[:48], 0, 48, table(20, 100))
    request = Chunk(RequestId("r"), PROMPT[48:], 48 + shift, table(20, 101), GREEDY)
    engine.run_now(Pass((request,)))
    right = kv(engine, table(0, 100), 100)[48 : 98 + shift]
    wrong = kv(engine, table(20, 101), 101)[48 + shift : 98 + 2 * shift]
    assert np.abs(right[:, 0, 0] - wrong[: len(right), 0, 0]).max() > 1e-2


def test_mixed_batch_is_each_alone(folder: Path) -> None:
    """Prefills and decodes of very different lengths in one pass each get what they get alone."""
    engine = load(folder, num_blocks=256)
    rng = random.Random(8)
    lengths = [1, 2, 15, 16, 17, 31, 130, 400, 480]
    prompts = [tuple(rng.choices(range(VOCAB), k=length)) for length in lengths]
    alone = [greedy_reference(engine, prompt, 6) for prompt in prompts]
    known = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    for turn in range(5 + len(prompts)):
        chunks = []
        for i in range(min(turn + 1, len(prompts))):
            if len(known[i]) < len(prompts[i]) + 6:
                new, done[i], start = tuple(known[i][done[i] :]), len(known[i]), done[i]
                blocks = table(i * 28, start + len(new))
                chunks.append(Chunk(RequestId(str(i)), new, start, blocks, GREEDY))
        rng.shuffle(chunks)
        for name, token in engine.run_now(Pass(tuple(chunks))).sampled.items():
            known[int(name)].append(token)
    assert [tokens[-6:] for tokens in known] == alone


def test_permuted_block_table(folder: Path) -> None:
    """Which blocks a request has, and in what order they lie, changes nothing."""
    engine = load(folder)
    expected = greedy_reference(engine, PROMPT, 4)
    before = kv(engine, table(0, 103), 103)
    blocks = list(range(64))
    random.Random(1).shuffle(blocks)
    mine = tuple(blocks[:7])
    known = [*PROMPT]
    start = 0
    for _ in range(4):
        token = compute(engine, known, start, 33, mine)
        start = len(known)
        known.append(token)
    assert known[100:] == expected
    np.testing.assert_allclose(kv(engine, mine, 103), before, **LIKE)


def test_blocks_move_between_engines(folder: Path) -> None:
    """Bytes copied to another engine's pool, at other places, continue identically."""
    source, target = load(folder), load(folder)
    assert source.shape == target.shape
    expected = greedy_reference(source, PROMPT, 5)
    mine = (40, 3, 17, 9, 25, 2, 33)
    for theirs, own in enumerate(mine):
        target.block(own)[:] = source.block(theirs)
    known = [*PROMPT, expected[0]]
    for wanted in expected[1:]:
        known.append(compute(target, known, len(known) - 1, 1, mine))
        assert known[-1] == wanted


def test_gguf_and_folder_are_one_model(folder: Path, tmp_path: Path) -> None:
    """The same weights from GGUF, with its permuted rows, and from safetensors give equal KV."""
    one = load(folder)
    two = load(write_gguf_model(tmp_path / "tiny.gguf"))
    assert greedy_reference(one, PROMPT, 8) == greedy_reference(two, PROMPT, 8)
    np.testing.assert_array_equal(kv(one, range(7), 107), kv(two, range(7), 107))
    assert one.shape.layout == two.shape.layout == "float32/v1:blk,layer,kv,tok,head,dim/L2/H2/D16"
    assert one.shape.eos_token_ids == two.shape.eos_token_ids == (EOS,)


def _naive_logits(tensors: dict[str, np.ndarray], tokens: Sequence[int], bias: bool) -> np.ndarray:
    """The last token's logits by the textbook, in float64, one head at a time."""
    heads, groups = 4, 2
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = weights["model.embed_tokens.weight"][list(tokens)]
    angle = np.outer(np.arange(len(tokens)), 10_000.0 ** (-np.arange(0, DIM, 2) / DIM))
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * weights[name]

    def turn(values: np.ndarray) -> np.ndarray:
        a, b = values[:, : DIM // 2], values[:, DIM // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)

    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        n = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            n @ weights[f"{at}self_attn.{p}_proj.weight"].T
            + (weights[f"{at}self_attn.{p}_proj.bias"] if bias else 0.0)
            for p in "qkv"
        )
        mixed = []
        for head in range(heads):
            mine = slice(head * DIM, (head + 1) * DIM)
            shared = slice(head // groups * DIM, (head // groups + 1) * DIM)
            scores = turn(q[:, mine]) @ turn(k[:, shared]).T / DIM**0.5
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weight / weight.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(mixed, 1) @ weights[at + "self_attn.o_proj.weight"].T
        n = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (n @ weights[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    head_name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    return norm(x[-1:], "model.norm.weight")[0] @ weights[head_name].T


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_textbook(tmp_path: Path, family: str, tied: bool) -> None:
    """Tied, untied and biased models give the logits of a naive float64 forward."""
    from moonserve.live.engine.inputs import build_inputs
    from tests.support.tiny import tiny_tensors

    engine = load(write_folder(tmp_path, family, tied=tied))
    chunk = Chunk(RequestId("r"), PROMPT, 0, table(0, 100), GREEDY)
    with torch.inference_mode():
        got = engine._model.forward(build_inputs((chunk,), engine._model.layout))[0].numpy()
    wanted = _naive_logits(tiny_tensors(family, tied=tied), PROMPT, family == "qwen2")
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


def test_llama3_rope_scaling(tmp_path: Path) -> None:
    """Llama 3's frequencies equal the published rule, wavelength by wavelength."""
    from moonserve.live.engine.weights import _inv_freq
    from moonserve.live.model.config import load_config

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    path = write_folder(tmp_path, rope_scaling=scaling)
    for step, got in enumerate(_inv_freq(load_config(path)).tolist()):
        plain = 10_000.0 ** (-2 * step / DIM)
        wavelength = 2 * np.pi / plain
        if wavelength < 64 / 4:
            wanted = plain
        elif wavelength > 64 / 1:
            wanted = plain / 8
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            wanted = (1 - smooth) * plain / 8 + smooth * plain
        assert got == pytest.approx(wanted, rel=1e-5)


def test_bfloat16_blocks_are_bytes(folder: Path) -> None:
    """A bfloat16 pool has half the bytes, another layout, and runs off the event loop."""
    engine = TorchEngine.load(folder, dtype="bfloat16", block_size=BLOCK, num_blocks=8, threads=1)

    async def main() -> None:
        chunk = Chunk(RequestId("r"), PROMPT[:20], 0, (1, 6), GREEDY)
        result = await engine.run(Pass((chunk,)))
        assert 0 <= result.sampled[RequestId("r")] < VOCAB
        assert result.elapsed_us > 0
        await engine.close()

    asyncio.run(main())
    assert engine.shape.layout.startswith("bfloat16/v1:")
    assert engine.block(6).nbytes == engine.shape.block_bytes == LAYERS * 2 * BLOCK * 2 * DIM * 2
    assert bytes(engine.block(0)).count(0) == engine.shape.block_bytes
    assert any(engine.block(6))


def test_damaged_kv_is_an_engine_failure(folder: Path) -> None:
    """Keys that are not numbers end in EngineFailed, never in a token."""
    engine = load(folder)
    compute(engine, PROMPT, 0, 100, table(0, 100))
    engine.block(2)[:] = b"\xff" * engine.shape.block_bytes
    with pytest.raises(EngineFailed, match="not finite"):
        compute(engine, [*PROMPT, 1], 100, 1, table(0, 101))


def test_the_pool_takes_memory_as_it_fills(folder: Path) -> None:
    """A pool of 512 MiB that holds nothing takes no memory; its blocks are zeros."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    engine = TorchEngine.load(folder, dtype="float32", kv_memory_bytes=512 << 20, threads=1)
    assert resident_bytes() - before < 256 << 20
    assert not any(engine.block(engine.shape.num_blocks - 1))


def test_bad_memory_requests(folder: Path) -> None:
    """A pool that cannot be is refused with the most that can, before it is allocated."""
    with pytest.raises(ConfigError, match=r"num_blocks.*use at most"):
        TorchEngine.load(folder, num_blocks=10**9)
    with pytest.raises(ConfigError, match="kv_memory_bytes"):
        TorchEngine.load(folder, kv_memory_bytes=100)
    with pytest.raises(ConfigError, match="num_blocks"):
        TorchEngine.load(folder, num_blocks=0)
    with pytest.raises(ConfigError, match="block_size"):
        TorchEngine.load(folder, block_size=0)


def test_weights_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    """Missing tensors, wrong shapes and cut files are ConfigErrors that name them."""
    with pytest.raises(ConfigError, match=r"model\.layers\.2\."):
        load(write_folder(tmp_path / "a", num_hidden_layers=3))
    with pytest.raises(ConfigError, match=r"embed_tokens.*100"):
        load(write_folder(tmp_path / "b", vocab_size=101))
    tensors = {
        "blk.0.attn_norm.weight": ("F32", (HIDDEN,), bytes(4 * HIDDEN)),
        "blk.0.attn_q.weight": ("F32", (3, HIDDEN), bytes(12 * HIDDEN)),
    }
    with pytest.raises(ConfigError, match=r"q_proj\.weight has shape \(3, 64\)"):
        load(write_gguf(tmp_path / "q.gguf", tiny_metadata(), tensors))
    broken = write_folder(tmp_path / "c") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot read"):
        load(broken.parent)
    broken.unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        load(broken.parent)


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_long_chunks_are_masked_in_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A chunk whose rows attend in steps writes the KV of one whole prefill; its token follows."""
    whole, stepped = load(folder), load(folder)
    expected = greedy_reference(whole, PROMPT, 1)
    monkeypatch.setattr(inputs, "_MASKED_ROWS", rows)
    blocks = table(3, len(PROMPT))
    assert [compute(stepped, PROMPT, 0, 40, blocks)] == expected
    ours = kv(stepped, blocks, len(PROMPT))
    np.testing.assert_allclose(ours, kv(whole, table(0, len(PROMPT)), len(PROMPT)), **LIKE)

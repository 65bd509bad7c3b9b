"""A tiny random model, and writers for the two forms models come in.

For tests that need a real engine but not real words: 2 layers, 4 heads over 2 KV heads, 100 tokens;
made in milliseconds from a seed. Weights are under Hugging Face names, as float32.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, MAX_LEN = 2, 64, 4, 2, 16, 128, 100, 512
EOS = 99

Array = NDArray[np.float32]


def tiny_tensors(family: str = "llama", *, tied: bool = True, seed: int = 1) -> dict[str, Array]:
    """Random weights; matrices are scaled so that outputs keep their size through the layers."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return (rng.standard_normal((rows, columns)) * 1.5 / columns**0.5).astype(np.float32)

    def vector(size: int, around: float) -> Array:
        return (around + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": vector(HIDDEN, 1.0),
    }
    if not tied:
        tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = vector(HIDDEN, 1.0)
        tensors[at + "post_attention_layernorm.weight"] = vector(HIDDEN, 1.0)
        for name, rows in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
            if family == "qwen2":
                tensors[f"{at}self_attn.{name}_proj.bias"] = vector(rows, 0.0)
        tensors[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        tensors[at + "mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[at + "mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[at + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    return tensors


def tiny_config(family: str = "llama", *, tied: bool = True) -> dict[str, object]:
    """The config.json that goes with tiny_tensors."""
    return {
        "model_type": family,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS,
    }


def write_folder(
    folder: Path, family: str = "llama", *, tied: bool = True, **changes: object
) -> Path:
    """Save the tiny model as a Hugging Face folder; `changes` override config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, tied=tied) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(family, tied=tied), folder / "model.safetensors")
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_metadata() -> dict[str, object]:
    """The GGUF metadata that goes with tiny_tensors."""
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.feed_forward_length": INNER,
        "llama.rope.freq_base": 10_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": VOCAB,
        "llama.context_length": MAX_LEN,
        "tokenizer.ggml.eos_token_id": EOS,
    }


def quantise(values: Array, kind: str) -> bytes:
    """A matrix as GGUF's Q4_1 or Q8_0; other kinds are float32."""
    if kind not in ("Q4_1", "Q8_0"):
        return values.tobytes()
    groups = values.reshape(-1, 32)
    if kind == "Q8_0":
        scale = np.abs(groups).max(1, keepdims=True) / 127
        codes = np.rint(groups / scale).astype(np.int8)
        return np.hstack([scale.astype("<f2").view(np.int8), codes]).tobytes()
    least = groups.min(1, keepdims=True)
    scale = (groups.max(1, keepdims=True) - least) / 15
    codes = np.rint((groups - least) / scale).astype(np.uint8)
    pair = np.hstack([scale, least]).astype("<f2").view(np.uint8)
    return np.hstack([pair, codes[:, :16] | codes[:, 16:] << 4]).tobytes()


def write_gguf_model(path: Path, *, tied: bool = True, kind: str = "F32") -> Path:
    """Save the tiny llama as llama.cpp's converter does: each head's two halves interleaved.

    kind: of the layers' matrices.
    """
    tensors = {}
    for name, values in tiny_tensors(tied=tied).items():
        stem, part = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if stem.endswith(("q_proj", "k_proj")):
            halves = values.reshape(-1, 2, DIM // 2, HIDDEN)
            values = halves.transpose(0, 2, 1, 3).reshape(values.shape)
        stored = kind if prefix and values.ndim == 2 else "F32"
        raw = quantise(values, stored)
        tensors[f"{prefix}{_GGUF_NAMES[stem]}.{part}"] = (stored, values.shape, raw)
    return write_gguf(path, tiny_metadata(), tensors)


_CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30, "Q6_K": 14}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    assert isinstance(value, list)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def write_gguf(
    path: Path,
    metadata: dict[str, object],
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]],
    version: int = 3,
) -> Path:
    """A minimal writer: `tensors` maps a name to (type, row-major shape, raw bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", _CODES[kind], len(data))
        data += raw + bytes(-len(raw) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path

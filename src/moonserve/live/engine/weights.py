"""A llama-like model's weights as torch tensors, fused as the forward pass wants them.

For live/engine/model. Reads GGUF files and Hugging Face safetensors folders through one naming
(Hugging Face's) and one rotary convention (its half-rotation), so that both give the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonserve.core.errors import ConfigError
from moonserve.live.model.config import ModelConfig, config_of_gguf, load_config, weight_files
from moonserve.live.model.gguf import Floats, Gguf, open_gguf

Get = Callable[[str], Tensor]
"""A tensor by its Hugging Face name, in whatever dtype it is stored (GGUF: float32)."""

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: [out, in] matrices; qkv and gate_up are stacked along out."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights in one dtype, and the rotary frequencies [head_dim / 2] in float32."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Tensor
    inv_freq: Tensor


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name, such as blk.3.attn_q.weight."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _unpermute(values: Floats, heads: int) -> Floats:
    """Undo llama.cpp's row order: its converter interleaves the two halves of each head."""
    rows = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)


def gguf_source(file: Gguf, config: ModelConfig) -> Get:
    """Tensors of a GGUF file under Hugging Face names, rows in Hugging Face order."""

    def get(name: str) -> Tensor:
        values = file.load(gguf_name(name))
        # Only the llama converter permutes; Qwen2's leaves rows as Hugging Face has them.
        if config.family == "llama" and ".q_proj." in name:
            values = _unpermute(values, config.heads)
        elif config.family == "llama" and ".k_proj." in name:
            values = _unpermute(values, config.kv_heads)
        return torch.from_numpy(values)

    return get


def folder_source(folder: Path) -> Get:
    """Tensors of all .safetensors files in a folder."""
    place: dict[str, Path] = {}
    try:
        for file in weight_files(folder):
            with safe_open(file, "pt") as opened:
                place.update(dict.fromkeys(opened.keys(), file))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {folder}: {error}", "model") from error

    def get(name: str) -> Tensor:
        if name not in place:
            raise ConfigError(f"{folder} has no tensor {name}; is it a llama model?", "model")
        with safe_open(place[name], "pt") as opened:
            return torch.as_tensor(opened.get_tensor(name))

    return get


def load_weights(
    path: Path, dtype: torch.dtype, progress: Callable[[str], None]
) -> tuple[ModelConfig, Weights]:
    """Read configuration and weights. ConfigError for missing tensors or shapes that do not fit."""
    if path.is_dir():
        config = load_config(path)
        return config, _fuse(config, folder_source(path), _inv_freq(config), dtype, progress)
    file = open_gguf(path)
    config = config_of_gguf(file)
    inv_freq = _inv_freq(config)
    with suppress(KeyError):  # Llama 3's scaling, as llama.cpp stores it
        inv_freq /= torch.from_numpy(file.load(file.tensors["rope_freqs.weight"].name))
    return config, _fuse(config, gguf_source(file, config), inv_freq, dtype, progress)


def _inv_freq(config: ModelConfig) -> Tensor:
    """Rotary frequencies; with Llama 3's scaling (transformers' modeling_rope_utils.py)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    inv_freq = 1.0 / (config.rope_theta ** (steps / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    wavelength = 2 * torch.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_len / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq * (smooth + (1 - smooth) / scaling.factor)


def _fuse(
    config: ModelConfig,
    get: Get,
    inv_freq: Tensor,
    dtype: torch.dtype,
    progress: Callable[[str], None],
) -> Weights:
    hidden, inter, dim = config.hidden, config.intermediate, config.head_dim
    q_rows, kv_rows = config.heads * dim, config.kv_heads * dim

    def load(name: str, *shape: int) -> Tensor:
        tensor = get(name)
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise ConfigError(f"tensor {name} is {found}, the configuration says {shape}", "model")
        return tensor.to(dtype)

    def stack(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    layers: list[Layer] = []
    projections = (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
    for index in range(config.layers):
        if index % max(1, config.layers // 4) == 0:
            progress(f"loading weights: layer {index} of {config.layers}")
        at = f"model.layers.{index}."
        attn = at + "self_attn."
        bias = None
        if config.qkv_bias:
            bias = stack(load(f"{attn}{name}_proj.bias", rows) for name, rows in projections)
        layers.append(
            Layer(
                attn_norm=load(at + "input_layernorm.weight", hidden),
                qkv=stack(load(f"{attn}{n}_proj.weight", rows, hidden) for n, rows in projections),
                qkv_bias=bias,
                out=load(attn + "o_proj.weight", hidden, q_rows),
                mlp_norm=load(at + "post_attention_layernorm.weight", hidden),
                gate_up=stack(
                    load(f"{at}mlp.{name}_proj.weight", inter, hidden) for name in ("gate", "up")
                ),
                down=load(at + "mlp.down_proj.weight", hidden, inter),
            )
        )
    embed = load("model.embed_tokens.weight", config.vocab_size, hidden)
    tied = config.tie_embeddings
    return Weights(
        embed=embed,
        layers=tuple(layers),
        norm=load("model.norm.weight", hidden),
        lm_head=embed if tied else load("lm_head.weight", config.vocab_size, hidden),
        inv_freq=inv_freq,
    )

"""A llama-like model's weights as torch tensors, fused for the forward pass.

live/engine/model uses it. It reads GGUF files and Hugging Face safetensors folders with one naming
(Hugging Face's) and one rotary convention (its half rotation), so both give the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonserve.live.engine.kernels import Kernels, Tiles, tile
from moonserve.live.engine.matrix import Matrix, pack
from moonserve.live.model.config import ModelConfig, config_of_gguf, load_config, weight_files
from moonserve.live.model.errors import BadModel
from moonserve.live.model.gguf import Gguf, Quants, open_gguf

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
    """One decoder layer; qkv and gate_up are stacked along their outputs."""

    attn_norm: Tensor
    qkv: Matrix | Tiles
    out: Matrix | Tiles
    mlp_norm: Tensor
    gate_up: Matrix | Tiles
    down: Matrix | Tiles


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights in one dtype, and the rotary frequencies [head_dim / 2] in float32."""

    embed: Tensor | Tiles
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Matrix | Tiles
    inv_freq: Tensor


class TensorSource(Protocol):
    """A source of tensors, with Hugging Face's names and row order."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in its stored dtype (GGUF: float32). Raises ConfigError if missing."""

    def quants(self, name: str) -> Quants | None:
        """Return a matrix's quantised form; None: the source does not store it in 4 or 8 bits."""


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor name, such as blk.3.attn_q.weight."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _unpermute(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo llama.cpp's row order, which interleaves the two halves of each head."""
    rows = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)


class GgufSource:
    """The tensors of a GGUF file."""

    def __init__(self, file: Gguf, config: ModelConfig) -> None:
        self._file = file
        # Only the converter of llama permutes; that of Qwen2 keeps Hugging Face's row order.
        llama = config.family == "llama"
        self._heads = {"q_proj": config.heads, "k_proj": config.kv_heads} if llama else {}

    def _rows(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        heads = self._heads.get(name.split(".")[-2])
        if heads is None or len(values) % (2 * heads):
            return values  # of the wrong shape, if it is a projection: `load_weights` refuses it
        return _unpermute(values, heads)

    def tensor(self, name: str) -> Tensor:
        """See Source."""
        return torch.from_numpy(self._rows(name, self._file.load(gguf_name(name))))

    def quants(self, name: str) -> Quants | None:
        """See Source."""
        raw = self._file.quants(gguf_name(name))
        if raw is None:
            return None
        codes, scale, least = (self._rows(name, it) for it in (raw.codes, raw.scale, raw.least))
        return Quants(codes, scale, least, raw.bits)


class FolderSource:
    """The tensors of all .safetensors files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: dict[str, Path] = {}
        try:
            for file in weight_files(folder):
                with safe_open(file, "pt") as opened:
                    self._place.update(dict.fromkeys(opened.keys(), file))
        except (SafetensorError, OSError) as error:
            raise BadModel(f"cannot read {folder}: {error}") from error

    def tensor(self, name: str) -> Tensor:
        """See Source."""
        if name not in self._place:
            raise BadModel(f"{self._folder} has no tensor {name}; is it a llama-like model?")
        try:
            with safe_open(self._place[name], "pt") as opened:
                return torch.as_tensor(opened.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise BadModel(f"cannot read tensor {name} of {self._folder}: {error}") from error

    def quants(self, name: str) -> Quants | None:
        """Return None: this reader knows no quantised matrices in folders."""
        return None


def load_weights(
    path: Path,
    dtype: torch.dtype,
    progress: Callable[[str], None],
    kernels: Kernels | None = None,
) -> tuple[ModelConfig, Weights]:
    """Read configuration and weights; with kernels, quantised matrices become Tiles.

    Raises ConfigError for missing tensors, and for shapes that do not fit the configuration.
    """
    if path.is_dir():
        config = load_config(path)
        folder = FolderSource(path)
        return config, _fuse(config, folder, _inv_freq(config), dtype, progress, kernels)
    file = open_gguf(path)
    config = config_of_gguf(file)
    inv_freq = _inv_freq(config)
    if "rope_freqs.weight" in file.tensors:  # Llama 3's scaling, as llama.cpp stores it
        inv_freq /= torch.from_numpy(file.load("rope_freqs.weight"))
    return config, _fuse(config, GgufSource(file, config), inv_freq, dtype, progress, kernels)


def _inv_freq(config: ModelConfig) -> Tensor:
    """Return the rotary frequencies, scaled as Llama 3 (transformers' modeling_rope_utils.py)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
    inv_freq = 1.0 / (config.rope_theta ** (steps / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    wavelength = 2 * torch.pi / inv_freq
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    smooth = ((scaling.original_max_len / wavelength - low) / (high - low)).clamp(0, 1)
    return inv_freq * (smooth + (1 - smooth) / scaling.factor)


def _fuse(
    config: ModelConfig,
    source: TensorSource,
    inv_freq: Tensor,
    dtype: torch.dtype,
    progress: Callable[[str], None],
    kernels: Kernels | None,
) -> Weights:
    hidden = config.hidden
    inter = config.intermediate
    dim = config.head_dim
    q_rows = config.heads * dim
    kv_rows = config.kv_heads * dim

    def check(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise BadModel(f"tensor {name} has shape {found}, but the configuration needs {wanted}")

    def load(name: str, *shape: int) -> Tensor:
        tensor = source.tensor(name)
        check(name, tuple(tensor.shape), shape)
        return tensor.to(dtype)

    def tiles(
        names: Sequence[str], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> Tiles | None:
        if kernels is None:
            return None
        parts = [source.quants(f"{name}.weight") for name in names]
        for name, part, count in zip(names, parts, rows, strict=True):
            if part is not None:
                check(f"{name}.weight", part.codes.shape, (count, columns))
        return tile(kernels, parts, bias)

    def matrix(
        names: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> Matrix | Tiles:
        biases = [load(f"{n}.bias", r) for n, r in zip(names, rows, strict=True)] if bias else []
        stacked = torch.cat(biases) if bias else None
        quantised = tiles(names, rows, columns, stacked)
        if quantised is not None:
            return quantised
        dense = torch.cat(
            [load(f"{n}.weight", r, columns) for n, r in zip(names, rows, strict=True)]
        )
        parts = [source.quants(f"{name}.weight") for name in names] if not bias else [None]
        return Matrix(dense, stacked, pack(parts, dtype))

    layers: list[Layer] = []
    for index in range(config.layers):
        if index % max(1, config.layers // 4) == 0:
            progress(f"loading weights: layer {index} of {config.layers}")
        at = f"model.layers.{index}."
        qkv = [f"{at}self_attn.{name}_proj" for name in "qkv"]
        gate_up = [f"{at}mlp.{name}_proj" for name in ("gate", "up")]
        layers.append(
            Layer(
                attn_norm=load(at + "input_layernorm.weight", hidden),
                qkv=matrix(qkv, (q_rows, kv_rows, kv_rows), hidden, config.qkv_bias),
                out=matrix([at + "self_attn.o_proj"], [hidden], q_rows, False),
                mlp_norm=load(at + "post_attention_layernorm.weight", hidden),
                gate_up=matrix(gate_up, (inter, inter), hidden, False),
                down=matrix([at + "mlp.down_proj"], [hidden], inter, False),
            )
        )
    vocabulary = config.vocab_size
    name = "model.embed_tokens"
    embed = tiles([name], [vocabulary], hidden, None) or load(f"{name}.weight", vocabulary, hidden)
    head: Matrix | Tiles
    if not config.tie_embeddings:
        head = matrix(["lm_head"], [vocabulary], hidden, False)
    else:
        head = embed if isinstance(embed, Tiles) else Matrix(embed)
    return Weights(
        embed=embed,
        layers=tuple(layers),
        norm=load("model.norm.weight", hidden),
        lm_head=head,
        inv_freq=inv_freq,
    )

"""A pass of single tokens through all layers in one call of the compiled kernels.

Model makes a Decoder if all its layers are Tiles. It reads and writes the pool in place: no key is
gathered or copied. torch would start about forty operations a layer for the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moonserve.live.engine.inputs import Layout, Singles
from moonserve.live.engine.kernels import Kernels, MatrixStruct, Tiles
from moonserve.live.engine.weights import Layer
from moonserve.live.model.config import ModelConfig

_WIDE = 8
"""Floats of one vector in kernels.c."""


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attn_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv", MatrixStruct),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("layer_count", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "positions", "blocks")),
        *((name, ctypes.c_void_p) for name in ("normed", "wide", "mixed", "ready", "sums")),
        ("scores", ctypes.c_void_p),
    )


class Decoder:
    """Layers and pool, as kernels.c reads them. The tensors must outlive it, and stay in place."""

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        layout: Layout,
        layers: Sequence[_Layer],
        tables: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._block_size = layout.block_size
        self._layers = (_Layer * len(layers))(*layers)
        cos, sin, pool = tables
        self._model = _Model(
            ctypes.addressof(self._layers),
            cos.data_ptr(),
            sin.data_ptr(),
            pool.data_ptr(),
            len(layers),
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            layout.block_size,
            config.norm_eps,
        )

    def run(self, hidden: Tensor, singles: Singles) -> None:
        """Run all layers on embeddings [rows, hidden], in place; write their keys and values."""
        rows, width = singles.blocks.shape
        config = self._config
        queries = config.heads * config.head_dim
        keys_values = 2 * config.kv_heads * config.head_dim
        inputs = max(config.hidden, queries, config.intermediate)
        sizes = (
            rows * config.hidden,
            rows * max(queries + keys_values, 2 * config.intermediate),
            rows * inputs,  # what attention or the activation gives
            rows * inputs,
            rows * inputs // 32,
            rows * config.heads * width * self._block_size,
        )
        room = torch.split_with_sizes(torch.empty(sum(sizes)), sizes)
        step = _Step(
            rows,
            width,
            *(each.data_ptr() for each in (hidden, singles.positions, singles.blocks, *room)),
        )
        self._kernels.library.moonserve_decode(
            ctypes.byref(self._model), ctypes.byref(step), self._kernels.threads
        )


def decoder(
    kernels: Kernels | None,
    config: ModelConfig,
    layout: Layout,
    layers: Sequence[Layer],
    tables: tuple[Tensor, Tensor, Tensor],
) -> Decoder | None:
    """Return the decoder over these layers, and over the tables cos, sin and pool.

    None: there are no kernels, or a matrix or a width does not fit them.
    """
    if kernels is None or config.hidden % _WIDE or config.head_dim % _WIDE:
        return None
    structs: list[_Layer] = []
    for layer in layers:
        matrices = [
            it.struct
            for it in (layer.qkv, layer.out, layer.gate_up, layer.down)
            if isinstance(it, Tiles)
        ]
        if len(matrices) < 4:
            return None
        norms = (layer.attn_norm.data_ptr(), layer.mlp_norm.data_ptr())
        structs.append(_Layer(*norms, *matrices))
    return Decoder(kernels, config, layout, structs, tables)

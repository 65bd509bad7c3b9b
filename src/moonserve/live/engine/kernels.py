"""Quantised weights in float32 engines: kept as the file has them, multiplied by compiled kernels.

live/engine/weights makes `Tiles`, live/engine/decode runs whole passes. The values are the file's
own and the arithmetic is float32, so the results equal those of dense matrices but for the order in
which they are added. A decode step reads every weight once, so memory bounds its speed; 4 bits and
their scales are a fifth of float32. Only this file and live/engine/decode call C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from moonserve.live.engine.compile import library
from moonserve.live.model.gguf import Quants

KernelChoice = Literal["auto", "native", "torch"]
FEW_ROWS = 24
"""Passes with at most this many rows read the codes; longer ones unpack each matrix first."""
_TILE = 32
_GROUP = 32


class MatrixStruct(ctypes.Structure):
    """Matrix in kernels.c."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


class Kernels:
    """The compiled library, with the threads that it uses. One thread at a time may call it."""

    def __init__(self, path: Path, threads: int) -> None:
        self.threads = threads
        self.library = ctypes.CDLL(str(path))
        self._scratch = torch.empty(0)

    @classmethod
    def load(cls, threads: int) -> Kernels:
        """Compile the kernels if this machine has not yet. Raises ConfigError if it cannot."""
        return cls(library(), threads)

    def multiply(self, tiles: Tiles, rows: Tensor) -> Tensor:
        """Multiply rows: [n, inputs] to [n, outputs]."""
        count, inputs = rows.shape
        product = torch.empty(count, tiles.struct.outputs)
        room = torch.empty(count * (inputs + inputs // _GROUP))
        self.library.moonserve_multiply(
            ctypes.byref(tiles.struct),
            pointer(rows.contiguous()),
            ctypes.c_int64(count),
            pointer(room),
            pointer(room[count * inputs :]),
            pointer(product),
            self.threads,
        )
        return product

    def unpack(self, tiles: Tiles) -> Tensor:
        """Return the dense matrix [outputs, inputs]; the next call overwrites it."""
        size = tiles.struct.outputs * tiles.struct.inputs
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        dense = self._scratch[:size].view(tiles.struct.outputs, tiles.struct.inputs)
        self.library.moonserve_unpack(ctypes.byref(tiles.struct), pointer(dense), self.threads)
        return dense


class Tiles:
    """A matrix in kernels.c's layout. It is used as a matrix of layers, and as embeddings."""

    def __init__(
        self,
        kernels: Kernels,
        codes: NDArray[np.uint32],
        scales: NDArray[np.float32],
        bias: Tensor | None,
        bits: int,
    ) -> None:
        self._kernels = kernels
        self._codes = codes
        self._scales = scales
        self._bias = bias
        self._shifts = np.arange(0, 32, bits, dtype=np.uint32)
        self._mask = np.uint32((1 << bits) - 1)
        self.struct = MatrixStruct(
            codes.ctypes.data,
            scales.ctypes.data,
            None if bias is None else bias.data_ptr(),
            codes.shape[0] * _TILE,
            codes.shape[1] * (32 // bits),
            bits,
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows: [n, inputs] to [n, outputs]."""
        if len(rows) <= FEW_ROWS:
            return self._kernels.multiply(self, rows)
        return linear(rows, self._kernels.unpack(self), self._bias)

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Return the rows [n, inputs] of these outputs, as an embedding has them."""
        tile, lane = np.divmod(ids.numpy(), _TILE)
        words = self._codes[tile, :, lane]
        codes = (words[..., None] >> self._shifts & self._mask).astype(np.float32)
        scales = self._scales[tile, :, :, lane]
        groups = codes.reshape(len(tile), -1, _GROUP) * scales[:, :, :1] + scales[:, :, 1:]
        return torch.from_numpy(groups.reshape(len(tile), -1))


def tile(kernels: Kernels, parts: Sequence[Quants | None], bias: Tensor | None) -> Tiles | None:
    """Stack quantised matrices along their outputs; None: their form does not fit the kernels."""
    stored = [part for part in parts if part is not None]
    if len(stored) < len(parts) or len({part.bits for part in stored}) != 1:
        return None
    codes = np.concatenate([part.codes for part in stored])
    outputs, inputs = codes.shape
    if outputs % _TILE or inputs % _GROUP:
        return None
    bits = stored[0].bits
    bytes_ = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    words = bytes_.reshape(outputs // _TILE, _TILE, -1, 4).transpose(0, 2, 1, 3)
    scale = np.concatenate([part.scale for part in stored])
    least = np.concatenate([part.least for part in stored])
    pairs = np.stack([scale, least]).reshape(2, outputs // _TILE, _TILE, -1)
    return Tiles(
        kernels,
        np.ascontiguousarray(words).view("<u4")[..., 0],
        np.ascontiguousarray(pairs.transpose(1, 3, 0, 2)),
        bias,
        bits,
    )


def pointer(values: Tensor) -> ctypes.c_void_p:
    """Return the address of a tensor's values, which must be contiguous float32 or int64."""
    return ctypes.c_void_p(values.data_ptr())

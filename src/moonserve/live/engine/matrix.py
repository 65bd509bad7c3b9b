"""A linear layer's matrix: dense, and also in 4 bits if the file has it, for small batches.

live/engine/weights and model use it; float32 engines with compiled kernels have Tiles instead. A
decode step with few requests reads every weight once, so memory bounds its speed, and 4 bits are a
quarter to read. Measured: 8 ms instead of 30 ms for the layers of SmolLM2-135M on one core with one
row. Arithmetic bounds long passes, so they use the dense form. Both forms have the file's quantised
values, rounded in the same way to bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from moonserve.live.model.gguf import Quants

FEW_ROWS = 8
"""Passes with at most this many rows use the 4-bit form."""
_GROUP = 32


@dataclass(frozen=True, slots=True)
class Packed:
    """torch's int4 layout: packed codes, and [columns / 32, outputs, 2] scales and midpoints."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix. `dense` is [outputs, inputs], in the engine's dtype."""

    dense: Tensor
    bias: Tensor | None = None
    packed: Packed | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows: [n, inputs] to [n, outputs]."""
        if self.packed is not None and len(rows) <= FEW_ROWS:
            codes = self.packed.codes
            scales = self.packed.scales
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes, _GROUP, scales)
            return torch.as_tensor(product if self.bias is None else product + self.bias)
        return linear(rows, self.dense, self.bias)


def pack(parts: Sequence[Quants | None], dtype: torch.dtype) -> Packed | None:
    """Stack 4-bit matrices along their outputs; None: use the dense form.

    That is so if a part is not in 4 bits, if torch lacks the kernel, and for float32 engines, whose
    results must be exact.
    """
    stored = [part for part in parts if part is not None and part.bits == 4]
    kernel = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    if dtype != torch.bfloat16 or len(stored) < len(parts) or not kernel:
        return None
    codes = np.concatenate([part.codes for part in stored])
    if len(codes) % _GROUP:  # the kernel's blocks of outputs
        return None
    scale = np.concatenate([part.scale for part in stored])
    least = np.concatenate([part.least for part in stored])
    # The kernel computes (code - 8) * scale + midpoint.
    pairs = np.stack([scale, least + 8 * scale], -1).transpose(1, 0, 2)
    return Packed(
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            torch.from_numpy(codes.astype(np.int32)), 1
        ),
        torch.from_numpy(np.ascontiguousarray(pairs)).bfloat16(),
    )

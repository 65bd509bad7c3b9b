"""The forward pass of llama-like decoders over a paged KV pool.

RMSNorm, rotary embedding (half rotation), grouped-query attention, SwiGLU: Llama, Qwen2 and similar
models. TorchEngine calls it on its one thread, in inference mode. It has no state of requests; the
pool is its only memory. It has no Python loop over tokens, heads or blocks. It has one over layers;
inside it, one over the prefilling requests and one over the groups of decoding requests.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from moonserve.live.engine.decode import decoder
from moonserve.live.engine.inputs import Inputs, Layout, SingleGroup, Singles, Span
from moonserve.live.engine.kernels import Kernels
from moonserve.live.engine.weights import Layer, Weights
from moonserve.live.model.config import ModelConfig


class Model:
    """Weights and the pool [num_blocks, layers, 2, block_size, kv_heads, head_dim].

    The pool starts as zeros and must stay finite, because masked slots are multiplied by 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layout: Layout,
        kernels: Kernels | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.layout = layout
        kv = (config.kv_heads, config.head_dim)
        shape = (layout.num_blocks, config.layers, 2, layout.block_size, *kv)
        self.pool = _zeros(shape, layout.dtype)
        self._tokens = self.pool.view(-1, *kv)
        self._blocks = self.pool.view(layout.num_blocks * config.layers * 2, -1)
        angles = torch.outer(torch.arange(config.max_len).float(), weights.inv_freq)
        self._cos = angles.cos().repeat(1, 2).to(layout.dtype)
        sin = angles.sin()
        self._sin = torch.cat((-sin, sin), -1).to(layout.dtype)
        tables = (self._cos, self._sin, self.pool)
        self.decoder = decoder(kernels, config, layout, weights.layers, tables)
        """For passes of single tokens; None: `forward` runs them."""

    def forward(self, inputs: Inputs, reached: Callable[[int], None] | None = None) -> Tensor:
        """Run a pass: write its keys and values; return logits [sample_rows, vocab], float32.

        reached: called with each layer's index after the layer has written its keys and values.
        """
        eps = self.config.norm_eps
        width = (self.config.hidden,)
        hidden = self.weights.embed[inputs.ids]
        cos = self._cos[inputs.positions].unsqueeze(1)
        sin = self._sin[inputs.positions].unsqueeze(1)
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, width, layer.attn_norm, eps)
            hidden += self._attention(index, layer, normed, cos, sin, inputs, reached)
            normed = rms_norm(hidden, width, layer.mlp_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            hidden += layer.down(silu(gate).mul_(up))
        return self._logits(hidden[inputs.sample_rows])

    def decode(self, singles: Singles) -> Tensor:
        """Run a pass of single tokens by the decoder: what `forward` does, in one call."""
        assert self.decoder is not None, "without a decoder, call forward"
        hidden = self.weights.embed[singles.ids]
        self.decoder.run(hidden, singles)
        return self._logits(hidden[singles.sample_rows])

    def _logits(self, hidden: Tensor) -> Tensor:
        width = (self.config.hidden,)
        last = rms_norm(hidden, width, self.weights.norm, self.config.norm_eps)
        return self.weights.lm_head(last).float()

    def _attention(
        self,
        index: int,
        layer: Layer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        inputs: Inputs,
        reached: Callable[[int], None] | None,
    ) -> Tensor:
        heads = self.config.heads
        kv_heads = self.config.kv_heads
        dim = self.config.head_dim
        qkv = layer.qkv(normed).view(len(normed), -1, dim)
        rotated = qkv[:, : heads + kv_heads]
        # cos holds both halves, sin its first half negated: roll swaps the halves of each head.
        rotated.copy_((rotated * cos).addcmul_(rotated.roll(dim // 2, -1), sin))
        keys_values = qkv[:, heads:].view(-1, 2, kv_heads, dim)
        self._tokens[inputs.slots[index]] = keys_values
        if reached is not None:
            reached(index)
        queries = qkv[:, :heads]
        mixed = torch.empty_like(queries)
        for span in inputs.spans:
            rows = slice(span.first, span.last)
            mixed[rows] = self._span(index, span, queries[rows], keys_values[rows])
        for group in inputs.groups:
            rows = slice(group.first, group.last)
            mixed[rows] = self._group(index, group, queries[rows])
        return layer.out(mixed.view(len(normed), -1))

    def _span(self, index: int, span: Span, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Compute attention of one request's tokens [tokens, heads, dim] over its context."""
        if span.gather is None:
            keys, values = keys_values.unbind(1)
        else:
            shape = (2, -1, self.config.kv_heads, self.config.head_dim)
            gathered = self._blocks.index_select(0, span.gather[index]).view(shape)
            keys, values = gathered[:, : span.context].unbind(0)
        return scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=span.mask,
            is_causal=span.mask is None,
            enable_gqa=True,
        )[0].transpose(0, 1)

    def _group(self, index: int, group: SingleGroup, queries: Tensor) -> Tensor:
        """Compute attention of one token of each request, padded to the longest context."""
        kv_heads = self.config.kv_heads
        dim = self.config.head_dim
        batch = group.last - group.first
        gathered = self._blocks.index_select(0, group.gather[index])
        keys, values = gathered.view(2, batch, -1, kv_heads, dim)[:, :, : group.context].unbind(0)
        # The heads that share a KV head become its queries, so no key is read or copied twice.
        return scaled_dot_product_attention(
            queries.view(batch, kv_heads, -1, dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=group.mask,
        ).reshape(batch, -1, dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until they are written; torch.zeros writes them at once."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(room, dtype=dtype).view(shape)

"""One pass as tensors: every index that all layers share, computed once, on whole arrays.

live/engine/model uses it. The rows of a pass are its tokens: first the chunks of several tokens
(spans), then the chunks of one token (singles: decoding requests). So each part is one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonserve.core.engine.batch import Chunk
from moonserve.live.model.config import ModelConfig

Ints = NDArray[np.int64]

_MASKED_ROWS = 512
"""A longer chunk with a context is computed in steps of so many rows. The attention kernel also
computes the masked upper triangle of a step, so smaller steps waste less."""
_SHORT_BLOCKS = 8
"""Singles with fewer blocks than this are not split into groups by length."""


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk of several tokens. `gather` [layers, 2 * blocks]; None: it has no context before."""

    first: int
    last: int
    context: int
    gather: Tensor | None
    mask: Tensor | None
    """[tokens, context], additive. None: the attention is causal."""


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Singles with similar context lengths, padded to the longest: [batch, context]."""

    first: int
    last: int
    context: int
    gather: Tensor
    """[layers, 2 * batch * blocks] rows of the pool: all keys, then all values."""
    mask: Tensor | None
    """[batch, 1, 1, context], additive. None: all have the same length."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A pass. `slots` [layers, rows, 2]: the pool rows of each row's key and value."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
    groups: tuple[SingleGroup, ...]
    sampling: tuple[Chunk, ...]
    """The chunks that sample, in the order of `sample_rows`."""
    sample_rows: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """The pool's geometry: [block, layer, key or value, token in block, kv head, dim]."""

    num_blocks: int
    layers: int
    block_size: int
    dtype: torch.dtype

    def block_rows(self, blocks: Ints) -> Tensor:
        """Return rows of the pool, viewed as [blocks * layers * 2, ...].

        Shape: [layers, 2 * blocks.size].
        """
        layer = np.arange(self.layers).reshape(-1, 1, 1)
        which = np.arange(2).reshape(1, 2, 1)
        rows = (blocks.reshape(1, 1, -1) * self.layers + layer) * 2 + which
        return torch.from_numpy(rows.reshape(self.layers, -1))

    def token_rows(self, blocks: Ints, offsets: Ints) -> Tensor:
        """Return rows of the pool, viewed as [blocks * layers * 2 * block_size, ...].

        Shape: [layers, rows, 2].
        """
        layer = np.arange(self.layers).reshape(-1, 1, 1)
        which = np.arange(2).reshape(1, 1, 2)
        rows = (blocks.reshape(1, -1, 1) * self.layers + layer) * 2 + which
        return torch.from_numpy(rows * self.block_size + offsets.reshape(1, -1, 1))


@dataclass(frozen=True, slots=True)
class Singles:
    """A pass of one token of each request, for live/engine/decode."""

    ids: Tensor
    positions: Tensor
    blocks: Tensor
    """[rows, blocks of the longest]; a shorter row is padded with block 0."""
    sampling: tuple[Chunk, ...]
    """The chunks that sample, in the order of `sample_rows`."""
    sample_rows: Tensor


def layout_name(config: ModelConfig, dtype: torch.dtype) -> str:
    """Return the name of the blocks' layout: two engines with one name can exchange KV bytes."""
    kind = str(dtype).removeprefix("torch.")
    order = "blk,layer,kv,tok,head,dim"
    return f"{kind}/v1:{order}/L{config.layers}/H{config.kv_heads}/D{config.head_dim}"


def build_inputs(chunks: Sequence[Chunk], layout: Layout) -> Inputs:
    """Arrange a pass. It asserts that the chunks keep Pass's contract."""
    assert chunks, "a pass has a chunk"
    spans = [chunk for chunk in chunks if len(chunk.tokens) > 1]
    singles = sorted((chunk for chunk in chunks if len(chunk.tokens) == 1), key=_length_class)
    ordered = spans + singles
    positions, blocks = _places(ordered, layout)
    ends = np.cumsum([len(chunk.tokens) for chunk in ordered])
    built_spans = [
        span
        for chunk, end in zip(spans, ends, strict=False)
        for span in _spans(chunk, int(end), layout)
    ]
    groups: list[SingleGroup] = []
    first = int(ends[-1]) - len(singles)
    for _, members in groupby(singles, key=_length_class):
        group = _group(list(members), first, layout)
        groups.append(group)
        first = group.last
    sampling = [(c, e - 1) for c, e in zip(ordered, ends, strict=True) if c.sampling is not None]
    return Inputs(
        ids=torch.tensor([token for chunk in ordered for token in chunk.tokens]),
        positions=torch.from_numpy(positions),
        slots=layout.token_rows(blocks, positions % layout.block_size),
        spans=tuple(built_spans),
        groups=tuple(groups),
        sampling=tuple(chunk for chunk, _ in sampling),
        sample_rows=torch.tensor([row for _, row in sampling], dtype=torch.int64),
    )


def build_singles(chunks: Sequence[Chunk], layout: Layout) -> Singles:
    """Arrange a pass whose chunks have one token each; it asserts what build_inputs asserts."""
    positions, _ = _places(chunks, layout)
    sampling = [(chunk, row) for row, chunk in enumerate(chunks) if chunk.sampling is not None]
    return Singles(
        ids=torch.tensor([chunk.tokens[0] for chunk in chunks]),
        positions=torch.from_numpy(positions),
        blocks=torch.from_numpy(_padded([_table(chunk, layout) for chunk in chunks])),
        sampling=tuple(chunk for chunk, _ in sampling),
        sample_rows=torch.tensor([row for _, row in sampling], dtype=torch.int64),
    )


def _length_class(chunk: Chunk) -> int:
    """Return a class for grouping: in one class, the block counts differ by less than factor 2."""
    return max(_SHORT_BLOCKS - 1, len(chunk.blocks)).bit_length()


def _places(chunks: Sequence[Chunk], layout: Layout) -> tuple[Ints, Ints]:
    """Return each row's sequence position and pool block."""
    positions: list[Ints] = []
    blocks: list[Ints] = []
    for chunk in chunks:
        at = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        table = np.array(chunk.blocks, dtype=np.int64)
        assert len(at) > 0, "a chunk has a token"
        assert at[-1] < len(table) * layout.block_size, "a chunk's blocks do not cover its tokens"
        assert 0 <= min(chunk.blocks) <= max(chunk.blocks) < layout.num_blocks, "not a pool block"
        positions.append(at)
        blocks.append(table[at // layout.block_size])
    return np.concatenate(positions), np.concatenate(blocks)


def _table(chunk: Chunk, layout: Layout) -> Ints:
    """Return the blocks with the chunk's context; a chunk may have more blocks."""
    needed = -(-(chunk.start + len(chunk.tokens)) // layout.block_size)
    return np.array(chunk.blocks[:needed], dtype=np.int64)


def _spans(chunk: Chunk, last: int, layout: Layout) -> Iterator[Span]:
    """Yield the spans of a chunk whose rows end at `last`."""
    count = len(chunk.tokens)
    first = last - count
    if chunk.start == 0:
        yield Span(first, last, count, None, None)
        return
    table = _table(chunk, layout)
    for begin in range(0, count, _MASKED_ROWS):
        rows = min(_MASKED_ROWS, count - begin)
        before = chunk.start + begin
        context = before + rows
        # Query i is at before + i and sees keys 0 .. before + i: the diagonal ends bottom right.
        mask = torch.full((rows, context), float("-inf"), dtype=layout.dtype)
        mask.triu_(before + 1)
        gather = layout.block_rows(table[: -(-context // layout.block_size)])
        yield Span(first + begin, first + begin + rows, context, gather, mask)


def _padded(tables: Sequence[Ints]) -> Ints:
    """Return the tables as rows of one array, padded with block 0, which is never read."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _group(chunks: Sequence[Chunk], first: int, layout: Layout) -> SingleGroup:
    padded = _padded([_table(chunk, layout) for chunk in chunks])
    lengths = torch.tensor([chunk.start + 1 for chunk in chunks])
    context = int(lengths.max())
    mask = None
    if int(lengths.min()) < context:
        mask = torch.zeros(len(chunks), 1, 1, context, dtype=layout.dtype)
        beyond = torch.arange(context) >= lengths[:, None]
        mask.masked_fill_(beyond[:, None, None], float("-inf"))
    return SingleGroup(first, first + len(chunks), context, layout.block_rows(padded), mask)

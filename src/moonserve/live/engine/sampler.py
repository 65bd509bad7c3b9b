"""From logits to token ids: greedy, temperature, top_k and top_p, with reproducible randomness.
Also biases, barred tokens, penalties and log probabilities, for requests that ask for them.

The random number of the token at position i depends only on (seed, i). So prefill in one process
and decode in another draw the same tokens as one process. Only TorchEngine calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonserve.core.errors import EngineFailed
from moonserve.core.request import Penalties, Sampling, TokenCounts, TokenLogprobs


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one sequence position: Philox, keyed by the seed."""
    bits = np.random.Philox(key=seed % 2**64, counter=position)
    return float(np.random.Generator(bits).random())


def shape(logits: Tensor, wanted: Sequence[tuple[Sampling, int]]) -> dict[int, tuple[Tensor, int]]:
    """Change the logits of the rows that ask for it, in place; call it before `sample`.

    Returns, for each row whose log probabilities are wanted, the logits as they were, and how many
    of the likeliest tokens to report.
    """
    plain: dict[int, tuple[Tensor, int]] = {}
    penalised = []
    for row, (how, position) in enumerate(wanted):
        shaping = how.shaping
        if shaping is None:
            continue
        if shaping.logprobs is not None:
            plain[row] = logits[row].clone(), shaping.logprobs
        if shaping.bias:
            ids, added = zip(*shaping.bias, strict=True)
            logits[row, list(ids)] += torch.tensor(added, dtype=logits.dtype)
        if shaping.barred and position < shaping.barred_until:
            logits[row, list(shaping.barred)] = -math.inf
        if shaping.allowed:
            bits = np.unpackbits(np.frombuffer(shaping.allowed, np.uint8), bitorder="little")
            allowed = np.zeros(logits.shape[1], bool)  # ids of padding have no bit
            count = min(len(bits), len(allowed))
            allowed[:count] = bits[:count]
            logits[row, torch.from_numpy(~allowed)] = -math.inf
        if shaping.penalties is not None and shaping.counts is not None and shaping.counts.ids:
            penalised.append((row, shaping.penalties, shaping.counts))
    if penalised:
        _penalise(logits, penalised)
    return plain


def _penalise(logits: Tensor, penalised: Sequence[tuple[int, Penalties, TokenCounts]]) -> None:
    """Change the logits of the tokens that these rows have so far, all rows at once.

    The order of operations is vLLM's, so that both compute the same numbers.
    """
    sizes = torch.tensor([len(counts.ids) // 8 for _, _, counts in penalised])
    rows = torch.tensor([row for row, _, _ in penalised]).repeat_interleave(sizes)
    at = (rows, _integers([counts.ids for _, _, counts in penalised]))
    count = _integers([counts.counts for _, _, counts in penalised])
    factors = [(it.repetition, it.frequency, it.presence) for _, it, _ in penalised]
    of_each = torch.tensor(factors, dtype=logits.dtype).repeat_interleave(sizes, 0)
    repetition, frequency, presence = of_each.unbind(1)
    values = logits[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count
    values -= presence * (count > 0)
    logits[at] = values


def _integers(packed: Sequence[bytes]) -> Tensor:
    """64-bit integers, packed as in TokenCounts."""
    return torch.from_numpy(np.frombuffer(bytearray().join(packed), np.int64))


def logprobs(logits: Tensor, token: int, most: int) -> TokenLogprobs:
    """Return the log probability of a token in one row, and the `most` likeliest tokens."""
    scores = torch.log_softmax(logits.double(), -1)
    top: list[tuple[int, float]] = []
    if most:
        values, ids = torch.sort(scores, descending=True, stable=True)
        top = list(zip(ids[:most].tolist(), values[:most].tolist(), strict=True))
    return TokenLogprobs(float(scores[token]), tuple(top))


def sample(logits: Tensor, wanted: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Return one token per row of logits [rows, vocab] (float32).

    wanted[i]: how to sample row i, and the token's position. Raises EngineFailed if a row has no
    finite maximum: the weights or the KV are damaged.
    """
    best = logits.argmax(-1)  # if two logits are equal, the lowest id wins
    if not bool(logits.gather(1, best[:, None]).isfinite().all()):
        raise EngineFailed("the model's output is not finite: weights or KV blocks are damaged")
    tokens: list[int] = best.tolist()
    for row, (how, position) in enumerate(wanted):
        if how.temperature > 0:
            tokens[row] = _draw(logits[row], how, uniform(how.seed, position))
    return tokens


def _draw(logits: Tensor, how: Sampling, point: float) -> int:
    """Invert the cumulative distribution of one row at `point`, most likely tokens first."""
    limit = min(how.top_k, len(logits)) if how.top_k > 0 else len(logits)
    # A stable sort keeps equal logits in the order of ids, so every process has the same order.
    values, ids = torch.sort(logits, descending=True, stable=True)
    scaled: NDArray[np.float64] = values[:limit].double().numpy()
    weights = np.exp((scaled - scaled[0]) / how.temperature)
    cumulative = np.cumsum(weights)
    # top_p keeps the fewest tokens whose mass reaches it, with the one that crosses it.
    kept = int(np.searchsorted(cumulative, how.top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    index = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    return int(ids[min(index, len(cumulative) - 1)])

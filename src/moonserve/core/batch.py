"""The engine's pass: which tokens of which request run next.

No prefill phase and no decode phase: every request has known tokens and computed tokens, and each
pass lets computed catch up (vLLM v1's view). `plan` decides, an Engine runs, `apply` accounts.
Called by the worker's serving loop and the simulator; computes nothing itself.
"""

from __future__ import annotations

import msgspec

from moonserve.core.request import Sampling
from moonserve.core.units import Micros, RequestId


class Chunk(msgspec.Struct, frozen=True):
    """Some tokens of one request to run in one pass.

    tokens[i] stands at sequence position start + i; its KV goes to slot (start + i) % block_size of
    block blocks[(start + i) // block_size]. `blocks` covers positions 0 .. start+len(tokens)-1.
    With `sampling`, the token at position start+len(tokens) is sampled from the last logits.
    """

    request: RequestId
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    sampling: Sampling | None = None


class Pass(msgspec.Struct, frozen=True):
    """One engine pass: chunks of different requests, no request twice."""

    chunks: tuple[Chunk, ...]


class PassResult(msgspec.Struct, frozen=True):
    """What a pass gave: the sampled token of each chunk that asked for one, and the time taken."""

    sampled: dict[RequestId, int]
    elapsed_us: Micros

"""The vocabulary between machines and drivers: what instances are and what they report.

Plain frozen structs; the same ones travel as msgpack on the control plane.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moonserve.core.prefix import Namespace
from moonserve.core.units import Bytes, InstanceId, Micros, SegmentId, Tokens

Role = Literal["prefill", "decode", "both"]


class InstanceInfo(msgspec.Struct, frozen=True):
    """What an engine instance says of itself when it joins; fixed for one epoch."""

    id: InstanceId
    epoch: int
    """Differs at every start of the process; facts of an older epoch are ignored."""
    role: Role
    url: str
    """Base URL of its vLLM-wire HTTP server, such as http://127.0.0.1:8101."""
    model: str
    namespace: Namespace
    kv_blocks: int
    """Size of the engine's block pool."""
    block_bytes: Bytes
    max_seqs: int
    chunk_tokens: Tokens
    """The most prompt tokens one pass computes."""
    max_len: Tokens
    """Prompt plus output may not exceed this."""
    segment: SegmentId | None = None
    connector: str = "embedded"
    rack: str = ""


class PassSample(msgspec.Struct, frozen=True):
    """One measured engine pass, as cost features and the time it took."""

    prefill_new: Tokens
    """Prompt tokens computed in this pass, over all chunks."""
    prefill_square: int
    """Sum over chunks of end^2 - start^2: the attention term."""
    prefill_past: Tokens
    """Sum over chunks of start: tokens attended to that were there before."""
    decode_seqs: int
    decode_context: Tokens
    """Sum of the decoding requests' context lengths."""
    elapsed_us: Micros


class TransferSample(msgspec.Struct, frozen=True):
    """One measured load of KV from the store."""

    size_bytes: Bytes
    elapsed_us: Micros


class InstanceLoad(msgspec.Struct, frozen=True):
    """What an instance reports at each heartbeat."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    passes: tuple[PassSample, ...] = ()
    """Passes measured since the last heartbeat, newest last; bounded by the sender."""
    transfers: tuple[TransferSample, ...] = ()

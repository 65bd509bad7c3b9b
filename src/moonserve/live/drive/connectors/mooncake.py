"""vLLM's Mooncake connector: both sides are told a transfer id, decode also whose it is.

Prefill first, then decode. The engine id comes from prefill's bootstrap server (live/fleet asks)
and is another after a restart: decode then answers 500. Decode with a transfer id that prefill
does not know waits for minutes: callers bring a deadline of their own, and an id that no other
attempt has.
"""

from __future__ import annotations

import msgspec

from moonserve.core.units import Micros

HELD_US: Micros = 300_000_000
"""How long prefill's KV may wait for decode: vLLM gives it up after 480 s."""


def prefill_params(transfer_id: str) -> bytes:
    """kv_transfer_params of a prefill, as JSON."""
    return msgspec.json.encode(
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    )


def decode_params(bootstrap: str, engine_id: str, transfer_id: str) -> bytes:
    """kv_transfer_params of its decode: where prefill's bootstrap is, and which engine it was."""
    return msgspec.json.encode(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": engine_id,
            "transfer_id": transfer_id,
        }
    )

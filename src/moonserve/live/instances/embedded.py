"""The embedded connector: KV goes through the store, under a lease that both share.

The same kv_transfer_params shape as vLLM's connectors, so that our workers also serve behind other
routers: prefill's reply parameters are handed to decode verbatim.
"""

from __future__ import annotations

from typing import Any

from moonserve.core.placement import Decision
from moonserve.core.units import LeaseId


def prefill_params(lease: LeaseId, decision: Decision) -> dict[str, Any]:
    """What prefill is told: publish for a remote decode, reuse no more than was decided."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "lease": lease,
        "reuse_tokens": decision.reused_tokens,
    }


def decode_params(prefill_reply: dict[str, Any]) -> dict[str, Any]:
    """What decode is told: prefill's own words."""
    return prefill_reply

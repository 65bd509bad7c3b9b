"""vLLM's Mooncake connector: both engines get a transfer id, and decode also gets prefill's engine
id.

Prefill is called first, then decode. Prefill's bootstrap server reports the engine id, which
changes at a restart: decode then answers 500. If prefill does not know the transfer id, decode
waits for minutes. So callers set a time limit of their own, and use a new id for each attempt.
"""

from __future__ import annotations

import msgspec

from moonserve.core.errors import EngineFailed
from moonserve.core.units import Micros
from moonserve.live.drive.handover import Handed, PrefillCall

HELD_US: Micros = 300_000_000
"""How long prefill's KV may wait for decode. vLLM frees it after 480 s."""


def prefill_params(transfer_id: str) -> bytes:
    """kv_transfer_params of a prefill, as JSON."""
    return msgspec.json.encode(
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    )


def decode_params(bootstrap: str, engine_id: str, transfer_id: str) -> bytes:
    """kv_transfer_params of its decode, as JSON: prefill's bootstrap address and engine id."""
    return msgspec.json.encode(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": engine_id,
            "transfer_id": transfer_id,
        }
    )


class Mooncake:
    """A handover.HandoverConnector."""

    async def prefill(self, call: PrefillCall) -> Handed:
        """See HandoverConnector."""
        transfer = f"xfer-{call.caller.new_id()}"
        engine_id = await _engine_id(call)
        reply = await call.reply(prefill_params(transfer))
        kept = [choice.finish_reason for choice in reply.choices] == ["length"]
        params = decode_params(call.member.bootstrap, engine_id, transfer) if kept else None
        until_us = call.caller.conductor.now_us() + HELD_US
        handed = Handed(call.action.to, params, until_us, reply.cached_tokens())
        handed.engine_id = engine_id
        return handed


async def _engine_id(call: PrefillCall) -> str:
    member, rank = call.member, call.action.to.dp_rank
    try:
        return member.engine_id(rank)
    except EngineFailed:
        await member.requery()
        return member.engine_id(rank)

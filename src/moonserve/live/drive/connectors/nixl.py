"""vLLM's NIXL connector: prefill names what it holds, decode pulls it.

One after the other. Prefill's reply parameters go to decode as they came, once, and soon: used
again, or after the lease, they name blocks that hold something else by then, and vLLM answers 200
with wrong text.
"""

from __future__ import annotations

from moonserve.core.units import Micros
from moonserve.live.drive.handover import Handed, PrefillCall

PREFILL = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""kv_transfer_params of a prefill, as JSON."""
LEASE_US: Micros = 25_000_000
"""How long prefill's parameters may be used: vLLM holds the blocks for 30 s, of which decode needs
some to come to them."""
_RENEWED = b'"remote_blocks_expiry_time"'


def renewed(params: bytes) -> bool:
    """Whether decode's engine holds the blocks by itself from when it has the request, however long
    that waits there: vLLM does so since before its parameters had this field."""
    return _RENEWED in params


class Nixl:
    """A handover.HandoverConnector."""

    async def prefill(self, call: PrefillCall) -> Handed:
        """See HandoverConnector."""
        reply = await call.reply(PREFILL)
        said = bytes(reply.kv_transfer_params)
        params = None if said == b"null" else said  # its first token may have been its last
        until_us = call.caller.conductor.now_us() + LEASE_US
        handed = Handed(call.action.to, params, until_us, reply.cached_tokens())
        handed.renewed = renewed(said)
        return handed

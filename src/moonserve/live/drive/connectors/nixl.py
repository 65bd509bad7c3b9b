"""vLLM's NIXL connector: prefill reports where its KV is, and decode pulls it.

Prefill is called first, then decode. Decode gets prefill's reply parameters unchanged, once and
soon. If they are used twice, or after the lease, their blocks may hold other KV by then, and vLLM
answers 200 with wrong text.
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
"""How long prefill's parameters may be used. vLLM holds the blocks for 30 s, and decode needs some
of that to pull them."""
_RENEWED = b'"remote_blocks_expiry_time"'


def renewed(params: bytes) -> bool:
    """Whether decode's engine renews the lease as soon as it has the request, however long that
    waits in its queue. Every vLLM whose parameters have this field does so."""
    return _RENEWED in params


class Nixl:
    """A handover.HandoverConnector."""

    async def prefill(self, call: PrefillCall) -> Handed:
        """See HandoverConnector."""
        reply = await call.reply(PREFILL)
        said = bytes(reply.kv_transfer_params)
        # None if prefill's first token was also the last
        params = None if said == b"null" else said
        until_us = call.caller.conductor.now_us() + LEASE_US
        handed = Handed(call.action.to, params, until_us, reply.cached_tokens())
        handed.renewed = renewed(said)
        return handed

"""Leaving a pool: what would be lost with this process is moved to others first, if there are any.

For processes that own a segment, once they were told to stop. Never takes longer than it is given.
"""

from __future__ import annotations

import asyncio
import logging

from moonserve.core.errors import MoonserveError, StoreError
from moonserve.live.store.client import StoreClient
from moonserve.live.store.link import text

log = logging.getLogger(__name__)

_POLL_S = 0.05
_STALL_S = 3.0
"""With no object gone for as long, nobody takes any: all others may be leaving too."""


async def hand_on(client: StoreClient, most_s: float) -> None:
    """Have what lies in memory moved elsewhere within `most_s`; what is not, is said.

    At once over where the master is gone, as when a whole cluster stops, or nobody else is there.
    """
    try:
        async with asyncio.timeout(most_s):
            await _drain(client)
    except (OSError, MoonserveError) as error:  # TimeoutError is an OSError
        left = _in_memory(client)
        level = logging.WARNING if left else logging.DEBUG
        log.log(level, "left with %d objects: %s", left, text(error))


async def _drain(client: StoreClient) -> None:
    own = [it for it in client.owners if it.mounting.tier == "dram"]
    for owner in own:
        await client.drain(owner.mounting.id)
        await owner.catch_up()
    mine = [owner.mounting.id for owner in own]
    loop = asyncio.get_running_loop()
    least, since_s = _in_memory(client), loop.time()
    while (left := _in_memory(client)) and any(it not in mine for it in client.link.addresses):
        if left < least:
            least, since_s = left, loop.time()
        elif loop.time() > since_s + _STALL_S:
            raise StoreError("nobody takes them")
        await asyncio.sleep(_POLL_S)


def _in_memory(client: StoreClient) -> int:
    own = [owner for owner in client.owners if owner.mounting.tier == "dram"]
    return sum(len(owner.catalogue.held) for owner in own)

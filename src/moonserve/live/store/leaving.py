"""Leaving a pool: objects that would be lost with this process move to other members first.

Processes that own a segment call it after a signal to stop. It never takes longer than given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from moonserve.core.errors import StoreError
from moonserve.live.store.client import StoreClient
from moonserve.live.store.link import FAILURES, text
from moonserve.live.store.owner import Owner

log = logging.getLogger(__name__)

_POLL_S = 0.05


async def hand_on(client: StoreClient, most_s: float) -> None:
    """Move all objects in memory to other members within `most_s`; log how many could not.

    It ends at once if the master is gone, as when a whole cluster stops, or if there is no other
    member.
    """
    own = [it for it in client.owners if it.mounting.tier == "dram"]
    try:
        async with asyncio.timeout(most_s) as limit:
            try:
                for owner in own:
                    # else another start of this member could be drained, by its name
                    await owner.catch_up()
                    await client.drain(owner.mounting.id)
            except FAILURES as error:
                log.debug("no object is moved to other members: %s", text(error))
            else:
                await _until_empty(client, own)
    except FAILURES as error:
        why = f"{most_s:g} s were too short" if limit.expired() else text(error)
        log.warning("left with %d objects: %s", _count(own), why)


async def _until_empty(client: StoreClient, own: Sequence[Owner]) -> None:
    for owner in own:
        await owner.catch_up()
    mine = [owner.mounting.id for owner in own]
    loop = asyncio.get_running_loop()
    least = _count(own)
    since_s = loop.time()
    while (left := _count(own)) and any(it not in mine for it in client.link.addresses):
        if left < least:
            least, since_s = left, loop.time()
        elif loop.time() > since_s + client.settings.times.stall_s:
            raise StoreError("no other member takes them")
        await asyncio.sleep(_POLL_S)


def _count(own: Sequence[Owner]) -> int:
    return sum(len(owner.catalogue.held) for owner in own)

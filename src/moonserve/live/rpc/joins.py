"""Bodies of what workers send to a gateway by POST /internal/join, beat, leave and blocks.

msgpack. live.worker.join writes them and live.control.join reads them. The body of a join is an
InstanceInfo.
"""

from __future__ import annotations

import msgspec

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.schedule.facts import InstanceLoad
from moonserve.core.units import InstanceId

CONTENT_TYPE = "application/msgpack"


class BeatBody(msgspec.Struct, frozen=True):
    """A heartbeat of an instance."""

    id: InstanceId
    epoch: int
    load: InstanceLoad


class LeaveBody(msgspec.Struct, frozen=True):
    """An instance leaves."""

    id: InstanceId
    epoch: int


class BlocksBody(msgspec.Struct, frozen=True):
    """What a worker put into Mooncake's pool, and what it missed there, in order."""

    events: list[BlocksStored | BlocksRemoved]

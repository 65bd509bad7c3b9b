"""Load of an external engine that this Conductor did not send there: of clients that call it.

An engine's own counts include our requests. What they exceed our promises by is external load. Only
InstanceView calls these functions, and keeps the result beside our promises.
"""

from __future__ import annotations

import msgspec

from moonserve.core.schedule.facts import InstanceLoad, Role
from moonserve.core.units import Tokens


class ExternalLoad(msgspec.Struct, frozen=True):
    """Requests at one instance that this Conductor did not send, as of the last report."""

    waiting: int = 0
    """Requests whose prefill is ahead of one that comes now."""
    running: int = 0
    """Requests that decode."""
    context: Tokens = 0
    """Context lengths of those that decode, summed."""

    def or_less(self, other: ExternalLoad) -> ExternalLoad:
        """What two reports have in common: a request that came or went between an engine's count
        and ours shows in one of them only."""
        return ExternalLoad(
            min(self.waiting, other.waiting),
            min(self.running, other.running),
            min(self.context, other.context),
        )


NO_LOAD = ExternalLoad()


def external_load(
    role: Role, load: InstanceLoad, prefills: int, decoding: int, context: Tokens
) -> ExternalLoad:
    """What `load` counts beyond ours: so many calls in prefill, and in decode with such context.

    The engine does not report whose requests wait: they are shared out like all. An instance of
    role prefill runs nothing but prefills, one of role decode queues none.
    """
    total = load.running + load.waiting
    more = total - prefills - decoding
    if not load.everybody or more <= 0:
        return NO_LOAD
    waiting = {"prefill": more, "decode": 0}.get(role, round(load.waiting * more / total))
    running = more - waiting
    return ExternalLoad(waiting, running, max(0, load.kv_tokens - context) if running else 0)

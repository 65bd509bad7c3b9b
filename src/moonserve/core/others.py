"""Work at a foreign engine that the Conductor did not send there: other gateways', direct users'.

An engine's own counts have ours among them. What they exceed our promises by is others', and is
counted in the view beside the promises; InstanceView keeps the result, nobody else asks.
"""

from __future__ import annotations

import msgspec

from moonserve.core.facts import InstanceLoad, Role
from moonserve.core.units import Tokens


class Others(msgspec.Struct, frozen=True):
    """Requests of others at one instance, as of its last report."""

    waiting: int = 0
    """Whose prefill is ahead of one that comes now."""
    running: int = 0
    """Who decode."""
    context: Tokens = 0
    """Of those who decode, summed."""


NOBODY = Others()


def others(role: Role, load: InstanceLoad, prefills: int, decoding: int, context: Tokens) -> Others:
    """What `load` counts beyond ours: so many calls in prefill, and in decode with such context.

    Whose the waiting ones are the engine does not say: they are shared out like all. An instance
    for prefill alone runs nothing but prefills, one for decode queues none.
    """
    total = load.running + load.waiting
    more = total - prefills - decoding
    if not load.everybody or more <= 0:
        return NOBODY
    waiting = {"prefill": more, "decode": 0}.get(role, round(load.waiting * more / total))
    running = more - waiting
    return Others(waiting, running, max(0, load.kv_tokens - context) if running else 0)

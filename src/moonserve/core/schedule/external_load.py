"""Load of an instance that this Conductor did not send there: other gateways', direct clients'.

An external engine's own counts include our requests. What they exceed our promises by is external
load. Other gateways also report what they have promised, which such counts include later. Only
InstanceView calls these functions, and keeps the result beside our promises.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moonserve.core.schedule.facts import InstanceLoad, Promises, Role
from moonserve.core.units import Micros, Tokens


class ExternalLoad(msgspec.Struct, frozen=True):
    """Requests at one instance that this Conductor did not send, as of the last report."""

    waiting: int = 0
    """Requests whose prefill is ahead of one that comes now."""
    running: int = 0
    """Requests that decode."""
    context: Tokens = 0
    """Context lengths of those that decode, summed."""

    def or_more(self, other: ExternalLoad) -> ExternalLoad:
        """The load if each of two reports may miss a part of it."""
        if other is NO_LOAD:
            return self
        return ExternalLoad(
            max(self.waiting, other.waiting),
            max(self.running, other.running),
            max(self.context, other.context),
        )

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


class PeerLoad(msgspec.Struct, frozen=True):
    """What other gateways have promised on one instance, together."""

    until_us: Micros = 0
    """When their prefills are done, if nothing more comes."""
    promised: ExternalLoad = NO_LOAD
    """Their prefills, and all decodes that are promised or run."""
    now: ExternalLoad = NO_LOAD
    """Their prefills, and the decodes that run by now."""


NO_PEERS = PeerLoad()


def peer_load(promises: Iterable[Promises], now_us: Micros) -> PeerLoad:
    """The sum of what several gateways report of one instance."""
    queue_us = waiting = decodes = context = running = running_context = 0
    for it in promises:
        queue_us += it.queue_us
        waiting += it.prefills
        decodes += it.decodes
        context += it.context
        running += it.running
        running_context += it.running_context
    if not waiting and not decodes:
        return NO_PEERS
    return PeerLoad(
        now_us + queue_us,
        ExternalLoad(waiting, decodes, context),
        ExternalLoad(waiting, running, running_context),
    )

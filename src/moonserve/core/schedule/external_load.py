"""Work at an instance that the Conductor did not send there: other gateways', direct users'.

A foreign engine's own counts have ours among them. What they exceed our promises by is others'. And
other gateways tell what they have promised, which such counts have in them later. Either is counted
in the view beside our promises; InstanceView keeps the result, nobody else asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moonserve.core.schedule.facts import InstanceLoad, Promises, Role
from moonserve.core.units import Micros, Tokens


class Others(msgspec.Struct, frozen=True):
    """Requests of others at one instance, as of its last report."""

    waiting: int = 0
    """Whose prefill is ahead of one that comes now."""
    running: int = 0
    """Who decode."""
    context: Tokens = 0
    """Of those who decode, summed."""

    def or_more(self, other: Others) -> Others:
        """The same work as two see it who do not know all of it."""
        if other is NOBODY:
            return self
        return Others(
            max(self.waiting, other.waiting),
            max(self.running, other.running),
            max(self.context, other.context),
        )

    def or_less(self, other: Others) -> Others:
        """What two looks have in common: a request that came or went between an engine's count and
        ours shows in one of them only."""
        return Others(
            min(self.waiting, other.waiting),
            min(self.running, other.running),
            min(self.context, other.context),
        )


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


class Told(msgspec.Struct, frozen=True):
    """What other gateways have promised on one instance, together."""

    until_us: Micros = 0
    """When their prefills are done, if nothing more comes."""
    promised: Others = NOBODY
    """With all who will decode there."""
    now: Others = NOBODY
    """With those who decode by now."""


NOTHING = Told()


def told(promises: Iterable[Promises], now_us: Micros) -> Told:
    """The sum of what several gateways say of one instance."""
    queue_us = waiting = decodes = context = running = running_context = 0
    for it in promises:
        queue_us += it.queue_us
        waiting += it.prefills
        decodes += it.decodes
        context += it.context
        running += it.running
        running_context += it.running_context
    if not waiting and not decodes:
        return NOTHING
    return Told(
        now_us + queue_us,
        Others(waiting, decodes, context),
        Others(waiting, running, running_context),
    )

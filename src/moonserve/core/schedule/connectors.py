"""Which instances can serve a request together: those with a connector in common.

core.schedule.decide and the Conductor call it. Our own workers share a store, so any two of a model
can serve together; the gateway lets none of them join beside external engines of the same model.
External engines need the same connector; an engine without one serves whole requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.schedule.estimate import Ask, Estimate
from moonserve.core.schedule.facts import Connector
from moonserve.core.schedule.view import Decodes, InstanceView, Prefills
from moonserve.core.units import Tokens

NOBODY_GIVES = "no prefill instance that hands KV to it is alive"
"""Why a decode instance does all of a request; shown in the decision's record."""


def is_external(view: InstanceView) -> bool:
    """Whether it is an external engine, one that does not know our store."""
    return view.info.connector != "embedded"


def able(ask: Ask, prefills: Prefills, decodes: Decodes) -> Prefills | None:
    """The external `prefills` that have a decode instance."""
    ways = decodes.ways
    if len(ways) > 1 and decodes.taking < len(decodes):
        ways = dict.fromkeys([view.info.connector for view in decodes.all()])
    if ask.whole:  # KV is handed on to one reader, except by SGLang
        ways = {way: None for way in ways if way == "sglang"}
    none_whole = "none" not in prefills.ways and prefills.views[0].info.role != "decode"
    if none_whole and all(way in ways for way in prefills.ways):
        return prefills
    found = [
        view
        for view in prefills.all()
        if (decodes.has(view) if hands_nothing_on(view) else view.info.connector in ways)
    ]
    if len(found) == prefills.taking:
        return prefills
    return prefills.only(found) if found else None


def hands_nothing_on(view: InstanceView) -> bool:
    """Whether an external engine hands its prefills to no other instance.

    An instance of role decode may prefill if no other is left (ClusterView.prefills).
    """
    return view.info.connector == "none" or view.info.role == "decode"


def _meets(view: InstanceView) -> bool:
    """Whether it can decode only beside a prefill instance, in the same exchange."""
    return view.info.connector == "sglang" and view.info.role == "decode"


def mates(prefill: InstanceView, decodes: Decodes) -> Decodes:
    """The instances that can decode what the external `prefill` hands on."""
    way = prefill.info.connector
    if len(decodes.ways) == 1 and way in decodes.ways:
        return decodes
    return decodes.only(speaking(way, decodes.all()))


def speaking(way: Connector, views: Sequence[InstanceView]) -> Sequence[InstanceView]:
    """The instances with this connector."""
    if way == "embedded":
        return views
    return [view for view in views if view.info.connector == way]


def alone(
    ask: Ask, estimate: Estimate, decodes: Sequence[InstanceView], most: Tokens
) -> list[InstanceView]:
    """External instances that should do all of the request; none: prefill and decode are two calls.

    If the request must be whole: any that decodes. Else: those of role decode that hold all of the
    prompt but at most `most` tokens, since computing these takes less than a prefill elsewhere and
    a transfer. (Instances of role both are candidates like any other.) SGLang's of role decode
    cannot.
    """
    decodes = [view for view in decodes if view.takes_prefill and not _meets(view)]
    if ask.whole:
        return decodes
    context = ask.length + ask.expected_tokens
    return [
        view
        for view in decodes
        if view.info.role == "decode"
        if (held := estimate.own_tokens(view)) and ask.length - held <= most
        if view.has_slot(context)
    ]

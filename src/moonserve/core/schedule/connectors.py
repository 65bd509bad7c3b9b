"""Which instances can serve a request together: by what way KV gets from one to the other.

For placement and the Conductor. Our own workers share a store, and any two of a model can: the
gateway lets none of them join beside foreign engines of the same model. Of foreign engines only
those with the same connector can, and one with none serves whole requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.schedule.estimate import Ask, Estimate
from moonserve.core.schedule.facts import Connector
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import Tokens

NOBODY_GIVES = "no prefill instance that hands KV to it is alive"
"""Why a decode instance does all of it, in a decision's record."""


def is_external(view: InstanceView) -> bool:
    """Whether it is an external engine, one that does not know our store."""
    return view.info.connector != "embedded"


def able(
    ask: Ask, prefills: Sequence[InstanceView], decodes: Sequence[InstanceView]
) -> list[InstanceView]:
    """Those of the foreign `prefills` for whom there is somebody to decode."""
    ways = {view.info.connector for view in decodes}
    if ask.whole:  # KV is handed on to one reader, but for SGLang's, who meets each one
        ways &= {"sglang"}
    here = {view.info.id for view in decodes}
    return [
        view
        for view in prefills
        if (view.info.id in here if _whole(view) else view.info.connector in ways)
    ]


def _whole(view: InstanceView) -> bool:
    """Whether it hands its prefills to nobody: one of role decode is among those who may prefill
    where nobody else is left (ClusterView.prefills)."""
    return view.info.connector == "none" or view.info.role == "decode"


def _meets(view: InstanceView) -> bool:
    """Whether it serves nobody without a prefill instance that it meets."""
    return view.info.connector == "sglang" and view.info.role == "decode"


def mates(prefill: InstanceView, decodes: Sequence[InstanceView]) -> Sequence[InstanceView]:
    """Those who can decode what the foreign `prefill` has prefilled."""
    if _whole(prefill):
        return [view for view in decodes if view is prefill]
    return speaking(prefill.info.connector, decodes)


def speaking(way: Connector, views: Sequence[InstanceView]) -> Sequence[InstanceView]:
    """Those who hand KV on this way."""
    if way == "embedded":
        return views
    return [view for view in views if view.info.connector == way]


def alone(
    ask: Ask, estimate: Estimate, decodes: Sequence[InstanceView], most: Tokens
) -> list[InstanceView]:
    """Foreign instances that should do all of it by themselves; none: it is to be handed over.

    Where the request wants that, any that decodes; else those of role decode that have all of the
    prompt but for at most `most` tokens: to compute these takes less than another's prefill and a
    transfer. (Of role both, they are candidates like any other.) SGLang's of role decode cannot.
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

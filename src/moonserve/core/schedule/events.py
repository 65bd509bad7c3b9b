"""What happened when: the account of a run, for reports and digests.

The live loop and the simulator make events from the Conductor's facts and actions: two drivers that
did the same have the same events. Nothing here depends on block keys, addresses or the order of
simultaneous unrelated facts beyond the Conductor's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import msgspec

from moonserve.core.schedule.actions import (
    Abort,
    Action,
    Decode,
    GiveUp,
    Prefill,
    Refuse,
    Release,
    Spread,
)
from moonserve.core.schedule.adoption import Adopted, StepFact
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    ClientGone,
    DecodeEnded,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.units import Micros, RequestId


class Event(msgspec.Struct, frozen=True):
    """One thing that happened to a request."""

    at_us: Micros
    what: str
    """arrived, adopted, prefill, staged, prefilled, decode, decoded, failed, gone, refused,
    given_up, aborted, spread, released."""
    request: RequestId
    detail: str = ""
    """Which call, on which instances, reusing how many tokens."""


def events(now_us: Micros, facts: Iterable[StepFact], actions: Iterable[Action]) -> list[Event]:
    """What one step of the Conductor means; facts in the order that it took them."""
    made: list[Event] = []
    actions = list(actions)
    over = {action.request for action in actions if isinstance(action, Release)}
    for fact in sorted(facts, key=lambda f: (f.rank, f.subject)):
        if isinstance(fact, DecodeEnded) or (isinstance(fact, PrefillEnded) and fact.final):
            over.discard(fact.request)  # a client that leaves after that changes nothing
        match fact:
            case Arrived(request):
                made.append(Event(now_us, "arrived", request.id, str(request.length)))
            case Adopted(request, number=number, decodes=decodes):
                made.append(Event(now_us, "adopted", request.id, f"{number} {decodes}"))
            case PrefillEnded(request, number, final):
                made.append(Event(now_us, "prefilled", request, f"{number} {final}"))
            case StageEnded(request, number, instance):
                made.append(Event(now_us, "staged", request, f"{number} {instance}"))
            case DecodeEnded(request, number):
                made.append(Event(now_us, "decoded", request, str(number)))
            case CallFailed(request, number):
                made.append(Event(now_us, "failed", request, str(number)))
            case ClientGone(request) if request in over:  # else it had ended before
                made.append(Event(now_us, "gone", request))
            case _:
                pass
    for action in actions:
        match action:
            case Prefill(request, number, to, decision):
                detail = f"{number} {to.id} {decision.decode} {decision.reused_tokens}"
                for stage in decision.stages:
                    detail += f" {stage.instance}:{stage.start}-{stage.end}"
                made.append(Event(now_us, "prefill", request, detail))
            case Decode(request, number, to):
                made.append(Event(now_us, "decode", request, f"{number} {to.id}"))
            case Refuse(request, why):
                made.append(Event(now_us, "refused", request, why))
            case GiveUp(request):
                made.append(Event(now_us, "given_up", request))
            case Abort(request, number):
                made.append(Event(now_us, "aborted", request, str(number)))
            case Spread(request, number, keys, first, source, to):
                detail = f"{number} {source} {to} {first} {len(keys)}"
                made.append(Event(now_us, "spread", request, detail))
            case Release(request):
                made.append(Event(now_us, "released", request))
    return made


class Digest:
    """A hash over all events of a run, in order: equal runs have equal digests."""

    def __init__(self) -> None:
        self._hash = sha256()

    def take(self, happened: Iterable[Event]) -> None:
        """Add events."""
        for event in happened:
            line = f"{event.at_us}\t{event.what}\t{event.request}\t{event.detail}\n"
            self._hash.update(line.encode())

    def hex(self) -> str:
        """The digest so far, 64 hexadecimal digits."""
        return self._hash.hexdigest()

"""What the Conductor would decide now, without deciding it: for those who only ask.

Called for POST /api/select. Nothing is reserved, nobody is counted as having asked, no turn of a
policy is used up, and no refusal gives out a time to come again.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.request import Request
from moonserve.core.schedule import admission
from moonserve.core.schedule.actions import Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.handoff import Handoff
from moonserve.core.schedule.placement import Decision
from moonserve.core.schedule.residency import untouched
from moonserve.core.units import BlockKey, Micros


def look(
    conductor: Conductor, request: Request, keys: Sequence[BlockKey], now_us: Micros
) -> Decision | Refuse:
    """The decision that this request would get if it came now, or its refusal.

    With a policy that lets requests wait: as if it were its turn already.
    """
    view, outlook, tuning = conductor.view, conductor.outlook, conductor.tuning
    prefills, decodes = view.prefills(request.model), view.decodes(request.model)
    memory, rng = conductor._memory, conductor._memory.rng
    turn, state = memory.turn, None if rng is None else rng.getstate()
    with untouched(outlook._predictor):
        life, verdict = Handoff(request, keys, now_us), None
        if prefills and decodes:
            verdict = conductor._decide(life, prefills, decodes, now_us)
        memory.turn = turn
        if rng is not None and state is not None:
            rng.setstate(state)
        if verdict is None:
            return admission.nobody(request, view, now_us)
        refusal = admission.unwanted(request, verdict, tuning, view)
    return refusal or verdict.decision

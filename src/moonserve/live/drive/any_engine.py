"""Requests that need no KV: one call to any engine of their model.

`api.engine_text` sends /tokenize and /detokenize by it. The Conductor decides nothing for them, so
nothing is promised for them, and every instance can serve them, whatever its role.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import sample

from moonserve.core.errors import EngineFailed, MoonserveError
from moonserve.core.request import Request
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import RequestId
from moonserve.live.drive.calls import Caller
from moonserve.live.drive.lost import CallLost, EngineAnswer, Passed, plain
from moonserve.live.openai.external import ExternalRequest

log = logging.getLogger(__name__)

_CALLS = 3


class AnyEngine:
    """Makes the calls of one request, at most three, each to another instance."""

    def __init__(
        self, asked: ExternalRequest, infos: Sequence[InstanceInfo], caller: Caller
    ) -> None:
        """infos: the instances of its model."""
        self._asked = asked
        self._infos = sample(infos, min(_CALLS, len(infos)))
        self._caller = caller

    async def answer(self, name: RequestId) -> EngineAnswer:
        """The answer of the first instance that gives one; name: the id of the request.

        Raises EngineFailed if none does.
        """
        asked, caller = self._asked, self._caller
        request = Request(name, asked.model, 1)
        why = ""
        for info in self._infos:
            limit_s = caller.limits.token_s
            try:
                return await caller.whole(info, asked, request, asked.raw, limit_s)
            except Passed as passed:
                return passed.answer
            except MoonserveError as error:
                lost = CallLost.of(error)
                log.warning("%s: the call to %s failed: %s", name, info.id, lost.in_full)
                if lost.busy is not None and info is self._infos[-1]:
                    return lost.busy
                why = plain(lost, info.id)
        raise EngineFailed(why)

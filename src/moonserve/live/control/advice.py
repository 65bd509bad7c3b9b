"""GET /api/advice: what the twin found last, and the gauges that autoscalers read.

The twin (`moonserve twin`) is a process of its own. It posts each round's advice to
/internal/advice, and Control keeps the latest. Nothing here simulates, and nothing follows the
advice: an operator or an autoscaler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from moonserve.core.schedule.advice import Advice, is_stale
from moonserve.core.units import MICROS_PER_SECOND, Micros
from moonserve.live.control.views import by_label
from moonserve.live.http.message import HttpRequest, Response, decode_json, json_response
from moonserve.live.http.server import Routes

PATH = "/api/advice"
_POST_PATH = "/internal/advice"


class AdviceReply(msgspec.Struct, frozen=True):
    """What GET /api/advice answers."""

    advice: Advice | None
    """None: no twin has reported since this process started."""
    age_s: float | None
    is_stale: bool
    """The twin has missed rounds: nobody should follow this advice any more."""


class LatestAdvice:
    """See the module."""

    def __init__(self, now_us: Callable[[], Micros]) -> None:
        self._now_us = now_us
        self._advice: Advice | None = None
        self._since_us: Micros = 0

    def routes(self) -> Routes:
        """Exact paths."""
        return {("GET", PATH): self._send, ("POST", _POST_PATH): self._take}

    def metrics(self) -> Iterator[Metric]:
        """Without advice that may be followed there is no sample, so that autoscalers keep the
        number of instances: a number that only seems right would make them change it."""
        reply = self._reply()
        advice = reply.advice
        wanted = None if advice is None or reply.is_stale else advice.wanted
        yield by_label(
            GaugeMetricFamily,
            "wanted_instances",
            "Fewest instances with which enough requests would have been in time, by the twin; "
            "absent without advice.",
            "role",
            {} if wanted is None else wanted.roles(),
        )
        age = GaugeMetricFamily(
            "moonserve_advice_age_seconds", "Time since the twin's last round; absent without one."
        )
        if reply.age_s is not None:
            age.add_metric((), reply.age_s)
        yield age

    async def _send(self, request: HttpRequest) -> Response:
        return json_response(self._reply())

    async def _take(self, request: HttpRequest) -> Response:
        """The twin's latest round. Raises BadRequest that names a wrong field."""
        self._advice = decode_json(await request.body(), Advice)
        self._since_us = self._now_us()
        return json_response({})

    def _reply(self) -> AdviceReply:
        advice = self._advice
        if advice is None:
            return AdviceReply(None, None, False)
        age_s = (self._now_us() - self._since_us) / MICROS_PER_SECOND
        return AdviceReply(advice, age_s, is_stale(advice, age_s))

"""OpenAI's API over foreign engines: from a client's HTTP request to a Life and back.

Mounted in place of gateway.app where a cluster has engines of others. Judges little: what a field
means is the engine's to say, whose 4xx reaches the client as it is. Holds no state of a request
beyond its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.core.request import Request, Stopping
from moonserve.core.units import RequestId, seconds_to_us
from moonserve.live.api.front import Front
from moonserve.live.api.limiter import Limits as DoorLimits
from moonserve.live.drive.calls import Caller, Guesses, Limits
from moonserve.live.drive.engines import Engines, Models
from moonserve.live.drive.life import Life
from moonserve.live.drive.prompt_info import Reader
from moonserve.live.external.observed import Observer
from moonserve.live.health import Health
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
)
from moonserve.live.openai import headers
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.prompts import Prompts
from moonserve.live.openai.request import Form
from moonserve.live.ports import Conducting, ModelCard

_COMPLETION_TOKENS = Stopping().max_tokens


class RelayApp(Front, Collector):
    """OpenAI's API before foreign engines; used as gateway.app.GatewayApp is."""

    lack = "no model has engines that can serve it"

    def __init__(
        self,
        conductor: Conducting,
        engines: Engines,
        observer: Observer,
        http: HttpClient,
        door: DoorLimits | None = None,
        limits: Limits | None = None,
        health: Health | None = None,
    ) -> None:
        """door: how many may come in; limits: how long engines may take."""
        door = door or DoorLimits()
        super().__init__(door, health or Health())
        self.metrics.registry.register(self)
        self._models = Models(conductor)
        prompts = Prompts(door.offload_bytes, door.max_tokenising_bytes)
        self._reader = reader = Reader(engines, http, prompts)
        self._caller = Caller(
            conductor,
            engines,
            observer,
            http,
            reader,
            Guesses(),
            self.metrics,
            limits or Limits(),
        )

    def cards(self) -> Sequence[ModelCard]:
        """See Front."""
        return self._models.cards()

    def card(self, name: str) -> ModelCard:
        """See Front."""
        return self._models.card(name)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = CounterMetricFamily(
            "moonserve_prompts_read",
            "Prompts, by how their length and prefix were found: ids and tokens (exact), engine "
            "(its /tokenize), text (estimated), unread (no prefix known).",
            labels=("how",),
        )
        for how, count in sorted(self._reader.read.items()):
            family.add_metric((how,), count)
        yield family

    async def generate(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        """See Front."""
        caller = self._caller
        tenant = headers.tenant(http.headers)
        self._door.enter(tenant)
        life, streams = None, False
        try:
            raw = await http.body()
            http.cancel_on_disconnect()
            asked = ExternalRequest(form, raw)
            infos = self._models.of(asked.model)
            reading = await self._reader.reading(asked, infos)
            longest = infos[0].max_len
            default = _COMPLETION_TOKENS if form == "completion" else longest
            request = Request(
                id=self._door.named(http, caller.conductor.known(RequestId(http.id))),
                model=asked.model,
                length=reading.length,
                stopping=Stopping(max_tokens=min(max(1, asked.max_tokens or default), longest)),
                slo=headers.slo(http.headers),
                priority=headers.priority(http.headers),
                arrived_us=seconds_to_us(http.arrived_s),
                whole=asked.whole,
                tenant=tenant,
            )
            life = Life(
                asked,
                reading,
                request,
                caller,
                http.arrived_s,
                lambda: self._door.leave(http, tenant),
            )
            answer = await life.begin()
            if answer is not None:
                return Response(answer.status, answer.body, answer.headers, answer.content_type)
            streams = True
            return StreamingResponse(life, content_type=life.content_type)
        finally:
            if life is None:
                self._door.leave(http, tenant)
            elif not streams:
                await life.aclose()

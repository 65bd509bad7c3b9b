"""OpenAI's API over foreign engines: from a client's HTTP request to a Life and back.

Mounted in place of gateway.app where a cluster has engines of others. Judges little: what a field
means is the engine's to say, whose 4xx reaches the client as it is. Holds no state of a request
beyond its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.core.request import Counted, Request, Stopping
from moonserve.core.units import RequestId, seconds_to_us
from moonserve.live.fleet.observed import Observer
from moonserve.live.gateway import headers
from moonserve.live.gateway.app import ModelEntry, ModelList
from moonserve.live.gateway.door import Door
from moonserve.live.gateway.door import Limits as DoorLimits
from moonserve.live.gateway.metrics import Metrics
from moonserve.live.gateway.prompts import Prompts
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
    json_response,
)
from moonserve.live.http.server import Handler
from moonserve.live.ports import Conducting
from moonserve.live.relay.bodies import PATHS, Asked, Form
from moonserve.live.relay.calls import Caller, Guesses, Limits
from moonserve.live.relay.engines import Engines, Models
from moonserve.live.relay.life import Life
from moonserve.live.relay.reading import Reader

_MODELS = "/v1/models"
_COMPLETION_TOKENS = Stopping().max_tokens


class RelayApp(Collector):
    """The routes of a gateway before foreign engines; used as gateway.app.GatewayApp is."""

    def __init__(
        self,
        conductor: Conducting,
        engines: Engines,
        observer: Observer,
        http: HttpClient,
        door: DoorLimits | None = None,
        limits: Limits | None = None,
    ) -> None:
        """door: how many may come in; limits: how long engines may take."""
        self.metrics = Metrics()
        self.metrics.registry.register(self)
        door = door or DoorLimits()
        self._door = Door(door, self.metrics)
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
        self._created = int(time.time())
        self.not_ready: Callable[[], str] = str
        """See GatewayApp."""

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        counted, chat, completion = self._door.counted, PATHS["chat"], PATHS["completion"]
        return {
            ("POST", chat): counted(chat, self._chat),
            ("POST", completion): counted(completion, self._completion),
            ("GET", _MODELS): counted(_MODELS, self._list_models),
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._door.metrics_text,
        }

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes; a model's name may have slashes."""
        return {("GET", _MODELS + "/"): self._door.counted(_MODELS, self._one_model)}

    def drain(self) -> None:
        """See GatewayApp."""
        self._door.draining = True

    async def idle(self, timeout_s: float) -> bool:
        """See GatewayApp."""
        return await self._door.idle(timeout_s)

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

    async def _chat(self, http: HttpRequest) -> Response | StreamingResponse:
        return await self._generate(http, "chat")

    async def _completion(self, http: HttpRequest) -> Response | StreamingResponse:
        return await self._generate(http, "completion")

    async def _generate(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        caller = self._caller
        tenant = headers.tenant(http.headers)
        self._door.enter(tenant)
        life, streams = None, False
        try:
            raw = await http.body()
            http.cancel_on_disconnect()
            asked = Asked(form, raw)
            infos = self._models.of(asked.model)
            reading = await self._reader.reading(asked, infos)
            longest = infos[0].max_len
            default = _COMPLETION_TOKENS if form == "completion" else longest
            request = Request(
                id=self._door.named(http, caller.conductor.known(RequestId(http.id))),
                model=asked.model,
                prompt=Counted(reading.length),
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
                return Response(answer.status, answer.body, content_type=answer.content_type)
            streams = True
            return StreamingResponse(life, content_type=life.content_type)
        finally:
            if life is None:
                self._door.leave(http, tenant)
            elif not streams:
                await life.aclose()

    async def _list_models(self, request: HttpRequest) -> Response:
        cards = self._models.cards()
        return json_response(
            ModelList([ModelEntry(card.name, self._created, card.max_len) for card in cards])
        )

    async def _one_model(self, request: HttpRequest) -> Response:
        name = request.path.removeprefix(_MODELS + "/")
        longest = min(info.max_len for info in self._models.of(name))
        return json_response(ModelEntry(name, self._created, longest))

    async def _health(self, request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: HttpRequest) -> Response:
        alive = [card.name for card in self._models.cards() if card.alive]
        lack = "no model has engines that can serve it"
        return self._door.readiness(alive, self.not_ready(), lack)

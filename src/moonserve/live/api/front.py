"""OpenAI's API as both kinds of gateway serve it: its routes, the models, readiness, and the drain.

`app` serves generations by workers of ours, live/relay by foreign engines; the gateway process
mounts what it is given. What a generation is nobody knows here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from moonserve.core.errors import NobodyAlive
from moonserve.core.units import Tokens
from moonserve.live.api.limiter import Door, Limits
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.health import Health
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import Handler
from moonserve.live.openai.request import CHAT, COMPLETION, Form
from moonserve.live.ports import ModelCard

_MODELS = "/v1/models"


class ModelEntry(msgspec.Struct):
    """One model in OpenAI's list."""

    id: str
    created: int
    max_model_len: Tokens
    object: str = "model"
    owned_by: str = "moonserve"


class ModelList(msgspec.Struct):
    """GET /v1/models."""

    data: list[ModelEntry]
    object: str = "list"


class Front:
    """The API over what a subclass serves with. Mount `routes()` and `prefixes()` in an App."""

    lack: ClassVar[str]
    """What is missing where no model is alive."""

    def __init__(self, limits: Limits, health: Health) -> None:
        self.metrics = RequestMetrics()
        self._door = Door(limits, self.metrics)
        self._created = int(time.time())
        self._health = health

    def cards(self) -> Sequence[ModelCard]:
        """All models."""
        raise NotImplementedError

    def card(self, name: str) -> ModelCard:
        """That model. Raises ModelNotFound, NobodyAlive."""
        raise NotImplementedError

    async def generate(self, http: HttpRequest, form: Form) -> Response | StreamingResponse:
        """Serve one generation."""
        raise NotImplementedError

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        counted = self._door.counted
        return {
            ("POST", CHAT): counted(CHAT, self._chat),
            ("POST", COMPLETION): counted(COMPLETION, self._completion),
            ("GET", _MODELS): counted(_MODELS, self._list_models),
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._door.metrics_text,
        }

    def prefixes(self) -> dict[tuple[str, str], Handler]:
        """Path prefixes; a model's name may have slashes."""
        return {("GET", _MODELS + "/"): self._door.counted(_MODELS, self._one_model)}

    def drain(self) -> None:
        """From now on new generations are answered 503, and so is /ready; all else goes on.

        Who shuts down calls this, then `idle`, and only then stops the server: as long as a
        generation runs, its instances must get through with their beats and store operations.
        """
        self._door.draining = True

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no generation is under way, streams included; False after `timeout_s`."""
        return await self._door.idle(timeout_s)

    async def _chat(self, http: HttpRequest) -> Response | StreamingResponse:
        self._check_decider()
        return await self.generate(http, "chat")

    async def _completion(self, http: HttpRequest) -> Response | StreamingResponse:
        self._check_decider()
        return await self.generate(http, "completion")

    def _check_decider(self) -> None:
        if why := self._health.undecided():
            raise NobodyAlive(why)

    async def _list_models(self, request: HttpRequest) -> Response:
        return json_response(ModelList([self._entry(card) for card in self.cards()]))

    async def _one_model(self, request: HttpRequest) -> Response:
        return json_response(self._entry(self.card(request.path.removeprefix(_MODELS + "/"))))

    async def _ready(self, request: HttpRequest) -> Response:
        alive = [card.name for card in self.cards() if card.alive]
        return self._door.readiness(alive, self._health.not_ready(), self.lack)

    def _entry(self, card: ModelCard) -> ModelEntry:
        return ModelEntry(card.name, self._created, card.max_len)

"""What the driver needs to know of external engines.

`Engines` is implemented by external.fleet.Fleet, and by fronts.engines for fronts. `Models` lists
the models of the instances that have joined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from moonserve.core.errors import ModelNotFound, NobodyAlive
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import InstanceId
from moonserve.live.external.member import Member
from moonserve.live.ports import Conducting, ModelCard
from moonserve.live.text.tools import TextTools

_FRESH_S = 0.2
"""How old the list of instances may be. An instance that left meanwhile is noticed when it is
called."""


class Engines(Protocol):
    """The external engines of a gateway."""

    def member(self, instance: InstanceId) -> Member:
        """The engine of an instance that has joined. Raises NobodyAlive where it is gone."""

    def follows_events(self, model: str) -> bool:
        """Whether the model's instances send KV events. If they do, block keys are those of its
        tokens."""

    def follows_events_of(self, instance: InstanceId) -> bool:
        """Whether this instance sends KV events."""

    def text(self, model: str) -> TextTools | None:
        """The model's tokenizer and chat template, as the engines have them. None: this gateway
        does not have them."""


class Models:
    """The instances that have joined, by the model they serve."""

    def __init__(self, conductor: Conducting) -> None:
        self._conductor = conductor
        self._by_model: dict[str, list[InstanceInfo]] = {}
        self._until_s = 0.0

    def of(self, model: str) -> Sequence[InstanceInfo]:
        """The instances of this model, at least one.

        Raises ModelNotFound, or NobodyAlive if no instance of any model has joined.
        """
        found = self._look().get(model) or self._look(0.0).get(model)
        if found is None:
            if not self._by_model:
                raise NobodyAlive("no engine has joined; GET /health returns the reason")
            known = ", ".join(sorted(self._by_model))
            message = f"model: {model!r} is not served here; known: {known}"
            raise ModelNotFound(message, "model", "model_not_found")
        return found

    def cards(self) -> list[ModelCard]:
        """One card per model, in order of name."""
        return [_card(name, infos) for name, infos in sorted(self._look(0.0).items())]

    def card(self, model: str) -> ModelCard:
        """The card of that model. Raises as `of` does."""
        return _card(model, self.of(model))

    def _look(self, fresh_s: float = _FRESH_S) -> dict[str, list[InstanceInfo]]:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._until_s or not fresh_s:
            self._by_model, self._until_s = {}, now_s + _FRESH_S
            for info in self._conductor.instances():
                self._by_model.setdefault(info.model, []).append(info)
        return self._by_model


def _card(model: str, infos: Sequence[InstanceInfo]) -> ModelCard:
    return ModelCard(model, min(info.max_len for info in infos), _serve(infos))


def _serve(infos: Sequence[InstanceInfo]) -> bool:
    """Whether these instances together can prefill and decode."""
    prefills = [info.connector for info in infos if info.role == "prefill"]
    return any(
        info.role == "both" or (info.role == "decode" and info.connector in prefills)
        for info in infos
    )

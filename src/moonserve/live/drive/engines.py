"""What the driver needs to know of external engines.

`Engines` is implemented by external.fleet.Fleet, and by fronts.engines for fronts. `Models` lists
the models of the instances that have joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonserve.core.errors import ModelNotFound, NobodyAlive
from moonserve.core.schedule.admission import all_drained
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import InstanceId
from moonserve.live.clock import LoopClock
from moonserve.live.external.member import Member
from moonserve.live.ports import Conducting, ModelCard
from moonserve.live.text.tools import TextTools

_FRESH_S = 0.2
"""How old the list of instances may be. An instance that left meanwhile is noticed when it is
called."""
_REMEMBERED_S = 300.0
"""How long a model without instances is expected back: requests for it are not 404 meanwhile."""


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
        self._clock = LoopClock()
        self._by_model: dict[str, list[InstanceInfo]] = {}
        self._cards: dict[str, ModelCard] = {}
        """Of models that were asked for since the last look."""
        self._seen_s: dict[str, float] = {}
        """When instances of each model were there last."""
        self._until_s = 0.0

    def of(self, model: str) -> Sequence[InstanceInfo]:
        """The instances of this model, at least one.

        Raises ModelNotFound; NobodyAlive if its instances, or those of all models, are away.
        """
        found = self._look().get(model) or self._look(0.0).get(model)
        if found is not None:
            return found
        reason = "GET /health returns the reason"
        is_drained = any(info.model == model for info in self._conductor.drained())
        if model in self._seen_s or is_drained:
            raise nobody_of(model, self._conductor, f"all are lost; {reason}")
        if not self._by_model:
            raise nobody_of(model, self._conductor, f"none has joined, or all are lost; {reason}")
        known = ", ".join(sorted(self._by_model))
        message = f"model: {model!r} is not served here; known: {known}"
        raise ModelNotFound(message, "model", "model_not_found")

    def cards(self) -> list[ModelCard]:
        """One card per model, in order of name."""
        return [_card(name, infos) for name, infos in sorted(self._look(0.0).items())]

    def card(self, model: str) -> ModelCard:
        """The card of that model. Raises as `of` does."""
        infos = self.of(model)
        if model not in self._cards:
            self._cards[model] = _card(model, infos)
        return self._cards[model]

    def _look(self, fresh_s: float = _FRESH_S) -> dict[str, list[InstanceInfo]]:
        now_s = self._clock.loop.time()
        if now_s >= self._until_s or not fresh_s:
            self._by_model, self._until_s = {}, now_s + _FRESH_S
            self._cards.clear()
            for info in self._conductor.instances():
                self._by_model.setdefault(info.model, []).append(info)
            self._seen_s.update(dict.fromkeys(self._by_model, now_s))
            gone = [name for name, at_s in self._seen_s.items() if now_s - at_s > _REMEMBERED_S]
            for name in gone:
                del self._seen_s[name]
        return self._by_model


NONE_JOINED = "none has joined yet, or all are lost; `moonserve instances` lists those that joined"
"""Why no worker of ours serves a model, if none is drained."""


def nobody_of(model: str, conductor: Conducting, otherwise: str) -> NobodyAlive:
    """The error if no instance of a model gets new work; otherwise: why, if none is drained."""
    drained = [info.id for info in conductor.drained() if info.model == model]
    if drained:
        return NobodyAlive(all_drained(model, drained))
    return NobodyAlive(f"no instance of model {model} gets new work: {otherwise}")


def _card(model: str, infos: Sequence[InstanceInfo]) -> ModelCard:
    return ModelCard(model, min(info.max_len for info in infos), _serve(infos))


def _serve(infos: Sequence[InstanceInfo]) -> bool:
    """Whether these instances together can prefill and decode."""
    prefills = [info.connector for info in infos if info.role == "prefill"]
    return any(
        info.role == "both" or (info.role == "decode" and info.connector in prefills)
        for info in infos
    )

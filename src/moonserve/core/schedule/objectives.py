"""Which objectives a request is held to: its own or the cluster's, or tighter ones.

Kept by the Conductor. Low priority, a tenant above its equal share, and refused clients that are
due about now make the objectives of a request tighter, so that it is refused first. `Tenants` is
bounded: it forgets a tenant that asks for nothing, and the smallest of too many. Where requests
wait at the Conductor, tenants take turns instead; see core.schedule.waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.request import EffectiveSlo, Request, Slo
from moonserve.core.schedule.policies import policy_of
from moonserve.core.schedule.retry import RetryCalendar
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens, shown_us

_HALVED_US: Micros = 30 * MICROS_PER_SECOND
_ACTIVE_US: Micros = 10 * MICROS_PER_SECOND
"""A tenant that asked for nothing this long has no share; what it received still counts."""
_STEPS = 8
"""In how many steps what was counted fades to its half."""
_MOST = 256
_LEFT = 0.9
_MORE = 1 + 1e-9
"""Sums of fading parts are equal only so far."""


class Tenants:
    """Prompt tokens by tenant; older ones count less."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._last_us: dict[str, Micros] = {}
        """When each tenant asked last."""
        self._faded_us: Micros = 0

    def asked(self, tenant: str, tokens: Tokens, now_us: Micros) -> None:
        """A request with a prompt of this many tokens arrived."""
        steps = (now_us - self._faded_us) * _STEPS // _HALVED_US
        if steps > 0:
            self._faded_us = now_us
            factor = 0.5 ** (steps / _STEPS)
            asked = {name: count * factor for name, count in self._asked.items()}
            self._asked = {name: count for name, count in asked.items() if count >= 1}
            self._given = {name: self._given.get(name, 0.0) * factor for name in self._asked}
            self._last_us = {name: self._last_us[name] for name in self._asked}
        if tenant not in self._asked and len(self._asked) >= _MOST:
            least = min(self._asked, key=self._asked.__getitem__)
            del self._asked[least], self._last_us[least]
            self._given.pop(least, None)
        self._asked[tenant] = self._asked.get(tenant, 0.0) + tokens
        self._last_us[tenant] = now_us

    def given(self, tenant: str, tokens: Tokens) -> None:
        """A request of this tenant is served."""
        if tenant in self._asked:
            self._given[tenant] = self._given.get(tenant, 0.0) + tokens

    def share(self, tenant: str, now_us: Micros) -> float:
        """The share of the capacity that may be in use when this tenant's next request is admitted.

        1.0 if the tenant received no more than an equal share of what active tenants received. Else
        its part of what they asked for, and at most _LEFT: the rest is left for the other tenants,
        at least one request of theirs.
        """
        active = [one for one, us in self._last_us.items() if us > now_us - _ACTIVE_US]
        if tenant not in active or len(active) == 1:
            return 1.0
        given = [self._given.get(one, 0.0) for one in active]
        if self._given.get(tenant, 0.0) <= _MORE * (sum(given) / len(active)):
            return 1.0
        return min(_LEFT, self._asked[tenant] / sum([self._asked[one] for one in active]))


_MENTIONED_US: Micros = 1_000
"""A reduction by less is not mentioned in a message."""


class Objectives:
    """See the module."""

    def __init__(self, tuning: Tuning, tenants: Tenants, calendar: RetryCalendar) -> None:
        self._tuning = tuning
        self._tenants = tenants
        self._calendar = calendar
        self._turns = policy_of(tuning.policy).late
        """Whether tenants take turns where requests wait; then no request is held to less."""

    def own(self, request: Request) -> Slo:
        """Its own objectives, or the cluster's."""
        return own_slo(request, self._tuning)

    def effective(
        self, request: Request, prefills: Sequence[InstanceView], now_us: Micros
    ) -> EffectiveSlo:
        """The objectives that it must be predicted to meet.

        Requests of low priority are refused first, and so are those of a tenant above its share.
        Refused clients that are due about now count as before it, each with a request like this.
        """
        slo = self.own(request)
        whys = list[str]()
        if slo.ttft_us is None and slo.tbt_us is None:
            return EffectiveSlo(slo)
        returning = self.returning(request, now_us)
        if returning and slo.ttft_us is not None:
            view = prefills[0]
            length = request.length
            alone_us = view.cost.prefill_us(length, 0, view.info.chunk_tokens)
            each_us = alone_us / view.cost.optimism / len(prefills)
            less_us = min(slo.ttft_us, round(returning * each_us))
            slo = Slo(slo.ttft_us - less_us, slo.tbt_us)
            if less_us >= _MENTIONED_US:
                less = f"less {less_us / 1e3:.0f} ms"
                whys.append(f"{less} for {returning:.1f} returning clients before it")
        share = 1.0
        low = self._tuning.low_share
        if request.priority < 0:
            share = low
            whys.append(f"{low:.3g} of its own, since its priority is below 0")
        part = 1.0 if self._turns else max(low, self._tenants.share(request.party.name, now_us))
        if part != 1.0:  # the two multiply: within a tenant low priority goes first all the same
            share *= part
            whose = f"tenant {request.tenant!r}" if request.tenant else "its address"
            whose += " received more than its share"
            whys.append(f"{part:.3g} of its own, since {whose}")
        if share != 1.0:
            slo = _scaled(slo, share)
        return EffectiveSlo(slo, ", ".join(whys) or None)

    def returning(self, request: Request, now_us: Micros) -> float:
        """How many clients that were refused before are expected before this one.

        Where other requests wait at the Conductor, or another admission decides: none.
        """
        if self._turns or request.priority > 0:
            return 0.0
        if self._tuning.mode(request.priority) != "predictive":
            return 0.0
        return self._calendar.ahead(request, now_us)


def own_slo(request: Request, tuning: Tuning) -> Slo:
    """A request's own objectives, or the cluster's; a single token has no time between tokens."""
    slo = request.slo
    of_all = tuning.slo
    if of_all.ttft_us is not None or of_all.tbt_us is not None:
        slo = slo.over(of_all)
    return slo if request.stopping.max_tokens > 1 else Slo(slo.ttft_us)


def _scaled(slo: Slo, share: float) -> Slo:
    """Objectives that are this share of others."""
    ttft_us = slo.ttft_us
    tbt_us = slo.tbt_us
    return Slo(
        None if ttft_us is None else round(share * ttft_us),
        None if tbt_us is None else round(share * tbt_us),
    )


def misses(what: str, predicted_us: Micros, goal_us: Micros) -> str:
    """An objective that is predicted to be missed, in words."""
    predicted = shown_us(predicted_us)
    goal = shown_us(goal_us)
    if predicted == goal:
        predicted = f"{predicted_us / 1e3:.10g} ms"
        goal = f"{goal_us / 1e3:.10g} ms"
    return f"predicted {what} of {predicted} misses the objective of {goal}"

"""What each tenant asked for and received lately: which tenant gives way in overload.

core.schedule.objectives uses it for policies that bind on arrival. Where requests wait at the
Conductor, tenants take turns instead; see core.schedule.waiting. Nothing here refuses a request.
Bounded: a tenant that asks for nothing is forgotten, and so is the smallest of too many.
"""

from __future__ import annotations

from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens

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

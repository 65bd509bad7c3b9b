"""What each tenant asked for and was given lately: who gives way where there is not enough for all.

Kept by core.admission for policies that bind on arrival; where requests wait at the Conductor
tenants take turns instead, see core.waiting. Nothing here refuses anybody. Bounded: a tenant that
asks for nothing is forgotten, and so is the least of too many.
"""

from __future__ import annotations

from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens

_HALVED_US: Micros = 30 * MICROS_PER_SECOND
_STEPS = 8
"""In how many steps what was counted fades to its half."""
_MOST = 256
_LEFT = 0.9
_MORE = 1 + 1e-9
"""Sums of fading parts are equal only so far."""


class Tenants:
    """Prompt tokens by tenant, the older the less."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._faded_us: Micros = 0

    def asked(self, tenant: str, tokens: Tokens, now_us: Micros) -> None:
        """A request of so many tokens came."""
        steps = (now_us - self._faded_us) * _STEPS // _HALVED_US
        if steps > 0:
            self._faded_us = now_us
            factor = 0.5 ** (steps / _STEPS)
            asked = {name: count * factor for name, count in self._asked.items()}
            self._asked = {name: count for name, count in asked.items() if count >= 1}
            self._given = {name: self._given.get(name, 0.0) * factor for name in self._asked}
        if tenant not in self._asked and len(self._asked) >= _MOST:
            least = min(self._asked, key=self._asked.__getitem__)
            del self._asked[least]
            self._given.pop(least, None)
        self._asked[tenant] = self._asked.get(tenant, 0.0) + tokens

    def given(self, tenant: str, tokens: Tokens) -> None:
        """It is served."""
        if tenant in self._asked:
            self._given[tenant] = self._given.get(tenant, 0.0) + tokens

    def share(self, tenant: str) -> float:
        """Of what there is, how much this tenant's next request may see in use.

        All, where it was given no more than a like part; else as much as its part of what all asked
        for, and at most _LEFT: what is above is for the others, a request of theirs at least.
        """
        if tenant not in self._asked or len(self._asked) == 1:
            return 1.0
        given = self._given.get(tenant, 0.0)
        if given <= _MORE * (sum(self._given.values()) / len(self._asked)):
            return 1.0
        return min(_LEFT, self._asked[tenant] / sum(self._asked.values()))

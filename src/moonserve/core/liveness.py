"""Liveness: which of several peers have been silent for too long.

The Conductor's membership and the connections of live.rpc use it.
It reads no clock and keeps no peers: its user looks regularly, with the time of each peer's last
sign of life.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from moonserve.core.units import Micros

Id = TypeVar("Id")


class Liveness:
    """The rule for one user's peers; all times are on the user's clock."""

    def __init__(self, silent_us: Micros, pause_us: Micros, grace_us: Micros = 0) -> None:
        """
        silent_us: a peer is lost after more than this time without a sign of life. pause_us: if
        more time has passed between two looks, this process was paused, and received nothing.
        grace_us: for so long after a pause nobody is lost: peers on the same host may have been
        paused too.
        """
        self._silent_us = silent_us
        self._pause_us = pause_us
        self._grace_us = grace_us
        self._looked_us: Micros | None = None
        self._grace_ends_us: Micros | None = None

    def silent(self, now_us: Micros, last_heard: Iterable[tuple[Id, Micros]]) -> list[Id]:
        """Return the peers that are lost, from (peer, time of its last sign of life).

        At the first look and at the look after a pause of this process, nobody is lost: what peers
        sent meanwhile is received before the next look.
        """
        before_us = self._looked_us
        self._looked_us = now_us
        if before_us is None:
            return []
        if now_us - before_us > self._pause_us:
            self._grace_ends_us = now_us + self._grace_us
        if self._grace_ends_us is not None and now_us <= self._grace_ends_us:
            return []
        lost_us = now_us - self._silent_us
        return [peer for peer, heard_us in last_heard if heard_us < lost_us]

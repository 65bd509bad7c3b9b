"""What is wrong with one process, in words: one object per process, made by its assembly.

Parts report to it; /health, /ready and the metrics read it. Nothing here acts on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable

from moonserve.core.units import Micros


class Health:
    """Collects the alarms of all parts, and the reasons why a load balancer should wait."""

    def __init__(self, undecided: Callable[[], str] = str) -> None:
        """undecided: why no Conductor can place a request now; empty: one can."""
        self.undecided = undecided
        self._alarms: list[Callable[[], list[str]]] = []
        self._reasons: list[Callable[[], str]] = []

    def report_alarms(self, source: Callable[[], list[str]]) -> None:
        """Include the alarms that `source` returns; it is called whenever somebody asks."""
        self._alarms.append(source)

    def report_unready(self, source: Callable[[], str]) -> None:
        """Include why one part is not ready yet; `source` returns "" once it is ready."""
        self._reasons.append(source)

    def alarms(self) -> list[str]:
        """What an operator should look at, part by part."""
        return [text for source in self._alarms for text in source()]

    def not_ready(self) -> str:
        """Why clients should use another gateway for now; empty: they need not."""
        return self.undecided() or self.incomplete()

    def incomplete(self) -> str:
        """What this process still waits for since its start, such as instances; empty: nothing."""
        return next((why for it in self._reasons if (why := it())), "")


class Expected:
    """Whether the instances for which a gateway waits at its start have joined.

    Requests that came before would stay with the first of them. The wait ends once all were there,
    or after a time: one engine that is down must not keep the gateway from its clients.
    """

    def __init__(
        self,
        joined: Callable[[], int],
        wanted: int,
        until_us: Micros,
        now_us: Callable[[], Micros],
    ) -> None:
        """joined: how many are there now; until_us: the latest end of the wait."""
        self._joined = joined
        self._wanted = wanted
        self._until_us = until_us
        self._now_us = now_us
        self._over = False

    def missing(self) -> str:
        """How many instances have joined of those that are waited for; empty: it waits no more."""
        if self._over:
            return ""
        count = self._joined()
        self._over = count >= self._wanted or self._now_us() >= self._until_us
        return "" if self._over else f"{count} of {self._wanted} instances have joined"

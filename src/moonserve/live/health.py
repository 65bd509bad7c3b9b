"""What is wrong with one process, in words: one object per process, made by its assembly.

Parts report to it; /health, /ready and the metrics read it. Nothing here acts on what it finds.
"""

from __future__ import annotations

from collections.abc import Callable


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
        return self.undecided() or next((why for it in self._reasons if (why := it())), "")

"""How many requests were refused because of their API key, by key and reason, for /metrics.

The guard and the gateway's API count. No secret comes here: a key is known by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

Reason: TypeAlias = Literal["unknown", "scope", "terms", "key_limit"]
"""There is no such key; it may not use this path; it may not ask for what the headers ask for; it
is over one of its limits."""
_MOST = 4_096
_OTHER = "(other)"
"""Stands for further keys; no key may have this name."""


class KeyRefusals(Collector):
    """See the module."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, Reason]] = Counter()

    def count(self, key: str, reason: Reason) -> None:
        """A request of the key of this name was refused; "": its key is unknown."""
        found = (key, reason)
        if found not in self._counts and len(self._counts) >= _MOST:
            found = (_OTHER, reason)
        self._counts[found] += 1

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = CounterMetricFamily(
            "moonserve_key_refusals",
            "Requests refused because of their API key.",
            labels=("key", "reason"),
        )
        for (key, reason), count in sorted(self._counts.items()):
            family.add_metric((key, reason), count)
        yield family

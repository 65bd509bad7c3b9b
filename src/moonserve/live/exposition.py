"""Metrics in Prometheus's text format, made in small pieces so that no request waits for a scrape.

Gateways, fronts and Conductors, which may have tens of thousands of samples, use it for /metrics.
The event loop is given back between families. Nothing here counts anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

_TURN_S = 0.004
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_ESCAPED_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Turn:
    """Gives the event loop back when work has kept it for some milliseconds."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()
        self._before_s = 0.0
        """How long the work took before the loop was given back last."""

    @property
    def worked_s(self) -> float:
        """How long the work has taken, without the turns of others."""
        return self._before_s + time.perf_counter() - self._since_s

    async def over(self) -> None:
        """Go on, or let others run first."""
        if time.perf_counter() - self._since_s > _TURN_S:
            self._before_s = self.worked_s
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()


async def exposed(families: Iterable[Metric], turn: Turn | None = None) -> bytes:
    """The page of these families. Each is read at another moment, when its turn comes."""
    turn = turn or Turn()
    parts = []
    for family in families:
        parts.append(rendered(family))
        await turn.over()
    return b"".join(parts)


def rendered(family: Metric) -> bytes:
    """One family, as prometheus_client writes it, in less time.

    Samples have neither a time nor an exemplar, and labels come in the order of their names.
    """
    name = family.name + "_total" if family.type == "counter" else family.name
    text = family.documentation.translate(_ESCAPED_HELP)
    lines = [f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"]
    for sample in family.samples:
        labels = _labels(sample.labels) if sample.labels else ""
        lines.append(f"{sample.name}{labels} {floatToGoString(sample.value)}\n")  # type: ignore[no-untyped-call]
    return "".join(lines).encode()


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{value.translate(_ESCAPED)}"' for name, value in sorted(labels.items())]
    return f"{{{','.join(pairs)}}}"

"""How far off the Conductor's predictions were: predicted against actual, in bounded memory.

The Conductor adds to them; metrics and the simulator's reports read them.
"""

from __future__ import annotations

from collections import deque

_KEPT = 1_024


class ErrorSeries:
    """The errors of one prediction: their mean over all time, and the latest of them."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self.latest: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """Pairs (predicted, actual), the newest last."""

    def add(self, predicted: float, actual: float) -> None:
        """Note one more prediction and what came of it."""
        self.count += 1
        self._sum += predicted - actual
        self.latest.append((predicted, actual))

    @property
    def bias(self) -> float | None:
        """Mean of predicted less actual; None before the first."""
        return self._sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """That quantile of the sizes of the latest errors; None before the first."""
        if not self.latest:
            return None
        ordered = sorted(abs(predicted - actual) for predicted, actual in self.latest)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class PredictionErrors:
    """The series of one Conductor."""

    def __init__(self) -> None:
        self.tbt = ErrorSeries()
        """Time between tokens (us), predicted on admission for when the prefill has ended."""
        self.output = ErrorSeries()
        """Output lengths (tokens), predicted when decode begins."""

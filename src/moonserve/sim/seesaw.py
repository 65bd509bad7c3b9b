"""Do the loads of prefill and decode swing against each other? Figures from a run's samples.

sim.metrics and the paper's figures use it. Load is the mean number of requests on an instance of
the pool, waiting ones included. It is taken at each sample while the last nine tenths of the
requests arrive. A swing that is faster than two samples is not seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonserve.sim.cluster import Simulation

Series = NDArray[np.float64]

_FILLING = 10
"""The first tenth of the requests fill empty pools: both rise, which is no swing."""
_CLEAR = 0.1
"""An autocorrelation below this is no period."""


def loads(sim: Simulation) -> tuple[Series, Series, Series]:
    """Seconds, and the load of each pool at that time; empty if instances do both, or none
    arrived."""
    rows = sim.trace.rows
    nodes = list(sim.nodes.values())
    first_us, last_us = rows[len(rows) // _FILLING].at_us, rows[-1].at_us
    samples = [s for s in sim.samples if first_us <= s.at_us <= last_us]
    if sim.setup.mixed or not samples:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    held = np.array([s.waiting for s in samples], float) + np.array([s.running for s in samples])
    is_prefill = np.array([node.info.role == "prefill" for node in nodes])
    times = np.array([s.at_us for s in samples], float) / 1e6
    return times, held[:, is_prefill].mean(axis=1), held[:, ~is_prefill].mean(axis=1)


def swing(
    times: Series, prefill: Series, decode: Series, sizes: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Correlation, amplitude of each load (half its spread from 5% to 95%, over its mean), and
    period.

    Dispersion is the variance over the mean of the requests in a pool. It is 1 if requests come at
    random to enough instances, less if admission steadies them, and more if admission makes them
    swing. The period is the lag at which the difference of the two normalised loads is most like
    itself again. A figure that cannot be computed is None.
    """
    found: dict[str, Any] = {
        "seesaw_correlation": None,
        "seesaw_amplitude_prefill": _amplitude(prefill),
        "seesaw_amplitude_decode": _amplitude(decode),
        "seesaw_period_s": None,
        "seesaw_dispersion_prefill": _dispersion(prefill, sizes[0]),
        "seesaw_dispersion_decode": _dispersion(decode, sizes[1]),
    }
    if len(times) < 8 or not prefill.std() or not decode.std():
        return found
    found["seesaw_correlation"] = float(np.corrcoef(prefill, decode)[0, 1])
    apart = (prefill - prefill.mean()) / prefill.std() - (decode - decode.mean()) / decode.std()
    if apart.std():
        found["seesaw_period_s"] = _period(apart, float(np.median(np.diff(times))))
    return found


def _amplitude(load: Series) -> float | None:
    if not len(load) or not load.mean():
        return None
    low, high = np.percentile(load, (5, 95))
    return float((high - low) / 2 / load.mean())


def _dispersion(load: Series, size: int) -> float | None:
    if not len(load) or not load.mean():
        return None
    return float(size * load.var() / load.mean())


def _period(series: Series, step_s: float) -> float | None:
    """The lag of the highest autocorrelation after it first fell below zero."""
    series = series - series.mean()
    count = len(series)
    spectrum = np.fft.rfft(series, 2 * count)
    like = np.fft.irfft(np.abs(spectrum) ** 2)[: count // 2]
    like /= like[0]
    below = np.flatnonzero(like < 0)
    if not len(below):
        return None
    at = int(below[0]) + int(np.argmax(like[below[0] :]))
    return at * step_s if like[at] >= _CLEAR else None

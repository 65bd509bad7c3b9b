"""Correlation, amplitude and period of two loads."""

from __future__ import annotations

import numpy as np
import pytest

from moonserve.sim.seesaw import swing


def test_a_swing_is_found() -> None:
    """Two waves of 40 s in opposite phases, sampled every 2 s."""
    times = np.arange(0, 600, 2.0)
    wave = np.sin(2 * np.pi * times / 40)
    found = swing(times, 10 + 5 * wave, 4 - wave)
    assert found["seesaw_correlation"] == pytest.approx(-1)
    assert found["seesaw_period_s"] == pytest.approx(40, abs=2)
    assert found["seesaw_amplitude_prefill"] == pytest.approx(0.5, rel=0.05)
    assert found["seesaw_amplitude_decode"] == pytest.approx(0.25, rel=0.05)


def test_random_arrivals_have_a_dispersion_of_one() -> None:
    """Whatever the pool's size: of so many requests on so many instances, the mean is a load."""
    rng = np.random.default_rng(1)
    prefill, decode = rng.poisson(20, 5_000) / 24, np.full(5_000, 8) + rng.poisson(1, 5_000)
    found = swing(np.arange(5_000.0), prefill, decode, (24, 2))
    assert found["seesaw_dispersion_prefill"] == pytest.approx(1, abs=0.05)
    assert found["seesaw_dispersion_decode"] == pytest.approx(2 / 9, rel=0.1)


def test_noise_has_no_period() -> None:
    """Loads that have nothing to do with each other show neither."""
    rng = np.random.default_rng(1)
    times = np.arange(2_000.0)
    found = swing(times, rng.normal(10, 1, 2_000), rng.normal(10, 1, 2_000))
    assert abs(found["seesaw_correlation"]) < 0.1
    assert found["seesaw_period_s"] is None


@pytest.mark.parametrize("count", [0, 3, 50])
def test_what_cannot_be_said_is_none(count: int) -> None:
    """Too few samples, or loads that never change."""
    found = swing(np.arange(float(count)), np.ones(count), np.zeros(count))
    assert found["seesaw_correlation"] is None
    assert found["seesaw_period_s"] is None
    assert found["seesaw_amplitude_decode"] is None
    assert found["seesaw_dispersion_decode"] is None

"""Output lengths learned, and the chance that a decode still runs later."""

from __future__ import annotations

from random import Random

import pytest

from moonserve.core.errors import ConfigError
from moonserve.core.request import Request, Stopping
from moonserve.core.schedule.decode_forecast import ErrorSeries
from moonserve.core.schedule.residency import (
    Lengths,
    Oracle,
    Predictor,
    Residency,
    Survival,
    Uniform,
    predictor_of,
)
from moonserve.core.units import RequestId


def request(prompt: int = 1_000, most: int = 100_000, tenant: str = "") -> Request:
    """One of this prompt length and max_tokens, on behalf of this tenant."""
    stopping = Stopping(max_tokens=most)
    return Request(RequestId("r"), "m", prompt, stopping=stopping, tenant=tenant)


def residencies(
    model: Predictor, residency: Residency, tokens: float, us: int, more: float, more_us: int
) -> float:
    """The chance that one with so many tokens, after so long, goes on for so many more."""
    lasts = model.lasts(residency)
    before = lasts.of(tokens, us)
    return lasts.of(tokens + more, us + more_us) / before if before else 0.0


def test_learned_shares_are_those_seen() -> None:
    """After many outputs, the share beyond a length is near the true one, and so is the mean."""
    rng, lengths = Random(1), Lengths()
    seen = [round(rng.expovariate(1 / 300)) + 1 for _ in range(3_000)]
    for tokens in seen:
        lengths.add(tokens)
    for at in (10, 50, 100, 300, 900):
        true = sum(tokens > at for tokens in seen) / len(seen)
        assert lengths.beyond(at) == pytest.approx(true, abs=0.03)
    assert lengths.mean() == pytest.approx(sum(seen) / len(seen), rel=0.1)


def test_shares_fall_and_never_reach_zero() -> None:
    """Longer is never likelier, also far beyond anything seen."""
    lengths = Lengths()
    for _ in range(100):
        lengths.add(7)
    shares = [lengths.beyond(at) for at in (0, 1, 2, 6, 8, 100, 10_000, 10**6, 10**9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > 0


def test_who_was_cut_off_would_have_gone_on() -> None:
    """Half of all are cut off at a random age: the others show how long those would have been."""
    rng, lengths = Random(1), Lengths()
    seen = [round(rng.expovariate(1 / 300)) + 1 for _ in range(3_000)]
    for tokens in seen:
        cut = rng.randint(1, 400) if rng.random() < 0.5 else 10**6
        if cut < tokens:
            lengths.add_cut(cut)
        else:
            lengths.add(tokens)
    for at in (10, 50, 100, 300, 900):
        true = sum(tokens > at for tokens in seen) / len(seen)
        assert lengths.beyond(at) == pytest.approx(true, abs=0.05)
    assert lengths.mean() == pytest.approx(sum(seen) / len(seen), rel=0.15)


def test_who_is_never_seen_to_end_is_expected_to_go_on() -> None:
    """All that max_tokens ended: each is there until its own, and so long is its output."""
    model = Survival()
    for most in (40, 50, 60) * 100:
        model.ended(request(most=most), most, 1)
    residency = model.residency(request(most=60), 1, 0)
    assert residencies(model, residency, 0.0, 0, 59.0, 0) > 0.9
    assert residencies(model, residency, 0.0, 0, 60.0, 0) == 0.0
    assert 55 < residency.expected <= 60


def test_the_mean_is_bounded_by_max_tokens() -> None:
    """Of outputs that may be no longer than that."""
    rng, lengths = Random(2), Lengths()
    seen = [round(rng.expovariate(1 / 300)) + 1 for _ in range(3_000)]
    for tokens in seen:
        lengths.add(tokens)
    for most in (1, 10, 100, 1_000, 10**6):
        true = sum(min(tokens, most) for tokens in seen) / len(seen)
        assert lengths.mean(most) == pytest.approx(true, rel=0.1)


def test_what_is_old_fades() -> None:
    """When outputs become longer, so does what is expected; nothing grows with the count."""
    lengths = Lengths()
    for tokens in [10] * 20_000 + [1_000] * 20_000:
        lengths.add(tokens)
    assert lengths.beyond(500) > 0.9


def test_a_class_learns_from_all_until_it_has_its_own() -> None:
    """A class never seen is like the mean of all; one seen often is like itself."""
    model = Survival()
    for _ in range(300):
        model.ended(request(prompt=100), 10, 1)
        model.ended(request(prompt=100_000), 2_000, 1)
    short, long = (model.residency(request(prompt=p), 1, 0).expected for p in (100, 100_000))
    other = model.residency(request(prompt=3_000), 1, 0).expected
    assert short < 100 < other < 1_500 < long


def test_tenants_are_classes_of_their_own() -> None:
    """A tenant with short answers is not mixed with one whose answers are long."""
    survival = Survival()
    for tenant, tokens in (("terse", 5), ("wordy", 2_000)) * 100:
        survival.ended(request(tenant=tenant), tokens, 0)
    expected = [
        survival.residency(request(tenant=t), 1_000, 0).expected for t in ("terse", "wordy")
    ]
    assert 10 * expected[0] < expected[1]


def test_classes_are_bounded() -> None:
    """However many models clients name, no more than so many histograms are kept."""
    model = Survival()
    for at in range(1_000):
        model.residency(Request(RequestId("r"), "m", 1, stopping=Stopping(at + 1)), 1, 0)
    for bits in range(300):
        model.residency(request(prompt=1 << bits % 30, most=1 << bits // 10), 1, 0)
    assert len(model._classes) <= 256


def test_survival_depends_on_age_and_ends_at_max_tokens() -> None:
    """An old output is likelier to last; no output passes max_tokens."""
    model = Survival()
    for tokens in [10] * 90 + [1_000] * 10:
        model.ended(request(), tokens, 1)
    young = model.residency(request(), 1, 0)
    assert residencies(model, young, 0, 0, 50, 1) < 0.2
    assert residencies(model, young, 100, 0, 50, 1) > 0.8
    capped = model.residency(request(most=120), 1, 0)
    assert residencies(model, capped, 100, 0, 20, 1) == 0
    assert capped.expected <= 120


def test_uniform_is_the_papers() -> None:
    """One time for all: the mean of past decodes; before the first, no decode lasts."""
    model = Uniform()
    residency = model.residency(request(), 1, 0)
    assert residencies(model, residency, 5, 10, 5, 10) == 0
    model.ended(request(), 10, 100)
    model.ended(request(), 10, 300)
    assert residencies(model, residency, 5, 150, 5, 49) == 1
    assert residencies(model, residency, 5, 150, 5, 50) == 0


def test_the_oracle_knows() -> None:
    """It gives the exact end; outside simulation there is none."""
    model: Predictor = Oracle(lambda request: 10)
    residency = model.residency(request(), 1, 0)
    assert (
        residencies(model, residency, 4, 0, 5, 0),
        residencies(model, residency, 4, 0, 6, 0),
    ) == (1, 0)
    with pytest.raises(ConfigError, match="in simulation only"):
        predictor_of("oracle")


def test_errors_are_counted() -> None:
    """Bias is of all, quantiles are of the latest; none of nothing."""
    errors = ErrorSeries()
    assert (errors.bias, errors.quantile(0.5)) == (None, None)
    for predicted in (3, 5, 13):
        errors.add(predicted, 4)
    assert (errors.bias, errors.quantile(0.5), errors.quantile(0.9)) == (3, 1, 9)
    for _ in range(2_000):
        errors.add(1, 1)
    assert errors.quantile(0.99) == 0


def test_a_stay_is_of_its_predictor() -> None:
    """A length that is known is no histogram: a bug, not a guess."""
    with pytest.raises(AssertionError):
        Survival().lasts(Residency(1, 0, 7, 7))

"""The fitted cost model."""

from random import Random

import msgspec
import pytest

from moonserve.core.engine.batch import Chunk, Pass
from moonserve.core.schedule.cost import Cost, LinearFit, pass_sample
from moonserve.core.schedule.facts import PassSample, TransferSample
from moonserve.core.units import RequestId


def truth(new: int, square: int, past: int, seqs: int, context: int) -> int:
    """A made-up engine's pass time in microseconds: one base, also for a pass that does both."""
    base = 8_000 if new else 30_000
    return round(base + 900 * new + 0.05 * square + 0.3 * past + 2_000 * seqs + 4 * context)


def samples(count: int, noise: float = 0.0, stalls: float = 0.0) -> list[PassSample]:
    """Passes as a worker would measure them."""
    random = Random(7)
    made = []
    for _ in range(count):
        new = random.choice([0, 32, 128, 300, 512])
        start = random.choice([0, 512, 1024, 3072]) if new else 0
        seqs = random.randrange(0 if new else 1, 17)
        context = seqs * random.randrange(50, 2_000)
        end = start + new
        square = end * end - start * start
        elapsed = truth(new, square, start, seqs, context) * (1 + random.uniform(-noise, noise))
        if random.random() < stalls:
            elapsed *= 10
        decodes = 0 if new else 1
        took_us = round(elapsed)
        made.append(PassSample(new, square, start, seqs, context, took_us, decodes=decodes))
    return made


@pytest.mark.parametrize(("noise", "stalls", "tolerance"), [(0, 0, 0.02), (0.1, 0.05, 0.12)])
def test_fit_finds_the_coefficients(noise: float, stalls: float, tolerance: float) -> None:
    """After 400 passes predictions are near the truth, with noise and stalled passes too."""
    cost = Cost()
    cost.observe(samples(400, noise, stalls), [])
    cases = [
        (cost.prefill_us(512, 0, 512), truth(512, 512 * 512, 0, 0, 0)),
        (cost.prefill_us(4096, 3584, 512), truth(512, 4096**2 - 3584**2, 3584, 0, 0)),
        (cost.decode_step_us(1, 500), truth(0, 0, 0, 1, 500)),
        (cost.decode_step_us(16, 16_000), truth(0, 0, 0, 16, 16_000)),
    ]
    for predicted, actual in cases:
        assert abs(predicted - actual) <= tolerance * actual, (predicted, actual)


def test_a_pass_that_does_both_has_one_base() -> None:
    """It reads the weights once: it costs a prefill of its chunks and its requests' decodes."""
    cost = Cost((1_000, 10, 0, 0, 500, 7, 2), learns=False)
    both = Pass(
        (
            Chunk(RequestId("a"), range(20), 0, (), None),
            Chunk(RequestId("b"), range(1), 30, (), None),
        )
    )
    assert cost.pass_of_us(pass_sample(both, 0)) == 1_000 + 200 + 7 + 62
    assert cost.pass_of_us(pass_sample(Pass(both.chunks[1:]), 0)) == 500 + 7 + 62


def test_a_cached_prefix_saves_attention_as_squares() -> None:
    """Prefill of n with p cached costs the terms n-p and n^2-p^2, not (n-p)^2."""
    cost = Cost(pass_prior=(0, 0, 1, 0, 0, 0, 0))
    assert cost.prefill_us(100, 60, 1_000) == 100**2 - 60**2


def test_chunks_add_up_to_the_whole() -> None:
    """Chunking changes only the per-pass and past terms: squares telescope."""
    cost = Cost(pass_prior=(10, 1, 1, 0, 0, 0, 0))
    assert cost.prefill_us(100, 0, 30) == cost.prefill_us(100, 0, 100) + 3 * 10


def test_cold_model_answers_with_its_prior_and_never_below_zero() -> None:
    """Before any sample the prior answers; wild samples never make a negative prediction."""
    cost = Cost(pass_prior=(0, 1000, 0, 0, 40_000, 0, 0))
    assert cost.prefill_us(10, 0, 100) == 10_000
    assert cost.decode_step_us(3, 99) == 40_000
    fit = LinearFit((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    for x in range(50):
        fit.observe((1.0, float(x)), float(max(1, 50 - x)))
    assert fit.predict((1.0, 1_000.0)) >= 0


def test_a_few_short_passes_do_not_blow_up_a_long_one() -> None:
    """Slow passes of few tokens teach nothing about attention over thousands."""
    cost = Cost()
    short = [PassSample(n, n * n, 0, 0, 0, 180_000) for n in (36, 4, 34)]
    cost.observe(short, [])
    assert 100_000 < cost.prefill_us(36, 0, 512) < 260_000
    assert cost.prefill_us(2_334, 0, 512) < 6_000_000


def test_transfers_are_fitted_too() -> None:
    """Transfer time is a base plus bytes; no bytes cost nothing."""
    cost = Cost()
    loads = [TransferSample(size, 3_000 + size // 1_000) for size in range(10**6, 10**8, 10**6)]
    cost.observe([], loads)
    assert abs(cost.transfer_us(50_000_000) - 53_000) < 1_500
    assert cost.transfer_us(0) == 0


def test_measuring_faults_are_ignored() -> None:
    """A pass of no duration teaches nothing."""
    cost = Cost()
    before = cost.prefill_us(512, 0, 512)
    cost.observe([PassSample(512, 512 * 512, 0, 0, 0, 0)], [])
    assert cost.prefill_us(512, 0, 512) == before


def test_the_lasting_fit_predicts_the_sum_of_all() -> None:
    """A profile's coefficients give back the whole time that passes took, early or late, however
    much they vary; the current ones follow what was last.
    """
    cost = Cost()
    early = [msgspec.structs.replace(s, elapsed_us=2 * s.elapsed_us) for s in samples(400, 0.6)]
    late = samples(400, 0.6)
    cost.observe([*early, *late], [TransferSample(1_000, 50), TransferSample(1_000, 150)])
    passes, loads = cost.lasting()
    lasting = Cost(passes, loads, learns=False)
    whole = sum(sample.elapsed_us for sample in early + late)
    assert sum(lasting.pass_of_us(s) for s in early + late) == pytest.approx(whole, rel=0.001)
    now = sum(cost.pass_of_us(sample) for sample in late)
    assert now == pytest.approx(sum(sample.elapsed_us for sample in late), rel=0.25)
    assert lasting.transfer_us(1_000) == 100


def test_slow_samples_count_as_much_as_fast_ones() -> None:
    """Passes of one kind that take now one time, now three times as long are predicted between."""
    fit = LinearFit((1_000.0,), (1.0,), (10.0,))
    for number in range(400):
        fit.observe((1.0,), 3_000 if number % 2 else 1_000)
    assert fit.predict((1.0,)) == pytest.approx(2_000, rel=0.1)

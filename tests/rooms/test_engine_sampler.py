"""The sampler: greedy and its ties, filters, and randomness that depends on (seed, position)."""

from __future__ import annotations

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from moonserve.core.errors import EngineFailed  # noqa: E402
from moonserve.core.request import Penalties, Sampling, Shaping  # noqa: E402
from moonserve.live.engine.sampler import logprobs, sample, shape, uniform  # noqa: E402
from moonserve.live.worker.counts import Counts  # noqa: E402

LOGITS = [0.0, 2.0, 1.0, 3.0, 3.0, -1.0]


def draws(how: Sampling, count: int = 4000) -> Counter[int]:
    """Tokens drawn at positions 0, 1, 2, ... from LOGITS."""
    rows = torch.tensor([LOGITS] * count)
    return Counter(sample(rows, [(how, position) for position in range(count)]))


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Temperature 0 is argmax, the lowest id on a tie, beside rows that draw."""
    rows = torch.tensor([LOGITS, LOGITS, [5.0] * 6])
    wanted = [(Sampling(temperature=0.0), 1), (Sampling(top_k=1), 2), (Sampling(temperature=0), 3)]
    assert sample(rows, wanted) == [3, 3, 0]


def test_draws_follow_the_distribution() -> None:
    """Frequencies over positions are the softmax at this temperature."""
    got = draws(Sampling(temperature=2.0, seed=5))
    weights = [math.exp(x / 2.0) for x in LOGITS]
    for token, weight in enumerate(weights):
        assert got[token] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_filters_keep_the_likeliest() -> None:
    """top_k keeps k tokens; top_p the fewest that reach its mass; both together, both."""
    assert set(draws(Sampling(top_k=2))) == {3, 4}
    assert set(draws(Sampling(top_k=3))) == {1, 3, 4}
    # Probabilities .382 .382 .141 .052 .019 .007 wait for ids 3 4 1 2 0 5 (softmax of LOGITS).
    assert set(draws(Sampling(top_p=0.3))) == {3}
    assert set(draws(Sampling(top_p=0.5))) == {3, 4}
    assert set(draws(Sampling(top_p=0.9))) == {1, 3, 4}
    assert set(draws(Sampling(top_p=1.0, temperature=3.0))) == set(range(6))
    assert set(draws(Sampling(top_p=0.9, top_k=2))) == {3, 4}
    assert set(draws(Sampling(top_p=1e-9, top_k=1000))) == {3}


def test_tiny_temperature_does_not_overflow() -> None:
    """A temperature close to 0 draws among the maxima."""
    assert set(draws(Sampling(temperature=1e-300), 50)) == {3, 4}


def test_seed_and_position_alone_decide() -> None:
    """The row's place in the batch and its company change nothing; seed and position do."""
    how = Sampling(seed=9)
    alone = [sample(torch.tensor([LOGITS]), [(how, i)])[0] for i in range(60)]
    together = sample(torch.tensor([LOGITS] * 60), [(how, i) for i in reversed(range(60))])
    assert together[::-1] == alone
    assert alone != [sample(torch.tensor([LOGITS]), [(Sampling(seed=8), i)])[0] for i in range(60)]
    assert uniform(9, 3) != uniform(9, 4)
    assert uniform(-1, 3) == uniform(-1, 3)
    assert 0 <= uniform(2**70, 2**40) < 1


def test_uniform_is_fixed_for_all_time() -> None:
    """The generator is part of the protocol between processes: its values never change."""
    assert [uniform(7, 0), uniform(7, 1)] == [0.8720734548204873, 0.0828426870273763]


def test_not_finite_is_refused() -> None:
    """NaN or infinite logits raise EngineFailed."""
    for bad in (math.nan, math.inf):
        with pytest.raises(EngineFailed):
            sample(torch.tensor([[0.0, bad]]), [(Sampling(), 0)])


def test_biases_and_barred_tokens_change_the_rows_that_ask_for_them() -> None:
    """A bias is added to its logit; a barred token does not come before its position."""
    rows = torch.tensor([LOGITS] * 4)
    biased = Sampling(temperature=0.0, shaping=Shaping(bias=((1, 2.5), (0, -100.0))))
    barred = Sampling(temperature=0.0, shaping=Shaping(barred=(3, 4), barred_until=8))
    wanted = [(Sampling(temperature=0.0), 7), (biased, 7), (barred, 7), (barred, 8)]
    assert shape(rows, wanted) == {}
    assert sample(rows, wanted) == [3, 1, 1, 3]


def test_log_probabilities_are_those_of_the_logits_as_they_are() -> None:
    """A bias chooses another token and changes no probability; the likeliest come first."""
    rows = torch.tensor([LOGITS] * 2)
    how = Sampling(temperature=0.0, shaping=Shaping(bias=((5, 100.0),), logprobs=2))
    wanted = [(Sampling(temperature=0.0), 1), (how, 1)]
    ((row, (plain, most)),) = shape(rows, wanted).items()
    tokens = sample(rows, wanted)
    assert (row, most, tokens) == (1, 2, [3, 5])
    found = logprobs(plain, tokens[row], most)
    total = sum(math.exp(x) for x in LOGITS)
    assert found.logprob == pytest.approx(-1.0 - math.log(total))
    assert [token for token, _ in found.top] == [3, 4]
    assert found.top[0][1] == pytest.approx(3.0 - math.log(total))
    assert logprobs(plain, 3, 0).top == ()


def penalised(row: list[float], prompt: list[int], text: list[int], how: Penalties) -> list[float]:
    """The logits of one row after its penalties, one token after the other."""
    row = [*row]
    for token in {*prompt, *text} if how.repetition != 1 else {*text}:
        row[token] *= 1 / how.repetition if row[token] > 0 else how.repetition
        row[token] -= how.frequency * text.count(token) + how.presence * (token in text)
    return row


def test_penalties_change_the_rows_that_ask_for_them() -> None:
    """Each row by its own penalties and its own text, whatever the rows beside it have; a row
    without a token of text has no penalty for it."""
    asked = [
        (Penalties(presence=1.5), [0], [1, 3, 3]),
        (Penalties(frequency=-0.75), [], [5, 5, 0, 5]),
        (Penalties(repetition=1.25), [4, 4, 5], [3]),
        (Penalties(0.5, 1.0, 0.5), [1, 2], [3, 3, 5]),
        (Penalties(presence=2.0), [3], []),
    ]
    plain = (Sampling(temperature=0.0), 7)
    wanted = [plain]
    for how, prompt, text in asked:
        counts = Counts(prompt if how.repetition != 1 else (), text).taken()
        shaping = Shaping(penalties=how, counts=counts)
        wanted += [(Sampling(temperature=0.0, shaping=shaping), 7), plain]
    rows = torch.tensor([LOGITS] * len(wanted))
    assert shape(rows, wanted) == {}
    expected = [LOGITS]
    for how, prompt, text in asked:
        expected += [penalised(LOGITS, prompt, text, how), LOGITS]
    torch.testing.assert_close(rows, torch.tensor(expected))

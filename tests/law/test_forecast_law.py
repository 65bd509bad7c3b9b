"""Law of the forecast: what is kept between forecasts changes none of them, to the last bit."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.request import Request, Stopping
from moonserve.core.schedule.forecast import Residencies, forecast, place_us
from moonserve.core.schedule.residency import Oracle, Predictor, Residency, Survival, Uniform
from moonserve.core.units import Micros, RequestId

STEP = (21_600.0, 4_200.0, 0.03446)


def plain(
    load: Residencies,
    joining: Residency,
    predictor: Predictor,
    now_us: Micros,
    wait_us: Micros,
    seqs: int | None,
) -> tuple[Micros, Micros]:
    """The forecast as it is defined: every hand-over in turn, nothing kept."""
    base, per_seq, per_context = STEP
    passes = load.passes(now_us, STEP)
    coming = sorted([*load.promised.values(), joining], key=lambda it: it.due_us)
    group = -(-len(coming) // 16)
    here: list[tuple[Residency, float, Micros, float]] = []

    def pass_us(ahead: float, more_us: Micros) -> tuple[float, float, float]:
        mean, variance, count = base, 0.0, 0.0
        for it, tokens, us, before in here:
            chance, weight = 1.0, per_seq + per_context * it.context
            if it is not joining and tokens + ahead > 0:
                lasts = predictor.lasts(it).of(tokens + ahead, us + more_us)
                chance = lasts / before if before else 0.0
                variance += chance * (1 - chance) * weight * weight
            mean += chance * weight
            count += chance
        return max(1.0, mean), mean + 1.5 * math.sqrt(variance), count

    for it in load.active.values():
        tokens, us = passes - it.began_tokens, now_us - it.due_us
        here.append((it, tokens, us, predictor.lasts(it).of(tokens, us)))
    at_us, ahead, mean_us = now_us, 0.0, load.step_us(STEP)
    for first in range(0, len(coming), group):
        arrived = coming[first : first + group]
        then_us = max(now_us, arrived[-1].due_us)
        if then_us > at_us:
            mean_us = pass_us(ahead, at_us - now_us)[0] if first else mean_us
            ahead += (then_us - at_us) / mean_us
            at_us = then_us
        for it in arrived:
            sure = it is joining
            before = 1.0 if sure else predictor.lasts(it).of(0.0, 0)
            here.append((it, -ahead, now_us - then_us, before))
        if then_us >= max(now_us, joining.due_us):
            break
    mean_us, high_us, count = pass_us(ahead, at_us - now_us)
    later_us = mean_us
    if wait_us:
        later_us, high_us, count = pass_us(ahead + wait_us / mean_us, at_us + wait_us - now_us)
    if seqs is not None and count > seqs:
        high_us += (count - seqs) * place_us(joining, later_us, seqs)
    return round(mean_us), round(high_us)


def request(number: int) -> Request:
    """One of a thousand tokens."""
    return Request(RequestId(f"r{number}"), "m", 1_000, stopping=Stopping(max_tokens=2_000))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["survival", "uniform", "oracle"]),
    st.integers(0, 2**32),
    st.integers(0, 40),
    st.integers(0, 30),
)
def test_forecasts_of_one_moment_are_those_made_alone(
    name: str, seed: int, running: int, coming: int
) -> None:
    """Whatever was asked before, and whatever began, ended or was promised in between."""
    rng = Random(seed)
    predictor: Predictor = Oracle(lambda id: 1 + int(id[1:]) * 97 % 700)
    if name != "oracle":
        predictor = Survival() if name == "survival" else Uniform()
    for number in range(rng.randrange(80)):
        predictor.ended(request(number), 1 + int(rng.expovariate(1 / 300)), 5_000_000)
    load = Residencies()
    now_us = 0
    for number in range(running + coming):
        due_us = now_us + rng.randrange(-1_000_000, 9_000_000)
        it = predictor.promise(request(number), rng.randrange(1, 90_000), due_us)
        load.promise(request(number).id, it)
        if number < running:
            now_us += rng.randrange(2_000_000)
            load.begin(request(number).id, now_us, STEP)
    for number in range(8):
        joining = predictor.residency(request(900), 5_000, now_us + rng.randrange(-1, 12_000_000))
        wait_us, seqs = rng.choice([0, 700_000]), rng.choice([None, 20])
        found = forecast(load, STEP, joining, predictor, now_us, 1.5, wait_us, seqs)
        assert found == plain(load, joining, predictor, now_us, wait_us, seqs)
        match rng.randrange(8):
            case 0:
                load.promise(RequestId(f"n{number}"), joining)
            case 1 if load.promised:
                load.begin(next(iter(load.promised)), now_us, STEP)
            case 2 if load.active:
                load.end(next(iter(load.active)), now_us, STEP)
            case 3:
                predictor.ended(request(number), 9, 1_000)
            case 4:
                now_us += rng.randrange(200_000)
            case _:
                pass

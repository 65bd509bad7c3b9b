"""What is learned of an engine that reports nothing."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import HitSample, PassSample
from moonserve.core.schedule.observed import CallWatch, ObservedCall, Part
from moonserve.core.units import Micros, Tokens

A800 = (67_900.0, 109.55, 7.413e-4, 2.5645, 21_600.0, 4_200.0, 0.03446)
CHUNK = 8_192


class Engine:
    """First come, first served, in passes of a known cost; `together`: a pass takes several."""

    def __init__(self, rng: Random, load: float, together: bool) -> None:
        self.rng, self.together = rng, together
        self.true = Cost(A800, learns=False)
        self.prompts = [self._prompt() for _ in range(50)]
        mean_us = sum(self.true.prefill_us(*it, CHUNK) for it in self.prompts) / 50
        self.came_us, now_us = list[Micros](), 0.0
        for _ in self.prompts:
            now_us += rng.expovariate(load / mean_us)
            self.came_us.append(round(now_us))

    def _prompt(self) -> tuple[Tokens, Tokens]:
        length = min(60_000, 50 + int(self.rng.lognormvariate(8.3, 0.9)))
        return length, int((length - 1) * self.rng.choice([0, 0, 0.3, 0.6, 0.9])) // 32 * 32

    def log(self) -> list[tuple[Micros, str, int]]:
        """When each was sent and answered."""
        rows = [(at, "sent", number) for number, at in enumerate(self.came_us)]
        rows += [(at, "answered", number) for at, number in self._answers()]
        return sorted(rows)

    def _answers(self) -> Iterator[tuple[Micros, int]]:
        done = [cached for _, cached in self.prompts]
        queue, coming, now_us = list[int](), list(range(50)), 0
        while queue or coming:
            if not queue:
                now_us = max(now_us, self.came_us[coming[0]])
            while coming and self.came_us[coming[0]] <= now_us:
                queue.append(coming.pop(0))
            left, new, square, past = CHUNK, 0, 0, 0
            ended: list[int] = []
            for number in queue:
                start = done[number]
                end = done[number] = min(self.prompts[number][0], start + left)
                new, square, past = new + end - start, square + end**2 - start**2, past + start
                left -= end - start
                if end == self.prompts[number][0]:
                    ended.append(number)
                if not left or not self.together:
                    break
            pass_us = self.true.pass_of_us(PassSample(new, square, past, 0, 0, 0))
            now_us += round(pass_us * max(0.5, self.rng.gauss(1.0, 0.05)))
            queue = [it for it in queue if it not in ended]
            yield from ((now_us + round(self.rng.expovariate(1 / 1_000)), it) for it in ended)


def began(
    watch: CallWatch, now_us: Micros, part: Part, prompt: Tokens, predicted: Tokens
) -> ObservedCall:
    """A call that was sent."""
    call = ObservedCall(part, prompt, predicted)
    watch.began(now_us, call)
    return call


def learned(engine: Engine) -> float:
    """Mean relative error of the prefill times predicted after the engine's 50 requests."""
    watch, cost, calls = CallWatch(CHUNK), Cost(), dict[int, ObservedCall]()
    for now_us, what, number in engine.log():
        length, cached = engine.prompts[number]
        if what == "sent":
            calls[number] = began(watch, now_us, "prefill", length, cached)
        else:
            watch.answered(now_us, calls[number], cached)
            watch.ended(now_us, calls[number])
        cost.observe(watch.take(now_us)[0], ())
    asked = [
        (n, int(n * part) // 32 * 32) for n in (500, 2_000, 8_000, 30_000) for part in (0, 0.5)
    ]
    true = [engine.true.prefill_us(*it, CHUNK) for it in asked]
    found = [cost.prefill_us(*it, CHUNK) for it in asked]
    return sum(abs(a - b) / b for a, b in zip(found, true, strict=True)) / len(asked)


def test_a_call_whose_time_is_doubtful_spoils_its_span_only() -> None:
    """Nothing is learned of it, nor of those beside it; the next one is learned from."""
    watch = CallWatch(CHUNK)
    first, second = (began(watch, 0, "prefill", 1_000, 0) for _ in range(2))
    first.doubtful = True
    watch.answered(100, first, 0)
    watch.answered(40_000, second, 0)
    assert watch.take(40_000)[0] == ()
    third = began(watch, 50_000, "prefill", 1_000, 0)
    watch.answered(80_000, third, 0)
    [learned] = watch.take(80_000)[0]
    assert (learned.prefill_new, learned.elapsed_us) == (1_000, 30_000)


@pytest.mark.parametrize(
    ("load", "together", "within"),
    [
        (0.2, False, 0.05),
        (0.6, False, 0.05),
        (0.9, False, 0.07),
        (0.2, True, 0.05),
        (0.6, True, 0.08),
    ],
)
def test_prefill_is_learned_though_requests_wait(
    load: float, together: bool, within: float
) -> None:
    """After 50 requests at loads up to 0.9 prefill times are right by some percent: of passes that
    err by 5%, and however long requests waited."""
    errors = [learned(Engine(Random(seed), load, together)) for seed in range(8)]
    assert sum(errors) / len(errors) < within


def test_waiting_is_not_taken_for_computing() -> None:
    """Two prompts sent together are one span: each alone would count the other's time again."""
    watch = CallWatch(CHUNK)
    first, second = (began(watch, 0, "prefill", 1_000, 0) for _ in range(2))
    watch.answered(100_000, first, 0)
    assert watch.take(100_000)[0] == ()
    watch.answered(200_000, second, 0)
    (sample,), _ = watch.take(200_000)
    assert (sample.prefill_new, sample.prefills, sample.elapsed_us) == (2_000, 2, 200_000)


def test_a_prompt_of_many_chunks_is_many_passes() -> None:
    """A prompt of three chunks gives one sample, of three passes."""
    watch = CallWatch(100)
    call = began(watch, 0, "whole", 300, 0)
    watch.answered(90_000, call, 0)
    (sample,), _ = watch.take(90_000)
    assert sample == PassSample(300, 90_000, 300, 0, 0, 90_000, 3, 0)


def test_a_reply_that_does_not_stream_ends_with_its_decoding() -> None:
    """Its time is that of its prefill and of a pass for each further token; only where it was
    alone, since who shared passes is not known."""
    watch = CallWatch(CHUNK)
    call = began(watch, 0, "whole", 1_000, 0)
    call.count = 11
    watch.answered(300_000, call, 0)
    watch.ended(300_000, call, 0)
    assert watch.take(300_000)[0] == (PassSample(1_000, 1_000_000, 0, 10, 10_050, 300_000, 1, 10),)
    both = [began(watch, 400_000, "whole", 1_000, 0) for _ in range(2)]
    for call in both:
        call.count = 11
        watch.answered(900_000, call, 0)
        watch.ended(900_000, call, 0)
    assert watch.take(900_000)[0] == ()


def test_nothing_is_learned_of_prompts_beside_a_reply_that_does_not_stream() -> None:
    """It decodes by now, or prefills still: the time between others' prompts may be no prefill. One
    token is none to decode: such a reply is as good as a stream's."""
    for tokens, learned in ((90, 0), (1, 1)):
        watch = CallWatch(CHUNK)
        hidden = ObservedCall("whole", 1_000, 0, streams=False)
        if tokens > 1:
            watch.began(0, hidden)
        for second in range(1, 9):
            call = began(watch, second * 1_000_000, "whole", 1_000, 0)
            if tokens == 1 and second == 8:
                watch.began(second * 1_000_000, hidden)
            watch.answered(second * 1_000_000 + 50_000, call, 0)
            watch.ended(second * 1_000_000 + 60_000, call, 0)
        hidden.count = tokens
        watch.answered(8_100_000, hidden, 0)
        watch.ended(8_100_000, hidden, 0)
        samples = [it for it in watch.take(9_000_000)[0] if it.prefill_new]
        assert {it.elapsed_us for it in samples} <= {50_000, 100_000}, samples
        assert any(it.prefill_new == 2_000 for it in samples) == bool(learned)
        call = began(watch, 9_000_000, "whole", 1_000, 0)
        watch.answered(9_050_000, call, 0)
        assert len(watch.take(9_100_000)[0]) == 1, "and from then on again"


def test_what_was_cached_may_be_said_at_the_end() -> None:
    """A streamed reply reports its cached tokens last; the span waits for that."""
    watch = CallWatch(CHUNK)
    call = began(watch, 0, "whole", 1_000, 512)
    watch.answered(50_000, call)
    assert watch.take(50_000) == ((), ())
    call.count = 3
    watch.ended(80_000, call, 512)
    (sample,), hits = watch.take(80_000)
    assert (sample.prefill_new, sample.prefill_past, sample.elapsed_us) == (488, 512, 50_000)
    assert hits == (HitSample(512, 512),)


def test_spans_with_failures_or_others_are_not_learned_from() -> None:
    """A call that failed and others' queue spoil a span."""
    for fault in ("failed", "others"):
        watch = CallWatch(CHUNK)
        call, other = began(watch, 0, "prefill", 1_000, 0), began(watch, 0, "prefill", 1_000, 0)
        if fault == "others":
            watch.others(10, 2, 0, 0)
        watch.ended(20, other) if fault == "failed" else watch.answered(20, other, 0)
        watch.answered(50_000, call, 0)
        watch.ended(60_000, call)
        watch.ended(60_000, other)
        assert watch.take(60_000)[0] == (), fault


def test_decode_steps_are_learned_between_changes() -> None:
    """Tokens per request and time since the last one came or went are a step's time."""
    watch = CallWatch(CHUNK)
    calls = [began(watch, 0, "decode", 1_000, 0) for _ in range(2)]
    for call in calls:
        watch.answered(0, call)
        call.count = 1
    watch.take(0)
    for call in calls:
        call.count = 21
    (sample,), hits = watch.take(400_000)
    assert (sample.decode_seqs, sample.elapsed_us, hits) == (2, 20_000, ())
    assert 2_000 <= sample.decode_context <= 2_042


def test_no_decode_step_is_learned_while_somebody_prefills() -> None:
    """Passes with a prefill in them are longer, and no measure of decoding."""
    watch = CallWatch(CHUNK)
    call = began(watch, 0, "whole", 1_000, 0)
    watch.answered(0, call, 0)
    watch.take(0)
    began(watch, 1, "whole", 1_000, 0)
    call.count = 40
    assert watch.take(400_000)[0] == ()


def test_decode_of_others_counts_as_load() -> None:
    """External decodes are in the batch, and so in the sample."""
    watch = CallWatch(CHUNK)
    watch.others(0, 0, 3, 5_000)
    call = began(watch, 0, "decode", 1_000, 0)
    watch.answered(0, call)
    call.count = 20
    (sample,), _ = watch.take(400_000)
    assert (sample.decode_seqs, sample.decode_context) == (4, 6_010)


def test_what_is_never_said_is_taken_to_be_as_predicted() -> None:
    """An engine that reports no cached tokens teaches its costs; claims are not judged."""
    watch = CallWatch(CHUNK)
    call = began(watch, 0, "whole", 1_000, 512)
    watch.answered(50_000, call)
    watch.ended(80_000, call)
    (sample,), hits = watch.take(80_000)
    assert (sample.prefill_new, hits, watch.unsaid, watch.said) == (488, (), 1, 0)


def test_no_decode_step_is_learned_beside_one_that_is_not_seen() -> None:
    """A decode without streaming is in the batch, since an unknown time."""
    watch = CallWatch(CHUNK)
    seen = began(watch, 0, "decode", 1_000, 0)
    watch.answered(0, seen)
    hidden = ObservedCall("decode", 1_000, 0, streams=False)
    watch.began(0, hidden)
    seen.count = 40
    assert watch.take(400_000)[0] == ()
    hidden.count = 20
    watch.answered(500_000, hidden, 0)
    watch.ended(500_000, hidden, 0)
    seen.count = 80
    ((sample,), _) = watch.take(900_000)
    assert (sample.decode_seqs, sample.elapsed_us) == (1, 10_000)

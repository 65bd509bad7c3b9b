"""A decision for people: the sentence and the text."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from moonserve.core.kv.index import Match
from moonserve.core.schedule.actions import Candidate, Decision, Stage
from moonserve.core.schedule.decide import decide
from moonserve.core.schedule.estimate import Ask, Roles
from moonserve.core.schedule.explain import Explanation, Stages, explanation, why
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, RequestId, SegmentId
from moonserve.show.explain import lines
from tests.support.cluster import view


def candidate(
    name: str,
    queue: int,
    compute: int,
    transfer: int = 0,
    score: float | None = None,
    decodes: int = 0,
) -> Candidate:
    """One that has 96 tokens; times in milliseconds, the score its TTFT if not given."""
    ttft_us = (queue + compute + transfer) * 1_000
    return Candidate(
        instance=InstanceId(name),
        local_tokens=96,
        reused_tokens=960 if transfer else 96,
        holder=SegmentId("p9") if transfer else None,
        transfer_us=transfer * 1_000,
        queue_us=queue * 1_000,
        compute_us=compute * 1_000,
        score=ttft_us if score is None else score,
        decodes=decodes,
    )


class Made(NamedTuple):
    """A decision, and the candidates that it was made from."""

    decision: Decision
    candidates: tuple[Candidate, ...]

    def but(self, **changes: object) -> Made:
        """The same with these changes of the decision."""
        return Made(msgspec.structs.replace(self.decision, **changes), self.candidates)


def decision(*candidates: Candidate, policy: str = "kvcache_centric", waited_us: int = 0) -> Made:
    """A decision about 1,000 tokens for the first of these."""
    best = candidates[0]
    made = Decision(
        policy=policy,
        prefill=best.instance,
        decode=InstanceId("d0"),
        prompt_tokens=1_000,
        copies=True,
        waited_us=waited_us,
        predicted_ttft_us=best.ttft_us + waited_us,
        predicted_tbt_us=25_000,
        pool_tokens=960,
        chosen=best,
        considered=len(candidates),
    )
    return Made(made, candidates)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            decision(candidate("p0", 5, 40, 20), candidate("p1", 200, 40)),
            "kvcache_centric chose p0 of 2: 65 ms to the first token, reusing 960 of 1,000 prompt "
            "tokens, 864 of them loaded from p9 and kept; p1 would have taken 240 ms, 200 ms of it "
            "in its queue.",
        ),
        (
            decision(candidate("p0", 5, 40), candidate("p1", 5, 900)),
            "kvcache_centric chose p0 of 2: 45 ms to the first token, reusing its own 96 of 1,000 "
            "prompt tokens; p1 would have taken 905 ms, 900 ms of it computing.",
        ),
        (
            decision(candidate("p0", 0, 40), candidate("p1", 0, 10, 50)),
            "kvcache_centric chose p0 of 2: 40 ms to the first token, reusing its own 96 of 1,000 "
            "prompt tokens; p1 would have taken 60 ms, 50 ms of it loading KV.",
        ),
        (
            decision(candidate("p0", 0, 2), candidate("p1", 0, 2)),
            "kvcache_centric chose p0 of 2: 2 ms to the first token, reusing its own 96 of 1,000 "
            "prompt tokens; p1 would have taken as long, but comes after it.",
        ),
        (
            decision(candidate("p5", 0, 2, decodes=2), candidate("p1", 0, 2, decodes=3)),
            "kvcache_centric chose p5 of 2: 2 ms to the first token, reusing its own 96 of 1,000 "
            "prompt tokens; p1 would have taken as long, but has 3 to decode, not 2.",
        ),
        (
            decision(candidate("p0", 0, 40), waited_us=1_200_000),
            "p0 was the only one to choose from after 1,200 ms at the Conductor: 40 ms to the "
            "first token, reusing its own 96 of 1,000 prompt tokens.",
        ),
        (
            decision(
                candidate("p0", 9, 40, score=0.25),
                candidate("p1", 0, 40, score=0.5),
                policy="alpha_beta",
            ),
            "alpha_beta chose p0 of 2: 49 ms to the first token, reusing its own 96 of 1,000 "
            "prompt tokens; its score of 0.25 was the lowest, p1 had 0.5.",
        ),
        (
            decision(candidate("p0", 9, 40, score=0), candidate("p1", 0, 40, score=0), policy="x"),
            "x chose p0 of 2: 49 ms to the first token, reusing its own 96 of 1,000 prompt tokens; "
            "its score equals that of p1, which comes after it.",
        ),
        (
            decision(
                candidate("p5", 9, 40, score=0),
                candidate("p1", 0, 4, score=0, decodes=1),
                policy="x",
            ),
            "x chose p5 of 2: 49 ms to the first token, reusing its own 96 of 1,000 prompt tokens; "
            "its score equals that of p1, which has 1 to decode, not 0.",
        ),
        (
            decision(
                candidate("p0", 9, 40, score=0.1), candidate("p1", 0, 4, score=0.2), policy="random"
            ),
            "random chose p0 of 2: 49 ms to the first token, reusing its own 96 of 1,000 prompt "
            "tokens; by a draw.",
        ),
    ],
)
def test_why_the_winner_won(made: Made, sentence: str) -> None:
    """One sentence names the winner, its plan, and what told it from the next one."""
    assert why(*made) == sentence


def test_the_reason_for_a_tie_is_as_it_was_when_it_was_decided() -> None:
    """Who has the fewest to decode wins among equals, whatever is promised afterwards."""
    first, second = view("m0", "both"), view("m1", "both")
    first.promise_decode(RequestId("r0"), 1)
    ask, views = Ask(41, Match(0, {})), [first, second]
    made = decide(ask, Roles(views, views), PolicyState(), Tuning(), 0)
    assert made is not None
    first.promise_decode(RequestId("r1"), 1)
    said = why(made.decision, made.candidates)
    assert said.endswith("m0 would have taken as long, but has 1 to decode, not 0.")


def test_nothing_reused_is_said() -> None:
    """All of the prompt is computed."""
    fresh = msgspec.structs.replace(candidate("p0", 0, 40), local_tokens=0, reused_tokens=0)
    assert "computing all 1,000 prompt tokens" in why(*decision(fresh))


def test_the_text_shows_terms_and_predictions_beside_the_truth() -> None:
    """Each candidate in a row that adds up, the chosen one marked, then predicted and actual."""
    made = decision(candidate("p0", 5, 40, 20), candidate("p1", 200, 40), waited_us=3_000)
    made = made.but(considered=70)
    told = explanation("r1", "stop", *made, why(*made))
    told.actual_ttft_ms, told.actual_tbt_ms, told.actual_cached_tokens = 70.25, 24.0, 960
    told.attempts = 2
    told.stages = Stages(
        waited_ms=3.0,
        queue_ms=4.0,
        load_ms=19.0,
        compute_ms=41.0,
        publish_ms=None,
        prefill_ms=66.0,
        handover_ms=5.0,
        decode_ms=None,
        total_ms=1_170.25,
    )
    text = list(lines(told))
    assert text[0] == "request r1: stop, in 2 attempts"
    assert text[1] == told.why
    assert text[3:7] == [
        "   candidate  from  local  reused  transfer  queue  compute  total",
        "*  p0         p9       96     960      20.0    5.0     40.0   65.0",
        "   p1         -        96      96       0.0  200.0     40.0  240.0",
        "  and 68 more",
    ]
    assert text[8:] == [
        "decode on d0; the pool held 960 of 1,000 prompt tokens",
        "waited 3.0 ms to be placed, part of the TTFTs",
        "               predicted  actual",
        "TTFT ms             68.0    70.2",
        "mean TBT ms         25.0    24.0",
        "reused tokens        960     960",
        "took 1,170.2 ms: waited 3.0, prefill 66.0 (queue 4.0, load 19.0, compute 41.0), "
        "hand-over 5.0",
    ]


def test_a_refused_request_has_its_reason_and_what_would_have_been() -> None:
    """Without a decision the text is short; with one it shows the candidates."""
    told = Explanation(request="r1", outcome="refused", why="No.", reject_reason="queue_full")
    assert list(lines(told)) == ["request r1: refused", "rejected (queue_full)", "No."]
    made = decision(candidate("p0", 5, 40))
    told = explanation("r1", "refused", *made, "predicted TTFT of 45 ms misses it")
    told.error, told.reject_reason = told.why, "ttft_slo"
    text = list(lines(told))
    assert text[:3] == ["request r1: refused", "rejected (ttft_slo)", told.why]
    assert any(line.startswith("*  p0") for line in text)
    assert text[-3].split() == ["TTFT", "ms", "45.0", "-"]


def shared(*ends: int, chunks: int | None = None) -> Made:
    """p0 alone would take 65 ms; with others, who go on to those ends, it takes 30."""
    starts = [0] * len(ends) if chunks else [0, *ends[:-1]]
    stages = tuple(
        Stage(InstanceId(f"p{at}"), start, end, 0, chunks or 4)
        for at, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
    made = decision(candidate("p0", 5, 40, 20), candidate("p1", 200, 40), waited_us=3_000)
    return made.but(prefill=stages[-1].instance, predicted_ttft_us=33_000, stages=stages)


def test_a_group_is_named_with_its_parts() -> None:
    """Who does what, the time together and alone; then in the text, where each part lies."""
    made = shared(600, 1_000)
    said = why(*made)
    assert "65 ms to the first token alone" in said
    assert said.endswith(
        " 2 instances share it: p0 600 p1 400 tokens; 30 ms to the first token together."
    )
    text = list(lines(explanation("r1", "stop", *made, said)))
    assert "part of p0: tokens 0 to 600" in text
    assert "part of p1: tokens 600 to 1,000" in text
    by_layers = why(*shared(1_000, 1_000, chunks=16))
    assert " 2 instances share it: the layers, in 16 chunks; 30 ms " in by_layers


def test_why_nobody_shares_it_is_said() -> None:
    """Where a group is possible; nothing where none is asked for."""
    made = decision(candidate("p0", 5, 40), candidate("p1", 200, 40))
    assert "split" not in why(*made)
    alone = made.but(alone="no other instance can take a part of it")
    assert why(*alone).endswith(" Not split: no other instance can take a part of it.")
    assert explanation("r1", "stop", *alone, "").alone == alone.decision.alone


def test_an_explanation_travels_as_json() -> None:
    """What the gateway sends is what the CLI reads."""
    made = shared(600, 1_000)
    told = explanation("r1", "stop", *made, why(*made))
    assert msgspec.json.decode(msgspec.json.encode(told), type=Explanation) == told

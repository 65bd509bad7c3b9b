"""The account of requests that end well, late, twice or not at all."""

from __future__ import annotations

import msgspec

from moonserve.core.request import Request, Slo
from moonserve.core.schedule.account import Account
from moonserve.core.schedule.adoption import Deposed, StepFact
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Joined,
    PrefillEnded,
)
from moonserve.core.schedule.record import FailedCall, Measured, PrefillTimes, Record, StageTimes
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import InstanceId, RequestId
from tests.support.cluster import info

SECOND = 1_000_000


class Told:
    """A Conductor of three instances, and the account of its facts and actions."""

    def __init__(self, admission: str = "none") -> None:
        tuning = Tuning(slo=Slo(2 * SECOND, SECOND), admission=admission)  # type: ignore[arg-type]
        cost = Cost((SECOND, 0, 0, 0, 500_000, 0, 0), (5, 0.005), learns=False)
        self.core = Conductor(tuning, cost_of=lambda _: cost)
        self.over: list[Record] = []
        self.account = Account(self.core.slo, self.over.append)
        names = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
        self.step(0, *[Joined(info(n, r)) for n, r in names.items()])  # type: ignore[arg-type]

    def step(self, now_us: int, *facts: StepFact) -> None:
        """One instant."""
        self.account.take(now_us, facts, self.core.step(now_us, facts))

    def serve(self, name: str, ttft_us: int, decode_us: int, tokens: int) -> None:
        """One request from its arrival to its end, from time 0 on."""
        who = RequestId(name)
        self.step(0, Arrived(Request(who, "m", 40), ()))
        self.step(ttft_us, PrefillEnded(who, 1, final=tokens == 1))
        if tokens > 1:
            self.step(ttft_us + decode_us, DecodeEnded(who, 2, tokens))


def test_only_what_meets_both_objectives_is_good() -> None:
    """TTFT by the first token, TBT by the mean gap; of one token there is none."""
    told = Told()
    told.serve("good", 2 * SECOND, 4 * SECOND, 5)
    told.serve("one", 2 * SECOND, 0, 1)
    told.serve("late", 2 * SECOND + 1, 4 * SECOND, 5)
    told.serve("slow", SECOND, 4 * SECOND + 1, 5)
    assert (told.account.good, told.account.good_tokens) == (2, 45 + 41)
    assert (told.account.wasted_us, len(told.account)) == (0, 0)


def test_time_at_the_gateway_counts() -> None:
    """A client waits since its headers came: in the TTFT, in the decision, and in a refusal."""
    told = Told("ttft")
    for name, since_us, good in (("a", SECOND, 1), ("b", 0, 1)):
        who = RequestId(name)
        request = Request(who, "m", 40, arrived_us=since_us)
        told.step(SECOND + 1, Arrived(request, ()))
        if name == "b":  # its prefill takes a second, and more than one has passed
            assert not told.core.promised().requests
        told.step(2 * SECOND, PrefillEnded(who, 1, final=True))
        assert told.account.good == good


def test_prefill_of_what_is_dropped_or_done_again_is_wasted() -> None:
    """Not if its client leaves; of a call that never ended, as much as it had time for."""
    told, who = Told("early"), RequestId("late")
    told.step(0, Arrived(Request(who, "m", 40), ()))
    for name in "abc":
        told.step(0, Arrived(Request(RequestId(name), "m", 40, slo=Slo(None, 500_000)), ()))
    keys = {"length": 41, "keys": (), "why": "", "retry": True}
    told.step(1, PrefillEnded(who, 1, final=False), ClientGone(RequestId("a")))
    assert told.account.wasted_us == 0
    told.step(2, CallFailed(who, 2, **keys))  # type: ignore[arg-type]
    assert told.account.wasted_us == SECOND  # prefill again
    half_us = 2 + SECOND // 2
    told.step(half_us, CallFailed(who, 4, **keys))  # type: ignore[arg-type]
    assert told.account.wasted_us == SECOND + SECOND // 2
    told.step(half_us, ClientGone(who), ClientGone(RequestId("b")), ClientGone(RequestId("c")))
    assert (told.account.wasted_us, len(told.account)) == (SECOND + SECOND // 2, 0)


def test_an_id_may_be_used_again_in_the_step_that_ends_it() -> None:
    """Its first life is released and the second goes on, in any order of the facts."""
    told, who = Told("none"), RequestId("twice")
    arrived = Arrived(Request(who, "m", 40), ())
    told.step(0, arrived)
    told.step(1, arrived, ClientGone(who))
    told.step(2, PrefillEnded(who, 1, final=True))
    assert (told.account.good, len(told.account)) == (1, 0)


def test_a_record_has_the_time_of_each_stage() -> None:
    """By the Conductor's clock; what only drivers and workers see, as they have measured it."""
    told, who = Told(), RequestId("r")
    told.step(10, Arrived(Request(who, "m", 40, tenant="t", arrived_us=4), ()))
    assert told.account.find(who).outcome == "running"  # type: ignore[union-attr]
    told.account.first_token(who, 900, 8)
    told.step(910, PrefillEnded(who, 1, final=False))
    told.step(2_000, DecodeEnded(who, 2, 5))
    parts = PrefillTimes(queue_us=100, load_us=200, compute_us=500, publish_us=50)
    told.account.close(who, "stop", Measured(tokens=5, handover_us=90, prefill=parts))
    [record] = told.over
    assert (record.tenant, record.ttft_us, record.is_good) == ("t", 896, True)
    assert record.measured.cached_tokens == 8
    assert record.stages() == StageTimes(
        waited_us=6,
        prefill_us=900,
        parts=parts,
        handover_us=90,
        decode_us=1_000,
        total_us=1_996,
    )


def test_only_a_request_with_a_token_has_a_ttft() -> None:
    """A call that does prefill and decode shows no end of its prefill, so its driver reports the
    predicted one. That counts if the request was served, and else only what came."""
    for served, measured, ttft_us in (
        (True, Measured(tokens=5), 900),
        (True, Measured(), 900),  # nobody counted
        (False, Measured(), None),
        (False, Measured(tokens=1), None),  # nobody saw when it came
    ):
        told, who = Told(), RequestId("r")
        both = msgspec.structs.replace(info("b", "both"), connector="none", model="other")
        told.step(0, Joined(both))
        told.step(0, Arrived(Request(who, "other", 40), ()))
        told.step(900, PrefillEnded(who, 1, final=False))
        running = told.account.find(who)
        assert running is not None
        assert running.ttft_us is None
        told.step(2_000, DecodeEnded(who, 1, 5) if served else ClientGone(who))
        told.account.close(who, "stop" if served else "cancelled", measured)
        [record] = told.over
        assert (record.ttft_us, record.is_good) == (ttft_us, True if served else None)


def test_the_token_of_a_prefill_that_came_to_nobody_has_no_ttft() -> None:
    """Its driver reported it, and the request was not served."""
    told, who = Told(), RequestId("r")
    told.step(10, Arrived(Request(who, "m", 40), ()))
    told.account.first_token(who, 900, None)
    told.step(910, PrefillEnded(who, 1, final=False), ClientGone(who))
    told.account.close(who, "cancelled", Measured())
    assert told.over[0].ttft_us is None


def test_a_record_names_the_calls_that_failed() -> None:
    """Where, when and why, and what the instance said; a call that was replaced before fails no
    more."""
    told, who = Told(), RequestId("r")
    told.step(10, Arrived(Request(who, "m", 40), ()))
    lost = {"length": 40, "keys": (), "retry": True}
    told.step(20, CallFailed(who, 1, "closed", **lost))  # type: ignore[arg-type]
    told.step(25, CallFailed(who, 1, "late news", **lost))  # type: ignore[arg-type]
    record = told.account.find(who)
    assert record is not None
    told.step(30, PrefillEnded(who, record.number, final=False))
    told.step(70, CallFailed(who, record.number, "d0 hangs", said="busy", **lost))  # type: ignore[arg-type]
    first = record.failed[0].instance
    assert first in ("p0", "p1")
    assert record.failed == (
        FailedCall(first, False, 10, 20, "closed"),
        FailedCall(InstanceId("d0"), True, 30, 70, "d0 hangs", "busy"),
    )


def test_a_refused_request_has_no_stages_and_the_reason() -> None:
    """Its decision is the one that admission did not accept."""
    told, who = Told("ttft"), RequestId("r")
    told.step(0, Arrived(Request(who, "m", 40, slo=Slo(1, None)), ()))
    told.account.close(who, "refused", Measured())
    [record] = told.over
    assert (record.outcome, record.reason, record.is_good) == ("refused", "ttft_slo", None)
    assert record.decision is not None
    assert record.stages().prefill_us is None
    assert told.account.find(who) is record


def test_a_record_is_over_once_it_is_closed_and_released() -> None:
    """Whichever comes last; a later request of its id has a record of its own."""
    told, who = Told(), RequestId("r")
    arrived = Arrived(Request(who, "m", 40), ())
    told.step(0, arrived)
    told.account.close(who, "first", Measured())
    assert told.over == []
    told.step(1, arrived, ClientGone(who))
    assert [record.outcome for record in told.over] == ["first"]
    told.step(2, ClientGone(who))
    assert len(told.over) == 1
    told.account.close(who, "second", Measured())
    told.account.close(who, "third", Measured())
    assert [record.outcome for record in told.over] == ["first", "second"]
    assert [record.outcome for record in told.account.latest()] == ["second"]


def test_the_latest_records_are_kept() -> None:
    """Those under way always; of those that are over a bounded number."""
    told = Told()
    told.step(0, Arrived(Request(RequestId("long"), "m", 40), ()))
    for number in range(502):
        who = RequestId(f"r{number}")
        told.step(number + 1, Arrived(Request(who, "m", 40), ()), ClientGone(who))
        told.account.close(who, "cancelled", Measured())
    names = [record.id for record in told.account.latest()]
    assert (names[0], names[1], names[-1], len(names)) == ("long", "r501", "r2", 501)


def test_another_conductor_that_leads_takes_the_records_along() -> None:
    """Nobody hears that they are over: they are not."""
    told, who = Told(), RequestId("r")
    told.step(0, Arrived(Request(who, "m", 40), ()))
    told.step(1, Deposed())
    told.account.close(who, "length", Measured())
    assert (told.over, len(told.account)) == ([], 0)
    assert told.account.find(who).outcome == "with another Conductor"  # type: ignore[union-attr]

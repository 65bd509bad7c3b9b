"""The account of requests that end well, late, twice or not at all."""

from __future__ import annotations

from moonserve.core.request import Request, Slo
from moonserve.core.schedule.account import Account
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import (
    Arrived,
    CallFailed,
    ClientGone,
    DecodeEnded,
    Fact,
    Joined,
    PrefillEnded,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import RequestId
from tests.support.cluster import info

SECOND = 1_000_000


class Told:
    """A Conductor of three instances, and the account of its facts and actions."""

    def __init__(self, admission: str = "none") -> None:
        tuning = Tuning(slo=Slo(2 * SECOND, SECOND), admission=admission)  # type: ignore[arg-type]
        cost = Cost((SECOND, 0, 0, 0, 500_000, 0, 0), (5, 0.005), learns=False)
        self.core = Conductor(tuning, cost_of=lambda _: cost)
        self.account = Account(self.core.slo)
        names = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
        self.step(0, *[Joined(info(n, r)) for n, r in names.items()])  # type: ignore[arg-type]

    def step(self, now_us: int, *facts: Fact) -> None:
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

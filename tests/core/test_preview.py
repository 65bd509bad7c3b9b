"""Conductor.preview: what would be decided, without deciding it."""

from __future__ import annotations

import pickle
import random

import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Decision, Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import Arrived, Joined
from moonserve.core.schedule.policies import POLICIES
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import RequestId, SegmentId
from tests.support.cluster import BLOCK, NAMESPACE, exact, info

PROMPT = tuple(range(41))
KEYS = tuple(chain_keys(NAMESPACE.root(), PROMPT, BLOCK))


def conductor(policy: str) -> Conductor:
    """Three prefill instances, one of which holds the prompt's head, and two that decode."""
    made = Conductor(Tuning(policy=policy), random.Random(1), exact)
    names = [("p0", "prefill"), ("p1", "prefill"), ("p2", "prefill"), ("d0", "decode")]
    made.step(0, [Joined(info(name, role)) for name, role in [*names, ("d1", "decode")]])
    made.step(1, [BlocksStored(SegmentId("p1"), KEYS[:6], None, "dram", 1)])
    for number in range(3):
        made.step(2, [Arrived(Request(RequestId(f"r{number}"), "m", len(PROMPT), PROMPT), KEYS)])
    return made


@pytest.mark.parametrize("policy", [name for name in POLICIES if not POLICIES[name].late])
def test_a_preview_is_what_would_be_decided_and_changes_nothing(policy: str) -> None:
    """Whatever the policy, drawing and turn-taking ones too, the request then gets just that."""
    asked, other = conductor(policy), conductor(policy)
    before = pickle.dumps(asked._state), pickle.dumps(asked._forecast)
    request = Request(RequestId("r"), "m", len(PROMPT), PROMPT, tenant="new")
    found = [asked.preview(request, KEYS, 3) for _ in range(3)]
    assert (pickle.dumps(asked._state), pickle.dumps(asked._forecast)) == before
    assert asked.promised() == other.promised()
    [placed] = asked.step(3, [Arrived(request, KEYS)])
    [unasked] = other.step(3, [Arrived(request, KEYS)])
    assert isinstance(placed, Prefill)
    assert placed == unasked
    for each in found:
        assert isinstance(each, Decision)
        assert each == placed.decision


def test_a_preview_says_whom_a_waiting_request_would_get() -> None:
    """Where requests wait to be bound, it is answered as if it were its turn."""
    found = conductor("late_binding").preview(
        Request(RequestId("r"), "m", len(PROMPT), PROMPT), KEYS, 3
    )
    assert isinstance(found, Decision)


def test_a_preview_says_the_refusal() -> None:
    """It is the one that the request would get; no slot of the Retry-After calendar is booked."""
    made = conductor("kvcache_centric")
    never = Request(RequestId("r"), "m", len(PROMPT), PROMPT, slo=Slo(ttft_us=1))
    found = made.preview(never, KEYS, 3)
    assert isinstance(found, Refuse)
    assert found.reason == "ttft_slo"
    assert len(made.retries) == 0
    nobody = made.preview(Request(RequestId("r"), "else", len(PROMPT), PROMPT), KEYS, 3)
    assert isinstance(nobody, Refuse)
    assert nobody.retry_after_us is None

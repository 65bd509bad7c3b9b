"""A look at what the Conductor would decide."""

from __future__ import annotations

import pickle
import random

import pytest

from moonserve.core.kv.facts import BlocksStored
from moonserve.core.kv.keys import chain_keys
from moonserve.core.request import Request, Slo
from moonserve.core.schedule.actions import Prefill, Refuse
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.dry_run import look
from moonserve.core.schedule.facts import Arrived, Joined
from moonserve.core.schedule.placement import Decision
from moonserve.core.schedule.policies import POLICIES, Tuning
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
        made.step(2, [Arrived(Request(RequestId(f"r{number}"), "m", PROMPT), KEYS)])
    return made


@pytest.mark.parametrize("policy", [name for name in POLICIES if not POLICIES[name].late])
def test_a_look_is_what_would_be_decided_and_changes_nothing(policy: str) -> None:
    """Whatever the policy, drawing and turn-taking ones too, the request then gets just that."""
    asked, other = conductor(policy), conductor(policy)
    before = pickle.dumps(asked._memory.__dict__), pickle.dumps(asked.outlook._predictor)
    request = Request(RequestId("r"), "m", PROMPT, tenant="new")
    found = [look(asked, request, KEYS, 3) for _ in range(3)]
    assert (pickle.dumps(asked._memory.__dict__), pickle.dumps(asked.outlook._predictor)) == before
    assert asked.promised() == other.promised()
    [placed] = asked.step(3, [Arrived(request, KEYS)])
    [unasked] = other.step(3, [Arrived(request, KEYS)])
    assert isinstance(placed, Prefill)
    assert placed == unasked
    for each in found:
        assert isinstance(each, Decision)
        assert each == placed.decision


def test_a_look_says_whom_a_waiting_request_would_get() -> None:
    """Where requests wait to be bound, it is answered as if it were its turn."""
    found = look(conductor("late_binding"), Request(RequestId("r"), "m", PROMPT), KEYS, 3)
    assert isinstance(found, Decision)


def test_a_look_says_the_refusal() -> None:
    """It is the one that the request would get, and gives nobody's time to come again away."""
    made = conductor("kvcache_centric")
    never = Request(RequestId("r"), "m", PROMPT, slo=Slo(ttft_us=1))
    found = look(made, never, KEYS, 3)
    assert isinstance(found, Refuse)
    assert found.reason == "ttft_slo"
    assert len(made.outlook.told) == 0
    nobody = look(made, Request(RequestId("r"), "else", PROMPT), KEYS, 3)
    assert isinstance(nobody, Refuse)
    assert nobody.retry_after_us is None

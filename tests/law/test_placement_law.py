"""Decisions that look at few instances against ones that look at all, in the plainest way."""

import sys
from unittest.mock import patch

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.core.kv.index import Match
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.decide import decide
from moonserve.core.schedule.estimate import Ask, Roles, choose_decode
from moonserve.core.schedule.policy_state import PolicyState
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.schedule.view import ClusterView, InstanceView
from moonserve.core.units import InstanceId, Micros, RequestId, SegmentId, Tokens
from tests.support.cluster import view

COSTS = [
    Cost((0, 10, 0, 0, 100, 10, 0.3), (5, 1.0), learns=False),
    Cost((7, 9, 0.01, 0.1, 90, 12, 0.25), (0, 2.0), learns=False),
]
NOW_US = 500
seldom = st.sampled_from([0] * 9 + [1])
goals = st.sampled_from([None, None, 110, 150])
busy = st.tuples(
    st.integers(0, 1_000), st.integers(0, 40), seldom, seldom, st.sampled_from(["", "a", "b"])
)


@settings(max_examples=60)
@given(
    st.lists(busy, min_size=30, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.integers(1, 12)), max_size=8),
    st.sampled_from(["kvcache_centric", "late_binding"]),
    st.booleans(),
)
def test_those_left_out_would_not_have_been_kept(
    loads: list[tuple[int, int, int, int, str]],
    holders: list[tuple[int, int]],
    policy: str,
    racks: bool,
) -> None:
    """The whole verdict is that of a decision that looks at every instance."""
    cluster = ClusterView()  # where alike instances share a kind
    for at, (promised_us, more, kind, begun, rack) in enumerate(loads):
        info = view(f"p{at:02}", "both").info
        info = msgspec.structs.replace(info, rack=rack if racks else "")
        one = InstanceView(info, 0, COSTS[kind])
        for number, work_us in enumerate((promised_us, 10 * more)):
            if work_us:
                one.promise_prefill(RequestId(f"r{number}"), work_us, 1, 0 if begun else NOW_US)
        one.promise_decode(RequestId("d"), more)
        cluster.add(one)
    views = cluster.prefills("m")
    held = {SegmentId(f"p{at:02}"): blocks for at, blocks in holders if at < len(views)}
    ask = Ask(41, Match(max(held.values(), default=0), held))
    roles = Roles(views, views, racks={SegmentId("p03"): "a"})

    def verdict() -> object:
        return decide(ask, roles, PolicyState(), Tuning(policy), NOW_US)

    quick = verdict()
    with patch.object(
        sys.modules["moonserve.core.schedule.decide"],
        "_likely",
        lambda estimate, views, now_us: views,
    ):
        assert quick == verdict()


def plainest(
    context: Tokens, views: list[InstanceView], goal_us: Micros | None, rack: str
) -> tuple[InstanceId, bool]:
    """The decode instance if prefill is elsewhere, by the docstring of choose_decode."""
    free = [v for v in views if v.has_slot(context)] or views
    rows = [(v.tbt_us(context), v.decodes, v.used, at, v) for at, v in enumerate(free)]
    good = []
    for row in rows:
        goals = [goal for goal in (goal_us, row[4].strictest_us()) if goal is not None]
        if all(row[0] <= goal for goal in goals):
            good.append(row)
    left = good or rows
    best = min(left, key=lambda row: row[:4])
    near = [row for row in left if row[4].info.rack == rack and row[0] <= best[0] * 1.02]
    if rack and best[4].info.rack != rack and near:
        best = min(near, key=lambda row: row[1:4])
    return best[4].info.id, bool(good)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 60), goals), max_size=4),
            seldom,
            st.sampled_from(["", "a", "b"]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 300),
    st.sampled_from([None, 105, 130, 160]),
    st.sampled_from(["", "a"]),
)
def test_decode_goes_where_the_plainest_rule_says(
    loads: list[tuple[list[tuple[int, int | None]], int, str]],
    context: int,
    goal_us: int | None,
    rack: str,
) -> None:
    """Lowest TBT of those with room, with goals met if possible; ties as documented."""
    views = []
    for at, (members, kind, its_rack) in enumerate(loads):
        info = msgspec.structs.replace(view(f"d{at}", "decode", max_seqs=3).info, rack=its_rack)
        one = InstanceView(info, 0, COSTS[kind])
        for number, (tokens, tbt_us) in enumerate(members):
            one.promise_decode(RequestId(f"r{number}"), tokens, tbt_us)
        for number in range(0, len(members), 3):  # goals end too
            one.end_decode(RequestId(f"r{number}"), 0)
        views.append(one)
    near = InstanceView(msgspec.structs.replace(view("p0", "prefill").info, rack=rack), 0, COSTS[0])
    chosen, meets = choose_decode(context, views, goal_us, near)
    assert (chosen.info.id, meets) == plainest(context, views, goal_us, rack)

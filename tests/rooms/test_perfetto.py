"""Requests as a Chrome trace: bars follow each other, and overlapping requests have own tracks."""

from __future__ import annotations

import json
from typing import Any

from moonserve.core.schedule.explain import CandidateRow, Explanation, Stages
from moonserve.show.perfetto import chrome_trace


def request(name: str, arrived_ms: int, **fields: Any) -> Explanation:
    """A request that waited 10 ms, prefilled for 100, and decoded for 200 after a hand-over."""
    stages = Stages(
        waited_ms=10.0,
        queue_ms=20.0,
        load_ms=None,
        compute_ms=70.0,
        publish_ms=5.0,
        prefill_ms=100.0,
        handover_ms=15.0,
        decode_ms=200.0,
        total_ms=330.0,
    )
    candidate = CandidateRow("p0", 0, 0, None, 0.0, 18.0, 66.0, 84.0, 84.0)  # type: ignore[arg-type]
    known: dict[str, Any] = {"prefill": "p0", "decode": "d0", "stages": stages}
    known |= {"candidates": [candidate], "arrived_ms": arrived_ms} | fields
    return Explanation(request=name, outcome="stop", why="Because.", **known)


def bars_of(*requests: Explanation) -> list[dict[str, Any]]:
    """The bars, each with the name of its process."""
    events = json.loads(chrome_trace(requests))["traceEvents"]
    names = {it["pid"]: it["args"]["name"] for it in events if it["ph"] == "M"}
    return [it | {"place": names[it["pid"]]} for it in events if it["ph"] == "X"]


def test_the_stages_of_a_request_follow_each_other() -> None:
    """Times in microseconds; parts of a prefill are inside its bar, with what was predicted."""
    bars = bars_of(request("r", 5))
    assert [(it["place"], it["name"], it["ts"], it["dur"]) for it in bars] == [
        ("Conductor", "r: waits", 5_000, 10_000),
        ("p0", "r: prefill", 15_000, 100_000),
        ("p0", "queue", 15_000, 20_000),
        ("p0", "compute", 35_000, 70_000),
        ("p0", "publish", 105_000, 5_000),
        ("d0", "r: hand-over", 115_000, 15_000),
        ("d0", "r: decode", 130_000, 200_000),
    ]
    assert bars[1]["args"]["predicted_ms"] == {"transfer": 0.0, "queue": 18.0, "compute": 66.0}


def test_requests_at_one_time_have_tracks_of_their_own() -> None:
    """A track is used again once it is free."""
    bars = bars_of(request("a", 0), request("b", 50), request("c", 150))
    tracks = {it["name"]: it["tid"] for it in bars if it["name"].endswith("prefill")}
    assert tracks == {"a: prefill": 1, "b: prefill": 2, "c: prefill": 1}


def test_what_was_refused_is_a_bar_of_the_conductor_and_what_runs_has_none() -> None:
    """Neither has stages of an instance."""
    none = dict.fromkeys(Stages.__struct_fields__)
    refused = Stages(**none | {"waited_ms": 0.0, "total_ms": 3.0})
    bars = bars_of(
        request("no", 0, stages=refused, reject_reason="ttft_slo"),
        request("yet", 0, stages=Stages(**none)),
        request("old", 0, stages=None),
    )
    assert [(it["place"], it["name"], it["dur"]) for it in bars] == [
        ("Conductor", "no: refused (ttft_slo)", 3_000)
    ]

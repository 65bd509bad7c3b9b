"""Requests as a Chrome trace: bars follow each other, and overlapping requests have own tracks."""

from __future__ import annotations

import json
from typing import Any

from moonserve.core.schedule.explain import Explanation, Stages
from moonserve.show.perfetto import chrome_trace
from tests.support.records import explained_request as request


def bars_of(*requests: Explanation) -> list[dict[str, Any]]:
    """The bars, each with the name of its process."""
    events = json.loads(chrome_trace(requests))["traceEvents"]
    names = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
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
    assert tracks == {"a: prefill": 4, "b: prefill": 5, "c: prefill": 4}, "1 to 3 are the places"


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

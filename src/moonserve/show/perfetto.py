"""Requests as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The CLI calls it with explanations of a gateway or with the rows of a recording. Each instance is a
process of the picture, and has as many tracks as it had requests at one time. Times come from the
Conductor's clock; where a stage was not measured, there is no bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from moonserve.core.schedule.explain import CandidateRow, Explanation

_CONDUCTOR = "Conductor"
_WITHIN = ("queue", "load", "compute", "publish")
_US_PER_MS = 1_000


class _Bar(msgspec.Struct, frozen=True):
    """One stage of one request at one place."""

    place: str
    name: str
    began_us: float
    took_us: float
    about: dict[str, Any]
    within: tuple[tuple[str, float], ...] = ()
    """Names and lengths of its parts, one after the other."""


def chrome_trace(requests: Iterable[Explanation]) -> bytes:
    """The JSON of a Chrome trace of these requests; those that are not over are left out."""
    bars = sorted(
        (bar for it in requests for bar in _bars(it)), key=lambda bar: (bar.began_us, bar.name)
    )
    places = {place: number for number, place in enumerate(_places(bars), 1)}
    events: list[dict[str, Any]] = []
    busy_until: dict[str, list[float]] = {place: [] for place in places}
    for bar in bars:
        track = _free_track(busy_until[bar.place], bar)
        events += _events(bar, places[bar.place], len(places) + 1 + track)
    for place, pid in places.items():
        tracks = range(len(places) + 1, len(places) + 1 + len(busy_until[place]))
        events += _names(place, pid, tracks)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(place: str, pid: int, tracks: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What a viewer calls a place and its tracks, and where chrome://tracing draws the place.

    No track has the number of a place: a viewer would take it for the main thread of a process.
    """
    of = {"ph": "M", "pid": pid}
    yield {**of, "name": "process_name", "args": {"name": place}}
    yield {**of, "name": "process_sort_index", "args": {"sort_index": pid}}
    for number, track in enumerate(tracks, 1):
        yield {**of, "name": "thread_name", "tid": track, "args": {"name": f"requests {number}"}}


def _places(bars: Iterable[_Bar]) -> list[str]:
    """The Conductor first, then the instances by name."""
    names = {bar.place for bar in bars}
    return sorted(names, key=lambda name: (name != _CONDUCTOR, name))


def _free_track(busy_until: list[float], bar: _Bar) -> int:
    """The first track that is free when the bar begins; bars come in the order of their begin."""
    end_us = bar.began_us + bar.took_us
    for track, until_us in enumerate(busy_until):
        if until_us <= bar.began_us:
            busy_until[track] = end_us
            return track
    busy_until.append(end_us)
    return len(busy_until) - 1


def _events(bar: _Bar, pid: int, track: int) -> Iterator[dict[str, Any]]:
    place = {"ph": "X", "pid": pid, "tid": track, "cat": "request"}
    yield {**place, "name": bar.name, "ts": bar.began_us, "dur": bar.took_us, "args": bar.about}
    began_us = bar.began_us
    for name, took_us in bar.within:
        yield {**place, "name": name, "ts": began_us, "dur": took_us}
        began_us += took_us


def _bars(it: Explanation) -> Iterator[_Bar]:
    stages = it.stages
    if stages is None or stages.total_ms is None or it.arrived_ms is None:
        return
    began_us = float(it.arrived_ms * _US_PER_MS)
    waited_us = _us(stages.waited_ms)
    about = {
        "request": it.request,
        "outcome": it.outcome,
        "why": it.why,
        "prompt_tokens": it.prompt_tokens,
        "output_tokens": it.output_tokens,
        "in_time": it.in_time,
    }
    if waited_us or it.prefill is None or stages.prefill_ms is None:
        whole_us = waited_us if stages.prefill_ms is not None else _us(stages.total_ms)
        yield _Bar(_CONDUCTOR, f"{it.request}: {_waits(it)}", began_us, whole_us, about)
    if it.prefill is None or stages.prefill_ms is None:
        return
    began_us += waited_us
    within = _parts((stages.queue_ms, stages.load_ms, stages.compute_ms, stages.publish_ms))
    chosen = it.candidates[0] if it.candidates else None
    yield _Bar(
        it.prefill,
        f"{it.request}: prefill",
        began_us,
        _us(stages.prefill_ms),
        about | _predicted(chosen) | {"cached_tokens": it.actual_cached_tokens},
        within,
    )
    began_us += _us(stages.prefill_ms)
    place = it.decode or it.prefill
    if stages.handover_ms is not None:
        took_us = _us(stages.handover_ms)
        parts = (stages.decode_queue_ms, stages.decode_load_ms, stages.decode_first_ms)
        within = _parts(parts)
        yield _Bar(place, f"{it.request}: hand-over", began_us, took_us, about, within)
        began_us += took_us
    if stages.decode_ms is not None:
        more = {"tbt_ms": it.actual_tbt_ms, "predicted_tbt_ms": it.predicted_tbt_ms}
        yield _Bar(place, f"{it.request}: decode", began_us, _us(stages.decode_ms), about | more)


def _parts(parts_ms: Sequence[float | None]) -> tuple[tuple[str, float], ...]:
    """Those that took time; a hand-over publishes nothing."""
    return tuple((name, _us(ms)) for name, ms in zip(_WITHIN, parts_ms, strict=False) if ms)


def _waits(it: Explanation) -> str:
    return f"refused ({it.reject_reason})" if it.reject_reason else "waits"


def _predicted(chosen: CandidateRow | None) -> dict[str, Any]:
    if chosen is None:
        return {}
    return {
        "predicted_ms": {
            "transfer": chosen.transfer_ms,
            "queue": chosen.queue_ms,
            "compute": chosen.compute_ms,
        }
    }


def _us(ms: float | None) -> float:
    return 0.0 if ms is None else round(ms * _US_PER_MS, 3)

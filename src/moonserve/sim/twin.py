"""The twin of a live cluster: its recorded requests of the last minutes, on simulated clusters.

`moonserve twin` makes one `Twin` a round, and core.schedule.advice asks it. The rows come from the
process that decides, in any order. Requests before the judged ones warm the simulated cluster up;
what its pool held at the start is put there by earlier requests of their prefixes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from moonserve.core.schedule.advice import ClusterShape, LoadOutcome
from moonserve.core.schedule.recorded import RecordedRequest
from moonserve.core.units import MICROS_PER_SECOND, Tokens
from moonserve.sim.cluster import Simulation
from moonserve.sim.plan import decode_bound, prefill_bound
from moonserve.sim.served import Served
from moonserve.sim.setup import Pace, Setup
from moonserve.sim.trace import Row, Trace

LEAST_JUDGED = 20
"""Fewer requests say nothing about a share."""
_ENDED = 0.95
"""The judged requests end where fewer than this share of those that arrived are over."""
_WARM_UP = 2.0
"""So many times as long as the judged requests' span is the time before it that is simulated."""
_MOST_PREFIXES = 500
_APART_US = 60 * MICROS_PER_SECOND
_SAMPLE_US = MICROS_PER_SECOND
"""How often, in simulated time, a simulation asks whether it shall stop."""
_UNJUDGED = ("cancelled", "waiting", "running")


class Judged(NamedTuple):
    """Recorded requests of some minutes, in order of arrival."""

    rows: list[RecordedRequest]
    from_ms: int
    """Those that arrived from here are judged,"""
    until_ms: int
    """to here, without it."""

    def judges(self, row: RecordedRequest) -> bool:
        """Whether this request is judged."""
        return self.from_ms <= row.timestamp < self.until_ms and row.outcome not in _UNJUDGED


def judged(
    rows: Sequence[RecordedRequest],
    under_way: Sequence[RecordedRequest],
    now_ms: int,
    span_ms: int,
    since_ms: int,
    begins_idle: bool = False,
) -> Judged:
    """The requests of the last `span_ms` that can be judged, and those that ran beside or before.

    under_way: requests that are not over, with a guess of their output. They are load, and the
    judged requests end where too many of them begin, otherwise now. since_ms: when the cluster last
    changed. begins_idle: nothing was under way before the first row, so that all that came since
    can be judged; otherwise the first rows only warm up.
    """
    if not rows:
        return Judged([], 0, 0)
    size = rows[-1].block_size
    rows = [row for row in rows if row.block_size == size]
    under_way = [row for row in under_way if row.block_size == size]
    over_ms = sorted(row.timestamp for row in rows)
    under_way_ms = sorted(row.timestamp for row in under_way)
    until_ms = _until_ms(over_ms, under_way_ms, now_ms, span_ms)
    if not begins_idle:
        span_ms = min(span_ms, max(1, round((until_ms - over_ms[0]) / (1 + _WARM_UP))))
    from_ms = min(until_ms, max(until_ms - span_ms, since_ms))
    warm_ms = from_ms - round(_WARM_UP * span_ms)
    load = [row for row in rows if row.timestamp + _total_ms(row) >= warm_ms]
    return Judged(sorted([*load, *under_way], key=lambda it: it.timestamp), from_ms, until_ms)


def _total_ms(row: RecordedRequest) -> float:
    total_ms = None if row.stages is None else row.stages.total_ms
    return total_ms or 0.0


def _until_ms(
    over_ms: Sequence[int], under_way_ms: Sequence[int], now_ms: int, span_ms: int
) -> int:
    """The latest time before which nearly all requests of a span are over. Both are in order.

    It does not look for an earlier load: without new requests there is nothing to judge.
    """

    def within(times_ms: Sequence[int], until_ms: int) -> int:
        return bisect_left(times_ms, until_ms) - bisect_left(times_ms, until_ms - span_ms)

    first_late = bisect_right(under_way_ms, over_ms[-1])  # none that came from there on is over
    until_ms = min([now_ms, *under_way_ms[first_late : first_late + 1]])
    for open_ms in reversed(under_way_ms):
        over = within(over_ms, until_ms)
        if over >= _ENDED * (over + within(under_way_ms, until_ms)):
            break
        until_ms = min(until_ms, open_ms)
    return until_ms


def happened(window: Judged) -> LoadOutcome:
    """What became of the judged requests."""
    rows = [row for row in window.rows if window.judges(row)]
    served = [row for row in rows if row.in_time is not None]
    return _outcome(
        len(rows),
        sum(row.in_time is True for row in rows),
        sum(row.outcome == "refused" for row in rows),
        [row.actual_ttft_ms for row in served if row.actual_ttft_ms is not None],
        [row.actual_tbt_ms for row in served if row.actual_tbt_ms is not None],
    )


def has_objectives(window: Judged) -> bool:
    """Whether some judged request had objectives."""
    rows = [row for row in window.rows if window.judges(row)]
    return any(row.ttft_slo_ms is not None or row.tbt_slo_ms is not None for row in rows)


class Twin:
    """One window of requests, on any cluster of these instances."""

    def __init__(
        self,
        window: Judged,
        setup: Setup,
        stop: Callable[[], bool],
        paces_since: Callable[[float], tuple[Pace, ...]] = lambda start_us: (),
    ) -> None:
        """setup: the cluster as it was; stop: whether there is no time left; paces_since: see
        Fitted."""
        self._stop = stop
        size = window.rows[0].block_size
        before = _prefixes(window.rows, size, max(1, setup.prefill or setup.mixed))
        start_us = before[-1].at_us + _APART_US if before else 0
        first_ms = window.rows[0].timestamp
        paces = paces_since(1e3 * first_ms - start_us)
        self._setup = msgspec.structs.replace(
            setup, goal=setup.tuning.slo, sample_us=_SAMPLE_US, paces=paces
        )
        load = [_row(row, start_us + 1_000 * (row.timestamp - first_ms)) for row in window.rows]
        self._trace = Trace("recorded", size, before + load)
        self._load = Trace("recorded", size, load)
        self._judged: list[RecordedRequest | None] = [None] * len(before)
        self._judged += [row if window.judges(row) else None for row in window.rows]

    def simulate(self, shape: ClusterShape, least: float = 0.0) -> LoadOutcome | None:
        """What would have become of the judged requests; None: there was no time, or it is certain
        that less than the share `least` is in time. Raises ConfigError if such a cluster cannot be
        simulated."""
        sim = Simulation(self._trace, self._of(shape))
        fates = _Fates(sim, self._judged, least)
        is_whole = not self._stop() and sim.run(lambda: fates.look() or self._stop())
        if is_whole:
            fates.look()
        if fates.open or fates.are_hopeless:
            return None
        return _outcome(
            fates.count,
            fates.in_time,
            fates.refused,
            fates.ttfts_ms,
            fates.tbts_ms,
        )

    def needs(self) -> tuple[int, int]:
        """The instances of each role below which work piles up, by the costs alone."""
        setup = self._setup
        ones = msgspec.structs.replace(setup, prefill=1, decode=1, mixed=0)
        bounds = prefill_bound(self._load, ones), decode_bound(self._load, ones)
        first, second = (1 if bound <= 0 else int(1 / bound) + 1 for bound in bounds)
        return (first + second, 0) if setup.mixed else (first, second)

    def _of(self, shape: ClusterShape) -> Setup:
        return msgspec.structs.replace(
            self._setup,
            prefill=shape.prefill,
            decode=shape.decode,
            mixed=shape.mixed,
            tuning=msgspec.structs.replace(self._setup.tuning, policy=shape.policy),
        )


class _Fates:
    """What became of the judged requests so far, in a simulation that runs."""

    def __init__(
        self, sim: Simulation, rows: Sequence[RecordedRequest | None], least: float
    ) -> None:
        """rows: of each request of the simulation, None for those that are not judged."""
        self._sim = sim
        self._rows = rows
        self._seen = 0
        self._running: list[tuple[Served, RecordedRequest]] = []
        self.count = sum(row is not None for row in rows)
        self._most_missed = (1 - least) * self.count
        self.in_time = 0
        self.missed = 0
        self.refused = 0
        self.ttfts_ms: list[float] = []
        self.tbts_ms: list[float] = []

    @property
    def open(self) -> bool:
        """Whether the fate of some request is not known."""
        return self.in_time + self.missed < self.count

    @property
    def are_hopeless(self) -> bool:
        """Whether fewer are in time than the least share."""
        late = sum(self._is_late(served, row) for served, row in self._running)
        return self.missed + late > self._most_missed + 1e-9

    def look(self) -> bool:
        """See what has happened since the last look; returns whether the rest does not matter."""
        arrived = self._sim.served
        new = zip(arrived[self._seen :], self._rows[self._seen : len(arrived)], strict=True)
        looked_at = self._running + [(served, row) for served, row in new if row is not None]
        self._seen = len(arrived)
        self._running = [it for it in looked_at if not self._take(*it)]
        return not self.open or self.are_hopeless

    def _is_late(self, served: Served, row: RecordedRequest) -> bool:
        """Whether a running request has missed its TTFT objective."""
        first_us = self._sim.clock.now_us if served.first_us is None else served.first_us
        return row.ttft_slo_ms is not None and first_us - served.arrived_us > 1e3 * row.ttft_slo_ms

    def _take(self, served: Served, row: RecordedRequest) -> bool:
        """Count a request if it is over. It is judged as core.schedule.account judges it: by the
        mean time between its tokens."""
        if served.outcome == "running":
            return False
        if served.outcome != "completed" or served.first_us is None or served.ended_us is None:
            self.missed += 1
            self.refused += served.outcome == "refused"
            return True
        ttft_ms = (served.first_us - served.arrived_us) / 1e3
        self.ttfts_ms.append(ttft_ms)
        is_slow = False
        if (gaps := row.output_length - 1) > 0:
            tbt_ms = (served.ended_us - served.first_us) / 1e3 / gaps
            self.tbts_ms.append(tbt_ms)
            is_slow = row.tbt_slo_ms is not None and tbt_ms > row.tbt_slo_ms
        if is_slow or self._is_late(served, row):
            self.missed += 1
        else:
            self.in_time += 1
        return True


def _outcome(
    count: int, in_time: int, refused: int, ttfts: Sequence[float], tbts: Sequence[float]
) -> LoadOutcome:
    def quantile(values: Sequence[float], share: float) -> float | None:
        return float(np.quantile(values, share)) if values else None

    return LoadOutcome(
        requests=count,
        in_time=in_time / max(1, count),
        refused=refused / max(1, count),
        ttft_p50_ms=quantile(ttfts, 0.5),
        ttft_p90_ms=quantile(ttfts, 0.9),
        tbt_p50_ms=quantile(tbts, 0.5),
        tbt_p90_ms=quantile(tbts, 0.9),
    )


def _row(row: RecordedRequest, at_us: int) -> Row:
    return Row(
        at_us,
        row.input_length,
        row.output_length,
        tuple(row.hash_ids),
        row.priority or 0,
        row.tenant or "",
    )


def _prefixes(rows: Sequence[RecordedRequest], size: Tokens, at_once: int) -> list[Row]:
    """Requests that put into the pool what it held when the first of `rows` arrived, `at_once` at
    a time so that all instances get some, and long before."""
    seen: set[int] = set()
    found: list[RecordedRequest] = []
    for row in rows:
        held = min(row.pool_tokens or 0, row.input_length) // size
        if held and row.hash_ids[held - 1] not in seen and len(found) < _MOST_PREFIXES:
            hashes = row.hash_ids[:held]
            found.append(msgspec.structs.replace(row, hash_ids=hashes, input_length=held * size))
        seen.update(row.hash_ids)
    return [_row(row, at // at_once * _APART_US) for at, row in enumerate(found)]

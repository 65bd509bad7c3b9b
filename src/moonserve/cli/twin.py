"""`moonserve twin`: simulates the last minutes of a running cluster, again and again, and advises.

It reads the gateway's API, simulates by `sim.twin`, and posts what `core.schedule.advice` found. It
may run anywhere: beside the gateway, where it only takes time that others leave, or on another
machine. `moonserve advise` and the page show its advice.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.serving import serving
from moonserve.core.errors import ConfigError, EngineFailed, NobodyAlive
from moonserve.core.schedule.advice import (
    Advice,
    ClusterShape,
    TwinQuestion,
    advise,
    goals_ms,
)
from moonserve.core.schedule.recorded import (
    RecordedCluster,
    RecordedInstance,
    RecordedRequest,
)
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import MICROS_PER_SECOND
from moonserve.logs import LINES
from moonserve.quantity import parse_duration_us

_COMPARED = ("kvcache_centric", "late_binding", "cache_aware", "least_loaded")
"""The policies that the present one is compared with."""
_TIMEOUT_S = 30.0
_LEAST_EVERY_S = 2.0
_LOOK_AGAIN_S = 0.5
"""How often it asks whether a cluster that starts is ready."""
_SHARE = 0.5
"""The part of a round in which it may simulate."""
_NICE = 19


class _Rows(msgspec.Struct):
    """What GET /api/recording/rows answers."""

    last: int
    more: bool
    rows: list[RecordedRequest]
    under_way: list[RecordedRequest]
    now_ms: int


class _Member(RecordedInstance, frozen=True):
    """An instance that serves, as /api/instances shows it."""

    epoch: int = 0


class _TunedCluster(msgspec.Struct):
    tuning: Tuning


def _every(context: click.Context, option: click.Parameter, text: str) -> float:
    try:
        every_s = parse_duration_us(text) / MICROS_PER_SECOND
    except ValueError as error:
        raise ConfigError(str(error), "--every") from None
    if every_s < _LEAST_EVERY_S:
        raise ConfigError(f"must be {_LEAST_EVERY_S:g}s or more, not {text}", "--every")
    return every_s


@click.command()
@url_option("The gateway.")
@click.option(
    "--every",
    "every_s",
    default="60s",
    show_default=True,
    metavar="TIME",
    callback=_every,
    help="Time of one round. The requests of about so long are judged.",
)
@click.option(
    "--rows",
    default=3_000,
    show_default=True,
    type=click.IntRange(50, 4_000),
    metavar="N",
    help="Most requests that are simulated; of more, the latest.",
)
@click.option(
    "--attainment",
    default=0.99,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of the requests that should be in time.",
)
@click.option("--once", is_flag=True, help="End after the first round that has requests to judge.")
def twin(url: str, every_s: float, rows: int, attainment: float, once: bool) -> None:
    """Simulate the last minutes of a running cluster under alternatives, and advise.

    Each round simulates the latest requests on the cluster as it is. If that matches what happened,
    it simulates one instance more and less of each role, other splits and other policies, and how
    few instances would have been enough. It reports to the gateway: see `moonserve advise`, the
    page /ui, and the gauge moonserve_wanted_instances.

    It runs with the lowest priority, and simulates for at most half of each round. The gateway
    needs objectives (--ttft-slo, --tbt-slo). It changes nothing itself.
    """
    if attainment != attainment:  # no range of click refuses NaN
        raise ConfigError("is not a number", "--attainment")
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    os.nice(_NICE)
    client = Client(url, _TIMEOUT_S)
    rounds = TwinRounds(client, every_s, rows, attainment)
    _await_ready(client, url, every_s)
    round_, said = 0, ""
    while True:
        began_s = time.monotonic()
        round_ += 1
        try:
            line = rounds.round()
        except (EngineFailed, NobodyAlive) as error:
            if said != str(error):
                _tell(f"round {round_}: {error}; asking again every {every_s:g} s")
            said = str(error)
        else:
            said = ""
            _tell(f"round {round_}: {line}")
            if once and rounds.has_judged:
                return
        time.sleep(max(0.0, every_s - (time.monotonic() - began_s)))


def _await_ready(client: Client, url: str, most_s: float) -> None:
    """Wait until the cluster can serve, but not longer than a round: the rounds say what is wrong.

    A cluster that starts beside this process needs some seconds, and a round would be lost.
    """
    until_s = time.monotonic() + most_s
    said = False
    while time.monotonic() < until_s:
        try:
            client.get("/ready")
        except (EngineFailed, NobodyAlive):
            if not said:
                _tell(f"waits at most {most_s:g} s until {url} is ready")
            said = True
            time.sleep(_LOOK_AGAIN_S)
        else:
            return


def _tell(line: str) -> None:
    LINES.put(sys.stdout, line)


class TwinRounds:
    """What the twin has seen of one cluster."""

    def __init__(self, client: Client, every_s: float, most: int, target: float) -> None:
        self._client = client
        self._every_s = every_s
        self._target = target
        self._rows: deque[RecordedRequest] = deque(maxlen=most)
        self._under_way: list[RecordedRequest] = []
        self._last = 0
        self._now_ms = 0
        """The time of the latest rows, by the gateway's clock."""
        self._begins_idle = False
        """Whether nothing was under way before the first row."""
        self._cluster = RecordedCluster([], Tuning())
        self._since_ms = 0
        """When the cluster was first seen as it is."""
        self.has_judged = False
        """Whether some round had requests to judge."""

    def round(self) -> str:
        """One round; returns what to print of it. Raises EngineFailed, NobodyAlive, and BadRequest
        if the gateway refuses the token."""
        began_s = time.monotonic()
        self._look()
        if self._cluster.instances:
            self._read()
        advice = self._advice(began_s + _SHARE * self._every_s)
        took_s = time.monotonic() - began_s
        advice = msgspec.structs.replace(advice, took_s=took_s)
        self._client.send("POST", "/internal/advice", dict[str, object], advice)
        count = 0 if advice.happened is None else advice.happened.requests
        what = f"{_requests(count)} judged, {len(advice.trials)} clusters simulated"
        return f"{what} in {took_s:.1f} s: {advice.text}"

    def _look(self) -> None:
        """See how many instances serve, and by which settings they work."""
        members = serving(self._client, _Member)
        tuning = self._client.get_as("/api/stats", _TunedCluster).tuning
        cluster = RecordedCluster([*sorted(members, key=lambda it: it.id)], tuning)
        if cluster != self._cluster:
            self._since_ms = time.time_ns() // 1_000_000 if self._cluster.instances else 0
            self._cluster = cluster

    def _read(self) -> None:
        """Read the requests that have ended since the last round."""
        more = True
        while more:
            reply = self._client.get_as(f"/api/recording/rows?after={self._last}", _Rows)
            if reply.last < self._last:
                self._rows.clear()  # the process that decides has started anew
            if not self._rows and not reply.rows:
                self._begins_idle = not reply.under_way
            elif reply.last - len(reply.rows) != self._last:
                self._begins_idle = False  # some rows were dropped before they were read
            self._last = reply.last
            self._rows.extend(reply.rows)
            self._under_way = reply.under_way
            self._now_ms = reply.now_ms
            more = reply.more
        if len(self._rows) == self._rows.maxlen:
            self._begins_idle = False

    def _shape(self) -> ClusterShape:
        count = Counter(it.role for it in self._cluster.instances)
        policy = self._cluster.tuning.policy
        return ClusterShape(count["prefill"], count["decode"], count["both"], policy)

    def _advice(self, deadline_s: float) -> Advice:
        from moonserve.sim.fitted import fit
        from moonserve.sim.recording import finds_output, setup_of_cluster
        from moonserve.sim.twin import LEAST_JUDGED, Twin, happened, has_objectives, judged

        slo = self._cluster.tuning.slo
        ttft_slo_ms, tbt_slo_ms = goals_ms(slo)
        none = Advice(
            text="",
            now=self._shape(),
            target=self._target,
            ttft_slo_ms=ttft_slo_ms,
            tbt_slo_ms=tbt_slo_ms,
            every_s=self._every_s,
        )
        replace = msgspec.structs.replace
        if why := _unlike(none.now):
            return replace(none, text=f"No advice: {why}.")
        span_ms = round(1_000 * self._every_s)
        window = judged(
            self._rows,
            self._under_way,
            self._now_ms,
            span_ms,
            self._since_ms,
            self._begins_idle,
        )
        was = happened(window)
        if not was.requests:
            what = "no request that arrived lately can be judged yet"
            return replace(none, text=f"No advice: {what}, {LEAST_JUDGED} are needed.")
        seen = replace(none, happened=was, from_ms=window.from_ms, until_ms=window.until_ms)
        if was.requests < LEAST_JUDGED:
            what = f"{_requests(was.requests)} can be judged yet, {LEAST_JUDGED} are needed"
            return replace(seen, text=f"No advice: only {what}.")
        if not has_objectives(window):
            what = "advice needs objectives: start the gateway with --ttft-slo and --tbt-slo"
            return replace(seen, text=f"No advice: {what}.")
        self.has_judged = True
        try:
            fitted = fit("recorded requests", self._cluster, self._rows)
            size = self._rows[-1].block_size
            keeps = finds_output(self._rows)
            setup = setup_of_cluster(self._cluster, fitted.profile, size, keeps)
            simulated = Twin(
                window, setup, lambda: time.monotonic() > deadline_s, fitted.paces_since
            )
            question = TwinQuestion(none.now, was, slo, self._target, _COMPARED, simulated.needs())
            found = advise(question, simulated.simulate)
        except ConfigError as error:
            return replace(seen, text=f"No advice: this cluster cannot be simulated: {error}.")
        return replace(
            seen, text=found.text, binds=found.binds, wanted=found.wanted, trials=found.trials
        )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def _unlike(shape: ClusterShape) -> str:
    """Why a cluster cannot be simulated; empty: it can."""
    if shape.mixed and (shape.prefill or shape.decode):
        return "some instances do both, and others only one; such a cluster is not simulated"
    if not shape.mixed and not (shape.prefill and shape.decode):
        return "there is no prefill or no decode instance"
    return ""

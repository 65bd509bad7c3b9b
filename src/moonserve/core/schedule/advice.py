"""What to change: how the load of the last minutes would have been served by other clusters.

`moonserve twin` simulates; `advise` chooses what to simulate, judges whether the simulation is
like what happened, and says in one sentence what follows. Everything here is pure: a caller gives
the function that simulates one cluster, and decides how long it may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from moonserve.core.request import Slo
from moonserve.core.schedule.verdict import percent

_SHARE_OFF = 0.1
"""The twin matches if its share of requests in time differs by at most this, or by one over the
root of their number, which is about what chance does,"""
_TTFT_OFF = 0.3
_TBT_OFF = 0.25
"""if its times differ by at most these shares of what was measured,"""
_OF_GOAL = 0.2
"""or by at most this share of the objective. Times beyond the objective count as equal: how late a
late request is does not matter."""
_NOTABLE = 0.03
"""Another policy or split is named if it has so many more requests in time."""
_GROWTHS = 5
_GROWTH = 1.4
_MOST_INSTANCES = 10_000
_MOST_TRIALS = 64
_PER_MS = 1_000

_ROLES = ("prefill", "decode", "mixed")
"""Fields of a ClusterShape."""

Binds: TypeAlias = Literal["prefill", "decode", "both", "none"]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST_INSTANCES)]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_AtMs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^\w*$")]


class ClusterShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many instances of each role there are, and by which policy requests are placed."""

    prefill: _Count
    decode: _Count
    mixed: _Count
    """Instances that do both; there are these, or prefill and decode."""
    policy: _Name

    def roles(self) -> dict[str, int]:
        """The number of instances by role."""
        if self.mixed:
            return {"both": self.mixed}
        return {"prefill": self.prefill, "decode": self.decode}

    def __str__(self) -> str:
        return f"{self.mixed}" if self.mixed else f"{self.prefill} + {self.decode}"


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of the judged requests. Cancelled ones do not count."""

    requests: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    in_time: _Share
    """The share that was served within its objectives."""
    refused: _Share
    ttft_p50_ms: _Ms | None
    """Of those that were served, as the next three; None: there are none."""
    ttft_p90_ms: _Ms | None
    tbt_p50_ms: _Ms | None
    tbt_p90_ms: _Ms | None


class TwinTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same load on one cluster, simulated."""

    shape: ClusterShape
    outcome: LoadOutcome


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a round of the twin found."""

    text: Annotated[str, msgspec.Meta(max_length=1_000)]
    """One or two sentences for people."""
    binds: Binds = "none"
    """Of which role more instances are wanted."""
    now: ClusterShape
    wanted: ClusterShape | None = None
    """The fewest instances with which enough requests would have been in time. None: there is no
    advice, and `text` says why."""
    happened: LoadOutcome | None = None
    trials: Annotated[tuple[TwinTrial, ...], msgspec.Meta(max_length=_MOST_TRIALS)] = ()
    """What was simulated; the first is the cluster as it was, which shows how well the twin
    matches."""
    target: _Share
    """The share of requests that should be in time."""
    ttft_slo_ms: _Ms | None = None
    tbt_slo_ms: _Ms | None = None
    from_ms: _AtMs = 0
    """The judged requests arrived from here, in ms since 1970,"""
    until_ms: _AtMs = 0
    """to here."""
    every_s: _Seconds
    """The time from one round to the next."""
    took_s: _Seconds = 0.0
    """How long the round took."""


class TwinQuestion(msgspec.Struct, frozen=True):
    """What happened, and what is asked about it."""

    now: ClusterShape
    happened: LoadOutcome
    slo: Slo
    target: float
    policies: Sequence[str]
    """Those to compare with the present one."""
    needs: tuple[int, int] = (1, 1)
    """With fewer prefill and decode instances, work would pile up. For instances that do both, the
    first one counts."""


Simulate: TypeAlias = Callable[[ClusterShape, float], LoadOutcome | None]
"""The judged requests on one cluster; None: there is no time left, or less than this share is in
time."""


class TwinFinding(msgspec.Struct, frozen=True):
    """The answer to a question; the fields mean what they mean in Advice."""

    text: str
    binds: Binds
    wanted: ClusterShape | None
    trials: tuple[TwinTrial, ...]


def advise(question: TwinQuestion, simulate: Simulate) -> TwinFinding:
    """Simulate the cluster as it was and, if that matches, others; say what follows."""
    trials = _Trials(simulate, question.target)
    twin = trials(question.now)
    if twin is None:
        return TwinFinding(
            "No advice: one simulation takes longer than a round may.", "none", None, ()
        )
    if off := mismatches(question.happened, twin, question.slo):
        text = f"No advice: the twin does not match what happened ({', '.join(off)})."
        return TwinFinding(text, "none", None, trials.found())
    wanted = _wanted(question, twin, trials)
    for shape in alternatives(question.now, question.policies):
        trials(shape)
    if wanted is None and trials.are_cut:
        text = "No advice: a round has too little time for all simulations; choose a longer one."
        return TwinFinding(text, "none", None, trials.found())
    binds = _binds(question, twin, wanted, trials)
    text = " ".join(_sentences(question, binds, wanted, trials))
    return TwinFinding(text, binds, wanted, trials.found())


def mismatches(happened: LoadOutcome, twin: LoadOutcome, slo: Slo) -> list[str]:
    """In what the twin is too far from what happened; empty: it matches."""
    off = []
    share_off = max(_SHARE_OFF, max(1, happened.requests) ** -0.5)
    if abs(happened.in_time - twin.in_time) > share_off + 1e-9:
        off.append(f"{percent(twin.in_time)} in time, not {percent(happened.in_time)}")
    for name, of_measured, goal_us in (
        ("ttft_p50_ms", _TTFT_OFF, slo.ttft_us),
        ("ttft_p90_ms", _TTFT_OFF, slo.ttft_us),
        ("tbt_p50_ms", _TBT_OFF, slo.tbt_us),
        ("tbt_p90_ms", _TBT_OFF, slo.tbt_us),
    ):
        measured, simulated = getattr(happened, name), getattr(twin, name)
        if measured is None or simulated is None:
            continue  # the shares differ, or neither served any
        most = float("inf") if goal_us is None else goal_us / _PER_MS
        allowed = of_measured * measured
        if goal_us is not None:
            allowed = max(allowed, _OF_GOAL * goal_us / _PER_MS)
        if abs(min(measured, most) - min(simulated, most)) > allowed:
            what, quantile, _ = name.split("_")
            off.append(f"{what.upper()} {quantile} {simulated:,.0f} ms, not {measured:,.0f} ms")
    return off


def alternatives(now: ClusterShape, policies: Sequence[str]) -> Iterator[ClusterShape]:
    """One more and one less of each role, the next splits, and other policies."""
    replace = msgspec.structs.replace
    if now.mixed:
        yield replace(now, mixed=now.mixed + 1)
        if now.mixed > 1:
            yield replace(now, mixed=now.mixed - 1)
    else:
        for more, less in ((1, 0), (0, 1), (1, -1), (-1, 1), (-1, 0), (0, -1)):
            shape = replace(now, prefill=now.prefill + more, decode=now.decode + less)
            if shape.prefill and shape.decode:
                yield shape
    for policy in policies:
        if policy != now.policy:
            yield replace(now, policy=policy)


class _Trials:
    """What was simulated, each cluster once."""

    def __init__(self, simulate: Simulate, target: float) -> None:
        self._simulate = simulate
        self._target = target
        self._done: dict[ClusterShape, LoadOutcome] = {}
        self._too_small: dict[ClusterShape, None] = {}
        self.are_cut = False
        """Whether time has ended before all was simulated."""

    def __call__(self, shape: ClusterShape) -> LoadOutcome | None:
        """The outcome; None: there was no time."""
        return self._done.get(shape) or self._run(shape, 0.0)

    def is_enough(self, shape: ClusterShape) -> bool:
        """Whether so many are in time as should be. Without time for it: no."""
        if shape in self._too_small:
            return False
        outcome = self._done.get(shape) or self._run(shape, self._target)
        if outcome is None:
            self._too_small[shape] = None
        return outcome is not None and outcome.in_time >= self._target

    def _run(self, shape: ClusterShape, least: float) -> LoadOutcome | None:
        if len(self._done) == _MOST_TRIALS:
            return None
        outcome = self._simulate(shape, least)
        if outcome is not None:
            self._done[shape] = outcome
        elif not least:
            self.are_cut = True
        return outcome

    def known(self, shape: ClusterShape | None) -> LoadOutcome | None:
        """The outcome if that was simulated."""
        return None if shape is None else self._done.get(shape)

    def found(self) -> tuple[TwinTrial, ...]:
        """All of them, in the order in which they were simulated."""
        return tuple(TwinTrial(shape, outcome) for shape, outcome in self._done.items())


# The number of instances.


def _wanted(question: TwinQuestion, twin: LoadOutcome, trials: _Trials) -> ClusterShape | None:
    """The fewest instances that are enough; None: none that was tried is."""
    now, target = question.now, question.target
    was_enough = question.happened.in_time >= target
    if not was_enough and twin.in_time >= target:
        return now  # the twin sees no shortage

    def is_enough(shape: ClusterShape) -> bool:
        if shape == now:
            return was_enough
        return trials.is_enough(shape)

    high = now if was_enough else _grown(question, is_enough)
    if high is None:
        return None
    grew = [role for role in _ROLES if getattr(high, role) > getattr(now, role)]
    # first what grew: if time ends, the other role keeps what it has
    for role in sorted(_ROLES, key=lambda role: role not in grew):
        low = getattr(now, role) if grew == [role] else 0
        high = _reduced(high, role, low, is_enough)
    return high


def _reduced(
    shape: ClusterShape, role: str, low: int, is_enough: Callable[[ClusterShape], bool]
) -> ClusterShape:
    """The same with the fewest instances of this role, more than `low`."""

    def with_(count: int) -> ClusterShape:
        return msgspec.structs.replace(shape, **{role: count})

    return with_(_least(low, getattr(shape, role), lambda count: is_enough(with_(count))))


def _grown(
    question: TwinQuestion, is_enough: Callable[[ClusterShape], bool]
) -> ClusterShape | None:
    """A larger cluster that is enough, not the smallest; None: none that was tried is. One role is
    enlarged before both are."""
    now, (first, second) = question.now, question.needs
    replace = msgspec.structs.replace
    prefill = min(_MOST_INSTANCES, max(now.prefill + 1, first))
    decode = min(_MOST_INSTANCES, max(now.decode + 1, second))
    mixed = min(_MOST_INSTANCES, max(now.mixed + 1, first))
    for _ in range(_GROWTHS):
        if now.mixed:
            shapes = [replace(now, mixed=mixed)]
        else:
            shapes = [
                replace(now, prefill=prefill),
                replace(now, decode=decode),
                replace(now, prefill=prefill, decode=decode),
            ]
        for shape in shapes:
            if is_enough(shape):
                return shape
        prefill, decode, mixed = (
            min(_MOST_INSTANCES, max(count + 1, round(_GROWTH * count)))
            for count in (prefill, decode, mixed)
        )
    return None


def _least(low: int, high: int, is_enough: Callable[[int], bool]) -> int:
    """The least number above `low`, which is not enough, that is; `high` is, and more are if fewer
    are."""
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


# The sentence.


def _binds(
    question: TwinQuestion, twin: LoadOutcome, wanted: ClusterShape | None, trials: _Trials
) -> Binds:
    """The role of which more are wanted; if no number is enough, the one of which one more serves
    the most."""
    now = question.now
    if wanted is not None:
        more_prefill = wanted.prefill + wanted.mixed > now.prefill + now.mixed
        more_decode = wanted.decode + wanted.mixed > now.decode + now.mixed
    elif now.mixed:
        return "both"
    else:
        one_more = trials.known(msgspec.structs.replace(now, prefill=now.prefill + 1))
        by_prefill = 0.0 if one_more is None else one_more.in_time - twin.in_time
        one_more = trials.known(msgspec.structs.replace(now, decode=now.decode + 1))
        by_decode = 0.0 if one_more is None else one_more.in_time - twin.in_time
        more_prefill = by_prefill > max(0.0, by_decode)
        more_decode = by_decode > max(0.0, by_prefill)
    if more_prefill and more_decode:
        return "both"
    return "prefill" if more_prefill else "decode" if more_decode else "none"


def _sentences(
    question: TwinQuestion, binds: Binds, wanted: ClusterShape | None, trials: _Trials
) -> Iterator[str]:
    now, was = question.now, percent(question.happened.in_time)
    outcome = trials.known(wanted)
    if wanted is None:
        yield f"{_what_binds(now, binds)}: {was} were in time, and {_best(question, trials)}."
    elif wanted == now and question.happened.in_time >= question.target:
        fewer = "" if max(now.roles().values()) == 1 else ", and one instance less would be too few"
        yield f"{now} is right: {was} were in time{fewer}."
    elif wanted == now:
        assert outcome is not None, "it was simulated first"
        yield (
            f"{was} were in time; the twin, with {percent(outcome.in_time)}, sees no shortage of"
            " instances."
        )
    else:
        assert outcome is not None, "what is wanted was simulated"
        had = f"the same load would have had {percent(outcome.in_time)} in time, now {was}."
        if binds == "none":
            yield f"{wanted} would be enough: {had}"
        else:
            yield f"{_what_binds(now, binds)}: with {wanted} {had}"
    if question.happened.in_time < question.target:
        yield from _without_more(question, trials)


def _what_binds(now: ClusterShape, binds: Binds) -> str:
    if now.mixed:
        return "There are too few instances"
    if binds == "none":
        return "Neither prefill nor decode binds alone"
    return "Prefill and decode bind" if binds == "both" else f"{binds.capitalize()} binds"


def _best(question: TwinQuestion, trials: _Trials) -> str:
    """The best of the clusters that are not enough."""
    shown = max(trials.found(), key=lambda it: it.outcome.in_time)
    if shown.shape == question.now:
        return "no other cluster that was simulated does better"
    policy = "" if shown.shape.policy == question.now.policy else f" and {shown.shape.policy}"
    return f"with {shown.shape}{policy} only {percent(shown.outcome.in_time)} would have been"


def _without_more(question: TwinQuestion, trials: _Trials) -> Iterator[str]:
    """The best split and the best policy of as many instances, if they are clearly better."""
    now = question.now
    total = sum(now.roles().values())
    others = [it for it in trials.found() if sum(it.shape.roles().values()) == total]
    splits = [it for it in others if it.shape.policy == now.policy and it.shape != now]
    policies = [it for it in others if it.shape.policy != now.policy]
    for found in (splits, policies):
        best = max(found, key=lambda it: it.outcome.in_time, default=None)
        if best is None or best.outcome.in_time < question.happened.in_time + _NOTABLE:
            continue
        share = percent(best.outcome.in_time)
        if best.shape.policy == now.policy:
            yield f"Split as {best.shape}, as many instances would have had {share}."
        else:
            yield f"With policy {best.shape.policy} they would have had {share}."


def goals_ms(slo: Slo) -> tuple[float | None, float | None]:
    """The objectives for TTFT and TBT in milliseconds."""
    ttft, tbt = slo.ttft_us, slo.tbt_us
    return None if ttft is None else ttft / _PER_MS, None if tbt is None else tbt / _PER_MS


def is_stale(advice: Advice, age_s: float) -> bool:
    """Whether advice is too old to be followed: the twin has missed rounds."""
    return age_s > 3 * max(advice.every_s, advice.took_s, 1.0)

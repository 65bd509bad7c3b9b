"""The state of a cluster as lines for the terminal: what `moonserve top` prints.

It takes the answers of GET /api/history and GET /api/instances as they are, and keeps the samples
of the last minute. It asks nobody and waits for nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moonserve.core.schedule.history import Pools
from moonserve.core.schedule.verdict import ClusterVerdict
from moonserve.show.table import table

_SAMPLES = 60
_BAR = 24
_WITHOUT_INSTANCES = 17
"""Lines of a screen beside instances, alarms and the verdict."""
_FUNNEL = (
    ("prompt_tokens", "prompt tokens"),
    ("held_tokens", "held by anyone"),
    ("chosen_tokens", "held where placed"),
    ("promised_tokens", "promised"),
    ("delivered_tokens", "delivered"),
)
_HEADS = (
    *("instance", "role", "queue", "prefills", "decodes", "places", "KV free", "TBT", "heard"),
    "trust",
)
_COUNTED = tuple(name for name, _ in _FUNNEL)


class ShownMinute(msgspec.Struct):
    """What became of the requests that were over in the last minute."""

    seconds: int = 0
    in_time: int = 0
    late: int = 0
    failed: int = 0
    cancelled: int = 0
    engine_refused: int = 0
    refused: Mapping[str, int] = {}
    """By reason."""
    output_tokens: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tbt_p50_ms: float | None = None
    tbt_p99_ms: float | None = None


class HistoryReply(msgspec.Struct):
    """What GET /api/history answers, as far as it is shown here."""

    now_ms: float
    verdict: ClusterVerdict
    pools: Pools
    minute: ShownMinute
    columns: dict[str, list[float | None]]
    alarms: list[str] = []
    standby: str = ""
    ttft_slo_ms: float | None = None
    tbt_slo_ms: float | None = None


class InstanceReply(msgspec.Struct):
    """One row of GET /api/instances, as far as it is shown here."""

    id: str
    role: str = ""
    state: str = "up"
    """Of external engines; workers that are listed are up."""
    why: str = ""
    queue_ms: float = 0.0
    prefills_promised: int = 0
    running: int = 0
    max_seqs: int = 0
    free_blocks: int = 0
    kv_blocks: int = 0
    tbt_ms: float = 0.0
    heard_ms_ago: float | None = None
    drained: bool = False
    trust: dict[str, float] = {}


class Top:
    """The last minute of one cluster."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {name: [] for name in _COUNTED}
        self.since_ms = 0.0
        """The time of the latest sample: ask for later ones."""

    def lines(
        self,
        reply: HistoryReply,
        instances: Sequence[InstanceReply],
        width: int = 100,
        height: int | None = None,
    ) -> Iterator[str]:
        """The whole screen. width: of long sentences; height: the most lines. Instances that do not
        fit are counted."""
        self._take(reply)
        verdict = textwrap.wrap(reply.verdict.text, width)
        yield from verdict
        if reply.standby:
            yield reply.standby
        yield ""
        yield from _requests(reply)
        yield ""
        yield from self._funnel()
        yield ""
        yield from _pools(reply)
        yield ""
        others = _WITHOUT_INSTANCES + len(verdict) + bool(reply.standby)
        others += bool(reply.alarms) + len(reply.alarms)
        most = len(instances) if height is None else max(1, height - others)
        yield from _instances(instances, most)
        if reply.alarms:
            yield ""
            yield from (f"alarm: {text}" for text in reply.alarms)

    def _take(self, reply: HistoryReply) -> None:
        for name, kept in self._samples.items():
            kept += [value or 0 for value in reply.columns.get(name, ())]
            del kept[:-_SAMPLES]
        self.since_ms = max([self.since_ms, *(it or 0 for it in reply.columns.get("at_ms", ()))])

    def _funnel(self) -> Iterator[str]:
        sums = {name: sum(kept) for name, kept in self._samples.items()}
        prompt = sums["prompt_tokens"]
        for name, title in _FUNNEL:
            share = sums[name] / prompt if prompt else 0.0
            yield f"{title:<18} {_bar(share)} {share:>4.0%} {sums[name]:>13,.0f}"


def _requests(reply: HistoryReply) -> Iterator[str]:
    minute, pools = reply.minute, reply.pools
    refused = sum(minute.refused.values())
    why = ", ".join(f"{reason} {count:,}" for reason, count in _largest(minute.refused))
    yield (
        f"{minute.seconds} s: {minute.in_time:,} in time, {minute.late:,} late,"
        f" {refused:,} refused{f' ({why})' if why else ''}, {minute.failed:,} failed,"
        f" {minute.cancelled:,} cancelled, {minute.engine_refused:,} refused by engines"
    )
    rate = minute.output_tokens / max(1, minute.seconds)
    yield (
        f"now: {pools.under_way:,.0f} under way, {pools.waiting:,.0f} wait;"
        f" {rate:,.0f} tokens/s generated"
    )
    for title, p50_ms, p99_ms, goal_ms in (
        ("TTFT", minute.ttft_p50_ms, minute.ttft_p99_ms, reply.ttft_slo_ms),
        ("mean TBT", minute.tbt_p50_ms, minute.tbt_p99_ms, reply.tbt_slo_ms),
    ):
        missed = p99_ms is not None and goal_ms is not None and p99_ms > goal_ms
        goal = "no goal" if goal_ms is None else f"goal {_ms(goal_ms)}"
        late = "  LATE" if missed else ""
        yield f"{title:<8} p50 {_ms(p50_ms):>10}   p99 {_ms(p99_ms):>10}   {goal}{late}"


def _largest(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _pools(reply: HistoryReply) -> Iterator[str]:
    pools = reply.pools
    full = max(pools.decode_slots, pools.decode_kv)
    for name, share, text in (
        (
            "prefill",
            pools.prefill_busy,
            f"busy, queue {_ms(pools.queue_ms)}, instances: {pools.prefills}",
        ),
        (
            "decode",
            full,
            f"full (places {pools.decode_slots:.0%}, KV {pools.decode_kv:.0%}),"
            f" TBT {_ms(pools.step_ms)}, instances: {pools.decodes}",
        ),
    ):
        binds = "  << binds" if reply.verdict.binding == name else ""
        yield f"{name:<18} {_bar(share)} {share:>4.0%} {text}{binds}"


def _instances(instances: Sequence[InstanceReply], most: int) -> Iterator[str]:
    if not instances:
        yield "no instance is there"
        return
    fullest = sorted(instances, key=lambda it: (it.state == "up", -it.queue_ms, -it.running, it.id))
    rows = [_HEADS, *(_row(it) for it in fullest[:most])]
    lines = list(table(rows, words=2))
    yield from lines
    if len(instances) > most:
        yield f"and {len(instances) - most:,} more"


def _row(it: InstanceReply) -> tuple[str, ...]:
    if it.state != "up":
        return (it.id, it.state, it.why, *[""] * (len(_HEADS) - 3))
    free = it.free_blocks / it.kv_blocks if it.kv_blocks else 0.0
    return (
        it.id,
        it.role,
        _ms(it.queue_ms),
        f"{it.prefills_promised:,}",
        f"{it.running:,}",
        f"{it.max_seqs:,}",
        f"{free:.0%}",
        _ms(it.tbt_ms),
        _ms(it.heard_ms_ago) + (", drained" if it.drained else ""),
        f"{it.trust.get('share', 1.0):.0%}",
    )


def _bar(share: float) -> str:
    done = round(_BAR * min(1.0, max(0.0, share)))
    return "#" * done + "." * (_BAR - done)


def _ms(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.3g} ms"

"""The last hours of a cluster in numbers: samples for charts over time, and the events beside them.

live.control.history feeds it: each request that is over, and once a second what the Conductor
believes of its instances. It is bounded: fine samples for a quarter of an hour, coarse ones for
some hours. Nothing here decides, and no request waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import msgspec

from moonserve.core.schedule.actions import Reason
from moonserve.core.schedule.funnel import Funnel, Reuse
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import BlockKey, Bytes, InstanceId, Micros, Tokens

REASONS: tuple[str, ...] = get_args(Reason)
MINUTE = 60
"""Samples of the finest kind in a minute."""
_SUB = 8
"""Parts into which each power of two is divided: a quantile is right to about 6%."""
_MOST_EVENTS = 500
_MOST_CHAIN_KEYS = 100_000
_CHAINS_A_SECOND = 20
_MOST_PAIRS = 4_096
_FADES = 0.97
"""What remains of the counts of a pair after a coarse sample."""
_PER_MS = 1_000

What: TypeAlias = Literal[
    "join", "epoch", "leave", "loss", "alarm", "alarm_over", "leader", "drain", "resume"
]
"""epoch: an instance joined again after a loss. leave: it left in order. leader: this process leads
from now on, or leads no more. drain: an instance gets no new work, or a segment no more blocks;
resume: an instance gets work again."""


class LaneEvent(msgspec.Struct, frozen=True):
    """One thing that happened to the cluster."""

    at_ms: int
    """Since 1970."""
    what: What
    subject: str
    """The instance, the segment, or the alarm."""
    detail: str = ""


class Durations:
    """How long requests took, as counts by length: quantiles in bounded memory."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0

    def add(self, us: Micros) -> None:
        """Count one."""
        power = max(us, _SUB).bit_length() - 4
        place = (power << 3) | ((us >> power) & (_SUB - 1))
        self.counts[place] = self.counts.get(place, 0) + 1
        self.total += 1

    def merge(self, other: Durations) -> None:
        """Add the counts of others."""
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count
        self.total += other.total

    def quantile_ms(self, share: float) -> float | None:
        """The length that this share of them does not exceed; None: there are none."""
        rest = share * self.total
        for place in sorted(self.counts):
            rest -= self.counts[place]
            if rest <= 1e-9:
                power = place >> 3
                low = (_SUB | (place & (_SUB - 1))) << power
                return (low + (1 << power) / 2) / _PER_MS
        return None


class Tally:
    """What became of the requests that were over in one span of time."""

    def __init__(self) -> None:
        self.in_time = 0
        self.late = 0
        self.failed = 0
        self.cancelled = 0
        self.engine_refused = 0
        self.refused: dict[str, int] = {}
        """By reason."""
        self.reuse = Reuse()
        self.output_tokens: Tokens = 0
        self.ttft = Durations()
        self.tbt = Durations()

    def take(self, record: Record) -> None:
        """Count a request that is over."""
        match record.fate:
            case "refused":
                reason = record.reason or "other"
                self.refused[reason] = self.refused.get(reason, 0) + 1
                return
            case "failed":
                self.failed += 1
            case "cancelled":
                self.cancelled += 1
            case "engine_refused":
                self.engine_refused += 1
            case "in_time":
                self.in_time += 1
            case "late":
                self.late += 1
        self.reuse.take(record)
        measured = record.measured
        self.output_tokens += measured.tokens
        if record.first_us is not None:
            self.ttft.add(record.first_us - record.arrived_us)
        if measured.tbt_us is not None:
            self.tbt.add(measured.tbt_us)

    def merge(self, other: Tally) -> None:
        """Add what another span of time counted."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + count
        self.reuse.merge(other.reuse)
        self.ttft.merge(other.ttft)
        self.tbt.merge(other.tbt)


_COUNTS = ("in_time", "late", "failed", "cancelled", "engine_refused", "output_tokens")


class Pools(msgspec.Struct, frozen=True):
    """How full prefill and decode are; an instance of both roles counts in both."""

    prefills: int = 0
    """Instances."""
    decodes: int = 0
    prefill_busy: float = 0.0
    """The share of prefill instances that have a prefill to do."""
    queue_ms: float = 0.0
    """Work that is promised to a prefill instance and not done, on average."""
    decode_slots: float = 0.0
    """The share of all places in decode batches that are taken."""
    decode_kv: float = 0.0
    """The share of decode's KV memory that running requests use."""
    step_ms: float = 0.0
    """Predicted time between tokens, mean over the decode instances that run something."""
    waiting: int = 0
    """Requests that wait at the Conductor."""
    under_way: int = 0
    """All requests that have arrived and are not over."""


def pools_of(views: Iterable[InstanceView], now_us: Micros, waiting: int, under_way: int) -> Pools:
    """How full the pools of these instances are now."""
    prefills = busy = queue_us = decodes = running = seats = context = memory = stepping = 0
    step_us = 0
    for view in views:
        role = view.info.role
        if role != "decode":
            prefills += 1
            left_us = view.queue_us(now_us)
            queue_us += left_us
            busy += left_us > 0
        if role != "prefill":
            decodes += 1
            load = view.residencies
            there = len(load.active) + load.external.running
            running += there
            seats += view.info.max_seqs
            context += load.context + load.external.context
            memory += view.kv_tokens
            if there:
                stepping += 1
                step_us += view.tbt_now_us(0)
    return Pools(
        prefills=prefills,
        decodes=decodes,
        prefill_busy=busy / max(1, prefills),
        queue_ms=queue_us / max(1, prefills) / _PER_MS,
        decode_slots=min(1.0, running / max(1, seats)),
        decode_kv=min(1.0, context / max(1, memory)),
        step_ms=step_us / max(1, stepping) / _PER_MS,
        waiting=waiting,
        under_way=under_way,
    )


def heat_of(view: InstanceView, now_us: Micros) -> float:
    """How full one instance is, from 0 to 1: whether it has a prefill to do, or the larger share
    of its places in decode and of its KV memory that is taken."""
    busy = 0.0
    if view.info.role != "decode":
        busy = 1.0 if view.queue_us(now_us) > 0 else 0.0
    if view.info.role != "prefill":
        load = view.residencies
        there = len(load.active) + load.external.running
        context = load.context + load.external.context
        full = max(there / view.info.max_seqs, context / max(1, view.kv_tokens))
        busy = max(busy, min(1.0, full))
    return busy


class StoreLevels(msgspec.Struct, frozen=True):
    """The pool of KV blocks, as far as its master is known."""

    used_bytes: Bytes = 0
    capacity_bytes: Bytes = 0
    evicted: int = 0
    """Blocks since the master's start."""


class HistorySample(msgspec.Struct, frozen=True):
    """One span of time: counts of requests that were over in it, and levels at its end."""

    at_ms: int
    """Its end, since 1970."""
    in_time: int
    late: int
    failed: int
    cancelled: int
    engine_refused: int
    refused: tuple[int, ...]
    """By REASONS, and others last."""
    prompt_tokens: Tokens
    """Of requests that were placed; this and the next three are sums of both funnels of Reuse."""
    held_tokens: Tokens
    chosen_tokens: Tokens
    """The prefix that the chosen instance held."""
    promised_tokens: Tokens
    delivered_tokens: Tokens
    told_tokens: Tokens
    """The prompts of those whose engine reported what it reused."""
    output_tokens: Tokens
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    tbt_p50_ms: float | None
    tbt_p90_ms: float | None
    tbt_p99_ms: float | None
    prefill_busy: float
    queue_ms: float
    decode_slots: float
    decode_kv: float
    step_ms: float
    waiting: float
    under_way: float
    prefills: float
    decodes: float
    used_bytes: Bytes
    capacity_bytes: Bytes
    evicted: int


SCALARS = tuple(name for name in HistorySample.__struct_fields__ if name != "refused")
_FULLNESS = ("prefill_busy", "queue_ms", "decode_slots", "decode_kv", "step_ms")
_LEVELS = (*_FULLNESS, "waiting", "under_way", "prefills", "decodes")


class HeatColumn(msgspec.Struct, frozen=True):
    """How full each instance was in one span of time, in percent."""

    at_ms: int
    instances: tuple[InstanceId, ...]
    percents: bytes


class Ring:
    """Samples of one length, the latest ones."""

    def __init__(self, step_s: int, length: int, heat_s: int) -> None:
        """heat_s: the length of a column of `heat`, a multiple of step_s."""
        self.step_s = step_s
        self.heat_s = heat_s
        self.samples: deque[HistorySample] = deque(maxlen=length)
        self.heat: deque[HeatColumn] = deque(maxlen=length * step_s // heat_s)
        self._tally = Tally()
        self._sums = dict.fromkeys(_LEVELS, 0.0)
        self._count = 0
        self._heat: dict[InstanceId, float] = {}
        self._heat_count = 0

    def take(
        self,
        at_ms: int,
        tally: Tally,
        pools: Pools,
        heat: Mapping[InstanceId, float],
        store: StoreLevels,
    ) -> bool:
        """One second is over. Returns whether a sample is complete."""
        self._tally.merge(tally)
        for name in _LEVELS:
            self._sums[name] += getattr(pools, name)
        self._count += 1
        for name, value in heat.items():
            self._heat[name] = self._heat.get(name, 0.0) + value
        self._heat_count += 1
        if self._heat_count >= self.heat_s:
            shares = [min(100, round(100 * it / self.heat_s)) for it in self._heat.values()]
            self.heat.append(HeatColumn(at_ms, tuple(self._heat), bytes(shares)))
            self._heat = {}
            self._heat_count = 0
        if self._count < self.step_s:
            return False
        self.samples.append(self._sample(at_ms, store))
        self._tally = Tally()
        self._sums = dict.fromkeys(_LEVELS, 0.0)
        self._count = 0
        return True

    def _sample(self, at_ms: int, store: StoreLevels) -> HistorySample:
        tally = self._tally
        refused = [tally.refused.get(reason, 0) for reason in REASONS]
        others = sum(tally.refused.values()) - sum(refused)
        ttft = [tally.ttft.quantile_ms(share) for share in (0.5, 0.9, 0.99)]
        tbt = [tally.tbt.quantile_ms(share) for share in (0.5, 0.9, 0.99)]
        reported = tally.reuse.reported
        every = Funnel()
        every.merge(reported)
        every.merge(tally.reuse.unreported)
        mean = {name: round(total / self._count, 4) for name, total in self._sums.items()}
        return HistorySample(
            at_ms=at_ms,
            refused=(*refused, others),
            prompt_tokens=every.prompt,
            held_tokens=every.held,
            chosen_tokens=every.local,
            promised_tokens=every.promised,
            delivered_tokens=reported.delivered,
            told_tokens=reported.prompt,
            ttft_p50_ms=ttft[0],
            ttft_p90_ms=ttft[1],
            ttft_p99_ms=ttft[2],
            tbt_p50_ms=tbt[0],
            tbt_p90_ms=tbt[1],
            tbt_p99_ms=tbt[2],
            used_bytes=store.used_bytes,
            capacity_bytes=store.capacity_bytes,
            evicted=store.evicted,
            prefill_busy=mean["prefill_busy"],
            queue_ms=mean["queue_ms"],
            decode_slots=mean["decode_slots"],
            decode_kv=mean["decode_kv"],
            step_ms=mean["step_ms"],
            waiting=mean["waiting"],
            under_way=mean["under_way"],
            prefills=mean["prefills"],
            decodes=mean["decodes"],
            **{name: getattr(tally, name) for name in _COUNTS},
        )


class Pair:
    """Requests that went from one prefill instance to one decode instance; old ones fade."""

    __slots__ = ("failed", "moved_bytes", "requests", "took_us")

    def __init__(self) -> None:
        self.requests = 0.0
        self.failed = 0.0
        """Those that failed, or whose calls had to be made again."""
        self.moved_bytes = 0.0
        """KV of their prompts."""
        self.took_us = 0.0
        """From the decode call to its first token, where that was measured."""

    @property
    def bytes_per_s(self) -> int | None:
        """The speed of its transfers; None: nobody measured any."""
        return round(1e6 * self.moved_bytes / self.took_us) if self.took_us else None

    def fade(self, share: float) -> None:
        """Old requests count less."""
        self.requests *= share
        self.failed *= share
        self.moved_bytes *= share
        self.took_us *= share


class Chain(msgspec.Struct, frozen=True):
    """The blocks of one prompt that was asked for lately."""

    keys: Sequence[BlockKey]
    block_tokens: Tokens


class ClusterHistory:
    """See the module."""

    def __init__(self) -> None:
        self.rings = (Ring(1, 900, 5), Ring(15, 960, 60))
        """A quarter of an hour by seconds, and four hours by 15 seconds."""
        self.lane: deque[LaneEvent] = deque(maxlen=_MOST_EVENTS)
        self.pairs: dict[tuple[InstanceId, InstanceId], Pair] = {}
        self.chains: deque[Chain] = deque()
        """Prompts of the last requests; of many requests a second, some."""
        self.pools = Pools()
        """As of the last second."""
        self._chain_keys = 0
        self._chains_now = 0
        self._tally = Tally()
        self._minute: deque[Tally] = deque(maxlen=MINUTE)

    def ended(self, record: Record, block_bytes: Bytes, block_tokens: Tokens) -> None:
        """A request is over. block_bytes, block_tokens: of a block of its KV; 0: not known."""
        self._tally.take(record)
        decision = record.decision
        if decision is None or record.outcome == "refused" or not block_tokens:
            return
        if not decision.joint:
            self._paired(record, decision.prefill, decision.decode, block_bytes / block_tokens)
        if record.keys and self._chains_now < _CHAINS_A_SECOND:
            self._chains_now += 1
            self.chains.append(Chain(record.keys, block_tokens))
            self._chain_keys += len(record.keys)
            while self._chain_keys > _MOST_CHAIN_KEYS:
                self._chain_keys -= len(self.chains.popleft().keys)

    def _paired(
        self, record: Record, prefill: InstanceId, decode: InstanceId, token_bytes: float
    ) -> None:
        pair = self.pairs.get((prefill, decode))
        if pair is None:
            if len(self.pairs) >= _MOST_PAIRS:
                return
            pair = self.pairs[prefill, decode] = Pair()
        pair.requests += 1
        pair.failed += record.outcome == "failed" or record.attempts > 1
        measured = record.measured
        if measured.handover_us:
            waited_us = 0 if measured.decode is None else measured.decode.queue_us
            pair.moved_bytes += record.prompt_tokens * token_bytes
            pair.took_us += measured.handover_us - waited_us

    def busiest_pairs(self, most: int) -> list[tuple[tuple[InstanceId, InstanceId], Pair]]:
        """The pairs between the `most` prefill and the `most` decode instances with the most
        requests."""
        busiest = []
        for side in (0, 1):
            sums: dict[InstanceId, float] = {}
            for key, pair in self.pairs.items():
                sums[key[side]] = sums.get(key[side], 0.0) + pair.requests
            busiest.append(set(sorted(sums, key=lambda name: -sums[name])[:most]))
        return [
            (key, pair)
            for key, pair in self.pairs.items()
            if key[0] in busiest[0] and key[1] in busiest[1]
        ]

    def happened(self, *events: LaneEvent) -> None:
        """Something happened to the cluster."""
        self.lane.extend(events)

    def second(
        self, at_ms: int, pools: Pools, heat: Mapping[InstanceId, float], store: StoreLevels
    ) -> None:
        """A second is over; at_ms: now, since 1970."""
        tally = self._tally
        self._tally = Tally()
        self._minute.append(tally)
        self._chains_now = 0
        self.pools = pools
        fine, coarse = self.rings
        fine.take(at_ms, tally, pools, heat, store)
        if coarse.take(at_ms, tally, pools, heat, store):
            self._fade()

    def _fade(self) -> None:
        for key, pair in list(self.pairs.items()):
            pair.fade(_FADES)
            if pair.requests < 0.05:
                del self.pairs[key]

    def last_minute(self) -> Tally:
        """What became of the requests that were over in the last 60 seconds."""
        found = Tally()
        for tally in self._minute:
            found.merge(tally)
        return found

    def seconds(self) -> int:
        """How many seconds `last_minute` is about."""
        return len(self._minute)

    def mean_pools(self) -> Pools:
        """How full the pools were in the last 60 seconds, on average; their sizes as of now."""
        samples = list(self.rings[0].samples)[-MINUTE:]
        if not samples:
            return self.pools
        means = {
            name: sum([getattr(it, name) for it in samples]) / len(samples) for name in _FULLNESS
        }
        return msgspec.structs.replace(self.pools, **means)

    def ring(self, step_s: Literal[1, 15]) -> Ring:
        """The samples of this length."""
        return self.rings[0 if step_s == 1 else 1]


def columns(samples: Sequence[HistorySample]) -> dict[str, list[float | int | None]]:
    """Samples by column, for charts. Reasons for which nothing was refused are left out."""
    table = {name: [getattr(it, name) for it in samples] for name in SCALARS}
    for place, reason in enumerate((*REASONS, "other")):
        counts = [it.refused[place] for it in samples]
        if any(counts):
            table[f"refused_{reason}"] = counts
    return table

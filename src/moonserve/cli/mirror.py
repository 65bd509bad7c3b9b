"""From a live cluster to a simulated one: a Profile of its measurements, a Setup of its parts.

`moonserve replay --profile-out` and `--compare` use it. It reads the gateway's API before and after
a run, and the workers' own metrics for what a call takes beside its work. It tunes nothing: the
cluster or its clients measured every number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from moonserve.cli.client import Client
from moonserve.core.errors import ConfigError, EngineFailed
from moonserve.core.schedule.profiles import Profile
from moonserve.core.schedule.tuning import Tuning
from moonserve.core.units import Bytes, Micros, Tokens

if TYPE_CHECKING:
    from moonserve.live.replay import ReplayResult
    from moonserve.sim.setup import Setup
    from moonserve.sim.trace import Trace

_TTFT = "vllm:time_to_first_token_seconds"
_HAND_OVER = "moonserve_kv_hand_over_seconds"
_MUCH, _MUCH_US = 1 / 3, 20_000
"""The share of a TTFT, or the time, above which calls and hand-overs are worth a warning."""
_COMPARED = (
    "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "tbt_mean_ms", "tbt_p50_ms", "tbt_p90_ms",
    "gap_p50_ms", "hit_rate_tokens", "span_s",
)  # fmt: skip


class _Cost(msgspec.Struct):
    pass_us: tuple[float, float, float, float, float, float, float]
    load_us: tuple[float, float]


class _Instance(msgspec.Struct):
    """What /api/instances returns of one instance, as far as it is read here."""

    id: str
    role: str
    url: str
    kv_blocks: int
    block_bytes: Bytes
    block_size: Tokens
    max_seqs: int
    chunk_tokens: Tokens
    cost: _Cost
    layers: int = 0


class _Segment(msgspec.Struct):
    id: str
    capacity_bytes: Bytes


class _Store(msgspec.Struct):
    segments: list[_Segment]


class _Stats(msgspec.Struct):
    store: _Store
    tuning: Tuning
    placed: int
    waited_us: Micros


class ClusterWatch:
    """Looks at a cluster when created, and again at `end`; then has a profile of the time
    between."""

    def __init__(self, client: Client, block_size: Tokens) -> None:
        """`block_size`: the trace's; the cluster's must be equal. Raises ConfigError."""
        self._client = client
        self._instances, self._stats = self._look()
        roles = {it.role for it in self._instances}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise ConfigError("this cluster has no prefill or no decode instances", "url")
        own = self._instances[0].block_size
        if own != block_size:
            raise ConfigError(
                f"the cluster's blocks have {own} tokens, the trace's {block_size}; "
                "choose --scale (or up's --block-size) so that they are equal",
                "scale",
            )
        self._before = self._waits()

    def end(self, name: str, answers: Sequence[ReplayResult]) -> None:
        """The run is over: fit the profile."""
        self._instances, self._stats = self._look()
        waits = [after - before for after, before in zip(self._waits(), self._before, strict=True)]
        self.profile = self._fit(name, answers, waits)

    def simulate(self, trace: Trace) -> dict[str, Any]:
        """The figures of the same rows on the same cluster, simulated with the fitted profile."""
        import numpy as np

        from moonserve.sim.cluster import Simulation
        from moonserve.sim.metrics import mean, measure

        sim = Simulation(trace, self.setup())
        sim.run()
        result = measure(sim, 0.0)
        tbts = [row.tbt_ms for row in result.rows if row.tbt_ms is not None]
        found = {"tbt_mean_ms": mean(np.array(tbts)), **result.summary}
        return {name: found[name] for name in _COMPARED}

    def setup(self) -> Setup:
        """The cluster, as the simulator takes it. Only the profile is measured."""
        from moonserve.sim.setup import Setup

        at_prefill = self._of("prefill")
        at_decode = self._of("decode")
        mixed = at_prefill[0].role == "both"
        room = {it.id: it.capacity_bytes for it in self._stats.store.segments}
        blocks = [room.get(it.id, 0) // it.block_bytes for it in at_prefill]
        return Setup(
            prefill=0 if mixed else len(at_prefill),
            decode=0 if mixed else len(at_decode),
            mixed=len(at_prefill) if mixed else 0,
            profile=self.profile,
            tuning=self._stats.tuning,
            cache_blocks=min(blocks),
            one_copy=True,
            prefill_seqs=at_prefill[0].max_seqs,
            chunk_tokens=at_prefill[0].chunk_tokens,
            decode_seqs=at_decode[0].max_seqs,
            ahead=0,
            overlap=False,
        )

    def _of(self, role: str) -> list[_Instance]:
        return [it for it in self._instances if it.role in (role, "both")]

    def _look(self) -> tuple[list[_Instance], _Stats]:
        try:
            return (
                self._client.get_as("/api/instances", list[_Instance]),
                self._client.get_as("/api/stats", _Stats),
            )
        except EngineFailed as err:
            raise ConfigError(
                f"no moonserve gateway of this version ({err}); leave out --profile-out and "
                "--compare",
                "url",
            ) from None

    def _waits(self) -> tuple[float, ...]:
        """(seconds, count) of prefill instances' first tokens and hand-overs, then of placements.

        The last is the time that requests waited at the Conductor; a simulation adds that time by
        itself.
        """
        sums = [0.0] * 4
        for instance in self._of("prefill"):
            page = Client(instance.url, token="").text("/metrics")
            for at, name in enumerate((_TTFT, _HAND_OVER)):
                sums[2 * at] += _value(page, f"{name}_sum")
                sums[2 * at + 1] += _value(page, f"{name}_count")
        return (*sums, self._stats.waited_us / 1e6, self._stats.placed)

    def _fit(self, name: str, answers: Sequence[ReplayResult], waited: Sequence[float]) -> Profile:
        """Fit the means over the instances of a role; the rest of what clients waited belongs to
        the calls."""
        first_s, firsts, hand_s, hands, waited_s, placed = waited
        ttft_us = _mean([a.tokens_us[0] - a.late_us for a in answers if a.tokens_us])
        waits = ((first_s, firsts), (waited_s, placed))
        inside_us = sum(1e6 * seconds / count for seconds, count in waits if count)
        at_prefill = [it.cost.pass_us for it in self._of("prefill")]
        at_decode = [it.cost.pass_us for it in self._of("decode")]
        loads = [it.cost.load_us for it in self._instances]
        one = self._instances[0]
        call_us = ttft_us - inside_us
        hand_over_us = 1e6 * hand_s / hands if hands else 0.0
        late_us = max((a.late_us for a in answers), default=0)
        self.doubts = list(_doubts(ttft_us, call_us, hand_over_us, late_us, placed - len(answers)))
        fitted = [_mean([c[i] for c in (at_prefill if i < 4 else at_decode)]) for i in range(7)]
        return Profile(
            name=f"live-{name}",
            source=f"fitted from {len(answers)} requests of {name} on {len(self._instances)} "
            "live instances",
            pass_us=msgspec.convert(fitted, tuple[float, float, float, float, float, float, float]),
            kv_bytes_per_token=one.block_bytes // one.block_size,
            link_bytes_per_s=1e6 / max(1e-9, _mean([per_byte for _, per_byte in loads])),
            kv_tokens=min(it.kv_blocks for it in self._of("decode")) * one.block_size,
            load_base_us=_mean([base for base, _ in loads]),
            call_us=max(0.0, call_us),
            hand_over_us=hand_over_us,
            layers=one.layers,
        )


def _doubts(
    ttft_us: float, call_us: float, hand_over_us: float, late_us: float, others: float
) -> Iterator[str]:
    """Reasons why the profile may describe this run more than the cluster. `others`: requests of
    other clients."""
    if others > 0:
        yield f"requests of others were served meanwhile ({others:,.0f}), and are in its means"
    beside_us = call_us + hand_over_us
    if beside_us > max(_MUCH_US, _MUCH * ttft_us):
        yield (
            f"of a mean TTFT of {ttft_us / 1e3:,.0f} ms, {beside_us / 1e3:,.0f} ms went into calls "
            "and hand-overs, which need nothing but CPUs: they were short of CPUs, and will not be "
            "at another load"
        )
    if late_us > max(_MUCH_US, _MUCH * ttft_us):
        yield f"requests were sent up to {late_us / 1e3:,.0f} ms late: this client was overloaded"
    if call_us < 0:
        yield "first tokens came sooner than the workers say they made them; call_us is set to 0"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _value(page: str, name: str) -> float:
    """The sum of a metric's samples on a page of metrics."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, page, re.MULTILINE))

"""What the Conductor counts, in Prometheus's form.

Control lists the collectors. They read the Conductor's counts when /metrics is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moonserve.core.schedule.account import Account
from moonserve.core.schedule.hot import SKIPPED
from moonserve.live.control.loop import ConductorLoop


class Predictions(Collector):
    """How far off the Conductor's predictions were: bias (predicted less actual), and sizes."""

    def __init__(self, conductor: ConductorLoop) -> None:
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the registry; nothing is told before there is something to compare."""
        for name, text, errors, unit in (
            (
                "moonserve_decode_tbt_error_seconds",
                "TBT predicted on admission for when prefill ends, less what it was then.",
                self._conductor.errors.tbt,
                1e6,
            ),
            (
                "moonserve_output_error_tokens",
                "Output length predicted when decode began, less what it was.",
                self._conductor.errors.output,
                1.0,
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=("figure",))
            parts = {"bias": errors.bias, "p50": errors.quantile(0.5), "p90": errors.quantile(0.9)}
            for figure, value in parts.items():
                if value is not None:
                    family.add_metric((figure,), value / unit)
            yield family


class Served(Collector):
    """What the Conductor's account says: goodput, prefill for nothing, prompts shared."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        it = self._account
        for name, text, count in (
            ("good_requests", "Served within their objectives; TBT by the mean gap.", it.good),
            ("good_tokens", "Input and output tokens of those.", it.good_tokens),
            (
                "wasted_prefill_seconds",
                "Prefill, as predicted, of what was dropped or failed later, or done again.",
                it.wasted_us / 1e6,
            ),
            ("shared_prefills", "Prompts that a group of instances shares.", it.shared),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)


class Copies(Collector):
    """Copies of prefixes: what the Conductor wanted, what came of it, what kept it from more."""

    def __init__(self, conductor: ConductorLoop) -> None:
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        hot = self._conductor.copies
        copies = CounterMetricFamily(
            "moonserve_spread_copies", "Copies of hot prefixes, by stage.", labels=("stage",)
        )
        for stage in ("started", "done", "failed"):
            copies.add_metric((stage,), hot.done[stage])
        yield copies
        skipped = CounterMetricFamily(
            "moonserve_spread_skipped", "Looks at hot prefixes without a copy.", labels=("reason",)
        )
        for reason in SKIPPED:
            skipped.add_metric((reason,), hot.skipped[reason])
        yield skipped
        for name, text, count in (
            ("spread_copied_bytes", "Bytes of hot prefixes that were copied.", hot.done["bytes"]),
            ("kept_blocks", "Blocks that prefill loaded and keeps.", self._conductor.kept_blocks),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)
        for name, text, count in (
            ("spread_copies_under_way", "Copies of hot prefixes.", len(hot)),
            ("spread_bytes_under_way", "What is still to come of them.", hot.bytes_under_way),
        ):
            yield GaugeMetricFamily(f"moonserve_{name}", text, value=count)


class Alarms(Collector):
    """How much is wrong."""

    def __init__(self, alarms: Callable[[], list[str]]) -> None:
        self._alarms = alarms

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        text = "Things that somebody should look at; /health says which."
        yield GaugeMetricFamily("moonserve_alarms", text, value=float(len(self._alarms())))

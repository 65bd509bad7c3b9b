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
    """The errors of the Conductor's predictions: bias (predicted less actual), and quantiles."""

    def __init__(self, conductor: ConductorLoop) -> None:
        self._conductor = conductor

    def collect(self) -> Iterable[Metric]:
        """Called by the registry. Before the first comparison there is no sample."""
        for name, text, errors, unit in (
            (
                "moonserve_decode_tbt_error_seconds",
                "TBT predicted at admission for the end of prefill, less the TBT then.",
                self._conductor.errors.tbt,
                1e6,
            ),
            (
                "moonserve_output_error_tokens",
                "Output length predicted at the start of decode, less the real length.",
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
    """The counts of the Conductor's account: goodput, wasted prefill, shared prompts."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        it = self._account
        for name, text, count in (
            (
                "good_requests",
                "Requests served within their SLOs; TBT is the mean of a request.",
                it.good,
            ),
            ("good_tokens", "Input and output tokens of those requests.", it.good_tokens),
            (
                "wasted_prefill_seconds",
                "Predicted prefill time of requests later dropped, failed or prefilled again.",
                it.wasted_us / 1e6,
            ),
            ("shared_prefills", "Prompts that a group of instances prefilled together.", it.shared),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)


class Copies(Collector):
    """Copies of hot prefixes: how many started, succeeded and failed, and why others did not."""

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
            "moonserve_spread_skipped",
            "Hot prefixes that were not copied, by reason.",
            labels=("reason",),
        )
        for reason in SKIPPED:
            skipped.add_metric((reason,), hot.skipped[reason])
        yield skipped
        for name, text, count in (
            ("spread_copied_bytes", "Copied bytes of hot prefixes.", hot.done["bytes"]),
            (
                "kept_blocks",
                "Blocks that prefill instances loaded and keep.",
                self._conductor.kept_blocks,
            ),
        ):
            yield CounterMetricFamily(f"moonserve_{name}", text, value=count)
        for name, text, count in (
            ("spread_copies_under_way", "Copies of hot prefixes that run now.", len(hot)),
            (
                "spread_bytes_under_way",
                "Bytes that these copies still have to move.",
                hot.bytes_under_way,
            ),
        ):
            yield GaugeMetricFamily(f"moonserve_{name}", text, value=count)


class Alarms(Collector):
    """The number of alarms."""

    def __init__(self, alarms: Callable[[], list[str]]) -> None:
        self._alarms = alarms

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        text = "Alarms that an operator should look at; /health lists them."
        yield GaugeMetricFamily("moonserve_alarms", text, value=float(len(self._alarms())))

"""The page of metrics: what is written, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moonserve.live import exposition
from moonserve.live.drive.metrics import Buckets
from moonserve.live.exposition import exposed


def awkward() -> Iterator[Metric]:
    """Families with text to escape, extreme values, no samples, and a histogram."""
    gauge = GaugeMetricFamily("g", 'A "gauge"\nof two \\ lines', labels=("b", "a"))
    for at, value in enumerate((1.0, float("inf"), float("-inf"), float("nan"), 1e21, 5e-324)):
        gauge.add_metric((f'"{at}"\n\\', "ü"), value)
    yield gauge
    yield CounterMetricFamily("c", "Without labels.", value=12345678901234)
    yield GaugeMetricFamily("none", "Nothing yet.", labels=("x",))
    buckets = Buckets((0.1, 1))
    for seconds in (0.05, 0.5, 5.0):
        buckets.observe(seconds)
    yield buckets.family("h_seconds", "A histogram.")


def test_the_page_is_what_prometheus_client_writes() -> None:
    """Byte for byte."""
    registry = CollectorRegistry(auto_describe=False)
    registry.collect = awkward  # type: ignore[method-assign]
    assert asyncio.run(exposed(awkward())) == generate_latest(registry)
    ours = CollectorRegistry()
    Gauge("made_by_it", "As a library does.", ("x",), registry=ours).labels("y").set(3)
    assert asyncio.run(exposed(ours.collect())) == generate_latest(ours)


def test_requests_go_on_while_a_page_is_made() -> None:
    """Other tasks have a turn between families once one has taken its time."""
    order: list[str] = []

    def families() -> Iterator[Metric]:
        for name in ("a", "b", "c"):
            order.append(name)
            end_s = time.perf_counter() + exposition._TURN_S * (name == "b")
            while time.perf_counter() <= end_s:
                pass
            yield GaugeMetricFamily(name, "Slow to collect.", value=1)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(order.append, "request")
        turn = exposition.Turn()
        await exposed(families(), turn)
        assert turn.worked_s >= exposition._TURN_S  # after it, a scrape pauses in proportion

    asyncio.run(main())
    assert order.index("request") < order.index("c")

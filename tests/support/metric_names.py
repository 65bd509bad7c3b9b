"""Every metric of every process, one line each, from gateways and a worker on one event loop.

`python -m tests.support.metric_names > tests/fixtures/metrics.txt` writes the list that is frozen.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

from prometheus_client.metrics_core import Metric

from moonserve.live.control import control
from moonserve.live.control.config import GatewayConfig
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.model.catalog import DEFAULT_MODEL
from moonserve.live.process.gateway import Gateway
from tests.support.inproc import TOKEN, site
from tests.support.registry import MemoryRegistry

FROZEN = Path(__file__).parents[1] / "fixtures" / "metrics.txt"


def frozen() -> dict[str, str]:
    """The line of each metric that is frozen, by its name."""
    return {re.split("[{ ]", line)[0]: line for line in FROZEN.read_text().splitlines()}


def described(families: Iterable[Metric]) -> dict[str, str]:
    """A line for each metric: name, labels, type and help."""
    return {_name(it): _line(it) for it in families}


def _name(family: Metric) -> str:
    return family.name + "_total" * (family.type == "counter")


def _line(family: Metric) -> str:
    labels = dict.fromkeys(getattr(family, "_labelnames", ()))
    for sample in family.samples:
        labels |= dict.fromkeys(sample.labels)
    names = ",".join(sorted(labels.keys() - {"le"}))
    of = f"{{{names}}}" if names else ""
    return f"{_name(family)}{of} {family.type}: {family.documentation}"


async def of_all_processes() -> dict[str, str]:
    """Every metric that a process of a cluster can have."""
    found: dict[str, str] = {}
    async with asyncio.timeout(60), site() as it:
        worker = await it.add("p0", "prefill")
        await it.add("d0", "decode")
        await it.tokens(list(range(40)), 2)
        await it.settle()
        found |= described(it.gateway._front.metrics.registry.collect())  # type: ignore[union-attr]
        found |= described(worker.runner._bench.metrics.registry.collect())
    with patch.object(control, "open_registry", _in_memory):
        config = GatewayConfig(model=DEFAULT_MODEL, token=TOKEN, port=0, registry="etcd://memory")
        engine = InstanceSpec(name="e0", url="http://127.0.0.1:9", role="both")
        gateway = await Gateway.start(config, [engine])
        found |= described(gateway._front.metrics.registry.collect())  # type: ignore[union-attr]
        await gateway.stop(0)
    return dict(sorted(found.items()))


async def _in_memory(url: str, tls: object) -> MemoryRegistry | None:
    return MemoryRegistry() if url else None


if __name__ == "__main__":
    print("\n".join(asyncio.run(of_all_processes()).values()))

"""The gateway before real vLLM engines that hand KV over by NIXL.

Opt-in, by `make test-vllm`. The engines of a module end with it: there is memory for few.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.clusters import Cluster, frees_both, same_as_one_engine, same_by_other_apis
from tests.vllm.engines import Engine, running
from tests.vllm.gateways import described, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.model]


@pytest.fixture(scope="module")
def nixl(python: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One engine that prefills and one that decodes, by NIXL."""
    logs = tmp_path_factory.mktemp("nixl")
    one = Engine("p0", folder, python, logs).by_nixl("kv_producer")
    two = Engine("d0", folder, python, logs).by_nixl("kv_consumer")
    with running(one, two):
        instances = [
            described(one, "prefill", "nixl", folder),
            described(two, "decode", "nixl", folder),
        ]
        with gateway(instances, logs, alone_tokens=256) as front:
            yield Cluster((one,), two, front)


def test_nixl_gives_what_one_engine_gives(nixl: Cluster) -> None:
    """By NIXL, greedy output equals one engine's, the second time too."""
    same_as_one_engine(nixl, fresh=True)
    same_as_one_engine(nixl, fresh=False)


def test_nixl_serves_responses_and_messages(nixl: Cluster) -> None:
    """They are handed over as chat is."""
    same_by_other_apis(nixl)


def test_nixl_frees_both_sides(nixl: Cluster) -> None:
    """A client that leaves is let go of by both engines."""
    frees_both(nixl)

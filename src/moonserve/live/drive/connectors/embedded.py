"""The embedded connector: KV goes through the store, under a lease that prefill and decode share.

The parameters have the form of vLLM's connectors, so that our workers also serve behind other
routers: decode gets prefill's reply parameters unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moonserve.core.schedule.actions import Decision, Stage
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import LeaseId


def prefill_params(lease: LeaseId, decision: Decision) -> dict[str, Any]:
    """The parameters of a prefill: publish KV for a remote decode, and reuse no more than was
    decided."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "lease": lease,
        "reuse_tokens": decision.reused_tokens,
    }


def group_params(
    lease: LeaseId, decision: Decision, group: Sequence[InstanceInfo]
) -> Iterator[tuple[Stage, InstanceInfo, dict[str, Any]]]:
    """The parameters for each member of a group: where its part begins, and which instance has the
    KV before it."""
    source = None
    for stage, to in zip(decision.stages, group, strict=True):
        followed = stage is not decision.stages[-1]
        part = {"start": stage.start, "source": source, "followed": followed}
        yield stage, to, prefill_params(lease, decision) | {"part": part}
        source = to.url


def decode_params(prefill_reply: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a decode: those that prefill returned."""
    return prefill_reply

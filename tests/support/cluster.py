"""Instances for Conductor tests: small numbers that can be checked by hand."""

from moonserve.core.kv.keys import Namespace
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import InstanceInfo, Role
from moonserve.core.schedule.view import InstanceView
from moonserve.core.units import InstanceId, SegmentId

BLOCK = 4
NAMESPACE = Namespace("m", "r", "l", BLOCK)


def info(name: str, role: Role, epoch: int = 1, max_seqs: int = 8) -> InstanceInfo:
    """An instance whose segment has the instance's name."""
    return InstanceInfo(
        id=InstanceId(name),
        epoch=epoch,
        role=role,
        url=f"http://{name}",
        model="m",
        namespace=NAMESPACE,
        kv_blocks=100,
        block_bytes=1_000,
        max_seqs=max_seqs,
        chunk_tokens=1_000,
        max_len=4_096,
        segment=SegmentId(name),
        layers=4,
    )


def exact(joining: InstanceInfo) -> Cost:
    """10 us a new token, a load 5 us and 5 per 1,000 bytes; TBT is 100 + 10 members + contexts."""
    return Cost((0, 10, 0, 0, 100, 10, 1), (5, 0.005), learns=False)


def view(name: str, role: Role, max_seqs: int = 8) -> InstanceView:
    """A view with exact costs."""
    joining = info(name, role, max_seqs=max_seqs)
    return InstanceView(joining, now_us=0, cost=exact(joining))

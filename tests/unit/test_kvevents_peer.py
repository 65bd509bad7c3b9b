"""vLLM's own classes read what our workers publish; needs vLLM beside this project."""

import msgspec
import pytest

from moonserve.core.kvevents import Cleared, KvEvent, Removed
from moonserve.live.kvevents.wire import decode_batch, encode_batch
from tests.support.kvevents import stored

EVENTS: list[KvEvent] = [
    stored([*range(96)], 32),
    stored([*range(128)], 32, 2, "CPU"),
    Removed([2**64 - 1, 1], "CPU"),
    Cleared(),
]


@pytest.mark.peer
def test_vllm_reads_our_batches() -> None:
    """Each field arrives, and vLLM writes the same bytes again, which we read."""
    theirs = pytest.importorskip(
        "vllm.distributed.kv_events", reason="vLLM is not installed beside this project"
    )
    sent = encode_batch(2.5, EVENTS, 3)
    batch = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(sent)
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 3)
    for ours, other in zip(EVENTS, batch.events, strict=True):
        assert type(other).__name__ == ours.__struct_config__.tag
        for name in other.__struct_fields__:
            assert getattr(other, name) == getattr(ours, name)
    back = msgspec.msgpack.encode(batch)
    assert back == sent
    assert [*decode_batch(back).events] == EVENTS

"""Limits of a StoreClient: an impossible call is refused before it is sent."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from moonserve.core.errors import BadRequest
from moonserve.core.store.master import Master
from moonserve.core.store.words import Address, Mount, PutOptions, Terms, Ticket
from moonserve.core.units import SegmentId
from moonserve.live.store import operations
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.objects import Objects


async def nobody(op: str, body: bytes, deadline_s: float) -> bytes:
    """A master that must not be called."""
    raise AssertionError(op)


def refused(ask: Callable[[StoreClient], Awaitable[object]]) -> BadRequest:
    """The error that a client without a segment raises at once."""

    async def body() -> BadRequest:
        settings = StoreSettings(segment=SegmentId("c"), epoch=1, capacity_bytes=0, token=b"")
        client = StoreClient(nobody, settings)
        try:
            with pytest.raises(BadRequest) as caught:
                await ask(client)
        finally:
            await client.close()
        return caught.value

    return asyncio.run(body())


@pytest.mark.parametrize("size", [0, -1, 1 << 70])
def test_an_impossible_size_is_not_evicted(size: int) -> None:
    """The error has the size and its limits."""
    error = refused(lambda client: client.evict(SegmentId("s"), size))
    assert error.param == "size"
    assert str(error) == f"size must be 1 to {1 << 62} bytes, not {size}"


@pytest.mark.parametrize("tenant", ["é\ud800", "t" * 257])
def test_a_tenant_that_cannot_be_encoded_is_refused(tenant: str) -> None:
    """Neither half characters nor a name without end."""
    options = PutOptions(tenant=tenant, blocks=False)
    error = refused(lambda client: Objects(client).put([(b"k", memoryview(b"v"))], options))
    assert error.param == "tenant"


@pytest.mark.parametrize("checksum", [-1, 1 << 64])
def test_a_checksum_that_is_none_is_refused(checksum: int) -> None:
    """The master keeps checksums in 64 bits: another number is an error of the call."""
    body = b"\x92\x91\x92\x02" + (b"\xff" if checksum < 0 else b"\xca\x5f\x80\x00\x00") + b"\xc0"
    with pytest.raises(BadRequest, match="put_end"):
        operations.PUT_END.answer(Master(Terms(), 1), 0, body)


def test_the_largest_checksum_is_kept() -> None:
    """All 64 bits come back."""
    master = Master(Terms(), 1)
    master.mount(0, Mount(SegmentId("s"), 1, 1 << 20, Address("", 0, "", b"")))
    [ticket] = master.put_start(0, SegmentId("s"), [(b"k", 64)], None)
    assert isinstance(ticket, Ticket)
    body = msgspec.msgpack.encode([[[ticket.id, (1 << 64) - 1]], None])
    operations.PUT_END.answer(master, 0, body)
    found = master.locate(b"k")
    assert found is not None
    assert found.checksum == (1 << 64) - 1

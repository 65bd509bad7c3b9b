"""Limits of a StoreClient: an impossible call is refused before it is sent."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moonserve.core.errors import BadRequest
from moonserve.core.store.words import PutOptions
from moonserve.core.units import SegmentId
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

"""A proxy of the tests: it speaks Envoy's external processing with a picker, message by message.

`Exchange` is one request of a client. It sends what Envoy sends, and keeps what the picker answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.struct_pb2 import Struct

from moonserve.live.picker.protocol import DESTINATION, NAMESPACE, SERVED, SUBSET, read_headers

DUPLEX, BUFFERED, NONE = (
    ProcessingMode.FULL_DUPLEX_STREAMED,
    ProcessingMode.BUFFERED,
    ProcessingMode.NONE,
)


def header_map(fields: Mapping[str, str]) -> HeaderMap:
    """Headers as Envoy sends them."""
    made = [HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
    return HeaderMap(headers=made)


def metadata(namespace: str, fields: Mapping[str, Any]) -> Metadata:
    """Metadata of one namespace."""
    value = Struct()
    value.update(dict(fields))
    return Metadata(filter_metadata={namespace: value})


def request_head(
    fields: Mapping[str, str] | None = None,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    ends: bool = False,
    mode: int = DUPLEX,
    reply_mode: int = NONE,
    subset: Sequence[str] | str | None = None,
) -> ProcessingRequest:
    """The first message of a request."""
    headers = {":method": method, ":path": path, "content-type": "application/json"}
    head = HttpHeaders(headers=header_map({**headers, **(fields or {})}), end_of_stream=ends)
    modes = ProtocolConfiguration(request_body_mode=mode, response_body_mode=reply_mode)
    message = ProcessingRequest(request_headers=head, protocol_config=modes)
    if subset is not None:
        given = subset if isinstance(subset, str) else list(subset)
        message.metadata_context.CopyFrom(metadata("envoy.lb.subset_hint", {SUBSET: given}))
    return message


def request_body(data: bytes, ends: bool = True) -> ProcessingRequest:
    """A piece of a request's body."""
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=ends))


def request_trailers() -> ProcessingRequest:
    """The trailers of a request."""
    return ProcessingRequest(request_trailers=HttpTrailers())


def reply_head(status: int = 200, served: str = "", ends: bool = False) -> ProcessingRequest:
    """The headers of a reply."""
    head = HttpHeaders(headers=header_map({":status": str(status)}), end_of_stream=ends)
    message = ProcessingRequest(response_headers=head)
    if served:
        message.metadata_context.CopyFrom(metadata(NAMESPACE, {SERVED: served}))
    return message


def reply_body(data: bytes, ends: bool = False) -> ProcessingRequest:
    """A piece of a reply's body."""
    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=ends))


def destinations(reply: ProcessingResponse) -> list[str]:
    """The endpoints of a pick: the header and the metadata must agree."""
    kind = reply.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), reply
    fields = mutated(reply)
    told = reply.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value
    assert fields[DESTINATION] == told
    return told.split(",")


def mutated(reply: ProcessingResponse) -> dict[str, str]:
    """The headers that a reply sets."""
    mutation = getattr(reply, reply.WhichOneof("response")).response.header_mutation
    return read_headers(HeaderMap(headers=[it.header for it in mutation.set_headers]))


class Exchange:
    """One request, over one gRPC stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = ExternalProcessorStub(channel).Process()
        self._replies: asyncio.Queue[ProcessingResponse | Exception | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Keep what the picker answers, also while the test sends more."""
        try:
            while (found := await self._call.read()) is not grpc.aio.EOF:
                self._replies.put_nowait(found)
            self._replies.put_nowait(None)
        except grpc.aio.AioRpcError as error:
            self._replies.put_nowait(error)

    async def send(self, *messages: ProcessingRequest) -> None:
        """Send these. What comes after the picker's last answer is lost."""
        for message in messages:
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    async def _next(self) -> ProcessingResponse | None:
        async with asyncio.timeout(10):
            found = await self._replies.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def reply(self) -> ProcessingResponse:
        """The picker's next message."""
        found = await self._next()
        assert found is not None, "the picker has ended the stream"
        return found

    async def ended(self) -> bool:
        """Whether the picker has ended the stream and sends no more."""
        return await self._next() is None

    async def ask(self, body: bytes, **head: Any) -> ProcessingResponse:
        """Send a request; the answer that has the endpoints, or the refusal."""
        await self.send(request_head(**head), request_body(body))
        return await self.reply()

    def cancel(self) -> None:
        """The client has gone, or its reply is whole."""
        self._call.cancel()

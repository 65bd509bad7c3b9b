"""The gRPC server of a picker: external processing for the proxy, and gRPC's health service.

A part of the picker's process. Each request of a client is one call, which ends as the proxy ends
it: most often by a reset of its stream. `connection` has HTTP/2 and gRPC's framing.
"""

from __future__ import annotations

import asyncio
import contextlib

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from moonserve.core.units import Bytes
from moonserve.live.http.handshakes import TlsListener
from moonserve.live.http.server import ProcessPart, listening
from moonserve.live.picker.connection import (
    INVALID,
    NOT_FOUND,
    CallBounds,
    CallRefused,
    CallServing,
    GrpcCall,
    GrpcConnection,
)
from moonserve.live.picker.front import PickerFront
from moonserve.live.store.settings import address
from moonserve.live.tls.contexts import ClientAuth, Tls

LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = range(4)
"""Statuses of gRPC's health service."""
_PROCESS = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_CHECK = b"/grpc.health.v1.Health/Check"
_WATCH = b"/grpc.health.v1.Health/Watch"
_LOOK_S = 1.0
_STOP_S = 1.0
_MORE_STREAMS = 1_024
"""Streams beside those of requests that may be under way: their bodies come, or are refused."""
_SHARED_STREAMS = 64
"""Streams of one connection where pickers share a port: a proxy with more opens further ones, which
the kernel gives to other pickers."""
_ROOM: Bytes = 1 << 20
"""Of a message, beside a body."""


class PickerServer(ProcessPart):
    """See the module."""

    def __init__(
        self,
        front: PickerFront,
        host: str,
        port: int,
        *,
        most: Bytes,
        streams: int,
        tls: Tls | None,
        client_auth: ClientAuth,
        shared_s: float | None = None,
    ) -> None:
        """most: the largest body; streams: requests that may be under way at once. shared_s: other
        pickers listen at this port too, and requests get so long when this one leaves; None: they
        do not."""
        self._host = host
        self.port = port
        """0 until `start`, if any free one is to be taken."""
        self._tls = tls
        self._client_auth = client_auth
        self._shared_s = shared_s
        calls = streams + _MORE_STREAMS
        self._serving = CallServing(
            {
                _PROCESS: _Processor(front).process,
                _CHECK: _Health(front).check,
                _WATCH: _Health(front).watch,
            },
            CallBounds(most + _ROOM, calls if shared_s is None else _SHARED_STREAMS, calls),
        )
        self._listener: asyncio.Server | TlsListener | None = None

    async def start(self, port: int) -> None:
        """Listen. Raises ConfigError."""
        tls = None if self._tls is None else self._tls.listener(self._client_auth, ("h2",))
        self._listener = await listening(
            lambda: GrpcConnection(self._serving),
            self._host,
            self.port,
            "picker_port",
            shared=self._shared_s is not None,
            tls=tls,
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        self.proxies_at = address(self._host, self.port)

    async def stop(self) -> None:
        """Listen no more, and cut what is left of all calls."""
        if self._listener is None:
            return
        self._listener.close()
        serving = self._serving
        for it in serving.open:
            it.leave()
        for waits_s in (self._shared_s or 0, _STOP_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waits_s):
                    while serving.calls:
                        await asyncio.wait(serving.calls)
            for it in list(serving.open):
                it.finish()
        await self._listener.wait_closed()


class _Processor:
    """External processing: one call is one request of a client."""

    def __init__(self, front: PickerFront) -> None:
        self._front = front

    async def process(self, call: GrpcCall) -> None:
        """See the protocol."""

        async def read() -> ProcessingRequest | None:
            message = await call.read()
            if message is None:
                return None
            try:
                return ProcessingRequest.FromString(message)
            except DecodeError:
                raise CallRefused(INVALID, "a message is no ProcessingRequest") from None

        async def write(reply: ProcessingResponse) -> None:
            await call.write(reply.SerializeToString())

        await self._front.serve(read, write)


class _Health:
    """gRPC's health service, for kubelets and proxies."""

    def __init__(self, front: PickerFront) -> None:
        self._front = front

    async def check(self, call: GrpcCall) -> None:
        """The status now."""
        status = self._status(await _service(call))
        if status == SERVICE_UNKNOWN:
            known = ", ".join((LIVENESS, *filter(None, READINESS)))
            raise CallRefused(NOT_FOUND, f"no such service; known: {known}")
        await _answer(call, status)

    async def watch(self, call: GrpcCall) -> None:
        """The status now, and whenever it changes."""
        service = await _service(call)
        last = UNKNOWN
        while True:
            status = self._status(service)
            if status != last:
                last = status
                await _answer(call, status)
            await asyncio.sleep(_LOOK_S)

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return SERVING
        if service not in READINESS:
            return SERVICE_UNKNOWN
        return SERVING if self._front.readiness().status == 200 else NOT_SERVING


async def _service(call: GrpcCall) -> str:
    """The service that is asked about. On the wire a HealthCheckRequest is one string in field 1,
    as StringValue is."""
    try:
        return str(StringValue.FromString(await call.read() or b"").value)
    except DecodeError:
        raise CallRefused(INVALID, "the message is no HealthCheckRequest") from None


async def _answer(call: GrpcCall, status: int) -> None:
    """A HealthCheckResponse is one number in field 1, as Int32Value is."""
    await call.write(Int32Value(value=status).SerializeToString())

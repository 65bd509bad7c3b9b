"""The gRPC server of a picker: external processing for the proxy, and gRPC's health service.

A part of the picker's process. Each request of a client is one stream, which ends as the proxy ends
it: most often by cancelling. A proxy that is gone is noticed by its connection's keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from moonserve.core.errors import ConfigError
from moonserve.core.units import Bytes
from moonserve.live.http.server import ProcessPart
from moonserve.live.picker.front import PickerFront
from moonserve.live.tls.contexts import ClientAuth, Tls

if TYPE_CHECKING:
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

LIVENESS = "liveness"
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
_LOOK_S = 1.0
_STOP_S = 1.0
_MORE_STREAMS = 1_024
"""Streams beside those of requests that may be under way: their bodies come, or are refused."""
_ROOM: Bytes = 1 << 20
"""Of a message, beside a body."""
_KEPT_ALIVE_MS = 30_000
_ANSWERED_MS = 10_000


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
    ) -> None:
        """most: the largest body; streams: requests that may be under way at once."""
        self._front = front
        self._host = host
        self.port = port
        """0 until `start`, if any free one is to be taken."""
        self._most = most
        self._streams = streams
        self._tls = tls
        self._client_auth = client_auth
        self._server: Any = None

    async def start(self, port: int) -> None:
        """Listen. Raises ConfigError."""
        streams = self._streams + _MORE_STREAMS
        self._server = server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._most + _ROOM),
                ("grpc.max_concurrent_streams", streams),
                # of a burst of more than 1,000 gRPC would cancel some by chance
                ("grpc.server.max_pending_requests", streams),
                ("grpc.server.max_pending_requests_hard_limit", streams),
                ("grpc.keepalive_time_ms", _KEPT_ALIVE_MS),
                ("grpc.keepalive_timeout_ms", _ANSWERED_MS),
                ("grpc.http2.min_ping_interval_without_data_ms", _ANSWERED_MS),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=streams,
        )
        add_ExternalProcessorServicer_to_server(_Processor(self._front), server)
        add_HealthServicer_to_server(_HealthService(self._front), server)
        host = f"[{self._host}]" if ":" in self._host else self._host
        where = f"{host}:{self.port}"
        try:
            if self._tls is None:
                self.port = server.add_insecure_port(where)
            else:
                self.port = server.add_secure_port(where, self._credentials(self._tls))
        except RuntimeError:
            what = f"cannot listen at {where}: choose a free port"
            raise ConfigError(what, "picker_port") from None
        await server.start()

    async def stop(self) -> None:
        """Cut what is left of all streams."""
        if self._server is not None:
            await self._server.stop(_STOP_S)

    def _credentials(self, tls: Tls) -> Any:
        """Those of the files, read again once they have changed."""
        files = tls.files
        stamps = files.stamps()

        def read() -> Any:
            pair = files.key.read_bytes(), files.cert.read_bytes()
            ca = files.ca.read_bytes() if files.ca is not None else None
            return grpc.ssl_server_certificate_configuration([pair], ca)

        def changed() -> Any:
            nonlocal stamps
            if (now := files.stamps()) == stamps:
                return None
            stamps = now
            try:
                return read()
            except OSError:
                return None  # the old ones stay in use

        required = self._client_auth == "required"
        return grpc.dynamic_ssl_server_credentials(read(), changed, required)


class _Processor(ExternalProcessorServicer):  # type: ignore[misc]
    """One call is one request of a client."""

    def __init__(self, front: PickerFront) -> None:
        self._front = front

    async def Process(self, requests: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        """See the protocol."""

        async def read() -> ProcessingRequest | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else message

        await self._front.serve(read, context.write)


class _HealthService(HealthServicer):  # type: ignore[misc]
    """gRPC's health service, for kubelets and proxies."""

    def __init__(self, front: PickerFront) -> None:
        self._front = front

    async def Check(  # noqa: N802 - gRPC's name
        self, request: HealthCheckRequest, context: Any
    ) -> HealthCheckResponse:
        """The status now."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            known = ", ".join((LIVENESS, *filter(None, READINESS)))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service; known: {known}")
        return HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - gRPC's name
        self, request: HealthCheckRequest, context: Any
    ) -> AsyncIterator[HealthCheckResponse]:
        """The status now, and whenever it changes."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                last = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(_LOOK_S)

    def _status(self, service: str) -> int:
        if service == LIVENESS:
            return int(HealthCheckResponse.SERVING)
        if service not in READINESS:
            return int(HealthCheckResponse.SERVICE_UNKNOWN)
        ready = self._front.readiness().status == 200
        return int(HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING)

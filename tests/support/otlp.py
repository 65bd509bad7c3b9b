"""A receiver of OTLP over HTTP, as a collector is one: it decodes what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from moonserve.live.http.message import HttpRequest, Response
from moonserve.live.http.server import App, Server, serve


class OtlpReceiver:
    """Listens on the running loop. All ids are in hex."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        """All spans that came, in protobuf."""
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        """What it answers."""
        self.calls = 0
        self.paused = asyncio.Event()
        """Cleared: it answers when this is set."""
        self.paused.set()
        self._server: Server | None = None

    async def start(self) -> OtlpReceiver:
        """Listen at a free port."""
        app = App({("POST", "/v1/traces"): self._export}, name="receiver")
        self._server = await serve(app, "127.0.0.1", 0)
        return self

    async def stop(self) -> None:
        """Stop."""
        assert self._server is not None
        self.paused.set()
        await self._server.stop(0)

    @property
    def url(self) -> str:
        """Where spans go."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.port}/v1/traces"

    async def _export(self, request: HttpRequest) -> Response:
        self.calls += 1
        body = await request.body()
        await self.paused.wait()
        if self.status == 200:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(of_resource.resource))
                for scoped in of_resource.scope_spans:
                    self.spans += scoped.spans
        said = ExportTraceServiceResponse().SerializeToString()
        return Response(self.status, said, content_type="application/x-protobuf")

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.02)

    def of(self, trace_id: str) -> dict[str, Any]:
        """The spans of one trace by name."""
        return {it.name: it for it in self.spans if it.trace_id.hex() == trace_id}

    def parents(self, trace_id: str, name: str) -> set[bytes]:
        """The parents' ids of all spans of this name in one trace."""
        wanted = (trace_id, name)
        return {it.parent_span_id for it in self.spans if (it.trace_id.hex(), it.name) == wanted}


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {it.key: _value(it.value) for it in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(it) for it in value.array_value.values]
    return getattr(value, kind)

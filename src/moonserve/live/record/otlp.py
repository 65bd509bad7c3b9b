"""Spans in the terms of OpenTelemetry, and the exporter that sends them by OTLP over HTTP.

The only module that imports opentelemetry. `traces` imports it if traces are on, and calls it from
its thread: `send` waits for the receiver. OpenTelemetry reads its own environment variables:
headers, certificates, compression, timeout, and attributes of the resource.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from moonserve import __version__
from moonserve.core.request import TraceContext
from moonserve.core.schedule.spans import StageSpan
from moonserve.core.units import Micros

_SCOPE = InstrumentationScope("moonserve", __version__)
_FLAGS = TraceFlags(TraceFlags.SAMPLED)
_NS_PER_US = 1_000


class OtlpSender:
    """Sends spans to one receiver."""

    def __init__(self, endpoint: str | None) -> None:
        """endpoint: URL for spans; None: the environment has it."""
        named = {} if os.environ.get(OTEL_SERVICE_NAME) else {"service.name": "moonserve"}
        self._resource = Resource.create({"service.version": __version__}).merge(Resource(named))
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send spans, again and again for some seconds; return whether the receiver took them."""
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """End a `send` that waits, soon."""
        self._exporter.shutdown()

    def spans(
        self, tree: StageSpan, context: TraceContext, since_us: Micros
    ) -> Iterator[ReadableSpan]:
        """The span of a request and those in it. since_us: what to add to their times, to count
        from 1970."""
        trace_id = int(context.trace_id, 16)
        parent = None
        if context.parent_id:
            parent = SpanContext(trace_id, int(context.parent_id, 16), True, _FLAGS)
        own = SpanContext(trace_id, int(context.span_id, 16), False, _FLAGS)
        yield from self._below(tree, own, parent, SpanKind.SERVER, since_us)

    def _below(
        self,
        span: StageSpan,
        own: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        since_us: Micros,
    ) -> Iterator[ReadableSpan]:
        events = []
        if span.first_token_us is not None:
            at_ns = (since_us + span.first_token_us) * _NS_PER_US
            events.append(Event("first_token", timestamp=at_ns))
        failed = span.error is not None
        yield ReadableSpan(
            span.name,
            context=own,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=events,
            kind=kind,
            status=Status(StatusCode.ERROR, span.error) if failed else Status(),
            start_time=(since_us + span.began_us) * _NS_PER_US,
            end_time=(since_us + span.ended_us) * _NS_PER_US,
            instrumentation_scope=_SCOPE,
        )
        for part in span.within:
            child = SpanContext(own.trace_id, secrets.randbits(64), False, _FLAGS)
            yield from self._below(part, child, own, SpanKind.INTERNAL, since_us)

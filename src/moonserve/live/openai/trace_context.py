"""Which trace a request belongs to: W3C's headers in, the headers for engines and a context out.

The gateway's API calls `begin_trace` once for each generation. The process that has the Conductor
sets the `SamplingRule`; a front gets it from there. Nothing here makes or exports a span.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from moonserve.core.request import TraceContext
from moonserve.live.openai.headers import trace_context

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_VERSION = "00"
_SAMPLED = 0x01
_RATIO_BITS = 64
"""By how many bits of a trace's id its place between 0 and 1 is found, as OpenTelemetry's SDKs do:
so all services with one ratio sample the same traces."""


class SamplingRule(msgspec.Struct, frozen=True):
    """Which requests have spans."""

    ratio: float = 1.0
    """The share of the traces that begin here, from 0 to 1."""
    follows_parent: bool = True
    """Whether the client decides for the traces that it has begun."""

    def samples(self, trace_id: str) -> bool:
        """Whether this trace is in the share."""
        place = int(trace_id, 16) % (1 << _RATIO_BITS)
        return place < round(self.ratio * (1 << _RATIO_BITS))


class BegunTrace(NamedTuple):
    """What `begin_trace` returns."""

    headers: Mapping[str, str]
    """For every call to an external engine."""
    context: TraceContext | None
    """Where the request's spans belong; None: it has none."""


class _Parent(NamedTuple):
    trace_id: str
    span_id: str
    is_sampled: bool


def begin_trace(
    headers: Mapping[str, str],
    rule: SamplingRule | None,
    draw: Callable[[int], int] = secrets.randbits,
) -> BegunTrace:
    """Find the trace of a request, or begin one.

    headers: of the client. rule: None: this cluster makes no spans, and headers pass unchanged.
    draw: returns a random number of so many bits. A malformed traceparent counts as none.
    """
    passed = trace_context(headers)
    if rule is None:
        return BegunTrace(passed, None)
    parent = _parent_of(headers)
    if parent is None:
        trace_id = f"{draw(128):032x}"
        passed.pop("tracestate", None)  # it would belong to another trace
    else:
        trace_id = parent.trace_id
    if parent is not None and rule.follows_parent:
        is_sampled = parent.is_sampled
    else:
        is_sampled = rule.samples(trace_id)
    parent_id = "" if parent is None else parent.span_id
    span_id = f"{draw(64):016x}" if is_sampled or parent is None else parent_id
    flags = _SAMPLED if is_sampled else 0
    passed["traceparent"] = f"{_VERSION}-{trace_id}-{span_id}-{flags:02x}"
    context = TraceContext(trace_id, span_id, parent_id) if is_sampled else None
    return BegunTrace(passed, context)


def _parent_of(headers: Mapping[str, str]) -> _Parent | None:
    """The client's span. None: it has sent none, or none that W3C's rules allow."""
    text = headers.get("traceparent")
    match = None if text is None else _PARENT.fullmatch(text.strip())
    if match is None:
        return None
    trace_id, span_id, flags, more = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    if more is not None and match[0].startswith(_VERSION):
        return None
    return _Parent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

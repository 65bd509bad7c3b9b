"""W3C's trace context: the client's span is the parent, and its flag and the sampler decide."""

from __future__ import annotations

import random

import pytest

from moonserve.core.request import TraceContext
from moonserve.live.openai.trace_context import SamplingRule, begin_trace

TRACE, SPAN = "a" * 32, "b" * 16
ALWAYS = SamplingRule()


def draw(bits: int) -> int:
    """One number for traces, and one for spans."""
    return {128: 0xC, 64: 0xD}[bits]


def test_without_spans_of_our_own_headers_go_on_as_they_are() -> None:
    """Also malformed ones: they are the engine's business."""
    headers = {"traceparent": "odd", "tracestate": "x=1", "baggage": "y=2", "cookie": "z"}
    begun = begin_trace(headers, None)
    assert begun.headers == {"traceparent": "odd", "tracestate": "x=1", "baggage": "y=2"}
    assert begun.context is None


def test_the_clients_span_is_the_parent_and_engines_get_ours() -> None:
    """The trace, its state and the baggage stay."""
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "x=1", "baggage": "y=2"}
    begun = begin_trace(headers, ALWAYS, draw)
    assert begun.context == TraceContext(TRACE, f"{0xD:016x}", SPAN)
    assert begun.headers == headers | {"traceparent": f"00-{TRACE}-{0xD:016x}-01"}


def test_a_trace_that_the_client_does_not_sample_is_not_sampled() -> None:
    """Engines see the client's span and its flag."""
    parent = f"00-{TRACE}-{SPAN}-00"
    begun = begin_trace({"traceparent": parent}, ALWAYS, draw)
    assert begun.context is None
    assert begun.headers == {"traceparent": parent}
    own = begin_trace({"traceparent": parent}, SamplingRule(follows_parent=False), draw)
    assert own.context == TraceContext(TRACE, f"{0xD:016x}", SPAN)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "odd",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_a_malformed_parent_counts_as_none(given: str) -> None:
    """A new trace begins, without the state of the other one."""
    begun = begin_trace({"traceparent": given, "tracestate": "x=1"}, ALWAYS, draw)
    assert begun.context == TraceContext(f"{0xC:032x}", f"{0xD:016x}")
    assert begun.headers == {"traceparent": f"00-{0xC:032x}-{0xD:016x}-01"}


def test_later_versions_of_the_header_are_read() -> None:
    """What follows the flags is for programs that know that version."""
    begun = begin_trace({"traceparent": f"01-{TRACE}-{SPAN}-03-more"}, ALWAYS, draw)
    assert begun.context is not None
    assert (begun.context.trace_id, begun.context.parent_id) == (TRACE, SPAN)


def test_a_ratio_samples_that_share_of_the_traces_as_others_do() -> None:
    """The same trace is sampled by every service with this ratio; engines see the decision."""
    seeded = random.Random(7)
    ids = [f"{seeded.getrandbits(128):032x}" for _ in range(4_000)]
    rule = SamplingRule(0.25)
    assert 0.22 < sum(map(rule.samples, ids)) / len(ids) < 0.28
    assert not any(SamplingRule(0.0).samples(it) for it in ids)
    assert all(ALWAYS.samples(it) for it in (*ids, "f" * 32))
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    theirs = TraceIdRatioBased(0.25)
    for it in ids[:200]:
        said = theirs.should_sample(None, int(it, 16), "").decision is Decision.RECORD_AND_SAMPLE
        assert said == rule.samples(it)
    none = begin_trace({}, SamplingRule(0.0), draw)
    assert none.context is None
    assert none.headers == {"traceparent": f"00-{0xC:032x}-{0xD:016x}-00"}

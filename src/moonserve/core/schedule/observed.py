"""How long the passes of an external engine last, learned from nothing but its calls.

An external engine reports no passes. Watch keeps the calls that are out to one instance and makes
PassSamples of them for the fit in core.schedule.cost. The time that requests wait is not learned as
computing time:

- Prefill: a span begins when the engine gets the first of our prompts, and ends when it has none
  left or has done six. It prefilled all that time, so the prompts of a span took that long
  together. One span is one sample, of all its passes. A request that waits behind others only
  stretches a span that counts them too. A reply that does not stream ends with its decoding, so
  the end of its prefill is unknown; unless it has one token only, it must have the span to itself.
- Decode: as long as no call begins or ends and none prefills, every decode gets one token a pass.

A span is not learned from if a call failed in it, if requests of others waited, or if the times of
a call are doubtful. The external fleet's monitor feeds it, on the gateway's clock; no call is kept
beyond its end.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, Literal, TypeAlias

from moonserve.core.schedule.facts import HitSample, PassSample
from moonserve.core.units import Micros, Tokens

Part: TypeAlias = Literal["prefill", "decode", "whole"]
"""Of a request: its prefill alone (one token), the decode after a remote prefill, or both."""

_SPAN_CALLS = 6
"""Prompts after which a span ends though more wait: under load it would never end."""
_LOOKED = 4
"""The most calls whose tokens are counted for a spell of decoding: a call must cost little."""
_LEAST_STEPS = 8
"""The least tokens per request in a spell of decoding: its ends are not the ends of passes."""
_APART_US: Micros = 5_000
_MOST_KEPT = 256


_Moment: TypeAlias = tuple[Micros, int, int]
"""A time, and the sums over time up to then: of the number of decodes, and of their contexts."""


class ObservedCall:
    """One call that is out. `count`: tokens that came; the receiver raises it."""

    __slots__ = (
        "_context",
        "_from",
        "_span",
        "cached",
        "count",
        "doubtful",
        "heard",
        "part",
        "predicted",
        "prompt",
        "streams",
    )

    def __init__(self, part: Part, prompt: Tokens, predicted: Tokens, streams: bool = True) -> None:
        """prompt: its length; predicted: the part of it that is expected to be cached there;
        streams: whether its tokens come one by one."""
        self.part = part
        self.prompt = prompt
        self.predicted = predicted
        self.streams = streams
        self.count: Tokens = 0
        self.cached: Tokens | None = None
        self.doubtful = False
        """Whether the time from its beginning to its answer may be another than was reported."""
        self.heard = False
        """Whether its answer or its end was reported: a later answer is ignored."""
        self._span: _Span | None = None
        self._from: Tokens = 0
        """`count` when the spell of decoding began, for the calls whose tokens are counted."""
        self._context: Tokens = 0
        """Its context, as counted so far."""


class _Span:
    """A time in which the engine prefilled our prompts, one after another or together."""

    __slots__ = ("after", "calls", "end", "open", "passes", "spoiled", "start", "unknown")

    def __init__(self, start: _Moment) -> None:
        self.start = self.end = start
        """It ends with the last answer."""
        self.calls: list[ObservedCall] = []
        self.unknown = 0
        """Calls whose cached tokens are not reported yet."""
        self.passes = 0
        """Passes that ended one prompt or several; several are answered at nearly the same time."""
        self.after = 0
        """Passes of decoding in it: a reply that does not stream comes with its last token."""
        self.open = True
        self.spoiled = False

    def apart_us(self) -> Micros:
        """Answers to prompts of one pass come within this time."""
        mean_us = (self.end[0] - self.start[0]) // max(1, self.passes)
        return max(_APART_US, mean_us // 16)


class CallWatch:
    """See the module. `chunk`: the most prompt tokens in one pass."""

    def __init__(self, chunk: Tokens) -> None:
        self._chunk = chunk
        self._prefilling: dict[ObservedCall, None] = {}
        self._decoding: dict[ObservedCall, None] = {}
        self._context: Tokens = 0
        """The sum of their contexts, as of the last look."""
        self._looked: tuple[ObservedCall, ...] = ()
        self._hidden: dict[ObservedCall, None] = {}
        """Calls that may decode by now without showing it: they do not stream."""
        self._blind = 0
        """Calls that may prefill or decode by now without showing which: they do not stream."""
        self._span: _Span | None = None
        self._steady_us: Micros = 0
        self._steady = False
        """Whether since then the decodes are the same, all of them visible, with no prefill."""
        self._crowd = (0, 0)
        """External decodes there, and the sum of their contexts."""
        self._queue = 0
        """External requests that wait there."""
        self._moment: _Moment = (0, 0, 0)
        self.said = self.unsaid = 0
        """Calls for which the engine reported the cached tokens, and for which it did not."""
        self._passes: list[PassSample] = []
        self._hits: list[HitSample] = []

    def began(self, now_us: Micros, call: ObservedCall) -> None:
        """A call was sent."""
        if call.part != "decode":
            self._settle(now_us)
            if not self._prefilling:
                self._begin(self._moment)
            self._prefilling[call] = None
            self._blind += _is_blind(call)
            self._steady = False
        elif not call.streams:
            self._settle(now_us)
            self._hidden[call] = None
            self._steady = False

    def answered(self, now_us: Micros, call: ObservedCall, cached: Tokens | None = None) -> None:
        """Its first token came, or all `count` of them at once. cached: as the engine reports it;
        None: not reported yet."""
        if call.heard:
            return
        call.heard = True
        self._settle(now_us)
        if call in self._prefilling:
            self._prefilled(now_us, call)
            self._known(call, cached)
        if call.part != "prefill":
            self._decoding[call] = None
            call._context = call.prompt + call.count
            self._context += call._context
        self._changed(call)

    def ended(self, now_us: Micros, call: ObservedCall, cached: Tokens | None = None) -> None:
        """The call is over, for any reason; a second report has no effect."""
        call.heard = True
        self._settle(now_us)
        if call in self._prefilling:  # without an answer its part of the span is unknown
            del self._prefilling[call]
            self._blind -= _is_blind(call)
            self._span = None
        self._leave(call)
        self._changed(call)
        self._known(call, cached)
        if call._span is not None:  # it will not be reported: the prediction stands
            self.unsaid += 1
            self._counted(call, call.predicted)

    def others(self, now_us: Micros, waiting: int, running: int, context: Tokens) -> None:
        """External requests there: how many wait, how many run, and the context of these."""
        self._settle(now_us)
        self._crowd = (running, context)
        self._queue = waiting
        self._look()
        if waiting and self._span is not None:
            self._span.spoiled = True

    def take(self, now_us: Micros) -> tuple[tuple[PassSample, ...], tuple[HitSample, ...]]:
        """Return and forget what was measured since the last call; the latest 256 of each."""
        self._settle(now_us)
        for call in self._decoding:
            self._context += call.prompt + call.count - call._context
            call._context = call.prompt + call.count
        self._look()
        passes = self._passes[-_MOST_KEPT:]
        self._passes = []
        hits = self._hits[-_MOST_KEPT:]
        self._hits = []
        return tuple(passes), tuple(hits)

    # Prefill.

    def _prefilled(self, now_us: Micros, call: ObservedCall) -> None:
        """Its part of the span is done. The span ends if no other call waits, or if it is long."""
        del self._prefilling[call]
        span = self._span
        if span is not None:
            apart = not span.calls or now_us - span.end[0] > span.apart_us()
            if apart and len(span.calls) >= _SPAN_CALLS:
                span = self._next(span)
            span.spoiled |= call.doubtful
            span.passes += apart
            span.calls.append(call)
            span.unknown += 1
            span.after += max(0, call.count - 1)
            call._span = span
            span.end = self._moment
        self._blind -= _is_blind(call)
        if not self._prefilling:
            self._span = None
            if span is not None:
                self._over(span)
        elif span is None:
            self._begin(self._moment)

    def _next(self, span: _Span) -> _Span:
        """The span ends with its last answer, and the next one begins there."""
        self._over(span)
        return self._begin(span.end)

    def _begin(self, start: _Moment) -> _Span:
        self._span = _Span(start)
        self._span.spoiled = self._queue > 0
        return self._span

    def _over(self, span: _Span) -> None:
        span.open = False
        span.spoiled = span.spoiled or self._blind > 0
        if not (span.unknown or span.spoiled):
            self._learn(span)

    def _known(self, call: ObservedCall, cached: Tokens | None) -> None:
        if cached is None or call.cached is not None or call.part == "decode":
            return
        self.said += 1
        self._counted(call, min(cached, call.prompt))
        self._hits.append(HitSample(call.predicted, min(cached, call.prompt)))

    def _counted(self, call: ObservedCall, cached: Tokens) -> None:
        """This part of its prompt was cached; the last call of a span completes the span."""
        call.cached = cached
        span = call._span
        call._span = None
        if span is not None:
            span.unknown -= 1
            if not (span.unknown or span.open or span.spoiled):
                self._learn(span)

    def _learn(self, span: _Span) -> None:
        """One sample: all passes of the span."""
        new = square = past = 0
        for call in span.calls:
            at = start = min(call.cached or 0, call.prompt - 1)
            new += call.prompt - start
            square += call.prompt**2 - start**2
            while at < call.prompt:
                past += at
                at += self._chunk
        prefills = max(span.passes, -(-new // self._chunk))
        took_us, area, context_area = (b - a for a, b in zip(span.start, span.end, strict=True))
        after = span.after
        if after and len(span.calls) > 1:
            return  # how their decodes shared passes is unknown
        seqs = area / max(1, took_us)
        context = context_area / max(1, took_us)
        beside = round(seqs * (prefills + after))
        own_context = after * (span.calls[0].prompt + after // 2)
        self._passes.append(
            PassSample(
                new,
                square,
                past,
                after + beside,
                own_context + round(context * (prefills + after)),
                took_us,
                prefills,
                after,
            )
        )

    # Decode.

    def _changed(self, call: ObservedCall) -> None:
        """A call goes on or is over: a new spell of decoding may begin."""
        self._hidden.pop(call, None)
        self._steady = not (self._prefilling or self._hidden)
        self._look()

    def _look(self) -> None:
        """Count the next spell's passes by these: all get a token in each."""
        self._looked = tuple(islice(self._decoding, _LOOKED)) if self._steady else ()
        for call in self._looked:
            call._from = call.count

    def _leave(self, call: ObservedCall) -> None:
        if call in self._decoding:
            del self._decoding[call]
            self._context -= call._context

    def _settle(self, now_us: Micros) -> None:
        """End the spell of steady decoding up to now, if there was one; another begins."""
        others, context = self._crowd
        seqs = len(self._decoding) + others
        context = self._context + context
        last_us, seqs_area, context_area = self._moment
        lasted_us = now_us - last_us
        self._moment = (now_us, seqs_area + seqs * lasted_us, context_area + context * lasted_us)
        looked = self._looked
        if self._steady and looked and not self._queue and now_us > self._steady_us:
            steps = sum(call.count - call._from for call in looked) / len(looked)
            if steps >= _LEAST_STEPS:
                context += round(len(self._decoding) * steps / 2)
                elapsed_us = round((now_us - self._steady_us) / steps)
                self._passes.append(PassSample(0, 0, 0, seqs, context, elapsed_us))
        self._steady_us = now_us


def _is_blind(call: ObservedCall) -> bool:
    return call.part == "whole" and not call.streams


class Trust:
    """Which share of an instance's claims to hold prefixes counts: `share`; 1: it is trusted.

    The index claims what an instance holds; its engine reports for each request how much it reused.
    If the engine finds far less than was claimed, the index is wrong: other token ids, another
    template, or events lost unnoticed. From then on only a share of its claims counts, until these
    prove right. Only the view changes it.
    """

    WINDOW: Final = 16
    """How many recent claims are judged together."""
    LEAST: Final = 4
    """Fewer claims are not judged."""
    LOST: Final = 0.5
    """If a smaller part of the claims is confirmed, the index is wrong, not merely late."""
    PROVEN: Final = 0.8
    """If this part or more is confirmed, the index is right."""
    FLOOR: Final = 1 / 16
    """The lowest share. A claim that counted nothing could never prove right."""

    def __init__(self) -> None:
        self.share = 1.0
        self.claimed: Tokens = 0
        self.found: Tokens = 0
        """Tokens found of those claimed, ever."""
        self.unclaimed: Tokens = 0
        """Tokens found beyond the claims, ever."""
        self._recent: deque[HitSample] = deque(maxlen=self.WINDOW)

    @property
    def trusted(self) -> bool:
        """Whether all of its claims count."""
        return self.share >= 1.0

    def observe(self, sample: HitSample) -> None:
        """Learn from one request. A request without a claim teaches nothing."""
        found = min(sample.claimed, sample.found)
        self.claimed += sample.claimed
        self.found += found
        self.unclaimed += sample.found - found
        if not sample.claimed:
            return
        self._recent.append(HitSample(sample.claimed, found))
        if len(self._recent) < self.LEAST:
            return
        ratio = sum(it.found for it in self._recent) / sum(it.claimed for it in self._recent)
        if ratio < self.LOST:
            self.share = max(self.FLOOR, self.share * ratio)
        elif not self.trusted and ratio >= self.PROVEN:
            self.share = min(1.0, 2 * self.share)
        else:
            return
        self._recent.clear()  # claims with the old share say nothing about the new one

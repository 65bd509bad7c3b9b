"""What passes of a foreign engine last, from nothing but its calls: what went in, when what came.

Such an engine reports no passes. Watch keeps the calls that are out to one instance and makes
PassSamples of them, for the fit in core.schedule.cost, so that its waiting is not learned as its
computing:

- Prefill: from the moment the engine had none of ours to do until it has none again, or has done
  six, it prefilled all the time; so long the prompts of that span took together. One span is one
  sample, of all its passes. A request that waits behind others only stretches a span that counts
  them too. A reply that does not stream ends with its decoding, so that nobody knows when it
  prefilled; unless it is of one token, it must have the span to itself.
- Decode: as long as nobody comes or goes and nobody prefills, all who decode get a token a pass.

A span in which a call failed, or others than us had requests waiting there, is not learned from.
Fed by live/fleet on the gateway's clock; no call is kept beyond its end.
"""

from __future__ import annotations

from itertools import islice
from typing import Literal, TypeAlias

from moonserve.core.kv.trust import HitSample
from moonserve.core.schedule.facts import PassSample
from moonserve.core.units import Micros, Tokens

Part: TypeAlias = Literal["prefill", "decode", "whole"]
"""Of a request: its prefill alone (one token), the decode after a remote prefill, or both."""

_SPAN_CALLS = 6
"""Prompts after which a span ends though more wait: under load it would never."""
_LOOKED = 4
"""So many calls' tokens are counted for a spell, however many decode: a call must cost little."""
_LEAST_STEPS = 8
"""Tokens per request that a span of decoding must have: its ends are not on passes' ends."""
_APART_US: Micros = 5_000
_MOST_KEPT = 256


_Moment: TypeAlias = tuple[Micros, int, int]
"""A time, and by then: sum over time of those who decode, and of their contexts."""


class Call:
    """One call that is out. `count`: tokens that came, raised by who receives them."""

    __slots__ = (
        "_context",
        "_from",
        "_span",
        "cached",
        "count",
        "heard",
        "part",
        "predicted",
        "prompt",
        "streams",
    )

    def __init__(self, part: Part, prompt: Tokens, predicted: Tokens, streams: bool = True) -> None:
        """prompt: its length; predicted: the part of it that is taken to be cached there; streams:
        whether its tokens come one by one."""
        self.part = part
        self.prompt = prompt
        self.predicted = predicted
        self.streams = streams
        self.count: Tokens = 0
        self.cached: Tokens | None = None
        self.heard = False
        """Whether its answer, or its end, was told: an answer told then says nothing."""
        self._span: _Span | None = None
        self._from: Tokens = 0
        """`count` when the spell of decoding began, of those by whom it is counted."""
        self._context: Tokens = 0
        """What counts as its context so far."""


class _Span:
    """A time in which the engine prefilled our prompts, one after another or together."""

    __slots__ = ("after", "calls", "end", "open", "passes", "spoiled", "start", "unknown")

    def __init__(self, start: _Moment) -> None:
        self.start = self.end = start
        """It ends with the last answer."""
        self.calls: list[Call] = []
        self.unknown = 0
        """Calls of which nobody has said yet how much was cached."""
        self.passes = 0
        """Those that ended a prompt, or several: these are answered at nearly the same time."""
        self.after = 0
        """Passes of decoding in it: a reply that does not stream comes with its last token."""
        self.open = True
        self.spoiled = False

    def apart_us(self) -> Micros:
        """Answers to prompts of one pass come nearer to each other than this."""
        mean_us = (self.end[0] - self.start[0]) // max(1, self.passes)
        return max(_APART_US, mean_us // 16)


class Watch:
    """See the module. `chunk`: the most prompt tokens in one pass."""

    def __init__(self, chunk: Tokens) -> None:
        self._chunk = chunk
        self._prefilling: dict[Call, None] = {}
        self._decoding: dict[Call, None] = {}
        self._context: Tokens = 0
        """Of those, summed, as of when they were last looked at."""
        self._looked: tuple[Call, ...] = ()
        self._hidden: dict[Call, None] = {}
        """Calls that may decode by now, and do not show it: they do not stream."""
        self._blind = 0
        """Calls that may prefill or decode by now, and do not show which: they do not stream."""
        self._span: _Span | None = None
        self._steady_us: Micros = 0
        self._steady = False
        """Whether those who decode are the same since then, all seen, and nobody prefilled."""
        self._crowd = (0, 0)
        """Requests of others that decode there, and the sum of their contexts."""
        self._queue = 0
        """Requests of others that wait there."""
        self._moment: _Moment = (0, 0, 0)
        self.said = self.unsaid = 0
        """Calls of which the engine said how much was cached, and of which it did not."""
        self._passes: list[PassSample] = []
        self._hits: list[HitSample] = []

    def began(self, now_us: Micros, call: Call) -> None:
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

    def answered(self, now_us: Micros, call: Call, cached: Tokens | None = None) -> None:
        """Its first token came, or all `count` of them at once. cached: as the engine says; None:
        it has not said yet."""
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

    def ended(self, now_us: Micros, call: Call, cached: Tokens | None = None) -> None:
        """It is over, however; again: of no effect."""
        call.heard = True
        self._settle(now_us)
        if call in self._prefilling:  # without an answer: what it took of the span nobody knows
            del self._prefilling[call]
            self._blind -= _is_blind(call)
            self._span = None
        self._leave(call)
        self._changed(call)
        self._known(call, cached)
        if call._span is not None:  # it is not going to be said: taken to be as predicted
            self.unsaid += 1
            self._counted(call, call.predicted)

    def others(self, now_us: Micros, waiting: int, running: int, context: Tokens) -> None:
        """Requests that others than us have there: so many wait, so many run, with such context."""
        self._settle(now_us)
        self._crowd = (running, context)
        self._queue = waiting
        self._look()
        if waiting and self._span is not None:
            self._span.spoiled = True

    def take(self, now_us: Micros) -> tuple[tuple[PassSample, ...], tuple[HitSample, ...]]:
        """What was measured since it was last asked; at most 256 of each, the latest."""
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

    def _prefilled(self, now_us: Micros, call: Call) -> None:
        """Its part of the span is done; the span, where nobody else waits or it is long enough."""
        del self._prefilling[call]
        span = self._span
        if span is not None:
            apart = not span.calls or now_us - span.end[0] > span.apart_us()
            if apart and len(span.calls) >= _SPAN_CALLS:
                span = self._next(span)
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

    def _known(self, call: Call, cached: Tokens | None) -> None:
        if cached is None or call.cached is not None or call.part == "decode":
            return
        self.said += 1
        self._counted(call, min(cached, call.prompt))
        self._hits.append(HitSample(call.predicted, min(cached, call.prompt)))

    def _counted(self, call: Call, cached: Tokens) -> None:
        """So much of its prompt was cached, said or not; the last of a span completes it."""
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
            return  # whose decodes shared how many passes nobody knows
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
                prefills + after if beside else after,
            )
        )

    # Decode.

    def _changed(self, call: Call) -> None:
        """A call goes on, or is over: a new spell of decoding may begin."""
        self._hidden.pop(call, None)
        self._steady = not (self._prefilling or self._hidden)
        self._look()

    def _look(self) -> None:
        """Count the next spell's passes by these: all get a token in each."""
        self._looked = tuple(islice(self._decoding, _LOOKED)) if self._steady else ()
        for call in self._looked:
            call._from = call.count

    def _leave(self, call: Call) -> None:
        if call in self._decoding:
            del self._decoding[call]
            self._context -= call._context

    def _settle(self, now_us: Micros) -> None:
        """The spell of steady decoding up to now, if there was one, is over; another begins."""
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


def _is_blind(call: Call) -> bool:
    return call.part == "whole" and not call.streams

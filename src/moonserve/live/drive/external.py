"""Requests through external engines: their calls, whose pieces are the bytes of a reply.

`EngineCalls` makes the calls of one request for `request.RequestDriver`; `live/api` creates it. The
client's body goes to the engines unchanged, and so does their reply to the client, except for the
fields of KV transfer, the ids of tokens and the usage. If a stream's engine is lost, a completion
whose prompt is the tokens so far goes on with it: see openai.continuation. No token and no text is
made here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from moonserve.core.errors import DeadlineExceeded, MoonserveError
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decode, Prefill
from moonserve.core.schedule.facts import Connector, InstanceInfo
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, Tokens
from moonserve.live.drive.calls import Caller
from moonserve.live.drive.connectors.mooncake import Mooncake
from moonserve.live.drive.connectors.nixl import Nixl
from moonserve.live.drive.connectors.sglang import Sglang
from moonserve.live.drive.handover import Handed, HandoverConnector, PrefillCall
from moonserve.live.drive.inbox import ActionInbox
from moonserve.live.drive.lease import LeaseWatch
from moonserve.live.drive.lost import CallLost, EngineAnswer, Passed, logged
from moonserve.live.drive.passing import Passing, passing
from moonserve.live.drive.prompt_info import PromptInfo
from moonserve.live.drive.request import Life
from moonserve.live.drive.streamed import ContinuedPassing, KeptPassing, StreamedTokens
from moonserve.live.http.client import ClientStream
from moonserve.live.http.message import JSON
from moonserve.live.openai.continuation import Continuation, asking_ids
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.ports import OutgoingCall

Piece: TypeAlias = EngineAnswer | bytes
"""A whole reply, or whole events of a stream."""

_CONNECTORS: Mapping[Connector, HandoverConnector] = {
    "nixl": Nixl(),
    "mooncake": Mooncake(),
    "sglang": Sglang(),
}
"""The connectors that hand KV from a prefill engine to a decode engine. Without one, a single call
does both."""
_DRAIN_S = 0.5
_MOST_BEFORE_BYTES = 4 << 20
"""So much is kept at most of the events that come before the first token."""
_MOST_BYTES = 4
"""Of a character. Each may be a token."""
_SOME: Tokens = 8
"""Further tokens, which may stand for no text."""
_MOST_PROMPT: Tokens = 250_000
"""The ids of a longer prompt are not asked for: they would be too much for one event."""


class EngineCalls:
    """Makes the calls of one request. A lost call is made again while the client has received
    nothing; later, a stream goes on elsewhere if its tokens are known."""

    def __init__(
        self,
        asked: ExternalRequest,
        prompt: PromptInfo,
        request: Request,
        caller: Caller,
        arrived_s: float,
    ) -> None:
        self.reply = passing(asked.form)
        self.content_type = JSON
        self.again_s = caller.limits.again_s
        self._asked = asked
        self._prompt = prompt
        self._request = request
        self._caller = caller
        self._arrived_s = arrived_s
        self._loop = asyncio.get_running_loop()
        self._handed: Handed | None = None
        self._cached: Tokens | None = None
        """Prompt tokens that another engine's prefill reused. None: no other engine prefilled it,
        or it did not report them."""
        self._elsewhere = False
        """Whether the engine that makes the client's reply gets the prompt's KV from another."""
        self._prefilled_s: float | None = None
        """When another engine had prefilled the prompt, for replies that do not show decode's first
        token."""
        self._stream: ClientStream | None = None
        self._note: OutgoingCall | None = None
        self._at: tuple[InstanceInfo, Tokens] | None = None
        """The instance that makes the client's reply, and the prompt tokens that it was expected to
        reuse."""
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = arrived_s
        """When the last piece came."""
        self._inbox: ActionInbox | None = None
        """The Conductor's actions for the request."""
        self._continuation: Continuation | None = None
        self._kept: StreamedTokens | None = None
        """The tokens of the stream; None: they are not asked for."""
        self._final = "it was not streamed"
        """Why they are not."""
        self._begun_here = False
        """Whether the client has a part of the stream."""
        self._first_cached: Tokens | None = None
        """Prompt tokens that the call reused which began the stream; None: it did not report it."""

    @property
    def tokens(self) -> Tokens:
        """Tokens of the answer so far; 0 before its first byte."""
        return self.reply.tokens

    def broke_off(self) -> str:
        """See Calls."""
        kept = self._kept
        if kept is None:
            return self._final
        if self.reply.finish:
            return "its last token has come"
        kept.settle()
        return kept.why_not

    def known(self) -> tuple[Tokens, tuple[BlockKey, ...]]:
        """See Calls. The keys are those of the prompt: no other engine has KV of the answer."""
        known = self._kept.count if self._kept is not None and self._begun_here else 0
        return self._prompt.length + known, self._prompt.keys

    async def died(self, instance: InstanceInfo) -> bool:
        """See Calls."""
        return await self._caller.http.refuses(instance.url)

    async def prefill(self, action: Prefill, life: Life) -> Piece | None:
        """See Calls."""
        to, decision = action.to, action.decision
        self._cached = self._prefilled_s = None
        self._elsewhere = False
        try:
            if self._begun_here:
                await self._go_on(to if decision.joint else action.decode)
            if decision.joint:
                return await self._make_whole(action, life)
            await self._prefill(action, life)
            return None
        except Passed as passed:
            raise self._refused(passed, to) from None

    async def _prefill(self, action: Prefill, life: Life) -> None:
        """Have an engine prefill what another one decodes."""
        to, decision = action.to, action.decision
        connector = _CONNECTORS[to.connector]
        call = PrefillCall(self._caller, self._asked, self._request, action)
        self._handed = handed = await connector.prefill(call)
        self._cached = handed.cached
        self._elsewhere = handed.has_kv
        self._caller.reused(self._prompt, to, decision.reused_tokens, handed.cached)
        life.prefill_ended()
        if not self._asked.stream:  # such a reply does not show decode's first token
            self._prefilled_s = self._loop.time()
            life.first_token(handed.cached)

    def _refused(self, passed: Passed, to: InstanceInfo) -> MoonserveError:
        """What an engine's 4xx answer means: after the stream has begun, the client cannot get
        it."""
        if not self._begun_here:
            return passed
        text = logged(passed.answer.body)
        return CallLost(f"{to.id} refused to go on with the stream", detail=text, retry=False)

    async def _go_on(self, to: InstanceInfo) -> None:
        """Let the next call go on with the stream at `to`, from the tokens that the client has."""
        kept, continuation = self._kept, self._continuation
        assert kept is not None, "else the stream has ended"
        assert continuation is not None
        if not self._caller.engines.member(to.id).reports_ids:
            raise CallLost(f"{to.id} cannot go on with the stream of another engine", member=to.id)
        ids, doubtful = kept.in_doubt()
        for dropped in range(doubtful):
            text = await self._caller.text_of(to, self._asked.model, ids[: len(ids) - dropped])
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                kept.drop(dropped)
                break
        else:
            if doubtful:
                raise CallLost("the text of its last tokens is not known", retry=False)
        if continuation.stops and kept.matcher is None:
            kept.stop_at(continuation.stops, await self._held_back(kept, continuation.stops, to))
        self._asked = continuation.at(kept.prompt, kept.known, kept.count, to.max_len)

    async def _held_back(self, kept: StreamedTokens, stops: Sequence[str], to: InstanceInfo) -> str:
        """The text that vLLM held back: as many characters as may begin a stop string, and no
        more."""
        most = max(map(len, stops)) - 1
        if not most or not kept.count:
            return ""
        return (await self._end_of_text(kept, most, to))[-most:]

    async def _end_of_text(
        self, kept: StreamedTokens, most: int, to: InstanceInfo, less: Tokens = 0
    ) -> str:
        """The end of the answer's text, with at least so many characters if it has as many. less:
        how many of the last tokens are left out."""
        ids, before = kept.end_of(_MOST_BYTES * most + _SOME + less)
        ids = ids[: len(ids) - less]
        text = await self._caller.text_of(to, self._asked.model, [*before, *ids])
        if before:
            context = await self._caller.text_of(to, self._asked.model, before)
            text = text[len(context) :]
        return text

    async def _counted_end(self, reply: ContinuedPassing, to: InstanceInfo) -> bytes:
        """The last events of a reply that a stop string has ended within an event of several
        tokens: those after the string do not count."""
        kept = self._kept
        assert kept is not None
        assert kept.matcher is not None
        met = kept.matcher.met
        assert met is not None, "it has ended the reply"
        _, several = kept.in_doubt()
        after = 0
        with contextlib.suppress(MoonserveError):  # without an answer all of them count
            while after < several - 1:
                if met not in await self._end_of_text(kept, len(met), to, after + 1):
                    break
                after += 1
        kept.drop(after)
        return reply.end()

    def _streaming(self, to: InstanceInfo) -> ExternalRequest:
        """The request for the engine that makes the client's reply. It asks for the ids of a
        stream's tokens if another engine could go on with them."""
        asked = self._asked
        if not asked.stream:
            return asked
        if self._begun_here:
            return asking_ids(asked)
        self._kept = None
        if not self._caller.resumes:
            self._final = "--no-resume is set"
        elif not self._caller.engines.member(to.id).reports_ids:
            self._final = "its engine does not report the ids of tokens"
        elif self._prompt.length > _MOST_PROMPT:
            self._final = f"its prompt is longer than {_MOST_PROMPT} tokens"
        else:
            if self._continuation is None:
                self._continuation = Continuation(asked)
            self._final = self._continuation.why_not
            if not self._final:
                plan = self._continuation
                self._kept = StreamedTokens(asked.form, plan.wants_ids, plan.wants_usage)
                return plan.with_ids()
        return asked

    def _passing(self) -> Passing:
        """What reads the reply of the call that has begun."""
        kept = self._kept
        if kept is None:
            return passing(self._asked.form, self._cached, self._elsewhere)
        if self._begun_here:
            return ContinuedPassing(kept, self._first_cached)
        return KeptPassing(kept, self._cached, self._elsewhere)

    async def _make_whole(self, action: Prefill, life: Life) -> Piece | None:
        """Have one engine prefill and decode."""
        to = action.to
        decision = action.decision
        asked = self._streaming(to)
        self._at = (to, decision.reused_tokens)
        # the first token is not visible, so it is assumed to come as predicted
        if not asked.stream:
            wait_s = (decision.predicted_ttft_us - decision.waited_us) / MICROS_PER_SECOND
            self._timer = self._loop.call_later(wait_s, life.prefill_ended)
        self._note = self._caller.observer.began(
            to.id,
            "whole",
            decision.prompt_tokens,
            decision.reused_tokens,
            asked.stream or asked.max_tokens == 1,
        )
        return await self._run(to, asked, asked.raw, self._caller.limits.first_byte_s, life)

    async def decode(self, action: Decode, life: Life) -> Piece | None:
        """See Calls. What prefill left is used once."""
        handed, self._handed = self._handed, None
        assert handed is not None, "a decode follows a prefill"
        to, length = action.to, self._prompt.length
        self._at = (to, 0)
        asked = self._streaming(to)
        try:
            body, first_s = handed.taken(self._caller, asked, to)
            if handed.stream is not None:
                return await self._met(handed, to, first_s, life)
            self._note = self._caller.observer.began(
                to.id, "decode", length, length, self._asked.stream
            )
            return await self._run(to, asked, body, first_s, life)
        except Passed as passed:
            raise self._refused(passed, to) from None
        except (CallLost, DeadlineExceeded) as error:
            lost = CallLost.of(error)
            lost.member = lost.member or await handed.blamed(self._caller)
            raise lost from None
        finally:
            handed.drop()

    async def _met(
        self, handed: Handed, to: InstanceInfo, first_s: float, life: Life
    ) -> Piece | None:
        """The reply of a decode that was called together with its prefill."""
        assert handed.stream is not None
        stream = await handed.stream
        handed.stream = None
        self._note, handed.note = handed.note, None
        if self._asked.stream and stream.status == 200:
            return await self._begun(stream, to, first_s, life)
        return self._whole(await self._caller.rest(to, self._asked, self._request, stream), life)

    async def _run(
        self, to: InstanceInfo, asked: ExternalRequest, body: bytes, first_s: float, life: Life
    ) -> Piece | None:
        """Call the engine that makes the client's reply. body: that of `asked`, or one with more
        fields."""
        caller = self._caller
        if asked.stream:
            stream = caller.stream(to, asked, self._request, body, first_s)
            until_s = self._loop.time() + first_s
            await stream.__aenter__()
            if stream.status != 200:
                # raises, since the status is no success
                return self._whole(await caller.rest(to, asked, self._request, stream), life)
            return await self._begun(stream, to, until_s - self._loop.time(), life)
        limit_s = caller.limits.whole_s(first_s, asked.max_tokens)
        whole = caller.whole(to, asked, self._request, body, limit_s)
        if body is asked.raw:
            return self._whole(await whole, life)
        with LeaseWatch(caller.engines.member(to.id), to, self._request.id, life.inbox, first_s):
            return self._whole(await whole, life)

    async def _begun(
        self, stream: ClientStream, to: InstanceInfo, left_s: float, life: Life
    ) -> bytes:
        """The first whole events of a stream, or of the call that goes on with it."""
        kept = self._kept
        self._inbox = life.inbox
        self._stream = stream
        stream.idle(max(0.001, left_s))
        if kept is None or not self._begun_here:
            reply = self._passing()
            if kept is not None:
                kept.forget()
            first = await self._first_events(reply, stream, to, left_s)
            self.content_type = stream.headers.get("content-type", JSON)
        else:
            if self._first_cached is None:
                self._first_cached = self.reply.cached
            reply, mark = self._passing(), kept.mark()
            try:
                first = await self._first_events(reply, stream, to, left_s)
                if reply.uncounted:
                    first += await self._counted_end(cast(ContinuedPassing, reply), to)
            except BaseException:
                kept.back(mark)
                raise
        stream.idle(self._caller.limits.token_s)
        self.reply = reply
        self._answered(life, seen=True)
        self._begun_here = True
        self._count()
        return first

    async def _first_events(
        self, reply: Passing, stream: ClientStream, to: InstanceInfo, left_s: float
    ) -> bytes:
        """The first whole events, with a token."""
        until_s = self._loop.time() + left_s
        first = b""
        while not first or not reply.begun:
            if reply.error or len(first) > _MOST_BEFORE_BYTES:
                break
            if first and self._loop.time() > until_s:
                raise CallLost(f"{to.id} sent no token in time")
            chunk = await stream.take()
            if chunk is None:
                raise CallLost(f"{to.id} ended its stream before its first token")
            first += reply.passed(reply.whole(chunk))
        if reply.error:
            raise CallLost(f"{to.id} failed", detail=logged(reply.error))
        return first

    def _whole(self, answer: EngineAnswer, life: Life) -> EngineAnswer:
        """Account for a reply that came at once, and correct its usage. Raises CallLost if it is no
        JSON."""
        if not answer.body.lstrip().startswith((b"{", b"[")):
            assert self._at is not None
            why = f"{self._at[0].id} answered 200 with a reply that is no JSON"
            raise CallLost(why, detail=logged(answer.body))
        self.reply = passing(self._asked.form, self._cached, self._elsewhere)
        answer.body = self.reply.answered(answer.body)
        tokens = self.reply.counted.completion
        if self._note is not None and tokens is not None:
            self._note.count = tokens // self._asked.choices
        self._answered(life, seen=tokens is not None and tokens <= self._asked.choices)
        return answer

    def _answered(self, life: Life, seen: bool) -> None:
        """Account for the first bytes for the client.

        seen: whether they show when the first token came. If not, the end of another engine's
        prefill is taken for it.
        """
        now_s = self._loop.time()
        first_s = now_s if seen else self._prefilled_s
        if self._begun_here:  # it goes on: the client has had its first token
            self._caller.metrics.tbt.observe(now_s - self._last_s)
            self._caller.metrics.resumed += 1
        elif first_s is not None:
            self._caller.metrics.ttft.observe(first_s - self._arrived_s)
        if seen and not self._begun_here:
            life.first_token(self.reply.cached)
        if self._note is not None and (self._asked.stream or self.reply.counted.completion):
            self._note.answered(self.reply.cached)
        self._last_s = now_s
        self._stop_timer()
        life.prefill_ended()

    async def pour(self, sink: Callable[[Piece], bool]) -> bool:
        """See Calls. A piece is what has come of the stream, in whole events."""
        assert self._stream is not None, "a stream has begun"
        assert self._inbox is not None
        reply, observe_tbt = self.reply, self._caller.metrics.tbt.observe
        inbox = self._inbox

        def take(chunk: bytes) -> bool:
            if inbox.lost is not None:
                return False  # the call is being ended: another one makes what comes now
            whole = reply.whole(chunk)
            out = reply.passed(whole) if whole else b""
            if not out:
                return not reply.error
            now_s = self._loop.time()
            observe_tbt(now_s - self._last_s)
            self._last_s = now_s
            self._count()
            return sink(out) and not reply.error and not reply.uncounted

        ended = not reply.error and await self._stream.pour(take)
        if reply.uncounted:
            assert self._at is not None
            sink(await self._counted_end(cast(ContinuedPassing, reply), self._at[0]))
        if reply.error:
            raise CallLost("the engine reported an error in its stream", detail=logged(reply.error))
        if ended and not reply.finish:
            raise CallLost("the engine's stream ended early")
        return ended

    def _count(self) -> None:
        if self._note is not None:
            self._note.count = self.reply.events // self._asked.choices

    def ended(self) -> None:
        """See Calls. Takes the engine's count of tokens."""
        reply, metrics = self.reply, self._caller.metrics
        prompt = reply.counted.prompt
        cached = reply.cached
        tokens = reply.tokens
        self._caller.reader.learn(self._asked.model, self._prompt, prompt)
        metrics.prompt_tokens += prompt or self._prompt.length
        metrics.cached_tokens += cached or 0
        metrics.completion_tokens += tokens
        if self._at is not None:
            said = cached if self._cached is None else None
            self._caller.reused(self._prompt, *self._at, said)
        note, self._note = self._note, None
        if note is not None:
            note.count = min(note.count, tokens)
            note.ended(reply.counted.cached)

    async def stop(self) -> None:
        """See Calls."""
        self._stop_timer()
        if self._note is not None:
            self._note.ended()
            self._note = None
        if self._handed is not None:
            self._handed.drop()
            self._handed = None
        if self._stream is not None:
            self._stream.leave()
            self._stream = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def drain(self) -> None:
        """See Calls. Stops after a moment if the engine goes on sending."""
        stream = self._stream
        if stream is None or self.reply.cut_short:
            return
        stream.idle(_DRAIN_S)
        until_s = self._loop.time() + _DRAIN_S
        with contextlib.suppress(MoonserveError):
            while await stream.take() is not None and self._loop.time() < until_s:
                pass

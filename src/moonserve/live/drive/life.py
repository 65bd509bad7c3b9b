"""One request through foreign engines, as the Conductor says: calls, retries, the reply passed on.

`begin` until there is something for the client; then the life is its own stream of bytes. Before
the first of them a call that fails is made again elsewhere, after it the failure ends the stream as
an error event. All runs in the handler's task: what ends a call from outside cancels that task's
wait and nothing else. Here no token is made, and no text is read but for usage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from moonserve.core.errors import BadRequest, DeadlineExceeded, EngineFailed, MoonserveError
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceInfo,
    PrefillEnded,
)
from moonserve.core.units import MICROS_PER_SECOND, InstanceId, Tokens, seconds_to_us
from moonserve.live.drive import handover
from moonserve.live.drive.calls import Answer, Caller, CallLost, Passed, drain, plain
from moonserve.live.drive.dispatch import owed
from moonserve.live.drive.handover import Handed
from moonserve.live.drive.inbox import Inbox
from moonserve.live.drive.lease import Watch
from moonserve.live.drive.passing import Passing
from moonserve.live.drive.prompt_info import Reading
from moonserve.live.external.observed import OutgoingCall
from moonserve.live.http.client import ClientStream
from moonserve.live.http.connection import UpstreamError
from moonserve.live.http.message import JSON, error_reply
from moonserve.live.openai.external import ExternalRequest

log = logging.getLogger(__name__)

_AGAIN_S = 0.25
"""Before an engine that has just failed is called once more."""


class Life:
    """See the module. `close` on every path; it frees all that is held here and at engines."""

    def __init__(
        self,
        asked: ExternalRequest,
        reading: Reading,
        request: Request,
        caller: Caller,
        arrived_s: float,
        on_close: Callable[[], None],
    ) -> None:
        self._asked = asked
        self._reading = reading
        self._request = request
        self._caller = caller
        self._conductor = caller.conductor
        self._on_close: Callable[[], None] | None = on_close
        self._inbox = Inbox()
        self._handed: Handed | None = None
        self._cached: Tokens | None = None
        """Prompt tokens that prefill reused; None: there was none, or it did not say."""
        self._stream: ClientStream | None = None
        self._note: OutgoingCall | None = None
        self._at: tuple[InstanceInfo, Tokens] | None = None
        """Who is called for the client's reply, and how much it was expected to reuse."""
        self._owes_prefilled = False
        """Whether the Conductor is yet to be told of the first token of a call that does it all."""
        self._timer: asyncio.TimerHandle | None = None
        self._failed: InstanceId | None = None
        """Who was called last, in vain."""
        self._busy: Answer | None = None
        """What that one answered, if it takes no more now."""
        self._opened = False
        self._lives = False
        """Whether the Conductor still knows it."""
        self._sent = False
        """Whether the client has got something, or is about to."""
        self._over = False
        self._outcome = "cancelled"
        self._first = b""
        self._reply = Passing()
        self._loop = asyncio.get_running_loop()
        self._arrived_s = arrived_s
        self._prefilled_s: float | None = None
        """When another engine had prefilled it, where decode's first token is not seen."""
        self._first_s, self._last_s = 0.0, arrived_s
        """When the last piece came."""
        self.content_type = JSON

    # Until the first bytes.

    async def begin(self) -> Answer | None:
        """A whole answer, or None: a stream has begun, iterate. Raises what the client is owed."""
        if self._conductor.known(self._request.id):
            message = f"a request with id {self._request.id} is under way; ids must differ"
            raise BadRequest(message, "x-request-id", "duplicate_request_id")
        self._opened = self._lives = True
        self._conductor.open(self._request, self._reading.keys, self._inbox)
        while True:
            action = await self._inbox.get()
            match action:
                case Prefill():
                    work = self._prefill(action)
                case Decode():
                    work = self._decode(action)
                case Refuse():
                    self._outcome, self._lives = "refused", False
                    raise owed(action)
                case GiveUp(why=why):
                    self._outcome, self._lives = "failed", False
                    if self._busy is not None:
                        return self._busy
                    raise EngineFailed(why)
                case _:
                    continue
            self._inbox.out(action.number)
            try:
                answer = await work
            except Passed as passed:
                self._outcome = f"engine answered {passed.answer.status}"
                return passed.answer  # no failure: what is left of it ends as when a client goes
            except MoonserveError as error:
                log.warning("%s: a call to %s failed: %s", self._request.id, action.to.id, error)
                self._failed = action.to.id
                self._busy = error.busy if isinstance(error, CallLost) else None
                self._fail(error, action.to.id, retry=True)
                continue
            if answer is not None or self._sent:
                return answer

    async def _prefill(self, action: Prefill) -> Answer | None:
        """Prefill where the Conductor says; all of it, where that is one engine's."""
        decision, to = action.decision, action.to
        self._cached = self._prefilled_s = None
        if to.id == self._failed:  # nobody else is left: what was wrong may pass
            await self._inbox.engine(asyncio.sleep(_AGAIN_S))
        if decision.joint:
            self._at, self._owes_prefilled = (to, decision.reused_tokens), True
            if not self._asked.stream:  # its first token is not seen: taken to come as predicted
                wait_s = (decision.predicted_ttft_us - decision.waited_us) / MICROS_PER_SECOND
                self._timer = self._loop.call_later(wait_s, self._tell_prefilled)
            self._note = self._caller.observer.began(
                to.id,
                "whole",
                decision.prompt_tokens,
                decision.reused_tokens,
                self._asked.stream or self._asked.max_tokens == 1,
            )
            return await self._run(to, self._asked.raw, self._caller.limits.first_byte_s)
        self._handed = handed = await self._inbox.engine(
            handover.prefill(self._caller, self._asked, self._request, action)
        )
        self._cached = handed.cached
        self._caller.reused(self._reading, to, decision.reused_tokens, handed.cached)
        self._conductor.tell(PrefillEnded(self._request.id, self._inbox.number, final=False))
        if not self._asked.stream:  # decode's is not seen
            self._prefilled_s = self._loop.time()
            self._conductor.first_token(self._request.id, handed.cached)
        self._inbox.out(0)
        return None

    async def _decode(self, action: Decode) -> Answer | None:
        """Decode what was handed over, once."""
        handed, self._handed = self._handed, None
        assert handed is not None, "a decode follows a prefill"
        to, self._at = action.to, (action.to, 0)
        try:
            body, first_s = handed.taken(self._caller, self._asked, to)
            if handed.stream is not None:
                return await self._inbox.engine(self._met(handed, to, first_s))
            self._note = self._caller.observer.began(
                to.id, "decode", self._reading.length, self._reading.length, self._asked.stream
            )
            return await self._run(to, body, first_s)
        except (CallLost, DeadlineExceeded) as error:
            lost = error if isinstance(error, CallLost) else CallLost(str(error))
            lost.member = lost.member or await self._inbox.engine(handed.blamed(self._caller))
            raise lost from None
        finally:
            handed.drop()

    async def _met(self, handed: Handed, to: InstanceInfo, first_s: float) -> Answer | None:
        """The reply of a decode that was called beside its prefill."""
        assert handed.stream is not None
        stream = await handed.stream
        handed.stream, self._note, handed.note = None, handed.note, None
        if self._asked.stream and stream.status == 200:
            await self._begun(stream, to, first_s)
            return None
        return self._whole(await self._caller.rest(to, stream))

    async def _run(self, to: InstanceInfo, body: bytes, first_s: float) -> Answer | None:
        """Call an engine for the client's reply."""
        caller, asked = self._caller, self._asked
        if asked.stream:
            stream = caller.stream(to, asked, self._request, body, first_s)
            return await self._inbox.engine(self._open(stream, to, first_s))
        limit_s = caller.limits.whole_s(first_s, asked.max_tokens)
        whole = caller.whole(to, asked, self._request, body, limit_s)
        if body is asked.raw:
            return self._whole(await self._inbox.engine(whole))
        with Watch(caller.engines.member(to.id), to, self._request.id, self._inbox, first_s):
            return self._whole(await self._inbox.engine(whole))

    async def _open(self, stream: ClientStream, to: InstanceInfo, first_s: float) -> Answer | None:
        until_s = self._loop.time() + first_s
        await stream.__aenter__()
        if stream.status != 200:
            return self._whole(await self._caller.rest(to, stream))  # raises
        await self._begun(stream, to, until_s - self._loop.time())
        return None

    async def _begun(self, stream: ClientStream, to: InstanceInfo, left_s: float) -> None:
        """Until the first whole events of a stream are here."""
        self._stream, reply = stream, Passing(self._cached)
        stream.idle(max(0.001, left_s))
        first = b""
        while not first:
            chunk = await stream.take()
            if chunk is None:
                raise CallLost(f"{to.id} ended its stream before its first token")
            first = reply.passed(reply.whole(chunk))
        if reply.failed:
            raise CallLost(f"{to.id} failed: {first[:500].decode('utf-8', 'replace')}")
        stream.idle(self._caller.limits.token_s)
        self.content_type = stream.headers.get("content-type", JSON)
        self._reply, self._first = reply, first
        self._answered()
        self._account()

    def _whole(self, answer: Answer) -> Answer:
        """A reply that came at once, with its usage put right."""
        self._reply = Passing(self._cached)
        answer.body = self._reply.answered(answer.body)
        tokens = self._reply.counted.completion
        if self._note is not None and tokens is not None:
            self._note.count = tokens // self._asked.choices
        self._answered(seen=tokens is not None and tokens <= self._asked.choices)
        self._end()
        return answer

    def _answered(self, seen: bool = True) -> None:
        """Something is here for the client; seen: its first token, else that came nobody knows
        when, but for what prefill elsewhere said."""
        self._sent = True
        now_s = self._loop.time()
        first_s = now_s if seen else self._prefilled_s
        if first_s is not None:
            self._caller.metrics.ttft.observe(first_s - self._arrived_s)
        if seen:
            self._conductor.first_token(self._request.id, self._reply.cached)
        if self._note is not None and (self._asked.stream or self._reply.counted.completion):
            self._note.answered(self._reply.cached)
        self._first_s = self._last_s = now_s
        self._tell_prefilled()

    def _tell_prefilled(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._owes_prefilled:
            self._owes_prefilled = False
            self._conductor.tell(PrefillEnded(self._request.id, self._inbox.number, final=False))

    def _fail(self, error: MoonserveError, called: InstanceId, retry: bool) -> None:
        """The call that was out is over; the Conductor says what follows."""
        self._stop()
        self._lives = retry
        self._conductor.tell(
            CallFailed(
                request=self._request.id,
                number=self._inbox.number,
                why=plain(error, called),
                retry=retry,
                length=self._reading.length,
                keys=self._reading.keys,
                unreachable=isinstance(error, UpstreamError) and not error.sent,
                member=error.member if isinstance(error, CallLost) else None,
            )
        )
        self._inbox.out(0)
        self._owes_prefilled = False

    # The stream.

    def __aiter__(self) -> Life:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        stream = self._stream
        if self._over or stream is None:
            if stream is not None and self._outcome != "failed":
                await drain(stream)
            raise StopAsyncIteration
        inbox, out = self._inbox, b""
        while not out:
            if inbox.lost is not None:
                return self._break_off(CallLost(inbox.lost))
            inbox.awaiting = True  # Inbox.engine without a coroutine for each token
            try:
                chunk = await stream.take()
            except (UpstreamError, DeadlineExceeded) as error:
                return self._break_off(error)
            except asyncio.CancelledError:
                if inbox.is_ours():
                    return self._break_off(CallLost(str(inbox.lost)))
                raise
            finally:
                inbox.awaiting = False
            if chunk is None and not self._reply.finish:
                return self._break_off(CallLost("the engine's stream ended early"))
            if chunk is None:
                self._end()
                raise StopAsyncIteration
            if whole := self._reply.whole(chunk):
                out = self._reply.passed(whole)
        now_s = self._loop.time()
        self._caller.metrics.tbt.observe(now_s - self._last_s)
        self._last_s = now_s
        self._account()
        return out

    def _account(self) -> None:
        """Some of the stream has passed."""
        reply = self._reply
        if self._note is not None:
            self._note.count = reply.events // self._asked.choices
        if reply.failed:
            self._break_off(CallLost("failed in mid-stream"))
        elif reply.done:
            self._end()

    def _break_off(self, error: MoonserveError) -> bytes:
        """The stream cannot go on: say so, as its last event."""
        assert self._at is not None, "its stream has begun"
        called = self._at[0].id
        log.warning("%s: %s failed in mid-stream: %s", self._request.id, called, error)
        self._fail(error, called, retry=False)
        self._outcome, self._over = "failed", True
        reply = error_reply(EngineFailed(plain(error, called)))
        return b"data: %b\n\n" % msgspec.json.encode(reply)

    # Ends.

    def _end(self) -> None:
        """The last token is here, and what the engine has counted."""
        reply, metrics = self._reply, self._caller.metrics
        self._over, self._lives, self._outcome = True, False, reply.finish or "done"
        prompt, cached, tokens = reply.counted.prompt, reply.cached, reply.tokens
        self._caller.reader.learn(self._asked.model, self._reading, prompt)
        metrics.prompt_tokens += prompt or self._reading.length
        metrics.cached_tokens += cached or 0
        metrics.completion_tokens += tokens
        if self._at is not None:
            said = cached if self._cached is None else None
            self._caller.reused(self._reading, *self._at, said)
        self._conductor.tell(DecodeEnded(self._request.id, self._inbox.number, tokens))
        self._inbox.out(0)
        note, self._note = self._note, None
        if note is not None:
            note.count = min(note.count, tokens)
            note.ended(reply.counted.cached)

    def _stop(self) -> None:
        """End whatever is out."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._note is not None:
            self._note.ended()
            self._note = None
        if self._handed is not None:
            self._handed.drop()
            self._handed = None
        if self._stream is not None:
            self._stream.leave()
            self._stream = None

    async def aclose(self) -> None:
        """End it on every path: what is out is cut, what was promised is free."""
        self._stop()
        if self._opened:
            self._opened = False
            if self._lives:
                self._conductor.tell(ClientGone(self._request.id))
            gaps, spent_s = self._reply.tokens - 1, self._last_s - self._first_s
            tbt_us = seconds_to_us(spent_s / gaps) if gaps > 0 and spent_s else None
            self._conductor.close(self._request.id, self._outcome, tbt_us, self._reply.cached)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

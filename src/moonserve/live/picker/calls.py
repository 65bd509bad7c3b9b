"""PickedCall: a request whose calls a proxy makes, as the Conductor's ledger has it.

`front` makes one per request and tells it what the proxy reports. The proxy gets the Conductor's
first placement, and no second one: a call that is out cannot be made again from here. What the
proxy does not show (the first token, the number of tokens) is not guessed, except for the end of
the prefill, which comes as predicted.
"""

from __future__ import annotations

import asyncio

from moonserve.core.errors import DeadlineExceeded
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Abort, Action, Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceInfo,
    PrefillEnded,
)
from moonserve.core.schedule.record import ANSWERED, Measured
from moonserve.core.units import MICROS_PER_SECOND, Bytes, Tokens, seconds_to_us
from moonserve.live.api.engine_text import Prepared
from moonserve.live.drive.calls import Caller
from moonserve.live.drive.passing import passing
from moonserve.live.drive.request import error_for, gave_up
from moonserve.live.ports import OutgoingCall
from moonserve.page import pointer

_TAIL_BYTES: Bytes = 64 << 10
"""A reply that does not stream has its usage within this many bytes at its end."""


class PickedCall:
    """See the module. Implements ports.Inbox. Call `close` on every path."""

    def __init__(self, read: Prepared, request: Request, caller: Caller, arrived_s: float) -> None:
        """request: of `read`, with the instances that it may use. arrived_s: by the loop's
        clock."""
        self._read = read
        self._request = request
        self._caller = caller
        self._conductor = caller.conductor
        self._arrived_s = arrived_s
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[Prefill | Refuse | GiveUp] = self._loop.create_future()
        self._placed: Prefill | None = None
        self._number = 0
        """Of the call that is out, by the Conductor."""
        self._is_open = False
        """Whether the Conductor knows it by this object."""
        self._lives = False
        """Whether the Conductor still counts it."""
        self._prefills = False
        """Whether the end of the prefill has yet to be reported."""
        self._decodes = False
        """Whether the call that is out decodes."""
        self._timer: asyncio.TimerHandle | None = None
        self._note: OutgoingCall | None = None
        self._reply = passing(read.outgoing.form)
        self._shown = False
        """Whether the reply passes by here."""
        self._tail = b""
        self._first_s: float | None = None
        self._last_s = arrived_s
        """When the first and the last piece of a stream came."""
        self._outcome = "cancelled"

    @property
    def tokens(self) -> Tokens:
        """Of the prompt, and those of the answer that have passed by."""
        reply = self._reply
        return max(self._read.prompt.length, reply.counted.prompt or 0) + reply.tokens

    # What the Conductor orders.

    async def place(self, within_s: float) -> Prefill:
        """Open the request and wait for its placement.

        Raises what the client gets: Overloaded, NobodyAlive, BadRequest, EngineFailed,
        DeadlineExceeded.
        """
        self._is_open = self._lives = True
        self._conductor.open(self._request, self._read.prompt.keys, self)
        try:
            async with asyncio.timeout(within_s):
                action = await self._first
        except TimeoutError:
            raise DeadlineExceeded(f"no instance was free within {within_s:g} s") from None
        match action:
            case Refuse():
                self._outcome = "refused"
                shown = pointer(self._request.id, self._conductor.has_page)
                raise error_for(action, shown)
            case GiveUp():
                self._outcome = "failed"
                raise gave_up(action)
        self._placed = action
        return action

    def put_nowait(self, action: Action, /) -> None:
        """See Inbox."""
        match action:
            case Prefill(number=number):
                self._number = number
                self._prefills = True
                if self._placed is not None:  # for the ledger only: the engine has answered
                    self._loop.call_soon(self._prefilled)
            case Decode(number=number):
                self._number = number
                self._decodes = True
            case Refuse() | GiveUp():
                self._lives = False
            case Abort(number=number, why=why) if number == self._number:
                self._fail(why)
        if not self._first.done() and isinstance(action, Prefill | Refuse | GiveUp):
            self._first.set_result(action)

    # What the proxy reports.

    def sent(self) -> None:
        """The proxy makes the call now."""
        placed = self._placed
        assert placed is not None, "placed first"
        decision = placed.decision
        wait_s = (decision.predicted_ttft_us - decision.waited_us) / MICROS_PER_SECOND
        self._timer = self._loop.call_later(wait_s, self._prefilled)
        self._note = self._caller.observer.began(
            placed.to.id,
            "whole" if decision.joint else "prefill",
            decision.prompt_tokens,
            decision.reused_tokens,
            not decision.joint or self._read.outgoing.stream,
        )

    def answered(self, status: int, by: InstanceInfo, shown: bool) -> None:
        """The reply's headers have come. by: the instance that the client's reply comes from."""
        placed, outgoing = self._placed, self._read.outgoing
        assert placed is not None, "placed first"
        self._shown = shown
        if not 200 <= status < 300:
            self._refused(status, by)
            return
        decision = placed.decision
        self._outcome = "done"
        meant = placed.to if decision.joint else placed.decode
        if by.id != meant.id:
            self._fail(f"{meant.id} did not take the call, which went to {by.id}", again=True)
        if decision.joint:
            if shown and outgoing.stream and self._timer is not None:
                self._timer.cancel()  # the first token will show itself
            if not shown:
                self._caller.reused(self._read.prompt, by, decision.reused_tokens, None)
            return
        self._caller.reused(self._read.prompt, placed.to, decision.reused_tokens, None)
        self._caller.reused(self._read.prompt, by, 0, None)
        if outgoing.stream:  # the sidecar calls decode when the prefill has ended
            self._hand_over(by)

    def _hand_over(self, by: InstanceInfo) -> None:
        """The prefill of another instance has ended, and this one decodes."""
        if self._note is not None:
            self._note.answered(None)
            self._note.ended()
        length = self._read.prompt.length
        self._note = self._caller.observer.began(by.id, "decode", length, length, True)
        self._prefilled()

    def _refused(self, status: int, by: InstanceInfo) -> None:
        """The client gets an error: an engine's, or the proxy's own."""
        self._outcome = f"{ANSWERED}{status}"
        if status >= 500:
            self._fail(f"{by.id}: the proxy got status {status}")

    def passed(self, data: bytes, over: bool) -> None:
        """A piece of the reply has passed by."""
        if self._outcome != "done":
            return
        if self._read.outgoing.stream:
            self._streamed(data)
        else:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if over:
                self._came_whole()
        if self._reply.begun and (self._reply.done or (over and self._reply.finish)):
            self._complete()
        elif over:
            self._outcome = "failed"
            self._fail("the engine's stream ended early")

    def _came_whole(self) -> None:
        """A reply that does not stream is here. It shows when the first token came only if it has
        no other."""
        reply, choices = self._reply, self._read.outgoing.choices
        reply.answered(self._tail)
        tokens = reply.counted.completion
        if tokens is None:
            return
        if tokens <= choices:
            self._caller.metrics.ttft.observe(self._loop.time() - self._arrived_s)
            self._conductor.first_token(self._request.id, reply.cached)
        if self._note is not None:
            self._note.count = tokens // choices
            self._note.answered(reply.cached)

    def _streamed(self, data: bytes) -> None:
        reply = self._reply
        whole = reply.whole(data)
        if not whole:
            return
        reply.passed(whole)
        now_s = self._loop.time()
        metrics = self._caller.metrics
        if self._first_s is None:
            if not reply.begun:
                return
            self._first_s = now_s
            metrics.ttft.observe(now_s - self._arrived_s)
            self._conductor.first_token(self._request.id, reply.cached)
            if self._note is not None:
                self._note.answered(reply.cached)
            self._prefilled()
        else:
            metrics.tbt.observe(now_s - self._last_s)
        self._last_s = now_s
        if self._note is not None:
            self._note.count = reply.events // self._read.outgoing.choices

    def _complete(self) -> None:
        """The whole reply has passed by."""
        if not self._lives:
            return
        reply, metrics, placed = self._reply, self._caller.metrics, self._placed
        assert placed is not None, "placed first"
        metrics.prompt_tokens += reply.counted.prompt or self._read.prompt.length
        metrics.cached_tokens += reply.cached or 0
        metrics.completion_tokens += reply.tokens
        self._caller.reader.learn(
            self._read.outgoing.model, self._read.prompt, reply.counted.prompt
        )
        if placed.decision.joint:
            reused = placed.decision.reused_tokens
            self._caller.reused(self._read.prompt, placed.to, reused, reply.cached)
        self._prefilled()
        waits = not placed.decision.joint and not self._decodes
        number = self._number + waits  # the order to decode is on its way
        self._conductor.tell(DecodeEnded(self._request.id, number, reply.tokens))
        self._lives = False
        self._outcome = reply.finish or "done"

    def close(self) -> None:
        """The request has ended, however it did."""
        if self._timer is not None:
            self._timer.cancel()
        if self._note is not None:
            self._note.ended(self._reply.counted.cached)
            self._note = None
        if not self._is_open:
            return
        self._is_open = False
        if self._lives:
            self._conductor.tell(ClientGone(self._request.id))
        self._conductor.close(self._request.id, self._outcome, self._measured())

    def _prefilled(self) -> None:
        """The prefill has ended, or is taken to have."""
        if self._timer is not None:
            self._timer.cancel()
        if self._prefills and self._lives:
            self._prefills = False
            self._conductor.tell(PrefillEnded(self._request.id, self._number, final=False))

    def _fail(self, why: str, again: bool = False) -> None:
        """The call failed at the instance where the Conductor counts it. again: it goes on at
        another one, which the Conductor is to choose too, for its ledger."""
        if self._lives:
            prompt = self._read.prompt
            failed = CallFailed(
                self._request.id, self._number, why, again, prompt.length, prompt.keys
            )
            self._conductor.tell(failed)

    def _measured(self) -> Measured:
        if not self._shown:
            return Measured()
        reply, tokens = self._reply, self._reply.tokens
        gaps = tokens - 1
        tbt_us = None
        if self._first_s is not None and gaps > 0:
            tbt_us = seconds_to_us((self._last_s - self._first_s) / gaps)
        return Measured(tokens=tokens, cached_tokens=reply.cached, tbt_us=tbt_us)

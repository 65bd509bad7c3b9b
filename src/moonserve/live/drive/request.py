"""One request's life at the gateway, from its arrival at the Conductor to its end.

`RequestDriver` is the one road of all requests: it makes the calls that the Conductor wants, one
after the other, reports what became of each, and hands on the reply piece by piece. How a call is
made, and what its pieces are, is a `Calls` object's: `embedded.TokenCalls` for instances of ours,
`external.EngineCalls` for external engines. All of it runs in the task that serves the client:
what ends a call from outside cancels that task's wait, and nothing else (see `inbox`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from moonserve.core.errors import (
    BadRequest,
    EngineFailed,
    MoonserveError,
    NobodyAlive,
    Overloaded,
)
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.units import MICROS_PER_SECOND, BlockKey, InstanceId, Tokens, seconds_to_us
from moonserve.live.drive.inbox import Inbox
from moonserve.live.drive.lost import CallLost, Passed, plain
from moonserve.live.ports import Conducting

log = logging.getLogger(__name__)

PieceT = TypeVar("PieceT")
PieceT_co = TypeVar("PieceT_co", covariant=True)


class Reply(Protocol):
    """How far a reply has come."""

    @property
    def finish(self) -> str | None:
        """Why it ended; None: it has not."""

    @property
    def done(self) -> bool:
        """Whether its last piece has come."""

    @property
    def failed(self) -> bool:
        """Whether its last piece said that the engine failed."""

    @property
    def tokens(self) -> Tokens:
        """Tokens generated so far."""

    @property
    def cached(self) -> Tokens | None:
        """Prompt tokens that prefill reused; None: not reported (yet)."""


class Life(Protocol):
    """What a call reports while it is out. `RequestDriver` implements it."""

    @property
    def inbox(self) -> Inbox:
        """The Conductor's actions for this request."""

    def stage_ended(self, member: InstanceId) -> None:
        """An instance of a group has done its part of the prefill."""

    def prefill_ended(self, final: bool = False) -> None:
        """Prefill gave its token; a second report of the same call has no effect."""

    def first_token(self, cached: Tokens | None) -> None:
        """The request's first token is known to be there."""


class Calls(Protocol[PieceT_co]):
    """The calls of one request on one wire: made one at a time, each as the driver asks for it.

    Every method that waits may be cancelled; then `stop` is called. Failures are MoonserveErrors.
    """

    resumes: bool
    """Retry rule. True: a lost call goes on elsewhere by the tokens that are known. False: it is
    made again only while the client has got nothing."""
    again_s: float
    """Pause before the instance that has just failed is called once more."""

    @property
    def reply(self) -> Reply:
        """How far the reply has come."""

    async def prefill(self, action: Prefill, life: Life) -> PieceT_co | None:
        """Prefill; where the decision is joint, make the whole call and return its first piece.

        None: prefill gave nothing for the client.
        """

    async def decode(self, action: Decode, life: Life) -> PieceT_co | None:
        """Decode from what prefill left; the first piece."""

    async def next(self) -> PieceT_co | None:
        """The next piece of the call that has begun; None: the reply has ended."""

    def known(self) -> tuple[Tokens, tuple[BlockKey, ...]]:
        """Length and keys of what another instance would have to go on from."""

    def ended(self) -> None:
        """The reply is whole: account for it."""

    async def stop(self) -> None:
        """End whatever is out."""

    async def drain(self) -> None:
        """Read what follows a reply that has ended, so that its connection can be used again."""


class RequestDriver(Generic[PieceT]):
    """See the module. Call `next` until it returns None, and `aclose` on every path."""

    def __init__(
        self,
        request: Request,
        keys: Sequence[BlockKey],
        conductor: Conducting,
        calls: Calls[PieceT],
    ) -> None:
        """keys: of the prompt's full blocks. Nothing happens before the first `next`."""
        self._request = request
        self._keys = keys
        self._conductor = conductor
        self._calls = calls
        self.inbox = Inbox()
        self._opened = False
        self._lives = False
        """Whether the Conductor still counts the request."""
        self._prefilling = False
        """Whether the end of the prefill that is out has yet to be reported."""
        self._reading = False
        """Whether a call is out whose pieces are the client's."""
        self._called: InstanceId | None = None
        """The instance that was called last."""
        self._failed: InstanceId | None = None
        """The instance whose call failed last."""
        self._lost: CallLost | None = None
        """How that call failed."""
        self._held: PieceT | None = None
        """What prefill gave: the Conductor may refuse the request yet, before it decodes."""
        self._over = False
        self._pieces = 0
        self._outcome = "cancelled"
        self._loop = asyncio.get_running_loop()
        self._first_s = 0.0
        self._last_s = 0.0
        """When the first and the last piece came."""

    async def next(self) -> PieceT | None:
        """The next piece of the reply; None: there is no more. Raises what the client is owed:

        BadRequest, Overloaded, NobodyAlive, EngineFailed, and Passed before the first piece.
        """
        if not self._opened:
            self._open()
        while not self._over:
            if self._reading:
                piece = await self._read()
            else:
                piece = await self._act()
            if piece is not None:
                return piece
        return None

    async def aclose(self) -> None:
        """End whatever is out; the Conductor frees what it reserved."""
        if self._opened:
            self._opened = False
            if self._lives:
                self._conductor.tell(ClientGone(self._request.id))
            reply = self._calls.reply
            gaps = reply.tokens - 1 if self._pieces > 1 else 0
            tbt_us = seconds_to_us((self._last_s - self._first_s) / gaps) if gaps > 0 else None
            self._conductor.close(self._request.id, self._outcome, tbt_us, reply.cached)
        try:
            if self._calls.reply.done:
                await self._calls.drain()
        finally:
            await self._calls.stop()

    # What a call reports: see Life.

    def stage_ended(self, member: InstanceId) -> None:
        """See Life."""
        self._conductor.tell(StageEnded(self._request.id, self.inbox.number, member))

    def prefill_ended(self, final: bool = False) -> None:
        """See Life."""
        if self._prefilling:
            self._prefilling = False
            self._conductor.tell(PrefillEnded(self._request.id, self.inbox.number, final))

    def first_token(self, cached: Tokens | None) -> None:
        """See Life."""
        self._conductor.first_token(self._request.id, cached)

    # Steps.

    def _open(self) -> None:
        request = self._request
        if self._conductor.known(request.id):
            message = f"a request with id {request.id} is under way; ids must differ"
            raise BadRequest(message, "x-request-id", "duplicate_request_id")
        self._opened = self._lives = True
        self._conductor.open(request, self._keys, self.inbox)

    async def _act(self) -> PieceT | None:
        """Do what the Conductor wants next; the piece that came of it."""
        if self._held is not None:
            held, self._held = self._held, None
            if not isinstance(await self.inbox.peek(), Refuse):
                return held
        action = await self.inbox.get()
        match action:
            case Prefill() | Decode():
                return await self._make(action)
            case Refuse():
                self._end("refused")
                raise error_for(action)
            case GiveUp(why=why):
                self._end("failed")
                if self._lost is not None and self._lost.busy is not None:
                    raise Passed(self._lost.busy)
                raise EngineFailed(why)
            case _:
                return None

    async def _make(self, action: Prefill | Decode) -> PieceT | None:
        """Make one call, until its first piece is here."""
        self.inbox.out(action.number)
        self._called = action.to.id
        self._prefilling = isinstance(action, Prefill)
        try:
            piece = await self.inbox.until_lost(self._call(action))
        except Passed as passed:
            self._end(f"engine answered {passed.answer.status}")
            self._lives = True  # what is left of it ends as when a client leaves
            raise
        except Exception as error:  # noqa: BLE001 - a bug in a call is a failed call, and logged
            await self._fail(error, retry=True)
            return None
        if isinstance(action, Decode) or action.decision.joint:
            return self._took(piece)
        self.inbox.out(0)
        if self._calls.reply.done:
            self._end(self._calls.reply.finish)
            return self._noted(piece)
        self._held = self._noted(piece)
        return None

    async def _call(self, action: Prefill | Decode) -> PieceT | None:
        if isinstance(action, Decode):
            return await self._calls.decode(action, self)
        if action.to.id == self._failed and self._calls.again_s:
            await asyncio.sleep(self._calls.again_s)  # no other is left: its trouble may pass
        return await self._calls.prefill(action, self)

    async def _read(self) -> PieceT | None:
        """The next piece of the call that is out."""
        try:
            piece = await self.inbox.until_lost(self._calls.next())
        except Exception as error:  # noqa: BLE001 - a bug in a call is a failed call, and logged
            await self._fail(error, retry=self._calls.resumes)
            return None
        return self._took(piece)

    def _took(self, piece: PieceT | None) -> PieceT | None:
        """Account for a piece of the call whose pieces are the client's."""
        self._reading = True
        reply = self._calls.reply
        if reply.failed:
            self._break_off(CallLost("failed in mid-stream"))
        elif reply.done or piece is None:
            self._conductor.tell(DecodeEnded(self._request.id, self.inbox.number, reply.tokens))
            self._end(reply.finish or "done")
            self._calls.ended()
        return self._noted(piece)

    def _noted(self, piece: PieceT | None) -> PieceT | None:
        if piece is not None:
            self._last_s = self._loop.time()
            if not self._pieces:
                self._first_s = self._last_s
            self._pieces += 1
        return piece

    async def _fail(self, error: Exception, retry: bool) -> None:
        """The call that was out has failed; the Conductor says what follows, if anything does."""
        assert self._called is not None, "a call was out"
        await self._calls.stop()
        if isinstance(error, MoonserveError):
            lost = CallLost.of(error)
            log.warning("%s: a call to %s failed: %s", self._request.id, self._called, error)
        else:
            lost = CallLost("internal error")
            log.error("%s: a call to %s failed", self._request.id, self._called, exc_info=error)
        if not retry:
            self._break_off(lost)
            raise EngineFailed(plain(lost, self._called))
        self._report(lost, lost.retry)
        self._lost, self._failed = lost, self._called
        self._reading = False
        self.inbox.out(0)

    def _break_off(self, lost: CallLost) -> None:
        """The client has a part of the reply, which nobody can complete."""
        self._report(lost, retry=False)
        self._end("failed")

    def _report(self, lost: CallLost, retry: bool) -> None:
        assert self._called is not None, "a call was out"
        length, keys = self._calls.known()
        self._conductor.tell(
            CallFailed(
                request=self._request.id,
                number=self.inbox.number,
                why=plain(lost, self._called),
                retry=retry,
                length=length,
                keys=keys,
                unreachable=lost.unreachable,
                member=lost.member,
            )
        )

    def _end(self, outcome: str | None) -> None:
        """Nothing more comes; noted before the client has the last piece, since it may leave."""
        self._over = True
        self._lives = False
        self._outcome = outcome or self._outcome
        self.inbox.out(0)


def error_for(refusal: Refuse) -> MoonserveError:
    """The error that the client of a refused request gets."""
    why, reason, wait_us = refusal.why, refusal.reason, refusal.retry_after_us
    if reason == "duplicate_request_id":
        return BadRequest(why, "x-request-id", reason)
    if reason == "nobody_alive":
        return NobodyAlive(why)
    if reason == "kv_memory":  # no waiting helps
        return BadRequest(why, "prompt", "context_length_exceeded")
    return Overloaded(why, reason, None if wait_us is None else wait_us / MICROS_PER_SECOND)

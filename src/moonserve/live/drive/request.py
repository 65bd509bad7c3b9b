"""One request's life at the gateway, from its arrival at the Conductor to its end.

`RequestDriver` serves every request. It makes the calls that the Conductor asks for, one after the
other, reports the outcome of each, and returns the reply piece by piece. A `Calls` object knows how
calls are made and what a piece is: `embedded.TokenCalls` for our own workers,
`external.EngineCalls` for external engines.

The driver runs in the task that serves the client and starts no other. An action of the Conductor
that ends a call interrupts only the wait for an instance: see `inbox`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from moonserve.core.errors import (
    BadRequest,
    EngineFailed,
    MoonserveError,
    NobodyAlive,
    Overloaded,
    PackageMissing,
)
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decode, GiveUp, Prefill, Refuse
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    InstanceInfo,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.schedule.record import ANSWERED, DecodeTimes, Measured, PrefillTimes
from moonserve.core.units import (
    MICROS_PER_SECOND,
    BlockKey,
    InstanceId,
    Micros,
    Tokens,
    seconds_to_us,
)
from moonserve.live.drive.inbox import ActionInbox
from moonserve.live.drive.lost import CallLost, Passed, plain, quoted_message
from moonserve.live.ports import Conducting
from moonserve.page import pointer

log = logging.getLogger(__name__)

PieceT = TypeVar("PieceT")
PieceT_co = TypeVar("PieceT_co", covariant=True)


class ReplyState(Protocol):
    """How far a reply has come."""

    @property
    def finish(self) -> str | None:
        """Why it ended; None: it has not."""

    @property
    def done(self) -> bool:
        """Whether its last piece has come."""

    @property
    def tokens(self) -> Tokens:
        """Tokens generated so far."""

    @property
    def cached(self) -> Tokens | None:
        """Prompt tokens that prefill reused; None: not reported (yet)."""

    @property
    def prefill(self) -> PrefillTimes | None:
        """How the worker spent the last prefill's time; None: it has not reported it."""

    @property
    def decode(self) -> DecodeTimes | None:
        """How the worker spent the time before the last decode; None: it has not reported it."""


class Life(Protocol):
    """What a call reports while it is out. `RequestDriver` implements it."""

    @property
    def inbox(self) -> ActionInbox:
        """The Conductor's actions for this request."""

    def stage_ended(self, member: InstanceId) -> None:
        """Report that an instance of a group has done its part of the prefill."""

    def prefill_ended(self, final: bool = False) -> None:
        """Report that prefill returned its token. A second report for the same call has no
        effect."""

    def first_token(self, cached: Tokens | None) -> None:
        """Report that the request's first token has come."""


class Calls(Protocol[PieceT_co]):
    """The calls of one request. The driver asks for one at a time.

    Every method that waits may be cancelled; the driver then calls `stop`. Failures are
    MoonserveErrors.
    """

    again_s: float
    """Pause before the instance that has just failed is called once more."""

    @property
    def reply(self) -> ReplyState:
        """How far the reply has come."""

    async def prefill(self, action: Prefill, life: Life) -> PieceT_co | None:
        """Prefill. If the decision is joint, one call does prefill and decode; return its first
        piece.

        None: prefill returned nothing for the client.
        """

    async def decode(self, action: Decode, life: Life) -> PieceT_co | None:
        """Decode from what prefill left; return the first piece."""

    async def pour(self, sink: Callable[[PieceT_co], bool]) -> bool:
        """Give `sink` each piece of the call that has begun as it comes.

        True: the reply has ended; False: `sink` has returned False.
        """

    async def died(self, instance: InstanceInfo) -> bool:
        """Whether nothing listens any more at the address of an instance whose call broke off."""

    def broke_off(self) -> str:
        """Note that the call broke off whose pieces went to the client.

        Returns why the reply cannot go on elsewhere from the tokens that are known; empty: it can.
        """

    def known(self) -> tuple[Tokens, tuple[BlockKey, ...]]:
        """Length and block keys of prompt plus generated tokens; of the prompt alone if the reply
        could not go on elsewhere."""

    def ended(self) -> None:
        """Account for the reply, which is whole."""

    async def stop(self) -> None:
        """End every call that is out."""

    async def drain(self) -> None:
        """Read the end of a connection whose reply is whole, so that it can be used again."""


class RequestDriver(Generic[PieceT]):
    """Drives one request. Call `next` until it returns None, or `pour` until it returns True, and
    `aclose` on every path."""

    def __init__(
        self,
        request: Request,
        keys: Sequence[BlockKey],
        conductor: Conducting,
        calls: Calls[PieceT],
    ) -> None:
        """keys: of the prompt's full blocks. Nothing is sent before the first `next`."""
        self._request = request
        self._keys = keys
        self._conductor = conductor
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self.inbox = ActionInbox(self._loop)
        self._opened = False
        self._lives = False
        """Whether the Conductor still counts the request."""
        self._prefilling = False
        """Whether the end of the current prefill has yet to be reported."""
        self._reading = False
        """Whether the current call's pieces go to the client."""
        self._called: InstanceId | None = None
        """The instance that was called last."""
        self._members: tuple[InstanceInfo, ...] = ()
        """All instances of that call."""
        self._failed: InstanceId | None = None
        """The instance whose call failed last."""
        self._lost: CallLost | None = None
        """How that call failed."""
        self._held: PieceT | None = None
        """The piece that prefill returned. The Conductor may still refuse the request before it
        decodes."""
        self._over = False
        self._pieces = 0
        self._outcome = "cancelled"
        self._said = ""
        """What the instance said that refused the request."""
        self._first_s = 0.0
        self._last_s = 0.0
        """When the first and the last piece came."""
        self._handover_us: Micros | None = None
        """From the last decode call to its first piece."""

    async def next(self) -> PieceT | None:
        """The next piece of the reply; None: there is no more.

        Raises BadRequest, Overloaded, NobodyAlive, PackageMissing, EngineFailed; before the first
        piece also Passed.
        """
        pieces: list[PieceT] = []

        def only(piece: PieceT) -> bool:
            pieces.append(piece)
            return False

        await self.pour(only)
        return pieces[0] if pieces else None

    async def pour(self, sink: Callable[[PieceT], bool]) -> bool:
        """Give `sink` each piece of the reply as it comes. False: `sink` has returned False.

        True: there is no more. Raises as `next`.
        """
        if not self._opened:
            self._open()
        while not self._over:
            if self._reading:
                wanted = await self._read(sink)
            else:
                piece = await self._act()
                wanted = piece is None or sink(piece)
            if not wanted:
                return self._over
        return True

    async def aclose(self) -> None:
        """End every call that is out. The Conductor then frees what it reserved."""
        if self._opened:
            self._opened = False
            if self._lives:
                self._conductor.tell(ClientGone(self._request.id))
            self._conductor.close(self._request.id, self._outcome, self._measured())
        try:
            if self._calls.reply.done:
                await self._calls.drain()
        finally:
            await self._calls.stop()

    def _measured(self) -> Measured:
        reply = self._calls.reply
        gaps = reply.tokens - 1 if self._pieces > 1 else 0
        return Measured(
            tokens=reply.tokens,
            cached_tokens=reply.cached,
            tbt_us=seconds_to_us((self._last_s - self._first_s) / gaps) if gaps > 0 else None,
            handover_us=self._handover_us,
            prefill=reply.prefill,
            decode=reply.decode,
            said=self._said,
        )

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
        """Do the Conductor's next action; return the piece that came of it."""
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
                raise error_for(action, self._pointer())
            case GiveUp(why=why, stopping=stopping):
                self._end("failed")
                if stopping:
                    raise gave_up(action)
                busy = None if self._lost is None or self._pieces else self._lost.busy
                if busy is not None:
                    raise Passed(busy)
                if self._lost is not None and self._lost.package_missing:
                    raise PackageMissing(why + self._pointer())
                raise gave_up(action, self._pointer())
            case _:
                return None

    async def _make(self, action: Prefill | Decode) -> PieceT | None:
        """Make one call and wait for its first piece."""
        self.inbox.out(action.number)
        self._called = action.to.id
        self._members = (*(action.group if isinstance(action, Prefill) else ()), action.to)
        self._prefilling = isinstance(action, Prefill)
        called_s = self._loop.time()
        try:
            piece = await self.inbox.until_lost(self._call(action))
        except Passed as passed:
            self._end_refused(passed.answer.status, passed.detail)
            raise
        except Exception as error:  # noqa: BLE001 - a bug in a call is a failed call, and logged
            await self._fail(error)
            return None
        if isinstance(action, Decode):
            self._handover_us = seconds_to_us(self._loop.time() - called_s)
            return self._took(piece)
        if action.decision.joint:
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
            # no other instance is left, and its trouble may pass
            await asyncio.sleep(self._calls.again_s)
        return await self._calls.prefill(action, self)

    async def _read(self, sink: Callable[[PieceT], bool]) -> bool:
        """Give `sink` the pieces of the call that is out; return whether it takes more."""
        wanted = True
        inbox, reply = self.inbox, self._calls.reply

        def take(piece: PieceT) -> bool:
            nonlocal wanted
            if inbox.lost is not None:
                return False  # the call is being ended: a piece that comes now is too late
            if reply.done:
                self._took(piece)
            else:
                self._noted(piece)
            wanted = sink(piece)
            return wanted and not self._over

        try:
            ended = await self.inbox.until_lost(self._calls.pour(take))
        except Exception as error:  # noqa: BLE001 - a bug in a call is a failed call, and logged
            await self._fail(error, self._calls.broke_off())
            return True
        if ended:
            self._took(None)
        return wanted

    def _took(self, piece: PieceT | None) -> PieceT | None:
        """Account for a piece that goes to the client."""
        self._reading = True
        reply = self._calls.reply
        if reply.done or piece is None:
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

    async def _fail(self, error: Exception, final: str = "") -> None:
        """Report a failed call. The Conductor answers with its next action, unless `final` is a
        reason why no other call can take its place. Raises BadRequest if the request is wrong."""
        assert self._called is not None, "a call was out"
        await self._calls.stop()
        if isinstance(error, CallLost) and error.refused is not None:
            log.info("%s: %s", self._request.id, error.in_full)
            self._end_refused(error.refused.status, error.detail)
            raise error.refused
        if isinstance(error, MoonserveError):
            lost = CallLost.of(error)
            log.warning(
                "%s: the call to %s failed: %s%s",
                self._request.id,
                self._called,
                lost.in_full,
                self._pointer(),
            )
        else:
            lost = CallLost("internal error")
            log.error(
                "%s: the call to %s met a bug%s",
                self._request.id,
                self._called,
                self._pointer(),
                exc_info=error,
            )
        died = await self._died(lost)
        if self.inbox.is_over:
            pass  # the Conductor has ended the request already
        elif not final:
            self._report(lost, lost.retry, died)
        else:
            self._break_off(lost, died)
            said = f"{plain(lost, self._called)}; the stream cannot go on elsewhere: {final}"
            raise EngineFailed(said + self._pointer())
        self._lost, self._failed = lost, self._called
        self._reading = False
        self.inbox.out(0)

    def _pointer(self) -> str:
        return pointer(self._request.id, self._conductor.has_page)

    async def _died(self, lost: CallLost) -> int:
        """The epoch of the instance to blame if it is known to have ended under this call; else
        0."""
        if lost.broke:
            for it in self._members:
                if it.id == (lost.member or self._called) and await self._calls.died(it):
                    return it.epoch
        return 0

    def _break_off(self, lost: CallLost, died: int) -> None:
        """End the reply, because the client has a part of it that no instance can complete."""
        self._report(lost, False, died)
        self._end("failed")

    def _report(self, lost: CallLost, retry: bool, died: int) -> None:
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
                died=died,
                said=lost.said,
            )
        )

    def _end_refused(self, status: int, detail: str) -> None:
        """Note the end of a request that an instance refused: that is no failure of the cluster."""
        self._end(f"{ANSWERED}{status}")
        if said := quoted_message(detail):
            self._said = f"{self._called}: {said}"
        self._lives = True  # set again, so that `aclose` sends ClientGone

    def _end(self, outcome: str | None) -> None:
        """Note the end. It comes before the client gets the last piece, because the client may
        leave then."""
        self._over = True
        self._lives = False
        self._outcome = outcome or self._outcome
        self.inbox.out(0)


def gave_up(action: GiveUp, shown: str = "") -> MoonserveError:
    """The error that the client of a failed request gets; shown: see page.pointer. A server that
    stops takes its page along, so nothing points to it."""
    if action.stopping:
        return NobodyAlive(action.why)
    return EngineFailed(action.why + shown)


def error_for(refusal: Refuse, shown: str = "") -> MoonserveError:
    """The error that the client of a refused request gets; shown: see page.pointer."""
    why = refusal.why
    reason = refusal.reason
    wait_us = refusal.retry_after_us
    if reason == "duplicate_request_id":
        return BadRequest(why, "x-request-id", reason)
    if reason == "nobody_alive":
        return NobodyAlive(why)
    if reason == "kv_memory":  # waiting does not help
        return BadRequest(why, "prompt", "context_length_exceeded")
    return Overloaded(why + shown, reason, None if wait_us is None else wait_us / MICROS_PER_SECOND)

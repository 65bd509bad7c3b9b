"""One request's life: prefill, hand-over, decode, retry, cancel. A fact comes in, the next step
out.

    PREFILL --PrefillEnded--> DECODE --DecodeEnded--> ENDED
       ^  \\                     |
       |   `--final token--> ENDED
       `------CallFailed------- (either phase, unless it is given up; on from the tokens known)

If no instance is left for a retry, the life waits in PREFILL, with no call out, for one to join.
A request without a token is given up after MAX_ATTEMPTS failed calls. One that has tokens is not:
its client could not send it again. After as many failed calls without a token of decode between
them it pauses before each further call, and is given up when `patience_us` have passed as well,
counted from its first token at the earliest.
A request may itself be what kills instances. After MAX_DEATHS instances have died while they had a
call of it, without a token of decode from that call, it is given up, whether it has tokens or not.
A life that another Conductor began goes on here with the same call and its number.
Every call to an instance is numbered. An outcome with an older number has no effect, so that a late
reply of an aborted call cannot move the life. Every life reaches ENDED once; the Conductor releases
all its promises there. Only the Conductor calls it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from moonserve.core.frozen import Frozen
from moonserve.core.request import Request
from moonserve.core.schedule.actions import Decision, Stage
from moonserve.core.schedule.adoption import Adopted
from moonserve.core.schedule.facts import (
    CallFailed,
    ClientGone,
    DecodeEnded,
    PrefillEnded,
    StageEnded,
)
from moonserve.core.units import BlockKey, InstanceId, Micros, Tokens

MAX_ATTEMPTS = 3
"""Failed calls after which a request without a token is given up, and another one pauses. Calls
that no instance received do not count: a restart must not use up the attempts that are meant for
faults."""


MAX_DEATHS = 2
"""Instances that a request may take with it. Others that shared both of them with it are given up
too, unless decode gave them a token between; so it is not 1."""


class Phase(enum.Enum):
    """The phase of a life."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Place(Frozen, frozen=True):
    """Choose instances (again) and prefill from what is known."""


class Pause(Frozen, frozen=True):
    """As Place, but not at once: its calls have failed too often."""


class StartDecode(Frozen, frozen=True):
    """KV is in the store: let the decode instance go on."""


class End(Frozen, frozen=True):
    """The life is over; `failure` is the error that the client gets, if any."""

    failure: str | None = None


class Wait(Frozen, frozen=True):
    """Nothing follows from this fact."""


Next: TypeAlias = Place | Pause | StartDecode | End | Wait
LifeFact: TypeAlias = PrefillEnded | DecodeEnded | CallFailed | ClientGone


class Handoff:
    """The life of one request."""

    def __init__(self, request: Request, keys: Sequence[BlockKey], arrived_us: Micros) -> None:
        self.request = request
        self.party = request.party
        self.arrived_us = arrived_us
        self.length: Tokens = request.length
        self.keys = tuple(keys)
        self.prompt_keys = self.keys
        """As it arrived: its client is recognised by them if it is refused and returns."""
        self.phase = Phase.PREFILL
        self.number = 0
        """The number of the call that is out; outcomes of earlier calls are stale."""
        self.begun = False
        """Whether it has a token beyond its prompt, which its client may have received."""
        self.failures = 0
        """Failed calls since decode last gave a token, or prefill the first one, if an instance
        received them."""
        self.tries = 0
        """All failed calls since then."""
        self.deaths = 0
        """Instances that have died since then while they had a call of it."""
        self.doomed = False
        """Whether the instance of the call that is out has died, as another call has shown."""
        self.stalled_us: Micros | None = None
        """When the first call failed since then; None: none has."""
        self.decision: Decision | None = None
        self.called_us: Micros | None = None
        """When the last prefill call went out; None: another Conductor made it."""
        self.shares: tuple[Stage, ...] = ()
        """The parts of the prefill call that is out, as long as they are promised."""
        self.leases: list[int] = []
        """Numbers of the prefill calls so far; each has a lease of its own on the store. Empty: it
        was never placed."""
        self.at: list[InstanceId] = []
        """The instance of the call that is out, or is next; of a group, those that are not done."""
        self.failed: list[InstanceId] = []
        """Instances that failed this request since then; it avoids them while
        there are others."""

    @classmethod
    def adopted(cls, fact: Adopted, arrived_us: Micros) -> Handoff:
        """The life of a request that another Conductor has placed: its last call is out."""
        life = cls(fact.request, fact.keys, arrived_us)
        life.length = fact.length
        life.number = fact.number
        life.leases = list(fact.leases)
        life.begun = fact.begun
        life.decision = fact.decision
        if fact.decodes:
            life.phase = Phase.DECODE
            life.at = [fact.decision.decode]
        else:
            life.shares = fact.decision.shares
            life.at = [share.instance for share in life.shares]
        return life

    def placed(self, decision: Decision, now_us: Micros | None = None) -> int:
        """A prefill call goes out; returns its number."""
        assert self.phase is Phase.PREFILL
        self.decision = decision
        self.called_us = now_us
        self.number += 1
        self.leases.append(self.number)
        self.shares = decision.shares
        self.at = [share.instance for share in self.shares]
        return self.number

    def unplaced(self) -> None:
        """No call is out and no instance is chosen any more: prefill from what is known."""
        assert self.phase is not Phase.ENDED
        self.phase = Phase.PREFILL
        self.decision = None
        self.at = []
        self.doomed = False
        self.number += 1  # what the last call still reports is stale

    def decoding(self, instance: InstanceId) -> int:
        """A decode call goes out to `instance`; returns its number."""
        assert self.phase is Phase.DECODE
        assert self.decision is not None
        if instance != self.decision.decode:
            self.decision = msgspec.structs.replace(self.decision, decode=instance)
        self.at = [instance]
        self.number += 1
        return self.number

    def call_took_us(self, fact: LifeFact, now_us: Micros) -> Micros | None:
        """How long the prefill call took that this fact ends, beside what was predicted of it.

        None: it ends none, or the call met others, or a group did it, or its end may not be that of
        its prefill.
        """
        decision = self.decision
        if self.phase is not Phase.PREFILL or not isinstance(fact, PrefillEnded):
            return None
        if fact.number != self.number or self.called_us is None or decision is None:
            return None
        if decision.joint or decision.stages or decision.chosen.queue_us:
            return None
        return now_us - self.called_us - decision.chosen.ttft_us

    def staged(self, fact: StageEnded) -> bool:
        """Whether this fact ends the part of an instance of the group that prefills now."""
        if fact.number != self.number or fact.instance not in self.at[:-1]:
            return False
        self.at.remove(fact.instance)
        return True

    def end(self) -> None:
        """No fact moves this life any more."""
        self.phase = Phase.ENDED
        self.at = []

    def absent(self, fact: LifeFact) -> InstanceId | None:
        """The instance that refuses connections, if this fact reports that of the call now out."""
        if not isinstance(fact, CallFailed) or fact.number != self.number:
            return None
        return self._who(fact) if fact.unreachable or fact.died else None

    def _who(self, fact: CallFailed) -> InstanceId | None:
        """Which instance failed the call that is out."""
        return fact.member or (self.at[-1] if self.at else None)

    def step(self, fact: LifeFact, now_us: Micros, patience_us: Micros) -> Next:
        """What follows from a fact; changes the phase accordingly.

        patience_us: how long a request with tokens is tried again in spite of failures.
        """
        if self.phase is Phase.ENDED:
            return Wait()
        if isinstance(fact, ClientGone):
            return self._over(None)
        if fact.number != self.number:
            return Wait()
        match fact:
            case PrefillEnded(final=True):
                return self._over(None)
            case PrefillEnded():
                assert self.phase is Phase.PREFILL
                assert self.decision is not None
                self.phase = Phase.DECODE
                if not self.begun and self.decision.connector == "embedded":
                    self.begun = True
                    self._forgive()
                self.at = [self.decision.decode]
                return StartDecode()
            case DecodeEnded() if self.phase is Phase.PREFILL:
                return (
                    Wait()
                )  # of a call that never went out: its number was guessed (/api/release)
            case DecodeEnded():
                return self._over(None)
            case CallFailed():
                return self._failed(fact, now_us, patience_us)

    def lacks_decode(self, now_us: Micros, patience_us: Micros) -> Next:
        """Prefill has ended, but no instance can decode: what follows. The prefill is wasted."""
        self.failures += 1
        return self._again("no decode instance is alive", now_us, patience_us)

    def _failed(self, fact: CallFailed, now_us: Micros, patience_us: Micros) -> Next:
        """Place again unless it is given up; the Conductor calls `unplaced` first."""
        fresh = fact.length - self.length
        self.length = fact.length
        self.keys = fact.keys
        self.begun |= fresh > 0
        if fresh > 1:  # decode has given a token too, not only prefill
            self._forgive()
        elif fact.died or self.doomed:
            self.deaths += 1
        instance = self._who(fact)
        if instance is not None and instance not in self.failed:
            self.failed.append(instance)
        self.failures += not fact.unreachable
        if not fact.retry:
            return self._over(fact.why)
        return self._again(fact.why, now_us, patience_us)

    def _forgive(self) -> None:
        """What failed before this token does not count any more."""
        self.failures = self.tries = self.deaths = 0
        self.stalled_us = None
        self.failed.clear()

    def _again(self, why: str, now_us: Micros, patience_us: Micros) -> Next:
        """Whether to place it again, after a failure."""
        if self.deaths >= MAX_DEATHS:
            return self._over(f"{self.deaths} instances died while they had this request: {why}")
        self.tries += 1
        if self.stalled_us is None:
            self.stalled_us = now_us
        too_often = self.failures >= MAX_ATTEMPTS
        too_long = self.tries >= MAX_ATTEMPTS and now_us - self.stalled_us > patience_us
        if too_long or (too_often and not self.begun):
            return self._over(why)
        return Pause() if too_often else Place()

    def _over(self, failure: str | None) -> End:
        self.end()
        return End(failure)

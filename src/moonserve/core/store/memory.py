"""What segment owners and clients remember, so that a master may die and nothing readable is lost.

For live.store and for the simulated store of the tests; pure, like the master it talks to. An
owner keeps a Catalogue of its segment and the Tasks it works on; every client, owner or not, keeps
a Diary of what it did on segments, its own included, which their owners may not have heard of yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from moonserve.core.store.words import (
    UNSEEN,
    Change,
    Claim,
    Copy,
    Gone,
    Held,
    Key,
    Orders,
    PutOptions,
    Seen,
    Ticket,
)
from moonserve.core.units import Bytes, Micros

_MAX_LATEST = 4_096


class Catalogue:
    """What lies on one segment, as its owner knows it. Bounded by the segment."""

    def __init__(self, held: Sequence[Held] = ()) -> None:
        self.held: dict[Key, Held] = {it.key: it for it in held}
        self.seen: Seen = UNSEEN
        """For the next beat."""
        self._gone: dict[Key, int] = {}
        """The latest keys told as gone, with the ids that are: `add` may come after."""

    def add(self, held: Held) -> None:
        """A put has ended here, or a copy is made; of a copy to be noted before the master is told,
        lest its answer is lost."""
        known, gone = self.held.get(held.key), self._gone.get(held.key)
        if (known is None or known.id < held.id) and (gone is None or gone < held.id):
            self.held[held.key] = held

    def drop(self, key: Key, id: int) -> None:
        """What put or copy `id` wrote is no replica, nor is anything older under this key."""
        known = self.held.get(key)
        if known is not None and known.id <= id:
            del self.held[key]

    def apply(self, orders: Orders) -> None:
        """Take in the changes of a beat's answer, unless it is not the answer to the last one."""
        if orders.after != self.seen:
            return
        self.seen = orders.seen
        for change in orders.changes:
            self._apply(change)
        _keep_latest(self._gone)

    def _apply(self, change: Change) -> None:
        known = self.held.get(change.key)
        if isinstance(change, Gone):
            self.drop(change.key, change.id)
            self._gone[change.key] = change.id
        elif known is None or known.id <= change.id:
            self.held[change.key] = change

    def restart(self) -> None:
        """The segment is not mounted any more: changes are told from the start when it is."""
        self.seen = UNSEEN

    def pages(self, most: int) -> list[tuple[Change, ...]]:
        """All of it in pages of up to `most`, to mount with; at least one. What was told as gone is
        part of it: those who put that claim it for a while yet."""
        told: list[Change] = [*self.held.values()]
        told += [Gone(key, id) for key, id in self._gone.items()]
        rest = iter(told)
        pages = []
        while page := tuple(islice(rest, most)):
            pages.append(page)
        return pages or [()]


@dataclass(slots=True)
class _Running:
    copy: Copy
    until_us: Micros


class Tasks:
    """Copies to be made to one segment: at most `at_once` at a time, each once, each in time."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._queue: dict[int, _Running] = {}
        self._running: dict[int, _Running] = {}
        self._results: dict[int, bool] = {}
        self._finished: dict[int, None] = {}
        """The latest ids that ended: an old answer to a beat may name them once more."""

    def take(self, asked_us: Micros, copies: Sequence[Copy]) -> None:
        """What the answer to a beat sent at `asked_us` says is to be made."""
        for copy in copies:
            id = copy.held.id
            if id not in self._running and id not in self._finished and id not in self._results:
                self._queue.setdefault(id, _Running(copy, asked_us + copy.left_us))

    def next(self, now_us: Micros) -> Copy | None:
        """The copy to start now, with the time left for it; None: none, or enough run.

        When that has gone, its extent may be another's: no byte more is to be written. Those whose
        time went before they could start are passed over.
        """
        while self._queue and len(self._running) < self._at_once:
            id = next(iter(self._queue))
            running = self._queue.pop(id)
            if running.until_us > now_us:
                self._running[id] = running
                return msgspec.structs.replace(running.copy, left_us=running.until_us - now_us)
        return None

    def end(self, id: int, done: bool) -> None:
        """A running copy ended: its bytes are there and verified, or not."""
        if self._running.pop(id, None) is not None:
            self._results[id] = done

    def results(self) -> list[tuple[int, bool]]:
        """What the master is to be told of."""
        return list(self._results.items())

    def told(self, ids: Sequence[int]) -> None:
        """The master has answered these."""
        for id in ids:
            self._results.pop(id, None)
            self._finished[id] = None
        _keep_latest(self._finished)

    def forget(self) -> list[Copy]:
        """The master gave the segment up: all tasks are void. The running ones, to be stopped."""
        running = [it.copy for it in self._running.values()]
        self.told([*self._queue, *self._running, *self._results])
        self._queue.clear()
        self._running.clear()
        return running


@dataclass(slots=True)
class _Written:
    claim: Claim
    began_us: Micros
    at_us: Micros
    acknowledged: bool = False


class Diary:
    """What one client put and removed lately. Bounded by its rate and by `forget`."""

    def __init__(self) -> None:
        self._puts: dict[int, _Written] = {}
        self._removed: dict[Key, tuple[int, Micros]] = {}

    def writing(
        self,
        now_us: Micros,
        ticket: Ticket,
        key: Key,
        size: Bytes,
        parent: Key | None,
        options: PutOptions,
    ) -> None:
        """A put that was asked for at `now_us` begins: before the first byte is written."""
        held = Held(key, size, 0, ticket.id, ticket.id, ticket.offset, parent, options)
        claim = Claim(ticket.segment, ticket.epoch, held, True)
        self._puts[ticket.id] = _Written(claim, now_us, now_us)

    def ended(self, now_us: Micros, ticket: int, checksum: int) -> None:
        """All bytes are written; to be noted before the master is told, lest its answer is lost."""
        written = self._puts.get(ticket)
        if written is not None:
            it = written.claim
            held = msgspec.structs.replace(it.held, checksum=checksum)
            written.claim, written.at_us = Claim(it.segment, it.epoch, held, False), now_us

    def acknowledged(self, now_us: Micros, ticket: int) -> None:
        """The master said that the object exists by this put."""
        written = self._puts.get(ticket)
        if written is not None:
            written.acknowledged, written.at_us = True, now_us

    def drop(self, ticket: int) -> None:
        """The put was given up, or the master said that its ticket is stale."""
        self._puts.pop(ticket, None)

    def removed(self, now_us: Micros, key: Key, version: int) -> None:
        """The master removed this on our behalf, or noted that it is not to come back."""
        known, _ = self._removed.get(key, (version, now_us))
        self._removed[key] = (max(version, known), now_us)

    def held(self, ticket: int) -> Held | None:
        """What a put wrote; an owner adds it to its own catalogue once the master has said yes."""
        written = self._puts.get(ticket)
        return None if written is None else written.claim.held

    def claims(
        self, now_us: Micros, put_ttl_us: Micros
    ) -> tuple[list[Claim], list[tuple[Key, int]]]:
        """What to tell a master that may have restarted, until it answers; all is new again then,
        since that one has yet to tell the owners.

        A put that nobody acknowledged for a put's time to live was given up, unless its answer was
        lost: its extent may be another's since.
        """
        old_us = now_us - put_ttl_us
        claimed = [it for it in self._puts.values() if it.acknowledged or it.began_us > old_us]
        for written in claimed:
            written.at_us = now_us
        self._removed = {key: (version, now_us) for key, (version, _) in self._removed.items()}
        claims = [it.claim for it in claimed]
        return claims, [(key, version) for key, (version, _) in self._removed.items()]

    def forget(self, before_us: Micros) -> None:
        """What is older, owners have heard of, or were given up. Not while the master is silent:
        after a good answer, with a segment's and a put's time to live ago."""
        for id in [id for id, it in self._puts.items() if it.at_us < before_us]:
            del self._puts[id]
        for key in [key for key, (_, at_us) in self._removed.items() if at_us < before_us]:
            del self._removed[key]


def _keep_latest(names: dict[Any, Any]) -> None:
    """Forget the oldest beyond _MAX_LATEST."""
    for name in list(islice(names, max(0, len(names) - _MAX_LATEST))):
        del names[name]

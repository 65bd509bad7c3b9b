"""Order: the batches of one engine rank's KV events, each once and in sequence, or a Reset.

An engine numbers its batches from 0 at each start, and keeps the latest ones for a replay. Some get
lost on the way. Order has in `want` the number from which it wants a replay, holds what arrives
meanwhile, and returns batches and Resets. After a Reset, earlier batches no longer count. Those
that follow are true, but may not be all that the engine has. Called by live.kvevents.subscriber.

A replay begins with the last batch that is known: its time shows whether the engine is still in the
same run, since a restarted engine numbers from 0 again.

What never happens here: a batch returned twice or out of order; a batch returned after lost ones
without a Reset between; more batches held than the bound.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import msgspec

from moonserve.core.kv.events import KvBatch


class Reset(msgspec.Struct, frozen=True):
    """All batches that were returned so far no longer count."""

    why: str
    restarted: bool
    """The engine is a new process; otherwise batches were lost."""


Step: TypeAlias = KvBatch | Reset


class OrderStats(msgspec.Struct):
    """Counts since the beginning."""

    batches: int = 0
    """Batches returned, in order."""
    gaps: int = 0
    replays: int = 0
    """Replays asked for."""
    restarts: int = 0
    untrusted: int = 0
    """Resets because batches were lost for good."""
    late: int = 0
    """Batches that came twice, or from an earlier run of the engine."""
    overflows: int = 0
    """Times that more batches arrived during a replay than Order holds."""


class Order:
    """See the module. While `want` is not None, the caller runs a replay from that number: it calls
    `replayed` with each batch, then `replay_ended`."""

    def __init__(self, replays: bool, max_held: int = 4_096) -> None:
        """`replays`: whether the engine has an address for replays."""
        self.want: int | None = None
        """The number to replay from; None: no replay is wanted."""
        self.complete = False
        """Whether all batches of this run of the engine are known, from the first on."""
        self.stats = OrderStats()
        self._replays = replays
        self._max_held = max_held
        self._held: deque[tuple[int, KvBatch]] = deque()
        self._next: int | None = None
        """The number expected next; None: no batch is known, and any batch may be the first."""
        self._first_ts = self._last_ts = 0.0
        """Times of the first and the last batch returned since the last Reset."""
        self._connections = 0
        self._doubt = False
        """Whether the replay must still show that the engine is in the run that is known."""
        self._fresh = 0
        """Batches that this replay added."""
        self._useless = False
        """Whether the rest of this replay is of no use."""
        self._again: int | None = None
        """The number from which another replay is wanted after this one; None: no other is."""

    def connected(self) -> list[Step]:
        """The engine is connected, perhaps again: batches may be missing."""
        self._connections += 1
        if not self._replays:
            return self._lost("connection lost, and no replay") if self._connections > 1 else []
        self._held.clear()  # perhaps of an earlier run; otherwise the replay brings them again
        if self.want is None:
            self._ask()
        else:
            self._again = self._known()
        return []

    def arrived(self, seq: int, batch: KvBatch) -> list[Step]:
        """A published batch has arrived."""
        if self.want is None:
            return self._take(seq, batch, self._replays)
        self._hold(seq, batch)
        return []

    def replayed(self, seq: int, batch: KvBatch) -> list[Step]:
        """A batch of the wanted replay has arrived."""
        if self.want is None or self._useless:
            return []
        steps: list[Step] = []
        if self._doubt:
            last = self._known()
            if seq < last:
                return []
            if seq == last and batch.ts == self._last_ts:
                self._doubt = False
                return []
            if seq == last:
                steps = self._restarted()
                if seq > 0:
                    self._useless, self._again = True, 0
                    return steps
            else:
                steps = self._lost(f"batches from {last} on are not kept")
        if self._next is not None and seq > self._next:  # the engine dropped some of its answer
            if self._fresh:
                self._useless, self._again = True, self._known()
                return steps
            steps += self._lost(f"batch {self._next} cannot be had")
        if self._next is None or seq == self._next:
            self._fresh += 1
            steps.append(self._give(seq, batch))
        return steps

    def replay_ended(self, done: bool) -> list[Step]:
        """The replay has ended. `done` False: the engine did not answer in full by the deadline."""
        if self.want is None:
            return []
        steps: list[Step] = []
        asked, self.want = self.want, None
        if self._again is None and self._doubt:
            steps = self._lost("replay brought nothing" if done else "replay was not answered")
            if done and asked:
                self._again = 0  # perhaps it restarted, and has not published as many batches yet
        if self._again is not None:
            self._ask(self._again)
            return steps
        more = done and self._fresh > 0
        held = self._held
        self._held = deque()
        while held and self.want is None:
            steps += self._take(*held.popleft(), more)
        self._held.extend(held)
        return steps

    def _take(self, seq: int, batch: KvBatch, ask: bool) -> list[Step]:
        """A published batch while no replay runs; `ask`: a replay may be wanted."""
        if self._next is None:
            if seq == 0 or not ask:
                return [self._give(seq, batch)]
            return self._hold_for_replay(seq, batch)
        early = batch.ts < self._first_ts  # of an earlier run, or the clock was set back
        if seq == self._next and not early:
            return [self._give(seq, batch)]
        if seq == self._next and ask:
            return self._hold_for_replay(seq, batch)
        if seq == self._next and not self._replays:
            return [*self._lost("its clock went back"), self._give(seq, batch)]
        if early or (seq < self._next and batch.ts <= self._last_ts):
            self.stats.late += 1
            return []
        if seq > self._next:
            self.stats.gaps += 1
            if ask:
                return self._hold_for_replay(seq, batch)
            steps = self._lost(f"batches {self._next} to {seq - 1} are lost")
        else:
            steps = self._restarted()
            if seq > 0 and ask:
                return steps + self._hold_for_replay(seq, batch)
        return [*steps, self._give(seq, batch)]

    def _hold_for_replay(self, seq: int, batch: KvBatch) -> list[Step]:
        self._hold(seq, batch)
        self._ask()
        return []

    def _hold(self, seq: int, batch: KvBatch) -> None:
        if len(self._held) == self._max_held:
            self._held.clear()  # the next batch will show a gap
            self.stats.overflows += 1
        self._held.append((seq, batch))

    def _known(self) -> int:
        """The number of the last known batch, to replay from; 0 if none is known."""
        return 0 if self._next is None else self._next - 1

    def _ask(self, since: int | None = None) -> None:
        self.want = self._known() if since is None else since
        self.stats.replays += 1
        self._doubt = self._next is not None
        self._fresh = 0
        self._useless = False
        self._again = None

    def _give(self, seq: int, batch: KvBatch) -> KvBatch:
        if self._next is None:
            self.complete = seq == 0
        if self._next is None or batch.ts < self._first_ts:
            self._first_ts = batch.ts
        self._next, self._last_ts = seq + 1, batch.ts
        self.stats.batches += 1
        return batch

    def _restarted(self) -> list[Step]:
        self.stats.restarts += 1
        return self._reset("the engine restarted", True)

    def _lost(self, why: str) -> list[Step]:
        if self._next is None:
            return []
        self.stats.untrusted += 1
        return self._reset(why, False)

    def _reset(self, why: str, restarted: bool) -> list[Step]:
        self._next = None
        self._doubt = self.complete = False
        return [Reset(why, restarted)]

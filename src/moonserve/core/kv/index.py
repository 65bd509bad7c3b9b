"""PrefixIndex: which holder has which prefix, on which tier; PendingPrefixes: which it will have.

The Conductor feeds both, and placement reads them. A TieredIndex (core.kv.indexer) has a
PrefixIndex of its own for the Indexer API.

A piece is a run of successive blocks of a chain that the same holders hold in the same way. The
index maps each key to its piece. A report about a part of a piece splits it; neighbours that have
become alike are joined again. So a look-up goes from piece to piece, not from block to block, and
is exact, whatever holes a holder has.

PendingPrefixes is a radix tree of what instances will hold after the prefills promised to them. It
has whole chains only, and so never touches a chain block by block.

A full PrefixIndex makes room: it forgets blocks of the holder that has the most, those first that
no request was placed by for the longest time, and of a chain its end first. A forgotten block costs
a hit, nothing else: its holder still has it, and a later report of its removal changes nothing.

What never happens here: a block of a holder that was not reported; an order that depends on hashes
(keys may be any hashable); a key, bit or count that outlives the last block that it stood for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import TypeAlias

from moonserve.core.kv.facts import Tier
from moonserve.core.units import BlockKey, RequestId, SegmentId

MAX_ENTRIES = 4_000_000
"""Blocks that an index knows by default, counted once for each holder: 0.6 GiB of memory, or 1.2 if
all prompts have one block."""
COPIES = (1 << 20) - 1
"""All bits of the copies on one tier."""
ONE_COPY: dict[Tier, int] = {"device": 1, "dram": 1 << 20, "disk": 1 << 40}
"""One copy on a tier. A holder's count is the sum over its tiers, with 20 bits for each: no holder
has room for a million copies of one block."""
Held: TypeAlias = tuple[tuple[Hashable, ...], Hashable | None, Tier, int]
"""Blocks that one holder has: (keys, the key before them, tier, epoch)."""
_MAX_GONE = 4_096
_FEW = 6
_BATCH = 4_096
"""Blocks that a full index forgets at a time, at most 1/64 of its bound: some milliseconds."""
_DEEPEST = 64
"""How many pieces are followed to the end of a chain; reports may be of no true chain."""
_BITS = bytes.maketrans(b"01", b"\0\1")


class Match:
    """How many leading blocks of one chain each holder has without a gap.

    A snapshot: later changes of the index do not show. Callers must not change it.
    """

    __slots__ = ("_by_holder", "_ended", "_names", "pool")

    def __init__(
        self,
        pool: int,
        by_holder: dict[SegmentId, int] | None = None,
        ended: Sequence[tuple[int, int]] = (),
        names: Sequence[SegmentId] = (),
    ) -> None:
        self.pool = pool
        """The longest run in which every block has some holder; readers load it block by block."""
        self._by_holder = by_holder
        self._ended = ended  # (length, mask of the holders whose run it is)
        self._names = names  # by bit

    @property
    def by_holder(self) -> dict[SegmentId, int]:
        """The run that each holder has by itself; a holder of nothing is absent.

        Made at the first call. Shortest runs come first, then the lower bits of holders.
        """
        if self._by_holder is None:
            self._by_holder = {}
            for length, mask in self._ended:
                _spread(self._by_holder, mask, length, self._names)
        return self._by_holder


def _spread(runs: dict[SegmentId, int], mask: int, length: int, names: Sequence[SegmentId]) -> None:
    """Set `length` for every name whose bit is in `mask`."""
    if mask.bit_count() > _FEW:
        chosen = f"{mask:b}"[::-1].encode().translate(_BITS)
        runs.update(dict.fromkeys(compress(names, chosen), length))
        return
    while mask:
        low = mask & -mask
        runs[names[low.bit_length() - 1]] = length
        mask ^= low


class HolderState:
    """One holder: its bit in masks, its pieces, and how many blocks they have together."""

    __slots__ = ("alone", "bit", "blocks", "epoch", "name", "pieces")

    def __init__(self, name: SegmentId, epoch: int, bit: int) -> None:
        self.name = name
        self.epoch = epoch
        self.bit = bit
        self.blocks = 0
        self.pieces: dict[ChainPiece, None] = {}
        self.alone: dict[int, dict[HolderState, int]] = {
            one: {self: one} for one in ONE_COPY.values()
        }
        """`counts` of the pieces that only this holder has, once, on the tier of that count. Most
        pieces are such, and have no dict of their own."""


class ChainPiece:
    """A run of keys that the same holders have, each holder with one count for the whole run.

    It never has a key twice, and is in `pieces` of exactly the holders in its `counts`. These are
    changed by `put` and `take` only: pieces with one holder may share them.
    """

    __slots__ = ("counts", "keys", "mask", "next", "parent", "used")

    def __init__(
        self,
        keys: list[Hashable],
        parent: Hashable | None,
        mask: int,
        counts: dict[HolderState, int],
    ) -> None:
        self.keys = keys
        self.parent = parent
        """The key before keys[0]; None at a chain's head."""
        self.next: Hashable | None = None
        """The first key of the piece that last followed this one: a hint for joining."""
        self.mask = mask
        self.counts = counts
        self.used = False
        """Whether a request was placed by it since eviction looked at it last."""
        for holder in counts:
            holder.pieces[self] = None

    def put(self, it: HolderState, count: int) -> None:
        """The holder has so many copies, on each tier, of every key of the piece."""
        counts = self.counts
        if it not in counts:
            it.pieces[self] = None
            self.mask = self.mask | it.bit if counts else it.bit
        if len(counts) > 1:
            counts[it] = count
        elif counts and it not in counts:
            self.counts = counts.copy()
            self.counts[it] = count
        else:
            self.counts = it.alone.get(count) or {it: count}

    def take(self, it: HolderState) -> None:
        """The holder, which has copies, has none any more."""
        del it.pieces[self]
        self.mask ^= it.bit
        if len(self.counts) == 1:
            self.counts = {}
            return
        del self.counts[it]
        if len(self.counts) == 1:
            [(last, count)] = self.counts.items()
            self.mask = last.bit
            self.counts = last.alone.get(count, self.counts)

    def part(self, keys: list[Hashable], parent: Hashable | None) -> ChainPiece:
        """A new piece of some of the keys; the caller takes them out of this one."""
        counts = self.counts if len(self.counts) == 1 else dict(self.counts)
        new = ChainPiece(keys, parent, self.mask, counts)
        new.used = self.used
        return new


class PrefixIndex:
    """See the module. Exact for what was reported, in any order.

    Keys are chained hashes, so a key fixes all blocks before it. Reports have runs of chains, and
    `match` takes chains. A holder may store a key several times, and holds it until it was removed
    as often, on each tier separately. A report of an older epoch of a holder than the newest known
    one is late, and ignored. A newer epoch removes all that the older one held.

    Bounds: `max_entries` (key, holder) pairs. A full index evicts others for new ones, so it knows
    too little, never too much. It remembers the epochs of the last 4,096 holders that are gone.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.max_entries = max_entries
        self.entries = 0
        """How many (key, holder) pairs there are."""
        self.refused = 0
        """Blocks refused: a report had more of them than could be evicted for it."""
        self.evicted = 0
        """Blocks forgotten because the index was full."""
        self.late = 0
        """Blocks of late reports, which were ignored."""
        self._where: dict[Hashable, ChainPiece] = {}
        self._holders: dict[SegmentId, HolderState] = {}
        self._free: list[int] = []
        self._names: tuple[SegmentId, ...] = ()
        """Names of holders by bit. A name stays until its bit is reused."""
        self._gone: OrderedDict[SegmentId, int] = OrderedDict()
        """Holder without entries -> the oldest epoch with which it may come back."""

    def __len__(self) -> int:
        """How many different keys are held."""
        return len(self._where)

    def stored(
        self,
        holder: SegmentId,
        keys: Sequence[Hashable],
        parent: Hashable | None,
        tier: Tier = "dram",
        epoch: int = 0,
    ) -> None:
        """`holder` now has `keys`, a run of a chain, complete and readable.

        `parent` is the key before keys[0], held or not; None where keys[0] heads a chain.
        """
        if self._is_late(holder, epoch, len(keys)) or not keys:
            return
        it = self._holders.get(holder) or self._add(holder, epoch)
        keys = list(keys)
        if self.entries + len(keys) > self.max_entries:
            self._make_room(it, keys)
        at = 0
        one = ONE_COPY[tier]
        while at < len(keys):
            piece = self._where.get(keys[at])
            known = piece is not None and it in piece.counts
            room = len(keys) if known else self.max_entries - self.entries
            if not room:
                self.refused += 1
                at += 1
                continue
            if piece is None:
                piece = self._new(keys[at : at + room], parent if at == 0 else keys[at - 1])
            else:
                ahead = keys[at : at + min(room, len(piece.keys))]
                piece = self._cut(piece, *span(piece.keys, ahead))
            at += len(piece.keys)
            piece.put(it, piece.counts.get(it, 0) + one)
            if not known:
                it.blocks += len(piece.keys)
                self.entries += len(piece.keys)
            self._join(piece)
        if not it.pieces:
            self._forget(it, epoch)

    def removed(
        self, holder: SegmentId, keys: Sequence[Hashable], tier: Tier = "dram", epoch: int = 0
    ) -> None:
        """`holder` has one copy less of each of `keys` on `tier`; unknown blocks are ignored."""
        late = self._is_late(holder, epoch, len(keys))
        it = self._holders.get(holder)
        if late or it is None:
            return
        keys = list(keys)
        at = 0
        one = ONE_COPY[tier]
        while at < len(keys):
            piece = self._where.get(keys[at])
            count = 0 if piece is None else piece.counts.get(it, 0)
            if piece is None or not count // one & COPIES:
                at += 1
                continue
            start, stop = span(piece.keys, keys[at : at + len(piece.keys)])
            at += stop - start
            if count == one and len(piece.counts) == 1 and start > 0 and stop == len(piece.keys):
                self._shorten(it, piece, start)
                continue
            piece = self._cut(piece, start, stop)
            if count == one:
                self._lose(it, piece)
            else:
                piece.put(it, count - one)
            if piece.mask:
                self._join(piece)
        if not it.pieces:
            self._forget(it, epoch)

    def cleared(self, holder: SegmentId, tier: Tier = "dram", epoch: int = 0) -> None:
        """`holder` has emptied that tier."""
        late = self._is_late(holder, epoch, 1)
        it = self._holders.get(holder)
        if late or it is None:
            return
        others = ~(ONE_COPY[tier] * COPIES)
        for piece in list(it.pieces):
            left = piece.counts[it] & others
            if left:
                piece.put(it, left)
            else:
                self._lose(it, piece)
        if not it.pieces:
            self._forget(it, epoch)

    def dropped(self, holder: SegmentId, epoch: int) -> None:
        """`holder` is gone or has restarted: remove all that it held up to `epoch`, for good."""
        it = self._holders.get(holder)
        if it is None:
            self._remember(holder, max(epoch + 1, self._gone.get(holder, 0)))
        elif epoch >= it.epoch:
            self._drop(it, epoch + 1)

    def touch(self, keys: Sequence[Hashable]) -> None:
        """A request was placed by the chain `keys`: evict others before what is held of it.

        As long as the index is less than half full, nothing is noted.
        """
        if 2 * self.entries < self.max_entries:
            return
        at = 0
        while at < len(keys) and (piece := self._where.get(keys[at])) is not None:
            piece.used = True
            start = piece.keys.index(keys[at])
            at += parting(piece.keys, start, keys, at, len(piece.keys) - start)

    def blocks(self, holder: SegmentId) -> int:
        """How many blocks a holder has."""
        it = self._holders.get(holder)
        return 0 if it is None else it.blocks

    def tiers(self, key: Hashable, holder: SegmentId) -> tuple[Tier, ...]:
        """The tiers on which `holder` has `key`, fastest first."""
        it = self._holders.get(holder)
        piece = self._where.get(key)
        count = 0 if it is None or piece is None else piece.counts.get(it, 0)
        return tuple(tier for tier, one in ONE_COPY.items() if count // one & COPIES)

    def inventory(self, holder: SegmentId) -> list[Held]:
        """All that a holder has, for copying it into another index.

        Pass each to `stored`, in any order. A block with several copies comes several times.
        """
        it = self._holders.get(holder)
        if it is None:
            return []
        return [
            (tuple(piece.keys), piece.parent, tier, it.epoch)
            for piece in it.pieces
            for tier, one in ONE_COPY.items()
            for _ in range(piece.counts[it] // one & COPIES)
        ]

    def match(self, keys: Sequence[Hashable]) -> Match:
        """The longest leading run of the chain `keys`, in the pool and in each holder.

        O(pieces on the way) look-ups.
        """
        get = self._where.get
        end = len(keys)
        at = 0
        mask = -1
        ended: list[tuple[int, int]] = []
        while at < end:
            piece = get(keys[at])
            if piece is None:
                break
            here = mask & piece.mask
            if here != mask:
                if at and mask:
                    ended.append((at, mask ^ here))
                mask = here
            own = piece.keys
            stop = at + len(own)
            if stop <= end and keys[stop - 1] == own[-1]:
                at = stop
            else:
                start = own.index(keys[at])
                at += parting(own, start, keys, at, len(own) - start)
        if at and mask:
            ended.append((at, mask))
        return Match(at, None, ended, self._names)

    # Holders

    def _is_late(self, name: SegmentId, epoch: int, blocks: int) -> bool:
        """Whether a report of `epoch` is late; a newer epoch removes what an older one held."""
        it = self._holders.get(name)
        newest = self._gone.get(name, 0) if it is None else it.epoch
        if epoch < newest:
            self.late += blocks
        elif epoch > newest and it is None:
            self._remember(name, epoch)
        elif epoch > newest and it is not None:
            self._drop(it, epoch)
        return epoch < newest

    def _add(self, name: SegmentId, epoch: int) -> HolderState:
        """A new holder with a bit of its own, and no entries yet."""
        at = self._free.pop() if self._free else len(self._names)
        self._names = (*self._names[:at], name, *self._names[at + 1 :])
        it = self._holders[name] = HolderState(name, epoch, 1 << at)
        self._gone.pop(name, None)
        return it

    def _forget(self, it: HolderState, oldest_epoch: int) -> None:
        """The holder has nothing any more: another holder may reuse its bit."""
        del self._holders[it.name]
        it.alone.clear()  # they refer to their holder
        self._free.append(it.bit.bit_length() - 1)
        self._remember(it.name, oldest_epoch)

    def _remember(self, name: SegmentId, oldest_epoch: int) -> None:
        self._gone[name] = oldest_epoch
        self._gone.move_to_end(name)
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def _drop(self, it: HolderState, oldest_epoch: int) -> None:
        """Remove all that a holder has."""
        for piece in list(it.pieces):
            self._lose(it, piece)
        self._forget(it, oldest_epoch)

    # Eviction

    def _make_room(self, it: HolderState, keys: Sequence[Hashable]) -> None:
        """Evict so that the holder `it` can have these blocks too, or as many as fit."""
        where = self._where
        new = sum(1 for key in keys if (piece := where.get(key)) is None or it not in piece.counts)
        excess = self.entries + new - self.max_entries
        if excess <= 0:
            return
        least = self.entries - max(excess, min(_BATCH, self.max_entries // 64))
        while self.entries > max(0, least):
            largest = max(self._holders.values(), key=_BLOCKS)
            most = max(1, min(self.entries - least, largest.blocks // 8))
            self._evict(largest, most)
            if not largest.pieces and largest is not it:
                self._forget(largest, largest.epoch)

    def _evict(self, it: HolderState, most: int) -> None:
        """Take up to `most` blocks from a holder: a second chance for pieces that were used."""
        for piece in list(it.pieces):
            if piece not in it.pieces:
                continue  # it was joined to another one
            end = self._end(it, piece)
            if end.used or piece.used:
                end.used = piece.used = False
                del it.pieces[piece]
                it.pieces[piece] = None
                continue
            count = min(most, len(end.keys))
            end = self._cut(end, len(end.keys) - count, len(end.keys))
            self._lose(it, end)
            if end.mask:
                self._join(end)
            self.evicted += count
            most -= count
            if not most:
                return

    def _end(self, it: HolderState, piece: ChainPiece) -> ChainPiece:
        """The last piece that the holder has of a chain that goes on from this piece."""
        for _ in range(_DEEPEST):
            after = self._where.get(piece.next)
            if after is None or after.parent != piece.keys[-1] or it not in after.counts:
                break
            piece = after
        return piece

    # Pieces

    def _new(self, keys: list[Hashable], parent: Hashable | None) -> ChainPiece:
        """A new piece of the leading `keys` that nobody holds; nobody holds keys[0]."""
        if not self._where.keys().isdisjoint(keys):
            keys = keys[: next(i for i, key in enumerate(keys) if key in self._where)]
        piece = ChainPiece(keys, parent, 0, {})
        fresh = dict.fromkeys(keys, piece)
        if len(fresh) < len(keys):  # a key came twice, so this is no chain: take the first key only
            piece.keys = list(fresh)[:1]
            fresh = {piece.keys[0]: piece}
        self._where.update(fresh)
        before = self._where.get(parent)
        if before is not None:
            before.next = keys[0]
            if before.keys[-1] == parent:
                piece.parent = before.keys[-1]  # one object for both
        return piece

    def _cut(self, piece: ChainPiece, start: int, stop: int) -> ChainPiece:
        """Make a part of a piece a piece of its own."""
        if stop < len(piece.keys):
            piece, _ = self._split(piece, stop)
        if start:
            _, piece = self._split(piece, start)
        return piece

    def _split(self, piece: ChainPiece, at: int) -> tuple[ChainPiece, ChainPiece]:
        """Make two pieces of one; the larger part keeps the object."""
        head, tail = piece.keys[:at], piece.keys[at:]
        if len(head) < len(tail):
            new = piece.part(head, piece.parent)
            piece.keys = tail
            piece.parent = head[-1]
            new.next = tail[0]
            first, second = new, piece
        else:
            new = piece.part(tail, head[-1])
            piece.keys, piece.next, new.next = head, tail[0], piece.next
            first, second = piece, new
        self._where.update(dict.fromkeys(new.keys, new))
        return first, second

    def _join(self, piece: ChainPiece) -> None:
        """Join a piece with its neighbours if they have become alike."""
        before = self._where.get(piece.parent)
        if before is not None and before.keys[-1] == piece.parent:
            before.next = piece.keys[0]
            piece = self._joined(before, piece)
        after = self._where.get(piece.next)
        if after is not None and after.parent == piece.keys[-1] and after is not piece:
            self._joined(piece, after)

    def _joined(self, head: ChainPiece, tail: ChainPiece) -> ChainPiece:
        """Join two pieces if they are alike; the larger one keeps its object. Otherwise return the
        tail."""
        if head is tail or head.mask != tail.mask or head.counts != tail.counts:
            return tail
        if len(head.keys) < len(tail.keys):
            kept, gone = tail, head
            tail.keys[:0] = head.keys
            tail.parent = head.parent
        else:
            kept, gone = head, tail
            head.keys += tail.keys
            head.next = tail.next
        kept.used = kept.used or gone.used
        self._where.update(dict.fromkeys(gone.keys, kept))
        for holder in gone.counts:
            del holder.pieces[gone]
        return kept

    def _lose(self, it: HolderState, piece: ChainPiece) -> None:
        """A holder has lost its last copy of a piece."""
        piece.take(it)
        it.blocks -= len(piece.keys)
        self.entries -= len(piece.keys)
        if not piece.mask:
            self._delete(piece.keys)

    def _shorten(self, it: HolderState, piece: ChainPiece, stop: int) -> None:
        """The only holder has lost the end of a piece: the common case, done without a cut."""
        lost = len(piece.keys) - stop
        it.blocks -= lost
        self.entries -= lost
        self._delete(piece.keys[stop:])
        del piece.keys[stop:]

    def _delete(self, keys: list[Hashable]) -> None:
        where = self._where
        for key in keys:
            del where[key]


_BLOCKS = attrgetter("blocks")


def span(own: list[Hashable], keys: list[Hashable]) -> tuple[int, int]:
    """(start, stop) of the part of a piece that `keys` begins with, forwards or backwards.

    keys[0] is in the piece.
    """
    start = own.index(keys[0]) if keys[0] != own[-1] else len(own) - 1
    stop = start + 1
    if start and len(keys) > 1 and own[start - 1] == keys[1]:
        start = stop - _common(own[max(0, stop - len(keys)) : stop][::-1], keys)
    else:
        stop = start + _common(own[start : start + len(keys)], keys)
    return start, stop


def _common(one: list[Hashable], other: list[Hashable]) -> int:
    """How many leading keys are the same."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def parting(
    own: Sequence[Hashable], start: int, keys: Sequence[Hashable], at: int, most: int
) -> int:
    """How many keys `own` from `start` on has in common with `keys` from `at` on, up to `most`.

    The first key must be equal. By bisection: if two keys are equal, all keys before them are.
    """
    low = 1
    high = min(most, len(keys) - at)
    if own[start + high - 1] == keys[at + high - 1]:  # mostly
        return high
    while low < high:
        middle = (low + high + 1) >> 1
        if own[start + middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class PromisedRun:
    """Blocks that the same promised chains share, up to number `stop` of each chain."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        stop: int,
        counts: dict[SegmentId, int],
        after: dict[BlockKey, PromisedRun],
    ) -> None:
        self.keys = keys
        """One of these chains, from its head."""
        self.stop = stop
        self.counts = counts
        """Holder -> how many of the chains it was promised."""
        self.after = after
        """The runs that follow, by their first key."""


class PendingPrefixes:
    """Holders and the chains promised to them; keys are chained hashes, as in PrefixIndex."""

    def __init__(self) -> None:
        self._heads: dict[BlockKey, PromisedRun] = {}
        self._of: dict[RequestId, tuple[SegmentId, Sequence[BlockKey]]] = {}

    def heads(self) -> Iterable[PromisedRun]:
        """The runs that head the chains."""
        return self._heads.values()

    def promised(self, request: RequestId, holder: SegmentId, keys: Sequence[BlockKey]) -> None:
        """`holder` will have this chain through the prefill of this request."""
        self._of[request] = (holder, keys)
        self.add(holder, keys)

    def over(self, request: RequestId) -> None:
        """The request's prefill is over, or was never promised."""
        if request in self._of:
            self.remove(*self._of.pop(request))

    def add(self, holder: SegmentId, keys: Sequence[BlockKey]) -> None:
        """`holder` will have this chain."""
        at, after = 0, self._heads
        while at < len(keys):
            run = after.get(keys[at])
            if run is None:
                run = after[keys[at]] = PromisedRun(keys, len(keys), {}, {})
            stop = at + parting(run.keys, at, keys, at, run.stop - at)
            if stop < run.stop:
                rest = PromisedRun(run.keys, run.stop, run.counts.copy(), run.after)
                run.stop = stop
                run.after = {run.keys[stop]: rest}
            run.counts[holder] = run.counts.get(holder, 0) + 1
            at, after = stop, run.after

    def remove(self, holder: SegmentId, keys: Sequence[BlockKey]) -> None:
        """Take back an earlier `add`, whether the promise was kept or not."""
        at, after = 0, self._heads
        way: list[PromisedRun] = []
        while at < len(keys):
            run = after[keys[at]]
            run.counts[holder] -= 1
            if not run.counts[holder]:
                del run.counts[holder]
            if not run.counts:
                del after[keys[at]]  # no run after it has a promise either
                break
            way.append(run)
            at, after = run.stop, run.after
        for run in reversed(way):
            if len(run.after) == 1:
                [rest] = run.after.values()
                if rest.counts == run.counts:  # all chains go on there
                    run.keys = rest.keys
                    run.stop = rest.stop
                    run.after = rest.after

    def match(self, keys: Sequence[BlockKey]) -> dict[SegmentId, int]:
        """How many leading blocks of this chain each holder will have; others are absent."""
        found: dict[SegmentId, int] = {}
        at, after = 0, self._heads
        while at < len(keys):
            run = after.get(keys[at])
            if run is None:
                break
            stop = at + parting(run.keys, at, keys, at, run.stop - at)
            found.update(dict.fromkeys(run.counts, stop))
            if stop < run.stop:
                break
            at, after = stop, run.after
        return found

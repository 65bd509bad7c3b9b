"""PrefixIndex: who holds which prefix, on which tier; and Match, its answer.

Fed by the Conductor with what stores and engines report, read by placement; it never asks anybody.

Per key it keeps one integer, the mask of its holders. A holder that holds a block holds, nearly
always, all blocks before it, so masks only shrink along a chain, and a look-up finds the few
places where they do by bisection. The exceptions are kept exactly: a *hole* is a block that a
holder lacks while it holds one right after it. Holders with a hole on the chain asked for are
walked block by block; all others cannot be wrong, since a run that breaks and goes on leaves a
hole where it goes on.

What never happens here: a claim for a holder that was not told of it; an order that depends on
hashes (keys may be any hashable); a key, bit or count that outlives the last thing it stood for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import compress
from typing import Literal, TypeAlias

from moonserve.core.units import SegmentId

Tier: TypeAlias = Literal["device", "dram", "disk"]
"""G1, G2 and G3 of KV events: the engine's own pool, host memory, local disk."""

_FIELD = (1 << 20) - 1
_ONE: dict[Tier, int] = {"device": 1, "dram": 1 << 20, "disk": 1 << 40}
"""One copy on a tier. A holder's count of a key is the sum over tiers, 20 bits each: nobody has
room for a million copies of one block."""
_MAX_GONE = 4_096
_FEW = 6
_BITS = bytes.maketrans(b"01", b"\0\1")


class Match:
    """How much of one chain is held where, in leading contiguous blocks.

    A snapshot: later changes of the index do not show. Not to be changed.
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
        """The run that readers can load block by block, whoever holds each."""
        self._by_holder = by_holder
        self._ended = ended  # (length, mask of the holders whose run it is)
        self._names = names  # by bit

    @property
    def by_holder(self) -> dict[SegmentId, int]:
        """The run each holder has on its own; holders of nothing are absent.

        Made when first asked for: shortest runs first, then by the holders' bits.
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


class _Holder:
    """One holder: its bit, what it holds and how often, and its holes."""

    __slots__ = ("bit", "epoch", "holes", "name", "refs")

    def __init__(self, name: SegmentId, epoch: int, bit: int) -> None:
        self.name = name
        self.epoch = epoch
        self.bit = bit
        self.refs: dict[Hashable, int] = {}
        self.holes: dict[Hashable, int] = {}
        """Key that it lacks -> how many blocks right after it it holds."""


class PrefixIndex:
    """See the module. Exact for what it was told, in whatever order.

    A key fixes what comes before it (keys are chained hashes): the first parent told of a key
    counts, and `match` is asked with chains. A holder may store a key several times, and holds it
    until it was removed as often, on each tier for itself. Facts of an older epoch of a holder than
    the newest known are late, and ignored; a newer epoch drops all that the older one held.

    Bounds: `max_entries` (key, holder) pairs; what comes beyond is refused and counted, so the
    index then knows too little, never too much. Epochs of the last 4,096 holders gone.
    """

    def __init__(self, max_entries: int = 10_000_000) -> None:
        self.max_entries = max_entries
        self.entries = 0
        """(key, holder) pairs now."""
        self.refused = 0
        """Blocks not taken, since the index was full."""
        self.late = 0
        """Blocks of facts ignored, since their epoch was over."""
        self._masks: dict[Hashable, int] = {}
        self._parents: dict[Hashable, Hashable] = {}
        self._children: dict[Hashable, Hashable] = {}
        """Key -> its one known child, or a dict of several (no key is a dict)."""
        self._holes: dict[Hashable, int] = {}
        """Key -> mask of the holders for which it is a hole."""
        self._holders: dict[SegmentId, _Holder] = {}
        self._free: list[int] = []
        self._names: tuple[SegmentId, ...] = ()
        """By bit; a name stays after its holder went, until the bit is given anew."""
        self._gone: OrderedDict[SegmentId, int] = OrderedDict()
        """Holder without entries -> the oldest epoch it may come back with."""

    def __len__(self) -> int:
        """How many different keys are held."""
        return len(self._masks)

    def stored(
        self,
        holder: SegmentId,
        keys: Sequence[Hashable],
        parent: Hashable | None,
        tier: Tier = "dram",
        epoch: int = 0,
    ) -> None:
        """`holder` now has `keys`, a piece of a chain, complete and readable.

        `parent` is the key before keys[0], held or not; None where keys[0] heads a chain.
        """
        if not keys or self._is_late(holder, epoch, len(keys)):
            return
        it = self._holders.get(holder) or self._add(holder, epoch)
        one, bit, refs, masks = _ONE[tier], it.bit, it.refs, self._masks
        others = self.entries - len(refs)
        room = self.max_entries - others
        for key in keys:
            count = refs.get(key)
            if count is not None:
                refs[key] = count + one
            elif len(refs) >= room:
                self.refused += 1
            else:
                refs[key] = one
                mask = masks.get(key)
                if mask is None:
                    masks[key] = bit
                    self._link(key, parent)
                    before = parent
                else:
                    masks[key] = mask | bit
                    before = self._parents[key]
                if before is not None and before not in refs:
                    it.holes[before] = it.holes.get(before, 0) + 1
                    self._holes[before] = self._holes.get(before, 0) | bit
                if key in it.holes:
                    self._fill(it, key)
            parent = key
        self.entries = others + len(refs)
        if not refs:
            self._forget(it, epoch)

    def removed(
        self, holder: SegmentId, keys: Sequence[Hashable], tier: Tier = "dram", epoch: int = 0
    ) -> None:
        """`holder` has one copy less of each of `keys` on `tier`; what it never had is ignored."""
        late = self._is_late(holder, epoch, len(keys))
        it = self._holders.get(holder)
        if late or it is None:
            return
        one, refs = _ONE[tier], it.refs
        for key in keys:
            count = refs.get(key, 0)
            if count == one:
                self._lose(it, key)
            elif count // one & _FIELD:
                refs[key] = count - one
        if not refs:
            self._forget(it, epoch)

    def cleared(self, holder: SegmentId, tier: Tier = "dram", epoch: int = 0) -> None:
        """`holder` emptied that tier: every copy on it is gone at once."""
        late = self._is_late(holder, epoch, 1)
        it = self._holders.get(holder)
        if late or it is None:
            return
        one, refs = _ONE[tier], it.refs
        field = one * _FIELD
        if all(not count & ~field for count in refs.values()):
            self._drop(it, epoch)
            return
        for key, count in reversed(list(refs.items())):  # tails first: fewer holes on the way
            if not count & ~field:
                self._lose(it, key)
            else:
                refs[key] = count & ~field

    def dropped(self, holder: SegmentId, epoch: int) -> None:
        """`holder` is gone, or restarted: all it held up to `epoch` goes, at once and for good."""
        it = self._holders.get(holder)
        if it is None:
            self._remember(holder, max(epoch + 1, self._gone.get(holder, 0)))
        elif epoch >= it.epoch:
            self._drop(it, epoch + 1)

    def tiers(self, key: Hashable, holder: SegmentId) -> tuple[Tier, ...]:
        """The tiers on which `holder` has `key`, fastest first."""
        it = self._holders.get(holder)
        count = it.refs.get(key, 0) if it is not None else 0
        return tuple(tier for tier, one in _ONE.items() if count // one & _FIELD) if count else ()

    def match(self, keys: Sequence[Hashable]) -> Match:
        """The longest leading run of the chain `keys`, in the pool and in each holder.

        O(change points x log n) look-ups where no holder has a hole on the chain, else O(n).
        """
        get, end = self._masks.get, len(keys)
        mask = get(keys[0], 0) if keys else 0
        if not mask:
            return Match(0, {})
        loose = 0
        if self._holes:
            end = self._bound(keys)
            loose = self._loose(keys[:end])
        walked = mask & loose
        mask &= ~loose
        ended: list[tuple[int, int]] = []
        at, pool = 0, end if mask else 0
        ahead = [end - 1]
        seen = [get(keys[end - 1], 0) & ~loose]
        while mask and ahead:
            there = seen[-1]
            if there == mask:
                at = ahead.pop()
                seen.pop()
            elif ahead[-1] == at + 1:
                at = ahead.pop()
                ended.append((at, mask ^ there))
                mask = seen.pop()
                if not mask:
                    pool = at
            else:
                middle = (at + ahead[-1]) >> 1
                ahead.append(middle)
                seen.append(get(keys[middle], 0) & ~loose)
        if mask:
            ended.append((end, mask))
        if loose:
            while pool < end and get(keys[pool], 0):  # held by holders with holes only
                pool += 1
        if walked:
            self._walk(keys[:end], walked, ended)
        return Match(pool, None, ended, self._names)

    # Looking up

    def _bound(self, keys: Sequence[Hashable]) -> int:
        """Where all runs have ended: a position nobody holds, by galloping, or the end."""
        end, step = len(keys), 1
        while step < end:
            if keys[step] not in self._masks:
                return step
            step += step
        return end

    def _loose(self, keys: Sequence[Hashable]) -> int:
        """Mask of the holders with a hole among `keys`."""
        holes, loose = self._holes, 0
        if not holes.keys().isdisjoint(keys):
            for key in keys:
                loose |= holes.get(key, 0)
        return loose

    def _walk(self, keys: Sequence[Hashable], mask: int, ended: list[tuple[int, int]]) -> None:
        """Append the runs of the holders in `mask`, which all have keys[0], block by block."""
        for at, key in enumerate(keys):
            here = mask & self._masks.get(key, 0)
            if here != mask:
                ended.append((at, mask ^ here))
                mask = here
                if not mask:
                    return
        ended.append((len(keys), mask))

    # Holders

    def _is_late(self, name: SegmentId, epoch: int, blocks: int) -> bool:
        """Whether a fact of `epoch` comes too late; a newer epoch drops what an older one held."""
        it = self._holders.get(name)
        late = epoch < (self._gone.get(name, epoch) if it is None else it.epoch)
        if late:
            self.late += blocks
        elif it is not None and epoch > it.epoch:
            self._drop(it, epoch)
        return late

    def _add(self, name: SegmentId, epoch: int) -> _Holder:
        """A holder with a bit of its own, and no entries yet."""
        at = self._free.pop() if self._free else len(self._names)
        self._names = (*self._names[:at], name, *self._names[at + 1 :])
        it = self._holders[name] = _Holder(name, epoch, 1 << at)
        self._gone.pop(name, None)
        return it

    def _forget(self, it: _Holder, oldest_epoch: int) -> None:
        """It holds nothing any more: its bit may name another from now on."""
        del self._holders[it.name]
        self._free.append(it.bit.bit_length() - 1)
        self._remember(it.name, oldest_epoch)

    def _remember(self, name: SegmentId, oldest_epoch: int) -> None:
        self._gone[name] = oldest_epoch
        self._gone.move_to_end(name)
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def _drop(self, it: _Holder, oldest_epoch: int) -> None:
        """All that a holder has goes."""
        for key in it.holes:
            self._unhole(it, key)
        for key in it.refs:
            self._unmask(it, key)
        self.entries -= len(it.refs)
        self._forget(it, oldest_epoch)

    # Entries and holes

    def _lose(self, it: _Holder, key: Hashable) -> None:
        """The last copy of `key` is gone from a holder."""
        refs, holes = it.refs, it.holes
        del refs[key]
        self.entries -= 1
        parent = self._parents[key]
        if parent in holes:
            holes[parent] -= 1
            if not holes[parent]:
                self._fill(it, parent)
        child = self._children.get(key)
        if child is not None:
            orphans = sum(c in refs for c in child) if isinstance(child, dict) else child in refs
            if orphans:
                holes[key] = int(orphans)
                self._holes[key] = self._holes.get(key, 0) | it.bit
        self._unmask(it, key)

    def _fill(self, it: _Holder, key: Hashable) -> None:
        """`key` is no hole of this holder any more."""
        del it.holes[key]
        self._unhole(it, key)

    def _unhole(self, it: _Holder, key: Hashable) -> None:
        mask = self._holes[key] ^ it.bit
        if mask:
            self._holes[key] = mask
        else:
            del self._holes[key]

    def _unmask(self, it: _Holder, key: Hashable) -> None:
        mask = self._masks[key] ^ it.bit
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]
            self._unlink(key)

    def _link(self, key: Hashable, parent: Hashable | None) -> None:
        """A key that nobody held until now."""
        self._parents[key] = parent
        if parent is not None:
            child = self._children.setdefault(parent, key)
            if isinstance(child, dict):
                child[key] = None
            elif child is not key:
                self._children[parent] = {child: None, key: None}  # type: ignore[assignment]

    def _unlink(self, key: Hashable) -> None:
        """Nobody holds `key` any more."""
        parent = self._parents.pop(key)
        child = self._children.get(parent)
        if isinstance(child, dict):
            del child[key]
        if not isinstance(child, dict) or not child:
            self._children.pop(parent, None)

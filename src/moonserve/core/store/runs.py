"""Runs: successive blocks of a chain on one segment, and the order in which runs are evicted.

Only core.store.catalog uses this. A run keeps in arrays what its blocks differ in, and once what
they share, so that a block costs some 16 bytes beside its key. A run is divided where one part of
it is used, held or removed without the other; parts are not joined again.

What never happens here: a decision what to evict for; a change of a catalog's other ledgers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

from moonserve.core.store.evict import EVICTIONS, Eviction, Lru
from moonserve.core.store.words import ALIGN, Key, PutOptions, Replica, aligned
from moonserve.core.units import Bytes, SegmentId

LONGEST = 128
"""Blocks of one run. A key is looked for by going through its run, which takes 2 us or less."""

Numbers: TypeAlias = "range | array[int]"
"""Ids or places of successive blocks: nearly always they count up, and then cost nothing."""


class StoredRun:
    """Replicas of successive blocks of one chain, on one segment, alike in size and options.

    It never has a key twice. Only its last block can leave it; see `divided`.
    """

    __slots__ = (
        "_code",
        "_next",
        "_offsets",
        "checksums",
        "extent",
        "ids",
        "keys",
        "options",
        "parent",
        "segment",
        "several",
        "size",
        "versions",
    )

    def __init__(
        self, segment: SegmentId, parent: Key | None, size: Bytes, options: PutOptions, code: str
    ) -> None:
        """`code`: the type of an array of offsets, see `code_of`."""
        self.segment = segment
        self.parent = parent
        """The key before keys[0]; None at a chain's head."""
        self.size = size
        self.extent = aligned(size)
        """Bytes that each block takes up."""
        self.options = options
        self.keys: list[Key] = []
        self.versions: Numbers = range(0)
        self.ids: Numbers = self.versions
        """Of the put or copy that wrote each replica. Of objects that were put here they are the
        versions, and one object serves for both."""
        self.checksums = array("Q")
        self._offsets: Numbers = self.versions  # in units of ALIGN
        self._code = code
        self._next = 0  # after the key that was looked for last
        self.several = False
        """Whether an object of it may have had a second replica."""

    def __len__(self) -> int:
        return len(self.keys)

    def append(self, key: Key, checksum: int, version: int, id: int, offset: Bytes) -> None:
        """Add a block that continues the run."""
        self.keys.append(key)
        self.checksums.append(checksum)
        if self.ids is not self.versions:
            self.ids = _appended(self.ids, id)
            self.versions = _appended(self.versions, version)
        elif id == version:
            self.ids = self.versions = _appended(self.versions, version)
        else:
            self.ids = _appended(self.ids[:], id)
            self.versions = _appended(self.versions, version)
        step = self.extent // ALIGN
        self._offsets = _appended(self._offsets, offset // ALIGN, step, self._code)

    def prepend(
        self, key: Key, parent: Key | None, sums: tuple[int, int, int], offset: Bytes
    ) -> None:
        """Add the block that the run continues; `parent` is the key before it.

        sums: its checksum, version and id.
        """
        checksum, version, id = sums
        self.keys.insert(0, key)
        self.parent = parent
        self.checksums.insert(0, checksum)
        self.ids = array("Q", [id, *self.ids])
        self.versions = (
            range(version, self.versions.stop)
            if isinstance(self.versions, range) and self.versions.start == version + 1
            else array("Q", [version, *self.versions])
        )
        self._offsets = array(self._code, [offset // ALIGN, *self._offsets])

    def pop(self) -> None:
        """Take the last block out."""
        del self.keys[-1], self.checksums[-1]
        self._offsets = self._offsets[:-1]
        same = self.ids is self.versions
        self.versions = self.versions[:-1]
        self.ids = self.versions if same else self.ids[:-1]

    def offset(self, at: int) -> Bytes:
        """Where block number `at` of the run is in the segment."""
        return self._offsets[at] * ALIGN

    def replicas(self, start: int, stop: int) -> list[Replica]:
        """The places of a part of the run."""
        segment = self.segment
        return [Replica(segment, offset * ALIGN) for offset in self._offsets[start:stop]]

    def before(self, at: int) -> Key | None:
        """The key before block number `at`."""
        return self.keys[at - 1] if at else self.parent

    def index(self, key: Key) -> int:
        """The number of this key, which the run has."""
        keys = self.keys
        at = self._next
        if at >= len(keys) or keys[at] != key:
            at = len(keys) - 1 if key == keys[-1] else keys.index(key)
        self._next = at + 1
        return at

    def span(self, keys: Sequence[Key], at: int) -> tuple[int, int]:
        """(start, stop) of the part of the run that `keys` from `at` on begins with.

        The run has keys[at].
        """
        start = self.index(keys[at])
        own = self.keys[start : start + len(keys) - at]
        if own == list(keys[at : at + len(own)]):
            return start, start + len(own)
        same = 1
        while own[same] == keys[at + same]:
            same += 1
        return start, start + same

    def divided(self, at: int, keep_head: bool) -> StoredRun:
        """Give away the blocks from `at` on, or those before it, as a new run."""
        if keep_head:
            new = StoredRun(self.segment, self.keys[at - 1], self.size, self.options, self._code)
            gives, keeps = slice(at, None), slice(0, at)
        else:
            new = StoredRun(self.segment, self.parent, self.size, self.options, self._code)
            gives, keeps = slice(0, at), slice(at, None)
            self.parent = self.keys[at - 1]
        new.several = self.several
        new.keys, self.keys = self.keys[gives], self.keys[keeps]
        same = self.ids is self.versions
        new.versions, self.versions = self.versions[gives], self.versions[keeps]
        if same:
            new.ids, self.ids = new.versions, self.versions
        else:
            new.ids, self.ids = self.ids[gives], self.ids[keeps]
        new.checksums, self.checksums = self.checksums[gives], self.checksums[keeps]
        new._offsets, self._offsets = self._offsets[gives], self._offsets[keeps]
        return new


def code_of(capacity_bytes: Bytes) -> str:
    """The type of an array that can have every offset in a segment of this size."""
    return "I" if capacity_bytes // ALIGN < 1 << 32 else "Q"


def _appended(numbers: Numbers, number: int, step: int = 1, code: str = "Q") -> Numbers:
    """The numbers with one more. They are a range as long as each is `step` above the last."""
    if isinstance(numbers, range):
        if not numbers:
            return range(number, number + step, step)
        if number == numbers.stop:
            return range(numbers.start, number + step, step)
        numbers = array(code, numbers)
    numbers.append(number)
    return numbers


Divide: TypeAlias = Callable[[StoredRun, int, bool], StoredRun]
"""Divides a run as StoredRun.divided does, in all ledgers and orders."""


class RunOrder:
    """An order of eviction over the runs of one place: a segment, or a tenant's objects.

    The order names a run, and its last block goes first. A block is useless without the blocks
    before it. So a block that others in this place continue is evicted only after them, and what is
    left of a chain stays a usable prefix.

    For LRU this is the order of the single blocks: a run was used as a whole. The other orders
    rank each block by itself, so their runs have one block.

    Held keys may be in the order: `pop` takes them out when it meets them. Code that ends a hold
    must put the run in again (`enter` or `use`), so that every run with a free key is in the order
    or doomed. Beside the order's own cost every operation is O(1), amortised; `pop` also looks at
    the held runs that continue the key that it returns.
    """

    def __init__(self, eviction: str, holds: Container[Key], divide: Divide) -> None:
        """holds: the keys that must not go."""
        self._order: Eviction[StoredRun] = EVICTIONS[eviction]()
        self._lru = self._order if isinstance(self._order, Lru) else None
        self.longest = 1 if self._lru is None else LONGEST
        """How many blocks a run may have."""
        self._holds = holds
        self._divide = divide
        self._children: dict[Key, StoredRun | dict[StoredRun, None]] = {}
        """Key -> the runs here that continue it."""
        self._doomed: list[StoredRun] = []
        """A victim of the order, then the runs that go before it, each after its parent."""

    def add(self, run: StoredRun) -> None:
        """Add a run. It enters the order when it is used."""
        parent = run.parent
        if parent is None:
            return
        others = self._children.get(parent)
        if others is None:
            self._children[parent] = run
        elif isinstance(others, StoredRun):
            self._children[parent] = {others: None, run: None}
        else:
            others[run] = None

    def remove(self, run: StoredRun) -> None:
        """Remove a run that has left this place."""
        self._order.discard(run)
        self._orphan(run, run.parent)

    def _orphan(self, run: StoredRun, parent: Key | None) -> None:
        """`run` does not continue `parent` any more."""
        if parent is None:
            return
        others = self._children[parent]
        if isinstance(others, StoredRun):
            del self._children[parent]
            return
        del others[run]
        if not others:
            del self._children[parent]

    def only_child(self, key: Key) -> StoredRun | None:
        """The run that continues this key, if there is just one."""
        children = self._children.get(key)
        return children if isinstance(children, StoredRun) else None

    def prepended(self, run: StoredRun) -> None:
        """A block was put before the others of a run."""
        self._orphan(run, run.keys[0])
        self.add(run)

    def divided(self, old: StoredRun, new: StoredRun, keep_head: bool) -> None:
        """A run has given a part away. The part may be evicted if the run may: it is next then.

        What divides a run uses, holds or removes one part without the other.
        """
        if keep_head:
            self.add(new)
        else:
            self._orphan(old, new.parent)
            self.add(old)
            self.add(new)
        if self._lru is not None and (old in self._order or old in self._doomed):
            self._lru.use_first(new)

    def may_grow(self, run: StoredRun) -> bool:
        """Whether a block may be added to a run without a wrong place in the order."""
        if len(run) >= self.longest or run in self._doomed:
            return False
        return run not in self._order or (self._lru is not None and self._lru.is_latest(run))

    def use(self, runs: Sequence[StoredRun]) -> None:
        """The runs of one request, first run first, are used now; see Eviction.use."""
        self._order.use(runs)

    def enter(self, run: StoredRun) -> None:
        """Put a run into the order; nothing changes if it is in it, or is about to be evicted."""
        if run not in self._order and run not in self._doomed:
            self._order.use((run,))

    def pop(self) -> StoredRun | None:
        """Return the run whose last block is to be evicted next; None: all blocks are held.

        A caller that does not evict this block must hold it, or put the run back by `use`.
        """
        doomed = self._doomed
        holds = self._holds
        while True:
            while doomed:
                run = doomed[-1]
                free = len(run)
                while free and run.keys[free - 1] in holds:
                    free -= 1
                if not free or run in self._order:  # held or gone, or used since
                    doomed.pop()
                    continue
                if free < len(run):
                    self._divide(run, free, True)
                child = self._free_child(run.keys[-1])
                if child is None:
                    return run
                doomed.append(child)
            victim = self._order.pop()
            if victim is None:
                return None
            doomed.append(victim)

    def _free_child(self, key: Key) -> StoredRun | None:
        """Take a run that continues `key` with free blocks out of the order, up to a held one."""
        children = self._children.get(key, ())
        for child in (children,) if isinstance(children, StoredRun) else children:
            free = 0
            while free < len(child) and child.keys[free] not in self._holds:
                free += 1
            if free and child in self._order:
                first = child if free == len(child) else self._divide(child, free, False)
                self._order.discard(first)
                return first
        return None

"""Recovery: what owners and clients say lies on segments, until it is part of the stock.

For core.store.master, when it starts among segments that outlived another, and when a segment
comes back that it had given up. An owner tells its catalogue in pages; clients claim what owners
may not have heard of. Of two extents that overlap, the later is true (the larger id); so is the
later version of a key, and a removal that came after it. What an owner was told as gone is gone,
whoever claims it: its extent was others' since. Versions of equal bytes are replicas of one object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonserve.core.store.catalog import Stock
from moonserve.core.store.ledger import Shelf
from moonserve.core.store.words import Change, Claim, Found, Held, Key, Mount, Replica
from moonserve.core.units import Micros, SegmentId

_MAX_REMOVED = 65_536
_CLAIMS_KEPT_US: Micros = 60_000_000


@dataclass(slots=True)
class _Loading:
    mount: Mount
    heard_us: Micros
    held: list[Change] = field(default_factory=list)
    pages: int = 0


class Recovery:
    """Pages, claims and removals, and how they become objects."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._loading: dict[SegmentId, _Loading] = {}
        self._claims: dict[tuple[SegmentId, int], tuple[Micros, list[Claim]]] = {}
        """Segment and epoch -> when the first was told, and all."""
        self._removed: OrderedDict[Key, int] = OrderedDict()
        """Key -> version, of what was removed: nobody's catalogue brings it back."""

    @property
    def is_loading(self) -> bool:
        """Whether some owner is amid its pages."""
        return bool(self._loading)

    def page(
        self, now_us: Micros, mount: Mount, held: Sequence[Change], page: int, last: bool
    ) -> list[Change] | None:
        """Take one page of a catalogue; all of it after the last, empty before that.

        None: it is out of sequence, or of an older epoch.
        """
        loading = self._loading.get(mount.id)
        if page == 0:
            if loading is not None and loading.mount.epoch > mount.epoch:
                return None
            loading = self._loading[mount.id] = _Loading(mount, now_us)
        if loading is None or loading.mount != mount or loading.pages != page:
            return None
        loading.heard_us = now_us
        loading.held += held
        loading.pages += 1
        if not last:
            return []
        del self._loading[mount.id]
        return loading.held

    def claim(self, now_us: Micros, claims: Sequence[Claim]) -> None:
        """Keep claims until their segments are mounted, or have long not been."""
        for claim in claims:
            _, kept = self._claims.setdefault((claim.segment, claim.epoch), (now_us, []))
            kept.append(claim)

    def removed(self, key: Key, version: int) -> None:
        """A removal: this version and older ones do not come back."""
        self._removed[key] = max(version, self._removed.get(key, version))
        self._removed.move_to_end(key)
        if len(self._removed) > _MAX_REMOVED:
            self._removed.popitem(last=False)

    def reap(self, now_us: Micros, silent_us: Micros) -> None:
        """Give up owners that stopped amid their pages, and claims on segments that do not come."""
        for name in [it for it, load in self._loading.items() if load.heard_us <= silent_us]:
            del self._loading[name]
        old_us = now_us - _CLAIMS_KEPT_US
        for at in [it for it, (told_us, _) in self._claims.items() if told_us <= old_us]:
            del self._claims[at]

    def restore(self, told: Sequence[tuple[Shelf, Held]]) -> list[tuple[Shelf, Held]]:
        """Make objects of catalogues, and of the claims on their shelves and all mounted ones.

        Gives the puts under way, their extents taken. Owners hear of what was not true.
        """
        stock = self._stock
        found = [(shelf, held, False) for shelf, held in told]
        for name, epoch in list(self._claims):
            shelf = stock.shelves.get(name)
            if shelf is not None and shelf.mount.epoch == epoch:
                _, claims = self._claims.pop((name, epoch))
                gone = shelf.gone
                claims = [it for it in claims if it.held.id > gone.get(it.held.key, -1)]
                found += [(shelf, claim.held, claim.writing) for claim in claims]
        found.sort(key=lambda it: (it[1].id, not it[2]), reverse=True)
        placed: list[tuple[Shelf, Held]] = []
        latest: dict[tuple[SegmentId, Key], None] = {}
        puts: list[tuple[Shelf, Held]] = []
        for shelf, held, writing in found:
            removed = self._removed.get(held.key)
            at = (shelf.name, held.key)
            if at in latest or (removed is not None and removed >= held.version):
                shelf.note(held.key, held.id)
            elif stock.reserve(shelf, held.offset, held.size, held.options.tenant):
                (puts if writing else placed).append((shelf, held))
                if not writing:
                    latest[at] = None
            else:
                shelf.note(held.key, held.id)
        placed.sort(key=lambda it: (it[1].version, -it[1].id))
        for shelf, held in placed:
            self._place(shelf, held)
        return puts

    def _place(self, shelf: Shelf, held: Held) -> None:
        """Make a replica of an extent that is taken, or free it if it is not one any more."""
        stock = self._stock
        of = stock.objects.get(held.key)
        same = of is not None and (of.found.size, of.found.checksum) == (held.size, held.checksum)
        if of is not None and not same and of.found.version < held.version:
            stock.remove(of)
            of = None
        if of is None:
            replica = Replica(shelf.name, held.offset)
            found = Found(held.key, held.size, held.checksum, held.version, (replica,))
            of = stock.create(found, held.parent, held.options, shelf, held.id)
            stock.enter(of)
        elif same and held.key not in shelf.objects:
            stock.give(shelf, held.offset, held.size, held.options.tenant)
            stock.reserve(shelf, held.offset, held.size, of.options.tenant)
            stock.add_replica(of, shelf, held.offset, held.id)
        else:
            stock.give(shelf, held.offset, held.size, held.options.tenant)
            shelf.note(held.key, held.id)

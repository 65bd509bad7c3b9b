"""Which instances may still win a decision, found without pricing all: branch and bound.

core.schedule.decide asks it for policies whose score is the predicted TTFT. An instance's TTFT is
at least (the time until it is ready) + (the least that transfer and compute take on any instance
that holds no more). So instances are looked at in the order in which they are ready, until this
exceeds what can still matter. The few with the longest runs of the prompt are priced by themselves.

What is left out has a higher TTFT than the runner-up and is no tie, or is a tie that comes later in
the order of ties than `LOOKED` others. A law compares the decisions with a look at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moonserve.core.schedule.estimate import Estimate, Options
from moonserve.core.schedule.ranking import row_of
from moonserve.core.schedule.view import InstanceView, Prefills
from moonserve.core.units import Micros

LOOKED = 16
"""Of instances that tie so many are compared, the first by InstanceView.order, beside the holders
of the longest runs."""
SHOWN = 8
"""Of those that were priced so many are kept to be shown, beside those that are compared."""
FEW = 32
"""Of so many instances all are priced, in one loop; of more, a search prices fewer."""
_WINDOW = 48
"""Instances of which some may tie: if there are more, ties are sought by `order`."""
_FIRST = 4
"""Instances that are priced before the bound is looked at again; then twice as many, and so on."""
_NEVER: Micros = 1 << 60


def likely(estimate: Estimate, prefills: Prefills, now_us: Micros) -> Options:
    """The terms of the instances that may win, come second, or be compared with the winner; in
    order of ids.

    Among them are the SHOWN ones with the lowest TTFT of those that were priced.
    """
    if prefills.taking <= FEW:
        return estimate.options(prefills.all(), now_us)
    search = _Search(estimate, prefills, now_us)
    search.holders()
    search.soonest()
    search.ties()
    return search.found()


class _Search:
    """One search, and the terms of the rows that were priced."""

    __slots__ = (
        "best_us", "cut", "estimate", "least_us", "now_us", "options", "places", "prefills",
        "second_us", "views",
    )  # fmt: skip

    def __init__(self, estimate: Estimate, prefills: Prefills, now_us: Micros) -> None:
        self.estimate = estimate
        self.prefills = prefills
        self.views = prefills.views
        self.now_us = now_us
        self.cut = estimate.cut()
        self.least_us = estimate.least_us(prefills.floors.values(), self.cut)
        """What transfer and compute take at least where no more than `cut` blocks are held."""
        self.options = estimate.options((), now_us)
        self.places: dict[int, int] = {}
        """The place in `options` of each row that was priced."""
        self.best_us = _NEVER
        self.second_us = _NEVER

    def price(self, rows: Sequence[int]) -> None:
        """Find the TTFTs of those of these rows that take the request."""
        takes = self.prefills.takes
        places = self.places
        ttft_us = self.options.ttft_us
        views: list[InstanceView] = []
        first = len(ttft_us)
        for row in rows:
            if row not in places and takes[row]:
                places[row] = first + len(views)
                views.append(self.views[row])
        self.estimate.extend(self.options, views)
        for us in ttft_us[first:]:
            if us < self.best_us:
                self.second_us = self.best_us
                self.best_us = us
            elif us < self.second_us:
                self.second_us = us

    def holders(self) -> None:
        """Price those with the longest runs."""
        by_segment = self.prefills.by_segment
        rows: list[int] = []
        for segment in self.estimate.holders(self.cut):
            rows += by_segment.get(segment, ())
        self.price(rows)

    def soonest(self) -> None:
        """Price those that are ready so soon that they may be the best or the second."""
        ready = self.prefills.ready
        at = 0
        step = _FIRST
        while len(self.places) < self.prefills.taking:
            stop = len(ready.entries)
            if self.second_us < _NEVER:
                wait_us = self.second_us - self.least_us  # it may not be ready as late as this
                stop = ready.until(self.now_us + wait_us - 1) if wait_us > 0 else 0
            if at >= stop:
                break
            self.price([row_of(entry) for entry in ready.entries[at : min(at + step, stop)]])
            at += step
            step *= 2

    def ties(self) -> None:
        """Price those that may tie with the best: all, or the first by `order`."""
        prefills = self.prefills
        most_us = self.best_us - int((1 - prefills.most_error) * self.least_us) + 1
        last_us = self.now_us + most_us
        count = prefills.ready.until(last_us)
        if count <= _WINDOW:
            self.price(prefills.ready.rows(count))
            return
        compared = 0
        some: list[int] = []
        for row in self.by_order(count, last_us):
            some.append(row)
            if len(some) == LOOKED:
                self.price(some)
                compared += len(self.others(some))
                some = []
                if compared >= LOOKED:
                    break
        self.price(some)

    def by_order(self, count: int, last_us: Micros) -> Iterator[int]:
        """The rows that are ready by then, which are so many, by InstanceView.order; maybe some
        more."""
        views = self.views
        if 8 * count < len(views):
            rows = self.prefills.ready.rows(count)
            yield from sorted(rows, key=lambda row: (views[row].order, row))
        else:
            for entry in self.prefills.order.entries:
                row = row_of(entry)
                if views[row].idle_us <= last_us:
                    yield row

    def ties_of(self, rows: Iterable[int]) -> list[int]:
        """Those of these rows that were priced and tie with the best."""
        best_us = self.best_us
        options = self.options
        found: list[int] = []
        for row in rows:
            place = self.places.get(row)
            if place is None:
                continue
            work_us = options.transfer_us[place] + options.compute_us[place]
            if options.ttft_us[place] - best_us <= self.views[row].cost.error * work_us:
                found.append(row)
        return found

    def others(self, rows: Iterable[int]) -> list[int]:
        """Those that tie and are none of the holders of the longest runs."""
        local = self.options.local
        return [row for row in self.ties_of(rows) if local[self.places[row]] <= self.cut]

    def found(self) -> Options:
        """All that matter of those that were priced."""
        views = self.views
        places = self.places
        ttft_us = self.options.ttft_us
        rows = list(places)
        if len(rows) > SHOWN:
            ties = self.ties_of(rows)
            ties.sort(key=lambda row: (views[row].order, row))
            others = self.others(ties)
            rows.sort(key=lambda row: (ttft_us[places[row]], row))
            long = dict.fromkeys(others[LOOKED:])
            keep = [*rows[:SHOWN], *[row for row in ties if row not in long]]
            rows = list(dict.fromkeys(keep))
        return self.options.only([places[row] for row in sorted(rows)])

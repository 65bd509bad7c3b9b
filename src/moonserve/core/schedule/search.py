"""Which instances may still win a decision, found without pricing all: branch and bound.

core.schedule.decide asks it for policies whose score is the predicted TTFT. An instance's TTFT is
at least (the time until it is ready) + (the least that transfer and compute take on any instance
that holds no more). So instances are looked at in the order in which they are ready, until this
exceeds what can still matter. The few with the longest runs of the prompt are priced by themselves.

What is left out has a higher TTFT than the runner-up and is no tie, or is a tie that comes later in
the order of ties than `LOOKED` others. A law compares the decisions with a look at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonserve.core.schedule.estimate import Estimate
from moonserve.core.schedule.ranking import number_of, row_of
from moonserve.core.schedule.view import InstanceView, Prefills
from moonserve.core.units import Micros

LOOKED = 16
"""Of instances that tie so many are compared, the first by InstanceView.order, beside the holders
of the longest runs."""
FEW = 16
"""Of so many instances all are priced."""
_WINDOW = 48
"""Instances of which some may tie: if there are more, ties are sought by `order`."""
_NEVER: Micros = 1 << 60


def likely(
    estimate: Estimate, prefills: Prefills, shown: int, now_us: Micros
) -> Sequence[InstanceView]:
    """The instances that may win, come second, or be compared with the winner; in order of ids.

    Among them are the `shown` ones with the lowest TTFT of those that were priced.
    """
    if len(prefills) <= FEW:
        return prefills.all()
    search = _Search(estimate, prefills, now_us)
    search.holders()
    search.soonest()
    search.ties()
    return search.found(shown)


class _Search:
    """One search: the TTFTs of the rows that were priced."""

    __slots__ = (
        "best_us", "cut", "estimate", "least_us", "now_us", "prefills", "second_us", "ttfts_us",
        "views",
    )  # fmt: skip

    def __init__(self, estimate: Estimate, prefills: Prefills, now_us: Micros) -> None:
        self.estimate = estimate
        self.prefills = prefills
        self.views = prefills.views
        self.now_us = now_us
        self.cut = estimate.cut()
        self.least_us = estimate.least_us(prefills.floors.values(), self.cut)
        """What transfer and compute take at least where no more than `cut` blocks are held."""
        self.ttfts_us: dict[int, Micros] = {}
        self.best_us = _NEVER
        self.second_us = _NEVER

    def price(self, row: int) -> None:
        """Find the TTFT of a row, if it takes the request."""
        if row in self.ttfts_us or not self.prefills.takes(row):
            return
        view = self.views[row]
        us = self.estimate.work_us(view) + view.queue_us(self.now_us)
        self.ttfts_us[row] = us
        if us < self.best_us:
            self.second_us = self.best_us
            self.best_us = us
        elif us < self.second_us:
            self.second_us = us

    def holders(self) -> None:
        """Price those with the longest runs."""
        rows = self.prefills.by_segment
        for segment in self.estimate.holders(self.cut):
            for row in rows.get(segment, ()):
                self.price(row)

    def soonest(self) -> None:
        """Price those that are ready so soon that they may be the best or the second."""
        now_us = self.now_us
        least_us = self.least_us - now_us
        for entry in self.prefills.ready.entries:
            ready_us = number_of(entry)
            if least_us + (ready_us if ready_us > now_us else now_us) >= self.second_us:
                break
            self.price(row_of(entry))

    def ties(self) -> None:
        """Price those that may tie with the best: all, or the first by `order`."""
        prefills = self.prefills
        most_us = self.best_us - int((1 - prefills.most_error) * self.least_us) + 1
        last_us = self.now_us + most_us
        count = prefills.ready.until(last_us)
        if count <= _WINDOW:
            for entry in prefills.ready.entries[:count]:
                self.price(row_of(entry))
            return
        compared = 0
        for entry in prefills.order.entries:
            row = row_of(entry)
            view = self.views[row]
            if view.ready_us > last_us or not prefills.takes(row):
                continue
            self.price(row)
            if self.estimate.own_blocks(view) <= self.cut and self.is_tie(row):
                compared += 1
                if compared == LOOKED:
                    break

    def is_tie(self, row: int) -> bool:
        """Whether a row that was priced ties with the best."""
        view = self.views[row]
        more_us = self.ttfts_us[row] - self.best_us
        return more_us <= view.cost.error * self.estimate.work_us(view)

    def found(self, shown: int) -> Sequence[InstanceView]:
        """All that matter of those that were priced."""
        views = self.views
        ttfts_us = self.ttfts_us
        rows = sorted(ttfts_us)
        if len(rows) > 2 * shown:
            keep = dict.fromkeys(sorted(rows, key=ttfts_us.__getitem__)[:shown])
            ties = [row for row in rows if self.is_tie(row)]
            ties.sort(key=lambda row: views[row].order)
            held = self.estimate.own_blocks
            others = [row for row in ties if held(views[row]) <= self.cut]
            keep |= dict.fromkeys(row for row in ties if held(views[row]) > self.cut)
            keep |= dict.fromkeys(others[:LOOKED])
            rows = sorted(keep)
        return [views[row] for row in rows]

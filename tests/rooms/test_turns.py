"""The order of turns at something that serves one at a time."""

from __future__ import annotations

import asyncio

from moonserve.core.shares import Party, Waiting
from moonserve.live.turns import Turns


def order(*asked: tuple[Party, int], then: Waiting | None = None) -> list[int]:
    """The places in `asked` in the order of their turns."""
    waiting = then or Waiting()
    tickets = [waiting.add(party, size) for party, size in asked]
    turns = []
    while (ticket := waiting.next()) is not None:
        turns.append(tickets.index(ticket))
    return turns


def test_parties_take_turns_by_what_they_received() -> None:
    """The one that received least goes first; within a party, first come first served."""
    flood, calm = Party("flood", "a"), Party("calm", "b")
    assert order((flood, 8), (flood, 8), (flood, 8), (calm, 1), (calm, 1)) == [0, 3, 4, 1, 2]


def test_invented_tenants_and_many_addresses_gain_nothing() -> None:
    """What an address received counts for all tenants it names, and the reverse."""
    calm = (Party("calm", "b"), 8)
    invented = [(Party(f"t{i}", "a"), 8) for i in range(3)]
    assert order(*invented, calm) == [0, 3, 1, 2]
    spread = [(Party("flood", f"a{i}"), 8) for i in range(3)]
    assert order(*spread, calm) == [0, 3, 1, 2]


def test_tenants_behind_one_proxy_take_turns() -> None:
    """With one address for all, the tenants decide."""
    flood, calm = Party("flood", "proxy"), Party("calm", "proxy")
    assert order((flood, 8), (flood, 8), (calm, 8)) == [0, 2, 1]


def test_once_nobody_waits_all_is_forgotten() -> None:
    """A pause makes all equal, and names are not kept."""
    waiting = Waiting()
    flood, calm = Party("flood", "a"), Party("calm", "b")
    assert order((flood, 8), then=waiting) == [0]
    assert not waiting._given
    assert order((flood, 8), (calm, 8), then=waiting) == [0, 1]


def test_names_are_bounded() -> None:
    """A client that invents tenants while others wait makes nothing grow."""
    waiting = Waiting()
    waiting.add(Party("waits", "z"), 1)
    for i in range(5_000):
        waiting.add(Party(f"t{i}", f"a{i}"), 1)
        waiting.next()
    assert len(waiting._given) < 1_100


def test_a_cancelled_turn_goes_to_the_next() -> None:
    """Whoever is cancelled in the moment of its turn passes it on, and leaves nothing behind."""

    async def main() -> None:
        turns = Turns()
        party = Party("t", "a")
        await turns.begin(party, 1)
        first = asyncio.create_task(turns.begin(party, 1))
        second = asyncio.create_task(turns.begin(party, 1))
        third = asyncio.create_task(turns.begin(party, 1))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        turns.end()
        first.cancel()
        await third
        turns.end()
        assert (turns._taken, turns._futures, turns._waiting._waiting) == (False, {}, {})

    asyncio.run(main())

"""The store under seeded faults: first faults, then none; then every promise must hold.

A failure names its seed and the command to run it again. The quick suite runs 200 seeds,
`make test-slow` ten thousand.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from moonserve.core.store.words import ALIGN, aligned
from tests.support.pool_client import KEYS, Client, Oracle, intact
from tests.support.pool_nodes import MASTER, TERMS, Node, Segment
from tests.support.pool_world import World

CHAOS_US = 1_600_000
PEACE_US = 2_400_000


class Run:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self.rng = world.rng
        self.oracle = Oracle()
        self.clients = [Client(world, node, self.oracle) for node in world.nodes]
        self.excused: set[int] = set()
        self.seen: Counter[str] = Counter()

    def go(self) -> None:
        """Run with faults, then without, then check the promises."""
        world, rng = self.world, self.rng
        for client in self.clients:
            world.at(rng.randint(0, 50_000), client.live)
        for _ in range(rng.randint(0, 9)):
            world.at(rng.randint(50_000, CHAOS_US), rng.choice(FAULTS).__get__(self))
        world.run(CHAOS_US)
        for client in self.clients:
            client.busy = False
        self.heal()
        world.run(CHAOS_US + PEACE_US)
        self.check()

    # Faults

    def crash_node(self) -> None:
        """A process dies with its memory, and comes back later."""
        node = self.rng.choice(self.world.nodes)
        if node.alive:
            node.crash()
            self.world.at(self.rng.randint(5_000, 900_000), lambda: self._up(node))

    def _up(self, node: Node) -> None:
        if not node.alive:
            node.start()

    def crash_master(self) -> None:
        """The master dies, and another starts later."""
        world = self.world
        if world.master is not None:
            self._excuse()
            world.stop_master()
            world.at(self.rng.randint(1_000, 500_000), self._master_up)

    def _master_up(self) -> None:
        if self.world.master is None:
            self.world.restart_master()

    def _excuse(self) -> None:
        """Note objects that may be lost: the only process that knew them, and the master, died."""
        for version in self.oracle.acked:
            if not self._is_known(version):
                self.excused.add(version)

    def _is_known(self, version: int) -> bool:
        for node in self.world.nodes:
            if not node.alive:
                continue
            # This call renews the claims' times, which loses nothing.
            claims, _ = node.recent.claims(self.world.now, TERMS.put_ttl_us)
            if any(it.held.version == version and not it.writing for it in claims):
                return True
            for segment in node.segments:
                if any(it.version == version for it in segment.catalogue.held.values()):
                    return True
        return False

    def _link(self) -> tuple[str, str]:
        one, other = sorted(self.rng.sample([MASTER, *(it.name for it in self.world.nodes)], 2))
        return one, other

    def cut_link(self) -> None:
        """Two processes cannot reach each other for a while."""
        link = self._link()
        self.world.cut.add(link)
        self.world.at(self.rng.randint(10_000, 900_000), lambda: self.world.cut.discard(link))

    def slow_link(self) -> None:
        """Messages between two processes take long."""
        link = self._link()
        self.world.slow.add(link)
        self.world.at(self.rng.randint(10_000, 900_000), lambda: self.world.slow.discard(link))

    def bad_network(self) -> None:
        """Messages are lost and repeated."""
        self.world.loss, self.world.repeats = self.rng.random() * 0.3, self.rng.random() * 0.3

    def jump_clock(self) -> None:
        """The master's clock jumps, mostly forward."""
        self.world.skew += self.rng.randint(-300_000, 900_000)

    def drain(self) -> None:
        """A segment is to be emptied."""
        segment = self.rng.choice(self.rng.choice(self.world.nodes).segments)
        self.world.call(segment.node, "drain", (segment.name,), lambda answer: None)

    def heal(self) -> None:
        """All faults end."""
        world = self.world
        world.cut.clear()
        world.slow.clear()
        world.loss = world.repeats = 0.0
        self._master_up()
        for node in world.nodes:
            self._up(node)

    # The promises

    def check(self) -> None:
        """All promises."""
        self.nothing_leaks()
        self.events_say_what_is()
        self.owners_know_what_is()
        self.nothing_is_lost()
        self.replicas_are_back()

    def nothing_leaks(self) -> None:
        """The used bytes are those of the objects; no lease, put or copy is left."""
        master = self.world.master
        assert master is not None
        stats = master.stats()
        assert not stats.recovering
        assert (stats.leases, stats.pending_puts) == (0, 0)
        used = {it.id: 0 for it in stats.segments}
        for found in master.scan(b"", None, 1_000):
            for replica in found.replicas:
                used[replica.segment] += aligned(found.size)
        if not stats.pending_copies:
            assert used == {it.id: it.used_bytes for it in stats.segments}
            assert sum(used.values()) == sum(stats.tenants.values())
        assert len(stats.segments) == sum(len(it.segments) for it in self.world.nodes)

    def events_say_what_is(self) -> None:
        """A replay of the events gives the replicas that the master has."""
        master = self.world.master
        assert master is not None
        there = {
            (replica.segment, found.key)
            for found in master.scan(b"", None, 1_000)
            for replica in found.replicas
            if found.key in KEYS
        }
        assert set(self.world.replayed) == there

    def owners_know_what_is(self) -> None:
        """After the last beats, the owners' contents equal what the master has."""
        master = self.world.master
        assert master is not None
        on: dict[str, dict[bytes, tuple[int, int]]] = {}
        for found in master.scan(b"", None, 1_000):
            for replica in found.replicas:
                on.setdefault(replica.segment, {})[found.key] = (found.checksum, replica.offset)
        for node in self.world.nodes:
            for segment in node.segments:
                held = {it.key: (it.checksum, it.offset) for it in segment.catalogue.held.values()}
                assert held == on.get(segment.name, {})

    def nothing_is_lost(self) -> None:
        """An object that is complete on some segment is found, unless it was removed or evicted."""
        world, master = self.world, self.world.master
        assert master is not None
        if world.evicted + master.stats().evicted or not world.roomy:
            return
        there = {found.key for found in master.scan(b"", None, 1_000)}
        for version in self.oracle.acked:
            key, content, size, _ = self.oracle.content[version]
            if key in there or key in self.oracle.removed or version in self.excused:
                continue
            for node in world.nodes:
                for segment in node.segments:
                    if segment.catalogue._gone.get(key) == version:
                        continue  # it was moved away; its old bytes belong to no object
                    if self._gave_up(segment, content):
                        continue  # a put without an acknowledgement wrote these bytes
                    for offset in self._places(segment, content):
                        assert not intact(segment, offset, content, size), (
                            f"{key!r} is complete on {segment.name} but not found"
                        )

    def _gave_up(self, segment: Segment, content: int) -> bool:
        """Whether a put of this content, to here, was never acknowledged."""
        oracle = self.oracle
        on = [it for it, name in oracle.on.items() if name == segment.name]
        return any(oracle.content[it][1] == content and it not in oracle.acked for it in on)

    def _places(self, segment: Segment, content: int) -> list[int]:
        """Return where a content begins, except in extents that the master freed itself."""
        starts = [at * ALIGN for at, tag in segment.memory.items() if tag == content * 64]
        return [at for at in starts if (segment.name, at) not in self.world.given]

    def replicas_are_back(self) -> None:
        """If there is room for all, objects have the replicas they want, on no draining segment."""
        world, master = self.world, self.world.master
        assert master is not None
        stats = master.stats()
        self.seen.update(demoted=stats.demoted, promoted=stats.promoted)
        if world.evicted + stats.evicted or not world.roomy:
            return
        assert stats.pending_copies == 0
        usable = {it.id: it.node for it in stats.segments if not it.draining}
        for found in master.scan(b"", None, 1_000):
            *_, wanted = self.oracle.content[found.version]
            if master._catalog.objects[found.key].options.tenant:
                wanted = 1  # its quota may not allow more
            there = [it.segment for it in found.replicas]
            nodes = {usable[it] for it in there if it in usable}
            self.seen["whole"] += 1
            assert len(nodes) >= min(wanted, len(set(usable.values())))
            assert not usable or all(it in usable for it in there)


FAULTS = [
    Run.crash_node,
    Run.crash_node,
    Run.crash_master,
    Run.crash_master,
    Run.cut_link,
    Run.slow_link,
    Run.bad_network,
    Run.jump_clock,
    Run.drain,
]


def run_seed(seed: int) -> Run:
    """Run one seed; a failure names it."""
    run = Run(seed)
    try:
        run.go()
    except Exception as error:
        command = f"MOONSERVE_SEED={seed} pytest tests/dst/test_store_dst.py -k one_seed"
        raise AssertionError(f"seed {seed} failed; again: {command}") from error
    return run


@pytest.mark.python_core
def test_one_seed() -> None:
    """The seed in MOONSERVE_SEED keeps all promises; the default is seed 0."""
    run_seed(int(os.environ.get("MOONSERVE_SEED", "0")))


@pytest.mark.python_core
def test_promises_hold_under_faults() -> None:
    """200 seeds keep all promises; they read, demote, promote and repair often enough."""
    runs = [run_seed(seed) for seed in range(200)]
    assert sum(run.oracle.reads for run in runs) > 4_000
    seen = sum((run.seen for run in runs), Counter[str]())
    assert min(seen["demoted"], seen["promoted"], seen["whole"]) > 20


@pytest.mark.slow
def test_promises_hold_under_many_faults() -> None:
    """Ten thousand seeds keep all promises."""
    for seed in range(10_000):
        run_seed(seed)

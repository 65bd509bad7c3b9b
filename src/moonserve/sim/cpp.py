"""A prompt that a group of simulated instances prefills: what moves from each to the next.

In both forms of core.schedule.pipeline, a stage begins when the first piece of the previous stage
has arrived. Its last piece cannot be done before the previous stage's last piece is. Nothing in
between decides anything, so three transfers represent all pieces: the first, the middle, the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from moonserve.core.schedule.actions import Prefill, Stage
from moonserve.core.schedule.pipeline import HIDDEN, Form, shared_us
from moonserve.core.units import Bytes, Micros, Tokens
from moonserve.sim.call import Call, StagePart
from moonserve.sim.node import Node

Load = Callable[[Callable[[Tokens], None]], None]


class World(Protocol):
    """What sim.carrier provides: time, and links."""

    way_us: Micros

    def after(self, us: Micros, call: Callable[[], None]) -> None:
        """Call after `us`."""

    def move(self, source: str, target: Node, size: Bytes, done: Callable[[], None]) -> None:
        """Send `size` bytes from one instance to another."""


class Relay:
    """One prefill call of a group; `calls` go to `nodes`, in order."""

    def __init__(
        self,
        world: World,
        action: Prefill,
        nodes: Sequence[Node],
        form: Form,
        block_size: Tokens,
        load: Load,
        send: Callable[[Node, Call], None],
    ) -> None:
        self.nodes = nodes
        self.stages: Sequence[Stage] = action.decision.stages
        self._world = world
        self._form = form
        self._block_size = block_size
        self._send_call = send
        self._loads: dict[int, Callable[[], None]] = {}
        """For each stage that waits for its first piece: the function that begins it."""
        self._here = [False for _ in nodes]
        """For each stage: True once its first piece has arrived."""
        self._due = [0 for _ in nodes]
        """For each stage: transfers to it that have not ended."""
        self._sent = 0
        """How many calls were sent."""
        self.over = False
        """True if the group's call was broken off."""
        self.calls = [
            self._call(action, at, partial(self._load, at) if at else load)
            for at in range(len(nodes))
        ]

    def begin(self) -> None:
        """Send the first call; each next call goes out when the one before has its place.

        So groups that share instances never wait for each other's places in a circle.
        """
        self._sent += 1
        self._send_call(self.nodes[self._sent - 1], self.calls[self._sent - 1])

    def needs(self, node: Node) -> bool:
        """Whether a call to this node has not been sent yet."""
        return not self.over and node in self.nodes[self._sent :]

    def _admitted(self, load: Load, done: Callable[[Tokens], None]) -> None:
        load(done)
        if self._sent < len(self.nodes) and not self.over:
            self.begin()

    def _call(self, action: Prefill, at: int, load: Load) -> Call:
        stage = self.stages[at]
        cost = self.nodes[at].cost
        work_us = None
        if self._form == "layers":
            count = len(self.nodes)
            work_us = shared_us(cost, stage.start, stage.end, stage.pieces, count)
        part = StagePart(stage.pieces, work_us, whole=not at)
        admitted = partial(self._admitted, load)
        return Call(action.request, action.number, stage.end, stage.end, 1, admitted, part=part)

    def _load(self, at: int, done: Callable[[Tokens], None]) -> None:
        """Stage `at` has a place; in the layers form, it loads its share of what is reused."""
        stage, target = self.stages[at], self.nodes[at]
        ready = partial(self._ready, at, partial(done, stage.start))
        if self._form == "layers" and stage.start:
            size = stage.start * target.info.block_bytes // self._block_size // len(self.nodes)
            ready = partial(self._world.move, self.nodes[0].name, target, size, ready)
        self._world.after(self._world.way_us, ready)

    def _ready(self, at: int, begin: Callable[[], None]) -> None:
        """Begin the stage when its first piece has arrived."""
        if self._here[at]:
            begin()
        else:
            self._loads[at] = begin

    def began(self, node: Node, call: Call) -> None:
        """A stage's pass begins: its first piece will be done, and goes to the next stage."""
        at = self.calls.index(call)
        if at + 1 < len(self.nodes):
            first_us = node.pass_us // self.stages[at].pieces
            self._due[at + 1] = min(3, self.stages[at].pieces)
            self._world.after(first_us, partial(self._send_first, at))

    def ended(self, call: Call, done: Callable[[], None]) -> None:
        """A stage's pass has ended; `done` is called when the next stage has its last piece."""
        at = self.calls.index(call)
        size = len(self.nodes)
        whole = at + 1 == size or self.stages[at].pieces == 1

        def taken() -> None:
            if not whole:
                self._arrived(at + 1)
            self.nodes[at].let_go(call)
            done()

        if whole:
            taken()
        else:
            self._send(at, 1, taken)
        # the last stage keeps all KV, so the others send it their layers
        if at + 1 == size and self._form == "layers":
            target = self.nodes[at]
            share = call.known * target.info.block_bytes // self._block_size // size
            for node in self.nodes[:at]:
                self._world.move(node.name, target, share, lambda: None)

    def _send_first(self, at: int) -> None:
        if not self.nodes[at].dead:
            self._send(at, 1, partial(self._begins, at + 1))

    def _begins(self, at: int) -> None:
        """The stage's first piece has arrived."""
        pieces = self.stages[at].pieces
        if pieces > 2:
            self._send(at - 1, pieces - 2, partial(self._arrived, at))
        self._here[at] = True
        if at in self._loads:
            self._loads.pop(at)()
        self._arrived(at)

    def _arrived(self, at: int) -> None:
        self._due[at] -= 1
        if not self._due[at]:
            self.nodes[at].came(self.calls[at])

    def _send(self, at: int, pieces: int, done: Callable[[], None]) -> None:
        """Send `pieces` pieces of stage `at` to the next stage."""
        source = self.nodes[at]
        target = self.nodes[at + 1]
        stage = self.stages[at + 1]
        tokens = float(stage.start)
        if self._form == "layers":
            tokens = HIDDEN * (stage.end - stage.start)
        whole = tokens * target.info.block_bytes / self._block_size
        self._world.move(source.name, target, round(whole * pieces / stage.pieces), done)

"""The faults of a campaign: each is drawn with a seed, is applied for some seconds, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from tests.chaos.cluster import WORKERS, Cluster

_MOST_KILLS = 3
_WINDOW_S = 75.0
"""The supervisor waits longer before each start of a process that dies often. So a campaign kills
one process three times in this time at most, or it would be away longer than a stream waits."""
CLOCK_STEPS_S = (-3_600, 3_600, -1, 86_400, 0)


class Faults:
    """Draws faults and applies them to one cluster."""

    def __init__(self, cluster: Cluster, seed: int, gateways: bool, longest_s: float) -> None:
        """gateways: whether the processes that serve clients are killed too; longest_s: of one
        fault."""
        self.made: Counter[str] = Counter()
        self.fronts_lost = 0
        """How often a process that serves clients was lost; its streams end with it."""
        self._cluster = cluster
        self._draw = random.Random(seed)
        self._longest_s = longest_s
        self._kills: dict[str, list[float]] = {}
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill a worker": (6, lambda: self._kill(1)),
            "kill two workers": (2, lambda: self._kill(2)),
            "kill a gateway": (4 if gateways else 0, self._kill_gateway),
            "stop a process": (4, self._stop),
            "slow a process": (2, self._slow),
            "cut a link": (3, self._cut),
            "delay a link": (2, self._delay),
            "stall a link": (2, self._stall),
            "half-open a link": (2, self._half_open),
            "fill a disk": (1, self._fill_disk),
            "few descriptors": (1, self._few_descriptors),
            "step the clock": (1, self._step_clock),
        }

    @property
    def kinds(self) -> list[str]:
        """The names of all faults that may be drawn."""
        return [kind for kind, (weight, _) in self._kinds.items() if weight]

    async def one(self, kind: str = "") -> str:
        """Apply one fault, of this kind or drawn, and end it; return its kind."""
        if not kind:
            weights = [weight for weight, _ in self._kinds.values()]
            kind = self._draw.choices(list(self._kinds), weights)[0]
        await self._kinds[kind][1]()
        self.made[kind] += 1
        return kind

    async def _kill(self, count: int) -> None:
        pids = self._cluster.processes()
        alive = [name for name in WORKERS if name in pids and self._may_die(name)]
        for name in self._draw.sample(alive, min(count, len(alive))):
            self._kills.setdefault(name, []).append(time.monotonic())
            _send(pids[name], signal.SIGKILL)

    def _may_die(self, name: str) -> bool:
        since_s = time.monotonic() - _WINDOW_S
        return sum(at > since_s for at in self._kills.get(name, ())) < _MOST_KILLS

    async def _kill_gateway(self) -> None:
        pids = self._cluster.processes()
        names = sorted(name for name in pids if name not in WORKERS and name != "supervisor")
        if names:
            self.fronts_lost += 1
            _send(pids[self._draw.choice(names)], signal.SIGKILL)
            await asyncio.sleep(1)
            self.fronts_lost += 1  # streams that began while it was being killed

    def _process(self) -> tuple[str, int]:
        """A process that may stand still: each worker, and everything of the gateway."""
        pids = self._cluster.processes()
        pids.pop("supervisor", None)
        name = self._draw.choice(sorted(pids))
        return name, pids[name]

    def _lasting_s(self) -> float:
        """How long a fault lasts: sometimes a moment, sometimes longer than an instance may be
        silent."""
        return min(self._longest_s, self._draw.choice((0.1, 1, 2, 4, 8)))

    async def _stop(self) -> None:
        _, pid = self._process()
        async with _stopped(pid):
            await asyncio.sleep(self._lasting_s())

    async def _slow(self) -> None:
        """A process that has a tenth of its time."""
        _, pid = self._process()
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            async with _stopped(pid):
                await asyncio.sleep(0.09)
            await asyncio.sleep(0.01)

    async def _on_link(self, fault: str, *args: float) -> None:
        links = self._draw.choice((self._cluster.to_gateway, self._cluster.to_worker))
        link = links[self._draw.choice(WORKERS)]
        try:
            getattr(link, fault)(*args)
            await asyncio.sleep(self._lasting_s())
        finally:
            link.heal()

    async def _cut(self) -> None:
        await self._on_link("cut")

    async def _delay(self) -> None:
        await self._on_link("delay", self._draw.choice((0.02, 0.2)))

    async def _stall(self) -> None:
        await self._on_link("stall")

    async def _half_open(self) -> None:
        await self._on_link("half_open")

    async def _fill_disk(self) -> None:
        """No worker can write to any file, as on a full file system."""
        pids = [pid for name, pid in self._cluster.processes().items() if name in WORKERS]
        with contextlib.ExitStack() as stack:
            for pid in pids:
                stack.enter_context(_limited(pid, resource.RLIMIT_FSIZE, 0))
            await asyncio.sleep(3)

    async def _few_descriptors(self) -> None:
        """A process cannot open more than it has open now."""
        _, pid = self._process()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            now = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
            with _limited(pid, resource.RLIMIT_NOFILE, now):
                await asyncio.sleep(3)

    async def _step_clock(self) -> None:
        self._cluster.step_clock(self._draw.choice(CLOCK_STEPS_S))


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    _send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pid, signal.SIGCONT)


@contextlib.contextmanager
def _limited(pid: int, what: int, most: int) -> Iterator[None]:
    """Lower a soft limit of another process for a while."""
    try:
        soft, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, hard))
    except ProcessLookupError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, (soft, hard))

"""GET /api/history and /api/prefixes: what charts over time, and the page's summary of the cache,
are made from.

Control has one `Observed`. Once a second it notes what the Conductor believes, what happened to the
cluster, and now and then how full the pool is. The Conductor tells it of each request that is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.prefix_tree import PrefixNode, PrefixTree
from moonserve.core.schedule.history import (
    ClusterHistory,
    LaneEvent,
    StoreLevels,
    columns,
    heat_of,
    pools_of,
)
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.verdict import verdict
from moonserve.core.units import Tokens
from moonserve.live.clock import since_1970_us
from moonserve.live.control.leadership import Leadership
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.exposition import Turn
from moonserve.live.health import Health
from moonserve.live.http.message import HttpRequest, Response, decode_query, json_response
from moonserve.live.http.server import Routes
from moonserve.live.store.pool import Pool
from moonserve.live.tasks import keep_doing

_STORE_EVERY = 5
"""Seconds between two looks at the pool, whose master may be in another process."""
_STORE_S = 2.0
_MOST_NODES = 400
_PAIRS_SHOWN = 24
"""Of so many instances of each role the pairs are sent: the page shows no more."""


class HistoryAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /api/history."""

    step: Literal[1, 15] = 1
    """Seconds of one sample."""
    since: float = 0
    """Only samples and events after this time, in milliseconds since 1970."""
    heat: bool = False
    """Whether to send how full each instance was."""


class Observed:
    """See the module. Made with the process's parts, started on the event loop."""

    def __init__(
        self,
        conductor: ConductorLoop,
        pool: Pool,
        health: Health,
        leadership: Callable[[], Leadership],
    ) -> None:
        """leadership: of this process, which may be made later."""
        self._conductor = conductor
        self._pool = pool
        self._health = health
        self._leadership = leadership
        self._history = ClusterHistory()
        self._store = StoreLevels()
        self._draining: frozenset[str] = frozenset()
        self._alarms: frozenset[str] = frozenset()
        self._term = 0
        self._began_ms = 0
        """When the Conductor's clock was 0."""
        self._watching: list[asyncio.Task[None]] = []
        conductor.watch_ended(self._ended)

    def routes(self) -> Routes:
        """Exact paths."""
        return {
            ("GET", "/api/history"): self._send,
            ("GET", "/api/prefixes"): self._send_prefixes,
        }

    def start(self) -> None:
        """Begin to note what happens."""
        self._began_ms = since_1970_us(self._conductor.now_us()) // 1_000
        self._watching = [
            keep_doing("the history of the last hours", self._watch),
            keep_doing("looking at the pool", self._watch_store),
        ]

    def stop(self) -> None:
        """Note nothing more."""
        for task in self._watching:
            task.cancel()

    def _ended(self, record: Record) -> None:
        decision = record.decision
        view = None if decision is None else self._conductor.views().get(decision.prefill)
        if view is None:
            self._history.ended(record, 0, 0)
        else:
            info = view.info
            self._history.ended(record, info.block_bytes, info.namespace.block_size)

    async def _watch(self) -> None:
        due_ms = self._now_ms() // 1_000 * 1_000
        while True:
            now_ms = self._now_ms()
            due_ms = max(due_ms, now_ms // 1_000 * 1_000) + 1_000  # this process may have slept
            await asyncio.sleep((due_ms - now_ms) / 1_000)
            self._note(self._now_ms())

    def _now_ms(self) -> int:
        """Milliseconds since 1970, by a clock that is never set back."""
        return self._began_ms + self._conductor.now_us() // 1_000

    def _note(self, at_ms: int) -> None:
        """A second is over."""
        now_us = self._conductor.now_us()
        views = self._conductor.views()
        pools = pools_of(
            views.values(), now_us, self._conductor.waiting, self._conductor.promised().requests
        )
        heat = {name: heat_of(view, now_us) for name, view in views.items()}
        for change in self._conductor.member_changes():
            self._history.happened(LaneEvent(at_ms, change.what, change.instance, change.why))
        self._note_alarms(at_ms)
        self._history.second(at_ms, pools, heat, self._store)

    def _note_alarms(self, at_ms: int) -> None:
        alarms = frozenset(self._health.alarms())
        for text in sorted(alarms - self._alarms):
            self._history.happened(LaneEvent(at_ms, "alarm", text))
        for text in sorted(self._alarms - alarms):
            self._history.happened(LaneEvent(at_ms, "alarm_over", text))
        self._alarms = alarms
        term = self._leadership().term
        if term != self._term:
            detail = f"term {term}" if term else "another Conductor leads"
            self._history.happened(LaneEvent(at_ms, "leader", "this Conductor", detail))
            self._term = term

    async def _watch_store(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_STORE_S):
                    self._note_store(await self._pool.lookup({}))
            except (MoonserveError, OSError):
                pass  # Health reports a master that is away
            await asyncio.sleep(_STORE_EVERY)

    def _note_store(self, ledgers: dict[str, Any]) -> None:
        segments = ledgers.get("segments", ())
        self._store = StoreLevels(
            used_bytes=sum(it["used_bytes"] for it in segments),
            capacity_bytes=sum(it["capacity_bytes"] for it in segments),
            evicted=ledgers.get("evicted", 0),
        )
        draining = frozenset(it["id"] for it in segments if it["draining"])
        at_ms = self._now_ms()
        instances = {view.info.segment for view in self._conductor.views().values()}
        for name in sorted(draining - self._draining - instances):  # those have their own event
            self._history.happened(LaneEvent(at_ms, "drain", name))
        self._draining = draining

    async def _send(self, request: HttpRequest) -> Response:
        asked = decode_query(request.query, HistoryAsked)
        ring = self._history.ring(asked.step)
        history, slo = self._history, self._conductor.tuning.slo
        minute = history.last_minute()
        pools = history.mean_pools()
        alarms = self._health.alarms()
        said = verdict(minute, history.seconds(), pools, slo, len(alarms))
        reply = {
            "now_ms": self._now_ms(),
            "step_s": ring.step_s,
            "verdict": said,
            "alarms": alarms,
            "standby": self._leadership().standing_by(),
            "ttft_slo_ms": None if slo.ttft_us is None else slo.ttft_us / 1_000,
            "tbt_slo_ms": None if slo.tbt_us is None else slo.tbt_us / 1_000,
            "pools": pools,
            "minute": {
                "seconds": history.seconds(),
                "in_time": minute.in_time,
                "late": minute.late,
                "failed": minute.failed,
                "cancelled": minute.cancelled,
                "engine_refused": minute.engine_refused,
                "refused": minute.refused,
                "output_tokens": minute.output_tokens,
                "ttft_p50_ms": minute.ttft.quantile_ms(0.5),
                "ttft_p99_ms": minute.ttft.quantile_ms(0.99),
                "tbt_p50_ms": minute.tbt.quantile_ms(0.5),
                "tbt_p99_ms": minute.tbt.quantile_ms(0.99),
            },
            "columns": columns([it for it in ring.samples if it.at_ms > asked.since]),
            "lane": [it for it in history.lane if it.at_ms > asked.since],
        }
        if asked.heat:
            reply["heat_s"] = ring.heat_s
            reply["heat"] = [
                {"at_ms": it.at_ms, "instances": it.instances, "percents": list(it.percents)}
                for it in ring.heat
                if it.at_ms > asked.since
            ]
            reply["pairs"] = self._pairs()
        return json_response(reply)

    def _pairs(self) -> dict[str, dict[str, tuple[float, float, int | None]]]:
        """How requests went from prefill to decode lately, between the busiest instances: by both
        names, how many, how many failed, and the bytes a second."""
        found: dict[str, dict[str, tuple[float, float, int | None]]] = {}
        for (prefill, decode), pair in self._history.busiest_pairs(_PAIRS_SHOWN):
            figures = (round(pair.requests, 2), round(pair.failed, 2), pair.bytes_per_s)
            found.setdefault(prefill, {})[decode] = figures
        return found

    async def _send_prefixes(self, request: HttpRequest) -> Response:
        """The tree of prefixes that were asked for lately. Gives way to requests as it is made."""
        turn = Turn()
        trees: dict[Tokens, PrefixTree] = {}
        for chain in list(self._history.chains):
            tree = trees.setdefault(chain.block_tokens, PrefixTree(chain.block_tokens))
            tree.add(chain.keys)
            await turn.over()
        largest = max(trees.values(), key=lambda tree: tree.requests, default=None)
        nodes: list[PrefixNode] = []
        if largest is not None:
            for node in largest.nodes(self._conductor.index, _MOST_NODES):
                nodes.append(node)
                await turn.over()
        return json_response(
            {
                "requests": 0 if largest is None else largest.requests,
                "index_blocks": self._conductor.index_blocks(),
                "nodes": [
                    {**msgspec.structs.asdict(node), "key": bytes(node.key).hex()} for node in nodes
                ],
            }
        )

"""Reads an engine's /metrics page: its load, its cache's configuration, and when it started.

EngineMonitor reads a page per engine every second, so only a few lines of it are parsed. The names
are those of vLLM 0.6 to 0.32 and of SGLang. A page without them is empty, and no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

_STARTED = "process_start_time_seconds"
_CACHE = "vllm:cache_config_info"
_FINISHED = "vllm:request_success_total"
_BY_REASON = "vllm:num_requests_waiting_by_reason"
_FIELDS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",
    "vllm:inter_token_latency_seconds_sum": "gaps_s",
    "vllm:inter_token_latency_seconds_count": "gaps",
    "vllm:time_per_output_token_seconds_sum": "gaps_s",
    "vllm:time_per_output_token_seconds_count": "gaps",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "usage",
}
_WANTED = (_STARTED, _CACHE, _BY_REASON, _FINISHED, *_FIELDS)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RankPage(msgspec.Struct):
    """Load of one data-parallel rank."""

    running: int = 0
    waiting: int = 0
    """Includes requests that wait for KV from elsewhere, not for a pass."""
    deferred: int = 0
    """Waiting requests that wait for KV from elsewhere."""
    usage: float = 0.0
    """Part of its KV cache that running requests use, from 0 to 1."""
    finished: int = 0
    """Requests that have ended so far, with any outcome."""
    gaps: int = 0
    """Gaps between two tokens of a request so far, of all requests."""
    gaps_s: float = 0.0
    """The sum of these gaps, in seconds."""


class Page(msgspec.Struct):
    """What a /metrics page reports."""

    started_s: float | None = None
    """When the server process started, by its own clock; None: unknown."""
    ranks: dict[str, RankPage] = {}
    """Load by the name of each rank; empty: the page has no load."""
    cache: dict[str, str] = {}
    """The cache's configuration, by vLLM's names; empty: unknown."""

    def rank(self, number: int) -> RankPage | None:
        """The load of rank `number`, in the order of the ranks' names; None: it has none."""
        names = sorted(self.ranks, key=lambda name: (len(name), name))
        return self.ranks[names[number]] if number < len(names) else None


def read_page(text: str) -> Page:
    """Read a page in Prometheus's text format. Other lines are skipped."""
    page = Page()
    for name, labels, value in _lines(text):
        if name == _STARTED:
            page.started_s = value
        elif name == _CACHE:
            page.cache = page.cache or labels
        elif name != _BY_REASON or labels.get("reason") == "deferred":
            rank = page.ranks.setdefault(
                labels.get("engine", labels.get("dp_rank", "0")), RankPage()
            )
            if name == _FINISHED:
                rank.finished += int(value)
                continue
            field = _FIELDS.get(name, "deferred")
            setattr(rank, field, value if field in ("usage", "gaps_s") else int(value))
    return page


def _lines(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(_WANTED):
            continue
        head, _, number = line.rpartition(" ")
        name, _, rest = head.partition("{")
        if name not in _WANTED:
            continue  # a longer name
        try:
            value = float(number)
        except ValueError:
            continue
        if value == value and abs(value) < 1e15:
            yield name, dict(_LABEL.findall(rest)), value

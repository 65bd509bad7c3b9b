"""What a worker measures: Prometheus metrics, and samples for the Conductor and /debug/stages.

Metrics have vLLM's names where vLLM has them, else moonserve_… Every worker has its own registry,
so that several can run in one process. All parts of a worker report here; nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moonserve.core.engine.batch import Pass
from moonserve.core.schedule.cost import pass_sample
from moonserve.core.schedule.facts import PassSample, TransferSample
from moonserve.core.units import MICROS_PER_SECOND, Bytes, LeaseId, Micros, Tokens
from moonserve.live.ports import Clock
from moonserve.live.worker.job import Ledger

_LABELS = ("engine", "model_name")
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
FINISHED_REASONS = ("stop", "length", "abort", "error")
_MAX_PASSES = 256
_MAX_TRANSFERS = 64
_MAX_STAGES = 2_000

KVStageName: TypeAlias = Literal[
    "put", "read", "ahead", "handed_over", "loaded", "chained", "computed"
]
"""ahead: read before the request came. handed_over: from prefill's last pass until all its KV was
in the store. loaded: from the request's admission until its KV was here. For a part of a prompt,
chained: from its allocation until all KV of earlier parts was in its blocks; computed: its pass,
with the wait for its turn."""


class KVStage(msgspec.Struct, frozen=True):
    """What happened to a request's KV here, and when; /debug/stages shows it."""

    what: KVStageName
    lease: LeaseId
    began_us: Micros
    """On this machine's monotonic clock."""
    ended_us: Micros
    blocks: int = 0


class Samples:
    """The latest measurements: passes and transfers for the next heartbeat, stages of KV."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._passes: deque[PassSample] = deque(maxlen=_MAX_PASSES)
        self._transfers: deque[TransferSample] = deque(maxlen=_MAX_TRANSFERS)
        self.stages: deque[KVStage] = deque(maxlen=_MAX_STAGES)
        """Oldest first."""

    def add_passes(self, samples: Iterable[PassSample]) -> None:
        """Passes that were measured elsewhere."""
        self._passes.extend(samples)

    def add_pass(self, work: Pass, elapsed_us: Micros) -> None:
        """The engine computed this pass for so long."""
        self._passes.append(pass_sample(work, elapsed_us))

    def add_transfer(self, size: Bytes, began_us: Micros) -> None:
        """So many bytes came from the store, from then until now."""
        self._transfers.append(TransferSample(size, self._clock.now_us() - began_us))

    def add_stage(
        self, what: KVStageName, lease: LeaseId, began_us: Micros, blocks: int = 0
    ) -> None:
        """A stage that began then ends now."""
        self.stages.append(KVStage(what, lease, began_us, self._clock.now_us(), blocks))

    def take(self) -> tuple[tuple[PassSample, ...], tuple[TransferSample, ...]]:
        """The passes and transfers since the last call."""
        taken = (tuple(self._passes), tuple(self._transfers))
        self._passes.clear()
        self._transfers.clear()
        return taken


class Metrics:
    """Counters and histograms to add to; gauges are read from the runner when scraped."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prefix cache queries, in tokens."
        )
        self._counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.")
        self._external_queries = self._counter(
            "vllm:external_prefix_cache_queries", "Tokens looked for in the shared KV store."
        )
        self._external_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Tokens loaded from the shared KV store."
        )
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Number of prefill tokens processed."
        )
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Number of prefill tokens processed, by where their KV came from.",
            (*_LABELS, "source"),
            registry=self.registry,
        )
        self._computed = by_source.labels(**self._labels, source="local_compute")
        by_source.labels(**self._labels, source="local_cache_hit")
        self._loaded = by_source.labels(**self._labels, source="external_kv_transfer")
        self._generation_tokens = self._counter(
            "vllm:generation_tokens", "Number of generation tokens processed."
        )
        self._preemptions = self._counter(
            "vllm:num_preemptions", "Cumulative number of preemptions from the engine."
        )
        self._kv_recomputed = self._counter(
            "moonserve_kv_recomputed_tokens",
            "Prompt tokens a decode worker computed because their KV was not in the store.",
        )
        self.kv_ahead = self._counter(
            "moonserve_kv_ahead_blocks", "Blocks that were here before their request came."
        )
        self.kv_chained = self._counter(
            "moonserve_kv_chained_blocks",
            "Blocks that came from the worker of the part before, layer by layer.",
        )
        self._chain_wait = self._counter(
            "moonserve_chain_wait_seconds",
            "What passes over parts of prompts waited for the KV of earlier parts.",
        )
        self.kv_errors = self._counter(
            "moonserve_kv_store_errors", "Store calls that failed or ran past their deadline."
        )
        success = Counter(
            "vllm:request_success",
            "Count of finished requests.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._finished = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISHED_REASONS
        }
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token in seconds.", _TTFT_S
        )
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Inter-token latency in seconds.", _ITL_S
        )
        self._load = self._histogram(
            "moonserve_kv_load_seconds",
            "From a request's admission until its KV in the store was loaded, in seconds.",
            _TTFT_S,
        )
        self._hand_over = self._histogram(
            "moonserve_kv_hand_over_seconds",
            "From a prefill's last pass until all its KV was in the shared store, in seconds.",
            _TTFT_S,
        )

    def cache(self, block_size: Tokens, blocks: int) -> None:
        """The size of the KV cache; gateways read it from external engines."""
        made = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig.",
            ("engine", "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        made.labels(engine="0", block_size=str(block_size), num_gpu_blocks=str(blocks)).set(1)

    def watch(self, ledger: Callable[[], Ledger], blocks: int) -> None:
        """Read the gauges from this ledger at every scrape; blocks: the size of the pool."""
        self._gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            lambda: ledger().running,
        )
        self._gauge(
            "vllm:num_requests_waiting",
            "Number of requests waiting to be processed.",
            lambda: ledger().waiting,
        )
        self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            lambda: ledger().blocks_used / blocks,
        )

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        made = Gauge(name, text, _LABELS, registry=self.registry)
        made.labels(**self._labels).set_function(read)

    def arrived(self, prompt: Tokens) -> None:
        """A job with a prompt of so many tokens came."""
        self._prefix_queries.inc(prompt)

    def entered(self, prompt: Tokens, loaded: Tokens, take_kv: bool) -> None:
        """A job begins to run; so many of its prompt's tokens were loaded from the store."""
        self._prompt_tokens.inc(loaded)
        self._loaded.inc(loaded)
        if take_kv:
            self._kv_recomputed.inc(prompt - loaded)

    def loaded(self, us: Micros, asked: Tokens, found: Tokens) -> None:
        """A job waited so long for its KV: the store had `found` of `asked` tokens."""
        self._load.observe(us / MICROS_PER_SECOND)
        self._external_queries.inc(asked)
        self._external_hits.inc(found)

    def prompt_computed(self, tokens: Tokens) -> None:
        """The engine computed so many prompt tokens."""
        self._prompt_tokens.inc(tokens)
        self._computed.inc(tokens)

    def preempted(self, times: int) -> None:
        """The batch preempted jobs so many times."""
        if times:
            self._preemptions.inc(times)

    def token(self, us: Micros, first: bool) -> None:
        """A token came so long after the one before; the first, after the job."""
        (self._ttft if first else self._itl).observe(us / MICROS_PER_SECOND)
        self._generation_tokens.inc()

    def chain_wait(self, us: Micros) -> None:
        """A pass over a part waited so long for earlier parts."""
        self._chain_wait.inc(us / MICROS_PER_SECOND)

    def handed_over(self, us: Micros) -> None:
        """All KV of a prefill was in the store `us` after its last pass."""
        self._hand_over.observe(us / MICROS_PER_SECOND)

    def finished(self, reason: str) -> None:
        """A request ended for one of FINISHED_REASONS."""
        self._finished[reason].inc()

    def render(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

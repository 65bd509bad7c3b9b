"""A worker's Prometheus metrics, under vLLM's names; ours beside them as moonserve:…

One registry per worker, so that several can live in one process. Rendered by GET /metrics.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens

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


class Metrics:
    """Counters and histograms to add to; gauges are read from the runner when scraped."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prefix cache queries, in tokens."
        )
        self._counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.")
        self.external_queries = self._counter(
            "vllm:external_prefix_cache_queries", "Tokens looked for in the shared KV store."
        )
        self.external_hits = self._counter(
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
        self.generation_tokens = self._counter(
            "vllm:generation_tokens", "Number of generation tokens processed."
        )
        self.preemptions = self._counter(
            "vllm:num_preemptions", "Cumulative number of preemptions from the engine."
        )
        self.kv_recomputed = self._counter(
            "moonserve:kv_recomputed_tokens",
            "Prompt tokens a decode worker computed because their KV was not in the store.",
        )
        self.kv_ahead = self._counter(
            "moonserve:kv_ahead_blocks", "Blocks that were here before their request came."
        )
        self._make_chain_counters()
        self.kv_errors = self._counter(
            "moonserve:kv_store_errors", "Store calls that failed or ran past their deadline."
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
            "moonserve:kv_load_seconds",
            "From a request's admission until its KV in the store was loaded, in seconds.",
            _TTFT_S,
        )
        self._hand_over = self._histogram(
            "moonserve:kv_hand_over_seconds",
            "From a prefill's last pass until all its KV was in the shared store, in seconds.",
            _TTFT_S,
        )

    def _make_chain_counters(self) -> None:
        self.kv_chained = self._counter(
            "moonserve:kv_chained_blocks",
            "Blocks that came from the worker of the part before, layer by layer.",
        )
        self._chain_wait = self._counter(
            "moonserve:chain_wait_seconds",
            "What passes over parts of prompts waited for the KV of earlier parts.",
        )

    def cache(self, block_size: Tokens, blocks: int) -> None:
        """The size of the KV cache, as gateways for engines ask it."""
        made = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig.",
            ("engine", "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        made.labels(engine="0", block_size=str(block_size), num_gpu_blocks=str(blocks)).set(1)

    def watch(
        self,
        running: Callable[[], float],
        waiting: Callable[[], float],
        usage: Callable[[], float],
    ) -> None:
        """Ask the runner at every scrape; usage: the fraction of its blocks that are held."""
        self._gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            running,
        )
        self._gauge(
            "vllm:num_requests_waiting",
            "Number of requests waiting to be processed.",
            waiting,
        )
        self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        made = Gauge(name, text, _LABELS, registry=self.registry)
        made.labels(**self._labels).set_function(read)

    def prompt_computed(self, tokens: Tokens) -> None:
        """The engine computed so many prompt tokens."""
        self._prompt_tokens.inc(tokens)
        self._computed.inc(tokens)

    def prompt_loaded(self, tokens: Tokens) -> None:
        """So many prompt tokens came from the store and need no computing."""
        self._prompt_tokens.inc(tokens)
        self._loaded.inc(tokens)

    def chain_wait(self, us: Micros) -> None:
        """A pass over a part waited so long for earlier ones."""
        self._chain_wait.inc(us / MICROS_PER_SECOND)

    def first_token(self, us: Micros) -> None:
        """A request's first token came `us` after the request."""
        self._ttft.observe(us / MICROS_PER_SECOND)

    def next_token(self, us: Micros) -> None:
        """A later token came `us` after the one before."""
        self._itl.observe(us / MICROS_PER_SECOND)

    def handed_over(self, us: Micros) -> None:
        """All KV of a prefill was in the store `us` after its last pass."""
        self._hand_over.observe(us / MICROS_PER_SECOND)

    def loaded(self, us: Micros) -> None:
        """A request waited so long for its KV."""
        self._load.observe(us / MICROS_PER_SECOND)

    def finished(self, reason: str) -> None:
        """A request ended: one of FINISHED_REASONS."""
        self._finished[reason].inc()

    def render(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

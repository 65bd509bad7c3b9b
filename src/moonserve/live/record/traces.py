"""Traces: exports what became of each request as spans, beside the process that decides.

It is a part of the process that has the Conductor, because that has the record of every request, of
all fronts. The event loop only puts records into a bounded queue; a thread makes spans of them
(core.schedule.spans) and sends them (`otlp`). Requests that find no room, or whose spans the
receiver does not take, are counted. No request waits for it. Where traces are off, nothing is
imported and nothing is called.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.core.errors import ConfigError
from moonserve.core.schedule.record import Record
from moonserve.core.schedule.spans import span_tree
from moonserve.core.units import Micros
from moonserve.live.clock import since_1970_us
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.control.views import Figures
from moonserve.live.health import Health
from moonserve.live.http.server import ProcessPart
from moonserve.live.openai.trace_context import SamplingRule

if TYPE_CHECKING:
    from moonserve.live.record.otlp import OtlpSender

log = logging.getLogger(__name__)

FIELD = "otlp_traces_endpoint"
_INSTALL = "install it with: pip install 'moonserve[otel]'"
_PATH = "/v1/traces"
_MOST_WAITING = 4_096
_BATCH = 64
"""Requests in one message; each has about ten spans."""
_PAUSE_S = 1.0
"""How long requests wait for others, so that they are sent together."""
_STOP_S = 5.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_SAMPLER = "OTEL_TRACES_SAMPLER"
_SAMPLER_ARG = "OTEL_TRACES_SAMPLER_ARG"
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_PARENT_BASED = "parentbased_"


class TraceSettings(msgspec.Struct, frozen=True):
    """That spans are exported, where to, and of which requests."""

    endpoint: str | None
    """URL of the receiver; None: OpenTelemetry reads it from the environment."""
    sampling: SamplingRule


def trace_settings(endpoint: str, environ: Mapping[str, str]) -> TraceSettings | None:
    """What the setting and OpenTelemetry's environment variables ask for; None: no traces.

    endpoint: of the setting; empty: the environment decides. Some platforms set its variables for
    every program, so without the package they give a warning only, and the setting an error.

    Raises ConfigError: a value is wrong, or the package is not installed.
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    named = [name for name in _ENDPOINTS if environ.get(name)]
    if is_off or not (endpoint or named):
        return None
    if not _is_installed():
        if endpoint:
            raise ConfigError(f"needs OpenTelemetry; {_INSTALL}, or leave this out", FIELD)
        log.warning("%s is set, but no spans are exported; %s", named[0], _INSTALL)
        return None
    for name in _PROTOCOLS:
        if environ.get(name, _PROTOCOL) != _PROTOCOL:
            raise ConfigError(f"must be {_PROTOCOL}, not {environ[name]!r}; spans go by HTTP", name)
    for name, url in [(FIELD, endpoint)] if endpoint else [(it, environ[it]) for it in named]:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError("write it like http://127.0.0.1:4318/v1/traces", name)
    if endpoint and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _PATH
    return TraceSettings(endpoint or None, _sampling(environ))


def _is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def _sampling(environ: Mapping[str, str]) -> SamplingRule:
    """OpenTelemetry's samplers by name. Raises ConfigError."""
    named = environ.get(_SAMPLER) or "parentbased_always_on"
    kind = named.removeprefix(_PARENT_BASED)
    if kind not in _SAMPLERS:
        known = [*_SAMPLERS, *(_PARENT_BASED + it for it in _SAMPLERS)]
        raise ConfigError(f"must be one of {', '.join(known)}, not {named!r}", _SAMPLER)
    ratio = float(kind != "always_off")
    if kind == "traceidratio":
        text = environ.get(_SAMPLER_ARG) or "1.0"
        try:
            ratio = float(text)
        except ValueError:
            ratio = -1.0
        if not 0 <= ratio <= 1:
            raise ConfigError(f"must be a number from 0 to 1, not {text!r}", _SAMPLER_ARG)
    return SamplingRule(ratio, named.startswith(_PARENT_BASED))


class _Untraced(NamedTuple):
    record: Record
    since_us: Micros
    """What to add to the record's times, to count from 1970."""


class Traces(ProcessPart):
    """See the module. `_take` runs on the event loop, `_work` in a thread."""

    def __init__(
        self, conductor: ConductorLoop, health: Health, settings: TraceSettings | None
    ) -> None:
        """settings: None: traces are off."""
        self._conductor = conductor
        self._settings = settings
        self._sender: OtlpSender | None = None
        self._waiting: deque[_Untraced] = deque()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._is_failing = False
        self._exported = 0
        self._full = 0
        self._failed = 0
        if settings is not None:
            conductor.watch_ended(self._take)
            health.report_alarms(self._alarms)

    @property
    def sampling(self) -> SamplingRule | None:
        """Which requests have spans; None: none has."""
        return None if self._settings is None else self._settings.sampling

    def collectors(self) -> list[Collector]:
        """What was exported."""
        return [Figures(self._metrics)]

    async def prepare(self) -> None:
        """Load OpenTelemetry, if traces are on. Raises ConfigError."""
        if self._settings is None:
            return
        try:
            from moonserve.live.record.otlp import OtlpSender  # only here: it is optional, and slow
        except ImportError as error:  # packages that bring files of others have damaged it
            raise ConfigError(
                f"OpenTelemetry cannot be loaded ({error}); repair it with: pip install"
                " --force-reinstall opentelemetry-proto 'moonserve[otel]'",
                FIELD,
            ) from error
        self._sender = OtlpSender(self._settings.endpoint)

    async def stop(self) -> None:
        """Send what is waiting, for some seconds at most."""
        thread, sender = self._thread, self._sender
        if sender is None:
            return
        if thread is not None:
            self._ending.set()
            await asyncio.to_thread(thread.join, _STOP_S)
        sender.close()

    def _take(self, record: Record) -> None:
        if record.trace is None:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._full += 1
            return
        self._waiting.append(_Untraced(record, since_1970_us(self._conductor.now_us())))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
            self._thread.start()

    # The thread.

    def _work(self) -> None:
        assert self._sender is not None, "prepare comes before the first request"
        is_last = False
        while not is_last:
            is_last = self._ending.wait(_PAUSE_S)
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                self._send(self._sender, batch)

    def _send(self, sender: OtlpSender, batch: list[_Untraced]) -> None:
        spans = [
            span
            for it in batch
            if it.record.trace is not None
            for span in sender.spans(span_tree(it.record), it.record.trace, it.since_us)
        ]
        self._is_failing = not sender.send(spans)
        if self._is_failing:
            self._failed += len(batch)
        else:
            self._exported += len(batch)

    # What others read.

    def _alarms(self) -> list[str]:
        why = "spans are not exported: the receiver does not take them; the log has its answer"
        return [why] if self._is_failing else []

    def _metrics(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "moonserve_traced_requests", "Requests whose spans were exported.", value=self._exported
        )
        dropped = CounterMetricFamily(
            "moonserve_trace_dropped_requests",
            "Sampled requests without spans, by cause: full (too many waited), receiver (it did"
            " not take them).",
            labels=("cause",),
        )
        dropped.add_metric(("full",), self._full)
        dropped.add_metric(("receiver",), self._failed)
        yield dropped

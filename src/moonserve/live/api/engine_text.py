"""The API's backend for external engines, which make the text themselves.

`EngineText` is a `front.Backend`. Bodies pass through, and the engine checks what a field means;
the message of its 4xx answer reaches the client. No state of a request is kept after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.core.errors import BadRequest
from moonserve.core.request import Request, Stopping
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import RequestId, Tokens, seconds_to_us
from moonserve.live.access.terms import ClientTerms
from moonserve.live.api.exchange import Exchange
from moonserve.live.api.limiter import Limiter, Limits
from moonserve.live.api.ready_wait import ReadyWait
from moonserve.live.drive.any_engine import AnyEngine
from moonserve.live.drive.calls import Caller, CallLimits, Guesses
from moonserve.live.drive.engines import Engines, Models
from moonserve.live.drive.external import EngineCalls, Piece
from moonserve.live.drive.lost import EngineAnswer, Passed
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.drive.prompt_info import PromptInfo, PromptReader
from moonserve.live.drive.request import RequestDriver
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, Write
from moonserve.live.openai.external import FREE, ExternalRequest, body_shape
from moonserve.live.openai.prompts import Prompts
from moonserve.live.openai.request import PATHS, BodyShape, Form
from moonserve.live.openai.trace_context import SamplingRule, begin_trace
from moonserve.live.ports import Conducting, ModelCard, Observer

_COMPLETION_TOKENS = Stopping().max_tokens


class Prepared(msgspec.Struct, frozen=True):
    """One client's request, read and checked, before the Conductor knows of it."""

    outgoing: ExternalRequest
    prompt: PromptInfo
    request: Request


class EngineText(Collector):
    """See the module."""

    lack = "no model has engines that take new work; GET /health names those that are drained"
    forms: Sequence[Form] = tuple(PATHS)

    def __init__(
        self,
        conductor: Conducting,
        engines: Engines,
        observer: Observer,
        http: HttpClient,
        limits: Limits | None = None,
        call_limits: CallLimits | None = None,
        sampling: Callable[[], SamplingRule | None] = lambda: None,
        resumes: bool = True,
    ) -> None:
        """call_limits: how long engines may take. sampling: which requests have spans; None: none
        has. resumes: whether streams go on at another engine if theirs is lost."""
        self._sampling = sampling
        self.limits = limits or Limits()
        self.metrics = RequestMetrics()
        self.metrics.registry.register(self)
        self._models = Models(conductor)
        self._ready = ReadyWait(self._models.card, self.limits.wait_ready_us)
        prompts = Prompts(self.limits.offload_bytes, self.limits.max_tokenising_bytes)
        self.reader = PromptReader(engines, http, prompts)
        self.caller = Caller(
            conductor,
            engines,
            observer,
            http,
            self.reader,
            Guesses(),
            self.metrics,
            call_limits or CallLimits(),
            resumes,
        )

    def stop_waiting(self) -> None:
        """See Backend."""
        self._ready.stop()

    def body_shape(self, form: Form) -> BodyShape:
        """See Backend."""
        return body_shape(form)

    def cards(self) -> Sequence[ModelCard]:
        """See Backend."""
        return self._models.cards()

    def card(self, name: str) -> ModelCard:
        """See Backend."""
        return self._models.card(name)

    def instances(self, model: str) -> Sequence[InstanceInfo]:
        """Those of this model, at least one. Raises as `card` does."""
        return self._models.of(model)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = CounterMetricFamily(
            "moonserve_prompts_read",
            "Prompts, by how their length and prefix were found: ids and tokens (exact), engine "
            "(its /tokenize), text (estimated), unread (no prefix known).",
            labels=("how",),
        )
        for how, count in sorted(self.reader.read.items()):
            family.add_metric((how,), count)
        yield family

    async def exchange(
        self,
        http: HttpRequest,
        body: bytes,
        form: Form,
        terms: ClientTerms,
        limiter: Limiter,
        leave: Callable[[], None],
    ) -> Exchange:
        """See Backend."""
        caller = self.caller
        if form in FREE:
            outgoing = ExternalRequest(
                form, body, begin_trace(http.headers, self._sampling()).headers
            )
            infos = await self._able(outgoing)
            http.id = limiter.named(http.id, False)
            engine = AnyEngine(outgoing, infos, caller)
            return AskExchange(RequestId(http.id), engine, PATHS[form], leave)
        read = await self.prepare(http.headers, http.id, http.arrived_s, body, form, terms, limiter)
        request, prompt = read.request, read.prompt
        http.id = request.id
        calls = EngineCalls(read.outgoing, prompt, request, caller, http.arrived_s)
        driver: RequestDriver[Piece] = RequestDriver(request, prompt.keys, caller.conductor, calls)
        return EngineExchange(request, driver, calls, PATHS[form], leave)

    async def _able(self, outgoing: ExternalRequest) -> Sequence[InstanceInfo]:
        """The instances of its model, once there are some. Raises as `exchange` does."""
        await self._ready.card(outgoing.model)
        infos = self._models.of(outgoing.model)
        _check_connectors(outgoing.form, infos)
        return infos

    async def prepare(
        self,
        headers: Mapping[str, str],
        given: str,
        arrived_s: float,
        body: bytes,
        form: Form,
        terms: ClientTerms,
        limiter: Limiter,
    ) -> Prepared:
        """Read one request whose prompt is read. given: its id, which `limiter` may change;
        arrived_s: when its headers came, by the loop's clock. Raises as `exchange` does."""
        trace = begin_trace(headers, self._sampling())
        outgoing = ExternalRequest(form, body, trace.headers)
        outgoing.use_salt(terms.salt(outgoing.salt))
        infos = await self._able(outgoing)
        prompt = await self.reader.read_prompt(outgoing, infos, terms.party)
        longest = infos[0].max_len
        default = _COMPLETION_TOKENS if form == "completion" else longest
        request = Request(
            id=limiter.named(given, self.caller.conductor.known(RequestId(given))),
            model=outgoing.model,
            length=prompt.length,
            stopping=Stopping(max_tokens=min(max(1, outgoing.max_tokens or default), longest)),
            slo=terms.slo,
            priority=terms.priority,
            arrived_us=seconds_to_us(arrived_s),
            whole=outgoing.whole,
            tenant=terms.tenant,
            address=terms.party.address,
            trace=trace.context,
        )
        return Prepared(outgoing, prompt, request)


def _check_connectors(form: Form, infos: Sequence[InstanceInfo]) -> None:
    """Raise BadRequest if the model's engines cannot be given a request of this form."""
    if form in ("chat", "completion") or all(info.connector != "sglang" for info in infos):
        return
    raise BadRequest(
        f"model: {infos[0].model} has SGLang engines of role prefill and decode, and these serve"
        f" {PATHS['chat']} and {PATHS['completion']} only; use one of these, or engines of role"
        " both",
        "model",
        "unsupported_parameter",
    )


class EngineExchange(Exchange):
    """An engine's reply on its way to the client."""

    def __init__(
        self,
        request: Request,
        driver: RequestDriver[Piece],
        calls: EngineCalls,
        path: str,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(request.id, on_close)
        self._path = path
        self._prompt = request.length
        self._driver = driver
        self._calls = calls

    @property
    def tokens(self) -> Tokens:
        """See Exchange."""
        return max(self._prompt, self._calls.reply.counted.prompt or 0) + self._calls.tokens

    async def begin(self) -> Response | StreamingResponse:
        """See Exchange."""
        try:
            piece = await self._driver.next()
        except Passed as passed:
            return _response(passed.answer)
        if isinstance(piece, EngineAnswer):
            return _response(piece)
        assert piece is not None, "a stream begins with a piece"
        self._first = piece
        return StreamingResponse(self, content_type=self._calls.content_type)

    async def _pour(self, write: Write) -> bool:
        # A stream has begun, so its pieces are bytes.
        return await self._driver.pour(cast(Callable[[Piece], bool], write))

    async def _close(self) -> None:
        await self._driver.aclose()


class AskExchange(Exchange):
    """The answer of any engine to a request that needs no KV."""

    tokens = 0

    def __init__(
        self, name: RequestId, calls: AnyEngine, path: str, on_close: Callable[[], None]
    ) -> None:
        super().__init__(name, on_close)
        self._path = path
        self._calls = calls

    async def begin(self) -> Response | StreamingResponse:
        """See Exchange."""
        return _response(await self._calls.answer(self._request))

    async def _pour(self, write: Write) -> bool:
        return True

    async def _close(self) -> None:
        return


def _response(answer: EngineAnswer) -> Response:
    return Response(answer.status, answer.body, answer.headers, answer.content_type)

"""The worker's HTTP server: vLLM's paths over one Runner, /internal/… and /debug.

It also has the client of other workers' /internal/chain. The worker process makes both. A client
that disconnects cancels its request. All paths but /health and /metrics
need the cluster's token.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec

from moonserve import __version__
from moonserve.core.errors import BadRequest, EngineFailed, MoonserveError
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, LeaseId, RequestId
from moonserve.live.access.guard import Guard
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient
from moonserve.live.http.message import (
    HttpRequest,
    Response,
    StreamingResponse,
    decode_json,
    error_reply,
    error_response,
    json_response,
)
from moonserve.live.http.server import App, Handler, Reply, Routes
from moonserve.live.openai import headers
from moonserve.live.openai.reply import event, reply_head
from moonserve.live.openai.request import PATHS
from moonserve.live.openai.text import TextStream
from moonserve.live.text.grammar import Grammar, Grammars
from moonserve.live.text.tokenizer import Tokenizer
from moonserve.live.text.tools import Detokenizer
from moonserve.live.worker.fence import Fence, TermIsOver
from moonserve.live.worker.job import Job
from moonserve.live.worker.parts import Fetch
from moonserve.live.worker.runner import Runner
from moonserve.live.worker.wire import (
    CompletionBody,
    CompletionDelta,
    PartBody,
    PrefetchBody,
    Shaper,
    delta_of,
    hand_over_params,
    make_job,
    parse_packed,
)
from moonserve.live.worker.workbench import Workbench

_FOR_GATEWAYS = {
    path: "a worker serves /v1/completions for its gateway only; send the request to the gateway"
    for form, path in PATHS.items()
    if form != "completion"
}


class WorkerApp:
    """Handlers over one runner."""

    def __init__(
        self,
        runner: Runner,
        bench: Workbench,
        info: InstanceInfo,
        tokenizer: Tokenizer | None = None,
        guard: Guard | None = None,
        fence: Fence | None = None,
    ) -> None:
        """info: its `url` may be set later, before the first hand-over; guard: None lets every
        client in. fence: None: no Conductor reports its term to this worker.
        """
        self._fence = fence or Fence()
        self._runner = runner
        self._metrics = bench.metrics
        self._shape = bench.shape
        self.info = info
        self._tokenizer = tokenizer
        self._grammars = None if tokenizer is None else Grammars(tokenizer)
        self._guard = guard
        self._count = itertools.count()
        self._started = int(time.time())

    def app(self, more: Routes | None = None) -> App:
        """The routes; more: those of other parts of the process."""
        return App(
            {
                ("POST", "/v1/completions"): self._fenced(self._completions),
                ("POST", "/internal/prefetch"): self._fenced(self._prefetch),
                ("POST", "/internal/chain"): self._chain,
                ("GET", "/v1/models"): self._models,
                ("GET", "/version"): self._version,
                ("GET", "/health"): self._health,
                ("GET", "/metrics"): self._page,
                ("GET", "/debug/ledger"): self._ledger,
                ("GET", "/debug/stages"): self._stages,
                **(more or {}),
            },
            absent=_FOR_GATEWAYS,
            gate=self._guard,
            name=f"worker {self.info.id}",
        )

    def _fenced(self, handler: Handler) -> Handler:
        """The handler, for calls of the present term only."""

        async def fenced(request: HttpRequest) -> Reply:
            try:
                self._fence.check(request.headers)
            except TermIsOver as error:
                term = {headers.TERM: str(self._fence.term)}
                return json_response(error_reply(error), error.status, term)
            return await handler(request)

        return fenced

    async def _completions(self, request: HttpRequest) -> Reply:
        body = decode_json(await request.body(), CompletionBody)
        job = make_job(
            body,
            request=RequestId(f"{request.id}-{next(self._count)}"),
            lease=f"{request.id}/{secrets.token_hex(8)}",  # clients and retries repeat ids
            model=self.info.model,
            shape=self._shape,
            encode=self._tokenizer.encode if self._tokenizer else None,
            party=headers.party(request.headers),
        )
        head = reply_head(
            request.id, "completion", bool(body.stream), int(time.time()), self.info.model
        )
        shaper = Shaper(body, job, head)
        request.cancel_on_disconnect()
        grammar = await self._grammar(job)
        if body.stream:
            events = self._events(job, grammar, shaper)
            # The first event is awaited here, so that a refusal is a status and not a stream.
            return StreamingResponse(_Primed(await anext(events), events))
        async with aclosing(self._deltas(job, grammar)) as stream:
            deltas = [delta async for delta in stream]
        params = hand_over_params(self.info, job, deltas[-1])
        return json_response(shaper.whole(deltas, params))

    async def _grammar(self, job: Job) -> Grammar | None:
        """What the text of a job must be, after what it is already; None: it is free."""
        shaping = job.sampling.shaping
        if shaping is None or not shaping.schema:
            return None
        if self._grammars is None:
            what = "this worker has no tokenizer"
            raise BadRequest(f"structured_outputs: {what}", "structured_outputs")
        return await asyncio.to_thread(self._grammars.grammar, shaping.schema, job.text_before)

    async def _events(
        self, job: Job, grammar: Grammar | None, shaper: Shaper
    ) -> AsyncGenerator[bytes, None]:
        began = False
        cached = 0
        try:
            async with aclosing(self._deltas(job, grammar)) as stream:
                async for delta in stream:
                    yield shaper.chunk(delta, hand_over_params(self.info, job, delta))
                    began = True
                    cached = delta.cached_tokens
        except MoonserveError as error:
            if not began:
                raise
            yield event(error_reply(error))
        yield shaper.last_events(cached)

    async def _deltas(
        self, job: Job, grammar: Grammar | None
    ) -> AsyncGenerator[CompletionDelta, None]:
        """The generation with its text; it ends early at a stop string."""
        text = None
        if self._tokenizer is not None:
            stops = job.stopping
            detokenizer = Detokenizer(self._tokenizer, at_start=False)
            text = TextStream(detokenizer, stops.stop, stops.min_tokens)
        reason = "abort"
        try:
            async with aclosing(self._runner.generate(job, grammar)) as pieces:
                async for piece in pieces:
                    delta = delta_of(piece, text)
                    reason = delta.finish_reason or reason
                    yield delta
                    if delta.finish_reason is not None:
                        return
        except MoonserveError:
            reason = "error"
            raise
        finally:
            self._metrics.finished(reason)

    async def _prefetch(self, request: HttpRequest) -> Response:
        """Answers once the decode call came; a gateway that disconnects before will not make it."""
        body = parse_packed(await request.body(), PrefetchBody)
        request.cancel_on_disconnect()
        await self._runner.prefetch(LeaseId(body.lease), tuple(map(BlockKey, body.keys)))
        return json_response({})

    async def _chain(self, request: HttpRequest) -> StreamingResponse:
        """Answers when the part has its blocks; its KV follows as it is computed."""
        body = parse_packed(await request.body(), PartBody)
        request.cancel_on_disconnect()
        if self._runner.parts is None:
            raise BadRequest("this worker has no store, and no part of a prompt")
        frames = await self._runner.parts.hand_on(LeaseId(body.lease))
        return StreamingResponse(frames, content_type="application/octet-stream")

    async def _models(self, request: HttpRequest) -> Response:
        card = {
            "id": self.info.model,
            "object": "model",
            "created": self._started,
            "owned_by": "moonserve",
            "max_model_len": self.info.max_len,
        }
        return json_response({"object": "list", "data": [card]})

    async def _version(self, request: HttpRequest) -> Response:
        return json_response({"version": f"moonserve {__version__}"})

    async def _health(self, request: HttpRequest) -> Response:
        failure = self._runner.failure
        if failure is not None:
            return error_response(failure)
        return json_response({"status": "ok", "id": self.info.id, "role": self.info.role})

    async def _page(self, request: HttpRequest) -> Response:
        return Response(
            body=self._metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _ledger(self, request: HttpRequest) -> Response:
        return json_response(self._runner.ledger())

    async def _stages(self, request: HttpRequest) -> Response:
        return json_response(self._runner.stages())


def part_client(http: HttpClient, token: str, wait_s: float) -> Fetch:
    """Returns what fetches the KV of the part before from its worker; `wait_s` bounds each wait.

    The caller ends the call by leaving the block.
    """
    headers = {"content-type": "application/msgpack"} | bearer(token)

    @asynccontextmanager
    async def fetch(url: str, lease: LeaseId) -> AsyncIterator[AsyncIterator[bytes]]:
        async with http.stream(
            "POST",
            url + "/internal/chain",
            headers=headers,
            body=msgspec.msgpack.encode(PartBody(lease)),
            timeout_s=wait_s,
            idle_timeout_s=wait_s,
        ) as reply:
            if reply.status != 200:
                text = (await reply.read())[:300].decode("utf-8", "replace")
                raise EngineFailed(f"{url} answered {reply.status}: {text}")
            yield reply

    return fetch


class _Primed:
    """A stream that has begun: its first event, then the rest. `aclose` ends the generation."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        """End the generation."""
        await self._rest.aclose()

"""Calls to external engines: the address, the headers, the time limits, and how a call fails.

`external` and the connectors make their calls here. Every call has a time limit. To cancel a call
cuts its connection, and so the engine stops working for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

import msgspec

from moonserve.core.errors import UNREADABLE, Overloaded
from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.inferred import Guess
from moonserve.core.request import Request
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, InstanceId, Tokens, whole_number
from moonserve.live.drive.engines import Engines
from moonserve.live.drive.lost import CallLost, EngineAnswer, Passed, logged, refusal
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.drive.prompt_info import PromptInfo, PromptReader
from moonserve.live.http.client import ClientStream, HttpClient
from moonserve.live.http.message import JSON, ErrorBody, shaped
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.request import PATHS, Form
from moonserve.live.ports import Conducting, Observer
from moonserve.page import pointer

log = logging.getLogger(__name__)

_RETRIED = (401, 403, 408, 425, 429)
"""Statuses 4xx after which another engine is called. 401 and 403 are about the gateway's key, not
about the client's request."""
_BUSY = (429, 503)
_BUSY_TEXT = "no engine takes more requests now; send this one again later"
_WHOLE_S = 600.0
_MOST_GUESSED = 4_096


class _Detokenized(msgspec.Struct):
    prompt: str


class CallLimits(msgspec.Struct, frozen=True):
    """How long engines may take, in seconds."""

    first_byte_s: float = 300.0
    """For a prefill, or for the first token of a call that does prefill and decode."""
    handover_s: float = 60.0
    """For decode's first token after prefill has ended, the KV transfer included."""
    token_s: float = 60.0
    """For each piece of a stream after the first."""
    slow_token_s: float = 1.0
    """For each token after the first, in a reply that is not streamed."""
    again_s: float = 0.25
    """Pause before the gateway calls the engine that has just failed once more."""

    def whole_s(self, first_s: float, max_tokens: Tokens | None) -> float:
        """For a reply that is not streamed: the gateway sees nothing of it before its end."""
        if max_tokens is None:
            return max(first_s, _WHOLE_S)
        return first_s + min(_WHOLE_S, self.slow_token_s * max_tokens)


class Guesses:
    """What each instance probably holds if its engine sends no KV events: see core.kv.inferred."""

    def __init__(self) -> None:
        self._by_instance: dict[InstanceId, Guess] = {}

    def served(
        self,
        to: InstanceInfo,
        keys: Sequence[BlockKey],
        predicted: Tokens,
        cached: Tokens | None,
    ) -> list[BlocksStored | BlocksRemoved]:
        """Note that an instance now has this chain; the facts for the prefix index.

        predicted: tokens that the Conductor expected it to reuse; cached: tokens that it did reuse,
        None if the engine does not report them.
        """
        if to.segment is None:
            return []
        guess = self._by_instance.get(to.id)
        if guess is None or guess.epoch != to.epoch:
            guess = self._by_instance[to.id] = Guess(to.segment, to.epoch, to.kv_blocks)
            while len(self._by_instance) > _MOST_GUESSED:
                del self._by_instance[next(iter(self._by_instance))]
        told = guess.served(keys)
        if cached is not None:
            told += guess.said(predicted, cached)
        return told


class Caller(msgspec.Struct, frozen=True):
    """What the calls of all requests share."""

    conductor: Conducting
    engines: Engines
    observer: Observer
    http: HttpClient
    reader: PromptReader
    guesses: Guesses
    metrics: RequestMetrics
    limits: CallLimits
    resumes: bool = True
    """Whether streams go on at another engine if theirs is lost."""
    new_id: Callable[[], str] = lambda: uuid4().hex
    """Makes the id of a KV transfer; an id is never used twice."""

    def stream(
        self,
        to: InstanceInfo,
        asked: ExternalRequest,
        request: Request,
        body: bytes,
        first_s: float,
    ) -> ClientStream:
        """A call whose reply is read as it comes. The gateway sends nothing before the stream is
        entered."""
        url, headers = self._target(to, asked, request)
        return self.http.stream(
            "POST",
            url,
            headers=headers,
            body=body,
            timeout_s=first_s,
            idle_timeout_s=first_s,
            again=body is asked.raw,  # an engine hands KV over once
        )

    async def whole(
        self,
        to: InstanceInfo,
        asked: ExternalRequest,
        request: Request,
        body: bytes,
        limit_s: float,
    ) -> EngineAnswer:
        """Make a call and return its whole reply. Raises CallLost, Passed, UpstreamError,
        DeadlineExceeded."""
        url, headers = self._target(to, asked, request)
        again = body is asked.raw
        reply = await self.http.request(
            "POST", url, headers=headers, body=body, timeout_s=limit_s, again=again
        )
        return self._judged(to, request, asked.form, reply.status, reply.headers, reply.body)

    async def rest(
        self, to: InstanceInfo, asked: ExternalRequest, request: Request, stream: ClientStream
    ) -> EngineAnswer:
        """Read the rest of a reply that has begun, and leave the stream. Raises as `whole` does."""
        try:
            body = await stream.read()
        finally:
            stream.leave()
        return self._judged(to, request, asked.form, stream.status, stream.headers, body)

    def reused(
        self, prompt: PromptInfo, to: InstanceInfo, predicted: Tokens, cached: Tokens | None
    ) -> None:
        """Note that the instance now has the prompt.

        Where its engine sends no KV events, the index gets them from here. Blocks that it did not
        find in a shared store are reported as missing.
        """
        keys, size = prompt.keys, to.namespace.block_size
        if not keys:
            return
        if self.engines.follows_events_of(to.id):
            if to.fetches and cached is not None and cached < predicted:
                self.observer.missed(keys[cached // size : predicted // size])
            return
        if told := self.guesses.served(to, keys, predicted, cached):
            self.conductor.tell(*told)

    async def text_of(self, to: InstanceInfo, model: str, ids: Sequence[int]) -> str:
        """The text of these tokens, as the engine makes it. Raises CallLost, UpstreamError,
        DeadlineExceeded."""
        member = self.engines.member(to.id)
        body = {"model": model, "tokens": ids}
        reply = await member.ask("/detokenize", body)
        try:
            if reply.status == 200:
                return msgspec.json.decode(reply.body, type=_Detokenized).prompt
        except UNREADABLE:
            pass
        raise CallLost(f"{to.id} answered {reply.status} to /detokenize")

    def _target(
        self, to: InstanceInfo, asked: ExternalRequest, request: Request
    ) -> tuple[str, dict[str, str]]:
        member = self.engines.member(to.id)
        headers = {"content-type": JSON, "x-request-id": request.id, **asked.trace}
        headers |= member.headers
        if to.dp_rank is not None:
            headers["x-data-parallel-rank"] = str(to.dp_rank)
        return member.url + PATHS[asked.form], headers

    def _judged(
        self,
        to: InstanceInfo,
        request: Request,
        form: Form,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
    ) -> EngineAnswer:
        """A successful answer. Raises CallLost or Passed if it is an error.

        The client gets an engine's text only if that is about its own request. The log has all
        texts.
        """
        if status == 200:
            return EngineAnswer(status, body, headers.get("content-type", JSON))
        if 400 <= status < 500 and status not in _RETRIED:
            shown = pointer(request.id, self.conductor.has_page)
            log.info("%s: %s answered %d: %s%s", request.id, to.id, status, logged(body), shown)
            raise Passed(EngineAnswer(status, refusal(status, body, form)), logged(body))
        busy = None
        if status in _BUSY:
            wait_s = whole_number(headers.get("retry-after", ""))
            error = ErrorBody(_BUSY_TEXT, Overloaded.kind, None, "engine_busy")
            said = msgspec.json.encode(shaped(PATHS[form], status, error))
            waits = {"retry-after": str(wait_s or 1)}
            busy = EngineAnswer(status, said, JSON, waits)
        raise CallLost(f"{to.id} answered {status}", busy=busy, detail=logged(body))

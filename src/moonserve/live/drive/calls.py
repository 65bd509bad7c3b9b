"""Calls to foreign engines: where to, with which headers, within which time, and how they fail.

For `external` and the connectors. Every call has a deadline; to cancel one cuts its connection,
by which the engine learns to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

import msgspec

from moonserve.core.kv.facts import BlocksRemoved, BlocksStored
from moonserve.core.kv.guess import Guess
from moonserve.core.request import Request
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.units import BlockKey, InstanceId, Tokens
from moonserve.live.drive.engines import Engines
from moonserve.live.drive.lost import Answer, CallLost, Passed
from moonserve.live.drive.metrics import RequestMetrics
from moonserve.live.drive.prompt_info import PromptInfo, PromptReader
from moonserve.live.external.observed import Observer
from moonserve.live.http.client import ClientStream, HttpClient
from moonserve.live.http.message import JSON
from moonserve.live.openai.external import ExternalRequest
from moonserve.live.openai.request import PATHS
from moonserve.live.ports import Conducting

_RETRIED = (401, 403, 408, 425, 429)
"""Of the 4xx, those that say nothing against the request; the first two are about our key."""
_BUSY = (429, 503)
_WHOLE_S = 600.0
_MOST_GUESSED = 4_096


class CallLimits(msgspec.Struct, frozen=True):
    """How long engines may take; seconds."""

    first_byte_s: float = 300.0
    """For a prefill, or the first token of one that does all of it."""
    handover_s: float = 60.0
    """For decode's first token once prefill has ended, the transfer included."""
    token_s: float = 60.0
    """For each piece of a stream after the first."""
    slow_token_s: float = 1.0
    """For each token of a reply that is not streamed, beyond the first."""
    again_s: float = 0.25
    """Pause before an engine that has just failed is called once more."""

    def whole_s(self, first_s: float, max_tokens: Tokens | None) -> float:
        """For a reply that is not streamed, of which nothing shows before its end."""
        if max_tokens is None:
            return max(first_s, _WHOLE_S)
        return first_s + min(_WHOLE_S, self.slow_token_s * max_tokens)


class Guesses:
    """What each instance is taken to hold, where none tells; see core.approx."""

    def __init__(self) -> None:
        self._by_instance: dict[InstanceId, Guess] = {}

    def served(
        self,
        to: InstanceInfo,
        keys: Sequence[BlockKey],
        predicted: Tokens,
        cached: Tokens | None,
    ) -> list[BlocksStored | BlocksRemoved]:
        """An instance has this chain now: what the index is to be told.

        cached: what it reused of it, where `predicted` tokens were expected; None: not said.
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
    """What all lives share."""

    conductor: Conducting
    engines: Engines
    observer: Observer
    http: HttpClient
    reader: PromptReader
    guesses: Guesses
    metrics: RequestMetrics
    limits: CallLimits
    new_id: Callable[[], str] = lambda: uuid4().hex
    """Of a transfer: never the same twice."""

    def stream(
        self,
        to: InstanceInfo,
        asked: ExternalRequest,
        request: Request,
        body: bytes,
        first_s: float,
    ) -> ClientStream:
        """A call whose reply is read as it comes; nothing is sent before it is entered."""
        url, headers = self._target(to, asked, request)
        return self.http.stream(
            "POST",
            url,
            headers=headers,
            body=body,
            timeout_s=first_s,
            idle_timeout_s=first_s,
            again=body is asked.raw,  # KV is handed over once
        )

    async def whole(
        self,
        to: InstanceInfo,
        asked: ExternalRequest,
        request: Request,
        body: bytes,
        limit_s: float,
    ) -> Answer:
        """A call and its whole reply. Raises CallLost, Passed, UpstreamError, DeadlineExceeded."""
        url, headers = self._target(to, asked, request)
        again = body is asked.raw
        reply = await self.http.request(
            "POST", url, headers=headers, body=body, timeout_s=limit_s, again=again
        )
        answer = _read(reply.status, reply.headers, reply.body)
        _judge(to, answer)
        return answer

    async def rest(self, to: InstanceInfo, stream: ClientStream) -> Answer:
        """The whole of a reply that has begun; leaves the stream. Raises as `whole`."""
        try:
            answer = _read(stream.status, stream.headers, await stream.read())
        finally:
            stream.leave()
        _judge(to, answer)
        return answer

    def reused(
        self, prompt: PromptInfo, to: InstanceInfo, predicted: Tokens, cached: Tokens | None
    ) -> None:
        """The instance has the prompt now; where none tells, the index hears of it from here. What
        it did not find of a shared store is not there any more."""
        keys, size = prompt.keys, to.namespace.block_size
        if not keys:
            return
        if self.engines.follows_events_of(to.id):
            if to.fetches and cached is not None and cached < predicted:
                self.observer.missed(keys[cached // size : predicted // size])
            return
        if told := self.guesses.served(to, keys, predicted, cached):
            self.conductor.tell(*told)

    def _target(
        self, to: InstanceInfo, asked: ExternalRequest, request: Request
    ) -> tuple[str, dict[str, str]]:
        member = self.engines.member(to.id)
        headers = {"content-type": JSON, "x-request-id": request.id, **member.headers}
        if to.dp_rank is not None:
            headers["x-data-parallel-rank"] = str(to.dp_rank)
        return member.url + PATHS[asked.form], headers


def _read(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    answer = Answer(status, body, headers.get("content-type", JSON))
    if status in _BUSY:
        answer.headers["retry-after"] = headers.get("retry-after", "1")
    return answer


def _judge(to: InstanceInfo, answer: Answer) -> None:
    """Raises CallLost or Passed where it is no success."""
    status = answer.status
    if status == 200:
        return
    if 400 <= status < 500 and status not in _RETRIED:
        raise Passed(answer)
    text = f"{to.id} answered {status}: {answer.body[:500].decode('utf-8', 'replace')}"
    raise CallLost(text, busy=answer if status in _BUSY else None)

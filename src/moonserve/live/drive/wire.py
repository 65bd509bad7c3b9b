"""The client side of vLLM's HTTP wire: /v1/completions with token ids.

`embedded` calls our own workers by it. Every call has a time limit. To cancel a call ends its
connection, and so the worker stops.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, PackageMissing
from moonserve.core.request import Request, TokenLogprobs
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.record import DecodeTimes, PrefillTimes
from moonserve.core.units import BlockKey, LeaseId, Tokens, whole_number
from moonserve.live.drive.lost import CallLost, logged
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, ClientStream, HttpClient, sse_events
from moonserve.live.http.message import ErrorReply
from moonserve.live.openai.headers import TERM, of_party
from moonserve.live.openai.logprobs import read_ids
from moonserve.live.openai.reply import ReadChoice, ReadReply, read_reply
from moonserve.live.text.grammar import SCHEMA_FAILED


class Prefilled(msgspec.Struct, frozen=True):
    """The result of a prefill: its token, and the parameters for decode."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    cached_tokens: Tokens
    kv_transfer_params: dict[str, Any]
    times: PrefillTimes | None = None
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of each token, if the request wants them; None: it was sampled elsewhere."""


class Decoded(msgspec.Struct, frozen=True):
    """Some tokens of a running decode. The last piece has a finish_reason."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    times: DecodeTimes | None = None
    """With the first token that this call has made, if the worker reports it."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """See Prefilled."""


_encoder = msgspec.json.Encoder()


def completion_body(
    request: Request,
    tokens: Sequence[int],
    max_tokens: Tokens,
    stream: bool,
    kv_transfer_params: dict[str, Any],
) -> bytes:
    """The body of one /v1/completions call. tokens: the prompt and all tokens generated before."""
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "top_k": request.sampling.top_k,
        "seed": request.sampling.seed,
        "ignore_eos": request.stopping.ignore_eos,
        "stream": stream,
        "return_token_ids": True,
        "knows_prompt": True,
        "kv_transfer_params": kv_transfer_params,
    }
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.stopping.stop:
        body["stop"] = request.stopping.stop
    if request.stopping.stop_token_ids:
        body["stop_token_ids"] = request.stopping.stop_token_ids
    shaping = request.sampling.shaping
    if shaping is not None:
        body["logit_bias"] = dict(shaping.bias)
        body["logprobs"] = shaping.logprobs
        if shaping.penalties is not None:
            body["presence_penalty"] = shaping.penalties.presence
            body["frequency_penalty"] = shaping.penalties.frequency
            body["repetition_penalty"] = shaping.penalties.repetition
        if shaping.schema:
            body["structured_outputs"] = {"json": msgspec.Raw(shaping.schema.encode())}
    if request.stopping.min_tokens or shaping is not None:
        body["min_tokens"] = request.stopping.min_tokens
        body["generated_tokens"] = max(0, len(tokens) - request.length)
    return _encoder.encode(body)


class OrderedBy(msgspec.Struct, frozen=True):
    """By whose order calls are made."""

    term: Callable[[], int] = lambda: 0
    """The term of the Conductor that orders them; 0: no other one can lead."""
    refused: Callable[[int], None] = lambda term: None
    """Called with the higher term that a worker knows of, if it has refused a call for that."""


class WireClient:
    """Calls workers over one pool of keep-alive connections."""

    def __init__(
        self,
        http: HttpClient,
        token: str,
        prefill_timeout_s: float,
        token_timeout_s: float,
        orders: OrderedBy = OrderedBy(),  # noqa: B008 - frozen
    ) -> None:
        """token: the cluster's shared secret, which workers check; may be empty. orders: of the
        Conductor."""
        self._orders = orders
        self._http = http
        self._token = token
        self._prefill_timeout_s = prefill_timeout_s
        self._token_timeout_s = token_timeout_s

    async def prefill(self, to: InstanceInfo, request: Request, body: bytes) -> Prefilled:
        """Run a prefill to its end. Raises CallLost, UpstreamError, DeadlineExceeded."""
        reply = await self._http.request(
            "POST",
            to.url + "/v1/completions",
            headers=self._headers(request),
            body=body,
            timeout_s=self._prefill_timeout_s,
        )
        self._check(to, reply, reply.body)
        parsed = _parse(to, reply.body)
        choice = parsed.choices[0]
        return Prefilled(
            tuple(choice.token_ids or ()),
            choice.finish_reason,
            min(parsed.cached_tokens() or 0, request.length),
            _kv_transfer_params(to, parsed),
            parsed.prefill_times,
            _logprobs(to, choice),
        )

    async def prefetch(
        self, to: InstanceInfo, request: Request, lease: LeaseId, keys: Sequence[BlockKey]
    ) -> None:
        """Have a worker pull the blocks that a decode call under `lease` will need.

        Returns when that call has come there, or if the worker does not prefetch. Cancel it if the
        call will not come. Raises as `prefill` does.
        """
        headers = self._headers(request) | {"content-type": "application/msgpack"}
        reply = await self._http.request(
            "POST",
            to.url + "/internal/prefetch",
            headers=headers,
            body=msgspec.msgpack.encode({"lease": lease, "keys": keys}),
            timeout_s=self._prefill_timeout_s,
        )
        self._check(to, reply, reply.body)

    async def decode(
        self, to: InstanceInfo, request: Request, body: bytes
    ) -> AsyncGenerator[Decoded, None]:
        """Stream a decode. Raises as `prefill` does. Closing the generator aborts the call."""
        async with self._http.stream(
            "POST",
            to.url + "/v1/completions",
            headers=self._headers(request),
            body=body,
            timeout_s=self._prefill_timeout_s,
            idle_timeout_s=self._token_timeout_s,
        ) as reply:
            if reply.status != 200:
                whole = b"".join([chunk async for chunk in reply])
                self._check(to, reply, whole)
            async for data in sse_events(reply):
                parsed = _parse(to, data)
                choice = parsed.choices[0]
                if choice.token_ids or choice.finish_reason:
                    ids = tuple(choice.token_ids or ())
                    logprobs = () if choice.logprobs is None else _logprobs(to, choice)
                    yield Decoded(ids, choice.finish_reason, parsed.decode_times, logprobs)
            while await reply.take() is not None:
                pass  # so that the connection can be used again

    async def died(self, instance: InstanceInfo) -> bool:
        """Whether nothing listens at the address of a worker any more."""
        return await self._http.refuses(instance.url)

    def _headers(self, request: Request) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-request-id": request.id}
        term = self._orders.term()
        if term:
            headers[TERM] = str(term)
        return headers | of_party(request.party) | bearer(self._token)

    def _check(self, to: InstanceInfo, reply: ClientResponse | ClientStream, body: bytes) -> None:
        """Raises CallLost unless it is a good reply."""
        status = reply.status
        if status == 200:
            return
        term = whole_number(reply.headers.get(TERM, "")) if status == _CONFLICT else None
        if term is not None:
            self._orders.refused(term)
        if status == PackageMissing.status:
            raise CallLost(_why(to, body), retry=False, package_missing=True)
        if status == BadRequest.status:
            _refuse_schema(to, body)
        message = f"instance {to.id} answered {status}"
        raise CallLost(message, detail=logged(body), retry=status not in _HOPELESS)


_CONFLICT = 409
_HOPELESS = (400, 413)
"""Statuses that every instance would answer: the request itself is wrong. Other statuses 4xx are
about the worker: it has restarted as another one, or its queue is full."""


def _refuse_schema(to: InstanceInfo, body: bytes) -> None:
    """Raises CallLost if this error is about the request's JSON schema: no other worker can follow
    it either."""
    try:
        error = msgspec.json.decode(body, type=ErrorReply).error
    except UNREADABLE:
        return
    if error.code == SCHEMA_FAILED:
        refused = BadRequest(error.message, error.param, SCHEMA_FAILED)
        raise CallLost(f"{to.id}: {error.message}", retry=False, refused=refused)


def _why(to: InstanceInfo, body: bytes) -> str:
    """The text of a worker's error."""
    try:
        return f"{to.id}: {msgspec.json.decode(body, type=ErrorReply).error.message}"
    except UNREADABLE as error:
        return f"instance {to.id} sent no valid error: {error}"


def _kv_transfer_params(to: InstanceInfo, reply: ReadReply) -> dict[str, Any]:
    try:
        return msgspec.json.decode(reply.kv_transfer_params, type=dict[str, Any] | None) or {}
    except UNREADABLE as error:
        raise CallLost(
            f"instance {to.id} sent no valid kv_transfer_params: {error}", retry=True
        ) from None


def _logprobs(to: InstanceInfo, choice: ReadChoice) -> tuple[TokenLogprobs | None, ...]:
    """The log probabilities of each token; empty if there are none."""
    if choice.logprobs is None:
        return ()
    try:
        read = tuple(read_ids(choice.logprobs))
    except ValueError as error:
        raise CallLost(f"instance {to.id} sent no valid logprobs: {error}", retry=True) from None
    if len(read) != len(choice.token_ids or ()):
        raise CallLost(f"instance {to.id} sent not one logprob for each token", retry=True)
    return read


def _parse(to: InstanceInfo, data: bytes) -> ReadReply:
    try:
        reply = read_reply(data)
    except UNREADABLE as error:
        raise CallLost(f"instance {to.id} sent no valid reply: {error}", retry=True) from None
    if reply.error is not None:
        _refuse_schema(to, data)
        raise CallLost(f"instance {to.id} failed", detail=str(reply.error))
    if not reply.choices:
        raise CallLost(f"instance {to.id} sent a reply without choices", retry=True)
    return reply

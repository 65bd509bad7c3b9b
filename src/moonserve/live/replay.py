"""Sends requests to a gateway at given times, and notes when each token of each reply came.

`moonserve replay` calls it. The loop is open: a request is sent when it is due, whatever happened
to earlier ones. It sends OpenAI's streaming completions with vLLM's `ignore_eos` and
`return_token_ids`, and knows no traces. A request that fails is a result and no exception, unless
all other requests would fail in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, MoonserveError
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens
from moonserve.live.clock import LoopClock
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import HttpClient, sse_events
from moonserve.live.openai.reply import ReadReply, read_reply
from moonserve.live.tls.contexts import SYSTEM, ServerTrust

_SILENT_S = 600.0
_HOPELESS = ("401 ", "403 ", "404 ", "405 ")


class TimedRequest(msgspec.Struct, frozen=True):
    """One request; `at_us` counts from the beginning of the replay."""

    id: str
    at_us: Micros
    prompt: tuple[int, ...]
    max_tokens: Tokens


class ReplayResult(msgspec.Struct):
    """The result of one request. All times count from the time at which it was due."""

    id: str
    late_us: Micros
    """The delay of its sending: the sender was busy, or had reached its bound of open requests."""
    outcome: Literal["completed", "refused", "failed"] = "failed"
    """refused: the reply had status 429."""
    error: str = ""
    tokens_us: list[Micros] = []
    """When each output token came; tokens of one chunk have the same time."""
    cached_tokens: Tokens = 0


async def replay(
    url: str,
    model: str,
    dues: Iterable[TimedRequest],
    bound: int,
    on_answer: Callable[[ReplayResult], object] = lambda answered: None,
    trust: ServerTrust = SYSTEM,
    credential: str = "",
) -> list[ReplayResult]:
    """Send all requests, which are ordered by time; returns their results in the same order.

    At most `bound` requests are open at a time; one that waits for this is late, and its times
    count the wait. `on_answer` is called with each result as it comes; `credential` is an API key
    or the cluster's token. Raises BadRequest
    at the first reply that all other requests would get too: no such model or path, or no right to
    use it.
    """
    clock = LoopClock()
    http = HttpClient(trust, max_per_host=bound)
    places = asyncio.Semaphore(bound)
    began_us = clock.now_us()
    tasks: list[asyncio.Task[ReplayResult]] = []

    async def one(due: TimedRequest, due_us: Micros) -> ReplayResult:
        try:
            answered = await _send(http, url, model, due, due_us, clock, bearer(credential))
        finally:
            places.release()
        if answered.error[:4] in _HOPELESS:
            raise BadRequest(f"the gateway answered {answered.error}")
        on_answer(answered)
        return answered

    try:
        async with asyncio.TaskGroup() as group:
            for due in dues:
                due_us = began_us + due.at_us
                await clock.sleep_us(max(0, due_us - clock.now_us()))
                await places.acquire()
                tasks.append(group.create_task(one(due, due_us)))
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    finally:
        await http.close()
    return [task.result() for task in tasks]


async def _send(
    http: HttpClient,
    url: str,
    model: str,
    due: TimedRequest,
    due_us: Micros,
    clock: LoopClock,
    authorization: Mapping[str, str],
) -> ReplayResult:
    answered = ReplayResult(due.id, clock.now_us() - due_us)
    body = {
        "model": model,
        "prompt": due.prompt,
        "max_tokens": due.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    try:
        async with http.stream(
            "POST",
            f"{url}/v1/completions",
            headers={"content-type": "application/json", "x-request-id": due.id, **authorization},
            body=msgspec.json.encode(body),
            timeout_s=_SILENT_S,
            idle_timeout_s=_SILENT_S,
        ) as reply:
            if reply.status != 200:
                answered.outcome = "refused" if reply.status == 429 else "failed"
                answered.error = (
                    f"{reply.status} {(await reply.read())[:300].decode(errors='replace')}"
                )
                return answered
            async for data in sse_events(reply):
                _take(answered, read_reply(data), clock.now_us() - due_us)
        if answered.outcome == "failed" and not answered.error:
            answered.error = "the reply ended without a finish_reason"
    except (MoonserveError, *UNREADABLE) as error:
        answered.outcome = "failed"
        answered.error = str(error)
    return answered


def _take(answered: ReplayResult, event: ReadReply, now_us: Micros) -> None:
    """Account for one event that came `now_us` after the request was due."""
    if event.error is not None:
        answered.error = str(event.error)[:300]
    for choice in event.choices:
        count = 1 if choice.token_ids is None and choice.text else len(choice.token_ids or ())
        answered.tokens_us += [now_us] * count
        if choice.finish_reason is not None:
            answered.outcome = "completed"
    if (cached := event.cached_tokens()) is not None:
        answered.cached_tokens = cached


def seconds(us: Micros) -> float:
    """Microseconds as seconds."""
    return us / MICROS_PER_SECOND

"""Sends requests to a gateway at their times, and notes when each token of each answer came.

For `moonserve replay`. Open loop: a request is sent when it is due, whatever became of those
before it. Speaks OpenAI's streaming completions with vLLM's `ignore_eos` and `return_token_ids`;
knows no traces. A request that fails is a result, not an exception, but for what fails all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from moonserve.core.errors import BadRequest, MoonserveError
from moonserve.core.units import MICROS_PER_SECOND, Micros, Tokens
from moonserve.live.clock import LoopClock
from moonserve.live.http.client import HttpClient, sse_events
from moonserve.live.openai.reply import ReadReply, read_reply

_SILENT_S = 600.0
_HOPELESS = ("401 ", "403 ", "404 ", "405 ")


class Due(msgspec.Struct, frozen=True):
    """One request: when it is sent (since the replay began), and what."""

    id: str
    at_us: Micros
    prompt: tuple[int, ...]
    max_tokens: Tokens


class Answered(msgspec.Struct):
    """What became of one request. All times count from when it was due."""

    id: str
    late_us: Micros
    """Sent so much later: the sender was busy, or at its bound of requests under way."""
    outcome: Literal["completed", "refused", "failed"] = "failed"
    """refused: with status 429."""
    error: str = ""
    tokens_us: list[Micros] = []
    """When each output token came; those that came together have one time."""
    cached_tokens: Tokens = 0


async def replay(
    url: str,
    model: str,
    dues: Iterable[Due],
    bound: int,
    told: Callable[[Answered], object] = lambda answered: None,
) -> list[Answered]:
    """Send all requests, which come in the order of their times; the answers, in that order.

    At most `bound` are under way; those that wait for that are late, which counts. `told` is
    called as each ends. Raises BadRequest at the first answer that all others would get too: no
    such model or path, or no right to either.
    """
    clock = LoopClock()
    http = HttpClient(max_per_host=bound)
    places = asyncio.Semaphore(bound)
    began_us = clock.now_us()
    tasks: list[asyncio.Task[Answered]] = []

    async def one(due: Due, due_us: Micros) -> Answered:
        try:
            answered = await _send(http, url, model, due, due_us, clock)
        finally:
            places.release()
        if answered.error[:4] in _HOPELESS:
            raise BadRequest(f"the gateway answers {answered.error}")
        told(answered)
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
    http: HttpClient, url: str, model: str, due: Due, due_us: Micros, clock: LoopClock
) -> Answered:
    answered = Answered(due.id, clock.now_us() - due_us)
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
            headers={"content-type": "application/json", "x-request-id": due.id},
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
            answered.error = "the answer ended without a finish_reason"
    except (MoonserveError, msgspec.DecodeError) as error:
        answered.outcome = "failed"
        answered.error = str(error)
    return answered


def _take(answered: Answered, event: ReadReply, now_us: Micros) -> None:
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

"""Responses, Messages, embeddings and reranking as vLLM 0.32 has them, for tests.support.fake_vllm.

vLLM makes a chat of a Response or of Messages, and writes the chat's reply in their shape: so does
this. The shapes are those of vLLM's source and of its streams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class NamedJob(Protocol):
    """What is read of a generation."""

    id: str
    prompt: list[int]
    cached: int
    max_tokens: int

    def words(self, choice: int) -> list[str]:
        """The words of one choice."""

    def handed_over(self) -> dict[str, Any] | None:
        """The parameters for decode."""

    def pieces(self, choice: int) -> AsyncIterator[str]:
        """The words as they are made."""


def as_chat(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The chat request that vLLM makes of such a body."""
    chat = {name: value for name, value in body.items() if name not in ("input", "system")}
    if path == MESSAGES:
        before, limit = body.get("system"), body.get("max_tokens")
        said = body["messages"]
    else:
        before, limit = body.get("instructions"), body.get("max_output_tokens")
        said = body["input"]
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
    chat["messages"] = [{"role": "system", "content": before}, *said] if before else said
    chat["max_completion_tokens"] = limit
    return chat


def usage(path: str, job: NamedJob, said: int) -> dict[str, Any]:
    """Usage in the shape of the path."""
    if path == MESSAGES:
        left = len(job.prompt) - job.cached
        return {
            "input_tokens": left,
            "output_tokens": said,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": job.cached,
        }
    return {
        "input_tokens": len(job.prompt),
        "input_tokens_details": {
            "cached_tokens": job.cached,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": len(job.prompt) + said,
    }


def _message(job: NamedJob, model: str, text: str | None) -> dict[str, Any]:
    return {
        "id": job.id,
        "type": "message",
        "role": "assistant",
        "content": [] if text is None else [{"type": "text", "text": text}],
        "model": model,
        "stop_reason": None if text is None else "max_tokens",
        "stop_sequence": None,
        "usage": usage(MESSAGES, job, 0 if text is None else job.max_tokens),
    }


def _response(job: NamedJob, model: str, text: str | None) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    return {
        "id": job.id,
        "object": "response",
        "created_at": 1795818000,
        "incomplete_details": None if text is None else {"reason": "max_output_tokens"},
        "model": model,
        "output": [] if text is None else [{**item, "content": [part]}],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "parameters": {"properties": {"usage": {"type": "string"}}}}
        ],
        "top_p": 1.0,
        "status": "in_progress" if text is None else "incomplete",
        "usage": None if text is None else usage(RESPONSES, job, job.max_tokens),
        "user": None,
    }


def whole(path: str, job: NamedJob, model: str) -> dict[str, Any]:
    """The reply as one object."""
    make = _message if path == MESSAGES else _response
    reply = make(job, model, "".join(job.words(0)))
    params = job.handed_over()
    if path == MESSAGES and params is None:
        return reply
    return {**reply, "kv_transfer_params": params}


async def chunks(path: str, job: NamedJob, model: str) -> AsyncIterator[bytes]:
    """The reply as events with names."""
    if path == MESSAGES:
        yield _event("message_start", message=_message(job, model, None))
        block = {"type": "text", "text": ""}
        yield _event("content_block_start", index=0, content_block=block)
        async for word in job.pieces(0):
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
        yield _event("content_block_stop", index=0)
        ended = {"stop_reason": "max_tokens", "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=usage(path, job, job.max_tokens))
        yield _event("message_stop")
        return
    began = _response(job, model, None)
    yield _event("response.created", sequence_number=0, response=began)
    yield _event("response.in_progress", sequence_number=1, response=began)
    item = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant"}
    yield _event("response.output_item.added", output_index=0, item={**item, "content": []})
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    yield _event("response.content_part.added", part=part, **at)
    async for word in job.pieces(0):
        yield _event("response.output_text.delta", delta=word, **at)
    text = "".join(job.words(0))
    yield _event("response.output_text.done", text=text, **at)
    yield _event("response.completed", response=_response(job, model, text))


def _event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def embeddings(inputs: Sequence[Sequence[int]], model: str) -> dict[str, Any]:
    """One vector for each input."""
    count = sum(map(len, inputs))
    data = [
        {"index": index, "object": "embedding", "embedding": [float(len(it)), 0.5]}
        for index, it in enumerate(inputs)
    ]
    used = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    return {"id": "embd-1", "object": "list", "created": 1, "model": model} | {
        "data": data,
        "usage": {**used, "prompt_tokens_details": None},
    }


def reranked(query: str, documents: Sequence[str], model: str) -> dict[str, Any]:
    """The documents, those with the most of the query's words first."""
    words = set(query.split())
    scores = [len(words & set(it.split())) / len(words) for it in documents]
    order = sorted(range(len(documents)), key=lambda at: -scores[at])
    count = len(query) + sum(map(len, documents))
    results = [
        {"index": at, "document": {"text": documents[at]}, "relevance_score": scores[at]}
        for at in order
    ]
    used = {"prompt_tokens": count, "total_tokens": count}
    return {"id": "rerank-1", "model": model, "usage": used, "results": results}


def scored(text_1: str, text_2: Sequence[str], model: str) -> dict[str, Any]:
    """The share of each second text's words that the first one has."""
    words = set(text_1.split())
    scores = [len(words & set(it.split())) / len(it.split()) for it in text_2]
    count = len(text_1) + sum(map(len, text_2))
    used = {"prompt_tokens": count, "total_tokens": count}
    data = [{"index": at, "object": "score", "score": it} for at, it in enumerate(scores)]
    return {"id": "score-1", "object": "list", "model": model, "usage": used, "data": data}

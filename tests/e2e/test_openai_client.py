"""OpenAI's own Python client, unchanged, against the gateway on a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from moonserve.core.errors import EngineFailed, NobodyAlive, Overloaded
from moonserve.live.api.front import Front
from moonserve.live.api.own_text import OwnText
from moonserve.live.http.server import App, serve
from tests.support.serving import ByteText, FakeServing, say

TEXT = "naïve 你好 🙂"
USER: Any = [{"role": "user", "content": "hi"}]


@contextmanager
def gateway(*script: Any) -> Iterator[tuple[str, FakeServing]]:
    """A gateway in a thread, as the synchronous client needs one; gives its base URL."""
    serving = FakeServing(*script)
    ready = threading.Event()
    base: list[str] = []
    stop: list[Callable[[], None]] = []

    async def main() -> None:
        routes = Front(OwnText(serving, lambda model: ByteText()))
        server = await serve(App(routes.routes(), routes.prefixes()), "127.0.0.1", 0)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        base.append(f"http://127.0.0.1:{server.port}/v1")
        ready.set()
        await done.wait()
        await server.stop(1)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(10)
        yield base[0], serving
    finally:
        stop[0]()
        thread.join(10)
    assert serving.open == 0


def client(base: str) -> openai.OpenAI:
    """The synchronous client."""
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=10)


@pytest.mark.parametrize("step", [1, 4])
def test_chat(step: int) -> None:
    """A chat reply, whole and streamed, is the text; usage and ids are there."""
    with gateway(*say(TEXT, step, cached=5)) as (base, _), client(base) as ai:
        whole = ai.chat.completions.create(model="m", messages=USER)
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 5
        assert whole._request_id

        stream = ai.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage == whole.usage


def test_chat_stream_helper() -> None:
    """The client's accumulating helper understands the stream."""
    with (
        gateway(*say(TEXT)) as (base, _),
        client(base) as ai,
        ai.chat.completions.stream(model="m", messages=USER) as stream,
    ):
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_completions() -> None:
    """A text completion, whole and streamed, from text and from token ids."""
    with gateway(*say(TEXT)) as (base, serving), client(base) as ai:
        assert ai.completions.create(model="m", prompt="x").choices[0].text == TEXT
        pieces = ai.completions.create(model="m", prompt=[1, 2], stream=True, max_tokens=50)
        assert "".join(chunk.choices[0].text for chunk in pieces) == TEXT
        assert serving.requests[1].prompt == (1, 2)


def test_models() -> None:
    """Models are listed and found by name, slashes included."""
    with gateway() as (base, _), client(base) as ai:
        assert [model.id for model in ai.models.list()] == ["m", "org/big"]
        assert ai.models.retrieve("org/big").id == "org/big"
        with pytest.raises(openai.NotFoundError):
            ai.models.retrieve("other")


def test_async_client() -> None:
    """The asynchronous client: sixteen streams at once, none mixed up."""

    async def main(base: str) -> None:
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as ai:

            async def one() -> str:
                stream = await ai.chat.completions.create(model="m", messages=USER, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            assert await asyncio.gather(*(one() for _ in range(16))) == [TEXT] * 16

    with gateway(0.01, *say(TEXT)) as (base, serving):
        asyncio.run(main(base))
        assert len({request.id for request in serving.requests}) == 16


def test_leaving_a_stream_cancels_it() -> None:
    """Closing the client's stream ends the generation behind the gateway."""

    async def main(base: str, serving: FakeServing) -> None:
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as ai:
            stream = await ai.chat.completions.create(model="m", messages=USER, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            assert serving.open == 1
            await stream.close()
            async with asyncio.timeout(2):
                while serving.open:
                    await asyncio.sleep(0.005)

    with gateway(say("h")[0], 60.0) as (base, serving):
        asyncio.run(main(base, serving))
        assert serving.closed_early == 1


@pytest.mark.parametrize(
    ("asked", "error", "param", "code"),
    [
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"messages": [{"role": "x", "content": ""}]}, openai.BadRequestError, None, None),
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        (
            {"web_search_options": {}},
            openai.BadRequestError,
            "web_search_options",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 99}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
        ({"model": "gpt"}, openai.NotFoundError, "model", "model_not_found"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(
    asked: dict[str, Any], error: Any, param: str | None, code: str | None, stream: bool
) -> None:
    """The client raises its own error class, with the field and the code."""
    with gateway() as (base, _), client(base) as ai:
        with pytest.raises(error) as caught:
            ai.chat.completions.create(
                **{"model": "m", "messages": USER, "stream": stream, **asked}
            )
        assert (caught.value.param or "").startswith(param or "messages[0].role")
        assert caught.value.code == code
        assert caught.value.request_id


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ([NobodyAlive("nobody")], openai.InternalServerError, "nobody"),
        ([say("h")[0], EngineFailed("broke")], openai.APIError, "broke"),
    ],
)
def test_failed_streams(script: list[Any], error: Any, said: str) -> None:
    """A stream that fails before or after its first token raises in the client."""
    with (
        gateway(*script) as (base, _),
        client(base) as ai,
        pytest.raises(error, match=said),
    ):
        list(ai.chat.completions.create(model="m", messages=USER, stream=True))


def test_overload() -> None:
    """Overload raises RateLimitError with the reason and when to come again."""
    with (
        gateway(Overloaded("busy", "load", 2)) as (base, _),
        client(base) as ai,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        ai.chat.completions.create(model="m", messages=USER)
    assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("load", "2")

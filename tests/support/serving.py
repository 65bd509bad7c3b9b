"""A scripted cluster and text side for gateway tests: every character is its UTF-8 bytes' ids."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moonserve.core.errors import BadRequest, MoonserveError
from moonserve.core.request import Request
from moonserve.live.ports import ModelCard, Output
from moonserve.live.text.template import ChatTemplate

EOS = 256
VOCAB = 257
TOOL_TEMPLATE = (Path(__file__).parents[1] / "fixtures" / "tools.jinja").read_text()


class ByteText:
    """TextTools whose token ids are bytes; EOS has no text."""

    vocab_size = VOCAB
    longest_token_bytes = 4
    knows_tools = True
    has_known_calls = True

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def spelled(self, id: int) -> bytes:
        """One byte, or the name of EOS."""
        return bytes([id]) if id < EOS else b"<eos>"

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """One line per message; a template that refuses to hear "forbidden"."""
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        if "forbidden" in text:
            raise BadRequest("messages: the template refuses", "messages")
        return text

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh one."""
        return ByteDetokenizer()


class ToolText(ByteText):
    """The same with a chat template that has tools."""

    def __init__(self, source: str = TOOL_TEMPLATE) -> None:
        nothing: Any = SimpleNamespace(bos_token="", eos_token="")
        template = ChatTemplate(source, nothing)
        self.knows_tools = template.knows_tools
        self.has_known_calls = template.has_known_calls
        self.render_chat = template.render  # type: ignore[method-assign]


class ByteDetokenizer:
    """Bytes to whole characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """What is certain."""
        return self._utf8.decode(bytes(i for i in ids if i < EOS))

    def flush(self) -> str:
        """The rest."""
        return self._utf8.decode(b"", final=True)


class FakeServing:
    """Serving that plays a script: Outputs, errors to raise, and floats to sleep."""

    def __init__(self, *script: Output | MoonserveError | float) -> None:
        self.script: Sequence[Output | MoonserveError | float] = script or say("hello")
        self.cards = [ModelCard("m", 100, True), ModelCard("org/big", 1_000_000, False)]
        self.requests: list[Request] = []
        self.open = 0
        """Generations begun and not yet ended."""
        self.closed_early = 0
        self.waiting = asyncio.Event()
        self.ended = asyncio.Event()

    def models(self) -> list[ModelCard]:
        """As set."""
        return self.cards

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Play the script."""
        self.requests.append(request)
        self.open += 1
        whole = False
        try:
            for step in self.script:
                if isinstance(step, float):
                    self.waiting.set()
                    await asyncio.sleep(step)
                elif isinstance(step, MoonserveError):
                    whole = True
                    raise step
                else:
                    yield step
            whole = True
        finally:
            await asyncio.sleep(0)  # a real clean-up takes turns of the loop
            self.open -= 1
            self.closed_early += not whole
            self.ended.set()


def say(text: str, step: int = 1, cached: int | None = 0) -> list[Output]:
    """Outputs that spell `text`, `step` bytes each, ended by EOS."""
    data = text.encode()
    outputs = [Output(tuple(data[at : at + step])) for at in range(0, len(data), step)]
    outputs.append(Output((EOS,), finish_reason="stop"))
    outputs[0] = Output(outputs[0].token_ids, outputs[0].finish_reason, cached)
    return outputs

"""Streams whose every token is known: the fake engine's tokens are a hash of their context."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from moonserve.core.errors import MoonserveError
from moonserve.live.engine.fake import FakeEngine
from moonserve.live.http.client import HttpClient, UpstreamError, sse_events
from tests.support.up import TOKEN

MODEL = "smollm2-135m-instruct"
REFUSED = frozenset({429, 502, 503, 504})
"""Statuses with which a stream may be refused before its first token."""
SILENT_S = 150.0
"""A stream without a token for so long hangs. A cluster of five processes may need a minute to
come back where other programs use the machine."""
_FAMILY_TOKENS = 320
_FAMILIES = 8
PATIENCE_S = 25.0
"""An error of a stream that had begun is right only after such a time without progress: a request
waits 30 s for an instance of the role that it lacks."""
_TOGETHER_S = 0.5
"""Tokens of decode come closer together than this. A token alone comes from one more prefill. It is
no progress, since its decode failed again."""


class Outcomes:
    """How the streams ended."""

    def __init__(self) -> None:
        self.began = 0
        self.whole = 0
        self.cut = 0
        """Streams that ended with the process that served their client."""
        self.refused: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        """Errors of streams that had begun, which name what no retry could mend."""
        self.wrong: list[str] = []
        """Everything that must not be."""
        self.longest_silence_s = 0.0
        self.tokens = 0
        self.ttfts_s: list[float] = []
        """Of streams that began, in the order of their first tokens."""

    def __str__(self) -> str:
        refused = ", ".join(f"{count}x {status}" for status, count in sorted(self.refused.items()))
        errors = ", ".join(f"{count}x {text}" for text, count in self.errors.most_common())
        return (
            f"{self.began} streams began: {self.whole} whole, {self.cut} cut with their gateway, "
            f"errors: {errors or 'none'}, wrong: {len(self.wrong)}; refused before: "
            f"{refused or 'none'}; {self.tokens} tokens; longest silence "
            f"{self.longest_silence_s:.1f} s"
        )


class Load:
    """Clients that stream without a pause. `stop` lets their streams end."""

    def __init__(self, url: str, seed: int, fronts_lost: Callable[[], int], most: int) -> None:
        """fronts_lost: how often a process that serves clients was lost; most: tokens a stream."""
        self.outcomes = Outcomes()
        self._url = url
        self._seed = seed
        self._fronts_lost = fronts_lost
        self._most = most
        self._engine = FakeEngine()
        self._http = HttpClient()
        self._stopping = False
        self._clients: list[asyncio.Task[None]] = []

    def start(self, clients: int) -> None:
        """Begin to stream."""
        self._clients = [asyncio.create_task(self._client(at)) for at in range(clients)]

    async def until_streams(self, count: int) -> None:
        """Wait until so many streams have begun."""
        async with asyncio.timeout(SILENT_S):
            while self.outcomes.began < count:
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Begin no more streams, and wait for the end of those under way."""
        self._stopping = True
        try:
            async with asyncio.timeout(2 * SILENT_S):
                await asyncio.gather(*self._clients)
        except TimeoutError:
            self.outcomes.wrong.append("streams hang at the end")
        await self._http.close()

    async def _client(self, at: int) -> None:
        draw = random.Random(self._seed * 1_000 + at)
        while not self._stopping:
            await self._stream(draw)
            await asyncio.sleep(0.05 + 0.2 * draw.random())

    async def _stream(self, draw: random.Random) -> None:
        family = random.Random(draw.randrange(_FAMILIES))
        prompt = [family.randrange(1000, 40_000) for _ in range(_FAMILY_TOKENS)]
        prompt += [draw.randrange(1000, 40_000) for _ in range(draw.randrange(8, 200))]
        wanted = self._engine.reference(prompt, draw.randrange(self._most // 8, self._most))
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": len(wanted), "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True,
        }  # fmt: skip
        one = Checked(wanted)
        lost = self._fronts_lost()
        try:
            await self._read(one, json.dumps(body).encode())
        except UpstreamError as error:
            one.broke = str(error)
        except (MoonserveError, TimeoutError) as error:
            one.complaint = f"hangs: {error}"
        self._judge(one, self._fronts_lost() > lost)

    async def _read(self, one: Checked, body: bytes) -> None:
        async with self._http.stream(
            "POST", self._url + "/v1/completions", body=body, timeout_s=SILENT_S,
            headers={"content-type": "application/json", "authorization": f"Bearer {TOKEN}"},
            idle_timeout_s=SILENT_S, again=False,
        ) as reply:  # fmt: skip
            one.status = reply.status
            if reply.status != 200:
                one.take_refusal(await reply.read())
                return
            async for event in sse_events(reply):
                if one.take(event):
                    self.outcomes.began += 1
                    self.outcomes.ttfts_s.append(time.monotonic() - one.sent_s)
            one.ended = True

    def _judge(self, one: Checked, front_lost: bool) -> None:
        out = self.outcomes
        out.tokens += one.count
        out.longest_silence_s = max(out.longest_silence_s, one.longest_silence_s)
        if one.complaint:
            out.wrong.append(one.complaint)
        elif one.whole:
            out.whole += 1
        elif one.status and one.status != 200:
            out.refused[one.status] += 1
        elif not one.count and (one.broke or one.error):
            out.refused[0 if one.broke else 200] += 1
        elif front_lost:
            out.cut += 1
        elif one.error and one.error_after_s > PATIENCE_S:
            out.errors[one.error] += 1
        else:
            how = one.error or one.broke or f"ended with finish_reason {one.finish}"
            when = f", {one.error_after_s:.0f} s after its last progress" if one.error else ""
            out.wrong.append(f"a stream of {one.count} tokens of {len(one.wanted)}: {how}{when}")


class Checked:
    """One stream as it comes."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = wanted
        self.sent_s = time.monotonic()
        self.status = 0
        self.count = 0
        self.finish: str | None = None
        self.error = ""
        self.broke = ""
        self.complaint = ""
        self.ended = False
        self.longest_silence_s = 0.0
        self._last_s = 0.0
        self._moved_s = 0.0
        """When a token came that shows progress."""
        self.error_after_s = 0.0
        """The time from the last progress to the error."""

    @property
    def whole(self) -> bool:
        """Whether every token has come, and the end was regular."""
        return self.ended and self.count == len(self.wanted) and self.finish == "length"

    def take_refusal(self, body: bytes) -> None:
        """The body of a status that is not 200."""
        message = ""
        with contextlib.suppress(msgspec.DecodeError):
            message = msgspec.json.decode(body)["error"]["message"]
        if self.status not in REFUSED or not message:
            self.complaint = f"status {self.status}: {body[:200]!r}"

    def take(self, data: bytes) -> bool:
        """One event; return whether the stream began with it."""
        event = msgspec.json.decode(data)
        if "error" in event:
            self.error = event["error"]["message"]
            self.error_after_s = time.monotonic() - self._moved_s
            return False
        before = self.count
        for choice in event["choices"]:
            tokens = choice.get("token_ids") or []
            wanted = self.wanted[self.count : self.count + len(tokens)]
            if tokens != wanted and not self.complaint:
                self.complaint = f"token {self.count} is {tokens}, not {wanted}"
            self.count += len(tokens)
            if tokens:
                now_s = time.monotonic()
                if not self._last_s or now_s < self._last_s + _TOGETHER_S:
                    self._moved_s = now_s
                if self._last_s:
                    self.longest_silence_s = max(self.longest_silence_s, now_s - self._last_s)
                self._last_s = now_s
            self.finish = choice.get("finish_reason") or self.finish
        return not before and bool(self.count)

"""vLLM 0.32's HTTP wire without a model: it behaves as the captured exchanges, failures included.

A `Fabric` is the network between engines, over which the NIXL, Mooncake and SGLang connectors hand
KV on. Tokens are the bytes of the text. The generated words are a function of the prompt, so that
all engines with the right KV give the same, and one with wrong KV does not. Each word is a token,
or two of which the first has no text, as a part of a character has none (`halves`). A prompt of
token ids may end with words: then the engine goes on with them.

Attributes such as `statuses`, `delay_s`, `cut_after` and `hold` make it fail; `calls` has the
requests that it received.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from typing import Any, Literal

import msgspec

from moonserve.live.http.message import HttpRequest, Response, StreamingResponse, json_response
from moonserve.live.http.server import App, Server, serve
from moonserve.live.store.settings import url_of
from moonserve.live.tls.contexts import Tls
from tests.support import fake_forms
from tests.support.serving import ByteText

LEASE_S = 30.0
_HANG_S = 480.0
_WORDS = ("sea", "wind", "salt", "star", "moon", "wave", "sail", "rope", "gull", "tide")


_WORD, _HALF = 1_000, 2_000
"""Ids of the words, and of their first halves, begin here."""
_PART = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of a part of a character."""


def text_of(ids: Sequence[int]) -> str:
    """The text of generated tokens."""
    said = ["" if it >= _HALF else f" {_WORDS[it - _WORD]}" for it in ids if it >= _WORD]
    return "".join(said) + (_PART if ids and ids[-1] >= _HALF else "")


def spoken(prompt: Sequence[int], count: int, choice: int = 0, kv: bytes = b"") -> list[str]:
    """The words that follow a prompt. kv: not b"" if the KV is another prompt's."""
    digest = sha256(bytes(str(list(prompt)), "ascii") + kv).digest() * (1 + count // 32)
    return [f" {_WORDS[(byte + choice) % len(_WORDS)]}" for byte in digest[:count]]


class Call(msgspec.Struct):
    """One generation that was requested."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    at_s: float
    """When it came, by the loop's clock."""


class Refused(Exception):
    """An error reply in vLLM's shape."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        error = {"message": message, "type": kind, "param": None, "code": status}
        self.response = json_response({"error": error}, status, headers or {})


class Fabric:
    """The KV that engines can pull from each other, by engine id."""

    def __init__(self) -> None:
        self.ready: dict[str, dict[str, tuple[tuple[int, ...], float]]] = {}
        """Engine id -> request or transfer id -> (prompt, end of its lease)."""
        self.changed = asyncio.Event()
        self.rooms: dict[tuple[int, int], int] = {}
        """SGLang: how many calls have come to each room of each rank."""
        self.ranks: dict[int, int] = {}
        """SGLang: how many ranks a prefill engine has, by the port of its bootstrap server."""

    async def meet(self, room: tuple[int, int]) -> None:
        """Wait for the other half of a request, in a room of one rank of prefill."""
        self.rooms[room] = self.rooms.get(room, 0) + 1
        self.changed.set()
        self.changed = asyncio.Event()
        async with asyncio.timeout(_HANG_S):
            while self.rooms[room] < 2:
                await self.changed.wait()

    def put(self, engine: str, name: str, prompt: Sequence[int], lease_s: float) -> None:
        """Keep a prompt's KV under this name for a decode engine."""
        self.ready[engine][name] = (tuple(prompt), asyncio.get_running_loop().time() + lease_s)
        self.changed.set()
        self.changed = asyncio.Event()

    def pull(self, engine: str, name: str) -> tuple[int, ...] | None:
        """Take the prompt whose KV this is. None: it is not there, or its lease is over."""
        prompt, until_s = self.ready[engine].pop(name, ((), 0.0))
        return prompt if until_s > asyncio.get_running_loop().time() else None

    async def wait(self, engine: str, name: str) -> None:
        """Wait until it is there, for minutes, as vLLM's Mooncake connector does."""
        async with asyncio.timeout(_HANG_S):
            while name not in self.ready.get(engine, {}):
                await self.changed.wait()


class FakeVllm:
    """One engine. Call `start`, `restart` and `stop`; see the module for its faults."""

    def __init__(
        self,
        name: str = "e0",
        connector: Literal["none", "nixl", "mooncake", "sglang"] = "none",
        fabric: Fabric | None = None,
        *,
        model: str = "m",
        block_size: int = 32,
        max_len: int = 2048,
        dp_size: int = 1,
        token_s: float = 0.0,
        prompt_details: bool = True,
    ) -> None:
        self.name, self.model, self.max_len = name, model, max_len
        self.connector, self.fabric = connector, fabric or Fabric()
        self.block_size, self.dp_size, self.token_s = block_size, dp_size, token_s
        self.prompt_details = prompt_details
        self.calls: list[Call] = []
        self.running = 0
        self.aborted = 0
        """Generations whose client disconnected."""
        self.statuses: deque[int] = deque()
        """Statuses of the next answers; 200 is a normal answer."""
        self.headers: dict[str, str] = {}
        """Headers of an answer with another status."""
        self.delay_s = 0.0
        """Delay before the first byte."""
        self.prompt_token_s = 0.0
        """Duration of prefill for each token that is not cached."""
        self.cut_after: int | None = None
        """The connection of a stream is cut after this many tokens."""
        self.error_after: int | None = None
        """A stream sends an error event after this many tokens, and ends."""
        self.abort_after: int | None = None
        """It stops as vLLM does at SIGTERM: a stream ends with "abort" after this many words."""
        self.halves = False
        """Whether each word is two tokens, in two events."""
        self.together = 1
        """So many tokens come in one event."""
        self.parsers = False
        """Whether chats have parts that are no text, as with a reasoning parser."""
        self.hold: asyncio.Event | None = None
        """Every generation waits until it is set."""
        self.renews = True
        """Whether decode renews NIXL's lease, as in newer vLLM; the parameters show it."""
        self.lost_handovers = 0
        """How many of this engine's next handovers get lost."""
        self.script: deque[dict[str, Any]] = deque()
        """Replies to the next generations, in place of its own."""
        self.tls: Tls | None = None
        """Its certificate; None: it speaks in clear."""
        self.port = self.bootstrap_port = 0
        self.starts = 0
        self._servers: list[Server] = []
        self._text = ByteText()
        self._caches: list[set[bytes]] = []
        """The cached blocks of each rank."""
        self.engine_ids: list[str] = []

    @property
    def url(self) -> str:
        """Its base URL."""
        return url_of("127.0.0.1", self.port, self.tls)

    @property
    def bootstrap(self) -> str:
        """The URL of its bootstrap server."""
        return f"http://127.0.0.1:{self.bootstrap_port}"

    async def start(self) -> FakeVllm:
        """Listen on the ports that it had before. Engine ids are new, and no KV is cached or
        ready."""
        self.starts += 1
        self._caches = [set() for _ in range(self.dp_size)]
        self.engine_ids = [f"{self.name}-{self.starts}-dp{rank}" for rank in range(self.dp_size)]
        for engine in self.engine_ids:
            self.fabric.ready[engine] = {}
        routes = {
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", fake_forms.RESPONSES): self._chat,
            ("POST", fake_forms.MESSAGES): self._chat,
            ("POST", fake_forms.RESPONSES + "/render"): self._render,
            ("POST", fake_forms.MESSAGES + "/render"): self._render,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("POST", "/v1/rerank"): self._rerank,
            ("POST", "/v1/messages/count_tokens"): self._count_tokens,
            ("POST", "/score"): self._score,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
        }
        tls = self.tls.listener("none") if self.tls else None
        server = await serve(App(routes, name=self.name), "127.0.0.1", self.port, tls=tls)
        self.port = server.port
        query = App({("GET", "/query"): self._query}, name=f"{self.name} bootstrap")
        bootstrap = await serve(query, "127.0.0.1", self.bootstrap_port)
        self.bootstrap_port = bootstrap.port
        self.fabric.ranks[bootstrap.port] = self.dp_size
        self._servers = [server, bootstrap]
        return self

    async def stop(self) -> None:
        """Stop at once, as if killed: all connections are cut, and the KV that was ready is
        gone."""
        for engine in self.engine_ids:
            self.fabric.ready.pop(engine, None)
        servers, self._servers = self._servers, []
        for server in servers:
            await server.stop(0)

    async def restart(self) -> None:
        """Killed and started again at the same address."""
        await self.stop()
        await self.start()

    # Requests that are no generation.

    async def _health(self, request: HttpRequest) -> Response:
        return Response()

    async def _version(self, request: HttpRequest) -> Response:
        return json_response({"version": "0.32.0"})

    async def _models(self, request: HttpRequest) -> Response:
        card = {"id": self.model, "object": "model", "created": 1795818000, "owned_by": "vllm"}
        card |= {"root": self.model, "parent": None, "max_model_len": self.max_len}
        return json_response({"object": "list", "data": [card]})

    async def _query(self, request: HttpRequest) -> Response:
        ids = {str(rank): {"engine_id": engine} for rank, engine in enumerate(self.engine_ids)}
        return json_response({rank: {**it, "worker_addr": {}} for rank, it in ids.items()})

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = msgspec.json.decode(await request.body())
        tokens = self._prompt(body)
        shape = {"count": len(tokens), "max_model_len": self.max_len, "tokens": tokens}
        return json_response({**shape, "token_strs": None})

    async def _count_tokens(self, request: HttpRequest) -> Response:
        body = fake_forms.as_chat(fake_forms.MESSAGES, msgspec.json.decode(await request.body()))
        return json_response({"input_tokens": len(self._prompt(body))})

    async def _score(self, request: HttpRequest) -> Response:
        return await self._pooled(
            request,
            lambda body: fake_forms.scored(body["text_1"], body["text_2"], self.model),
        )

    async def _detokenize(self, request: HttpRequest) -> Response:
        tokens = msgspec.json.decode(await request.body())["tokens"]
        said = bytes(it for it in tokens if it < _WORD).decode(errors="replace")
        return json_response({"prompt": said + text_of(tokens)})

    async def _render(self, request: HttpRequest) -> Response:
        raw = await request.body()
        body = fake_forms.as_chat(request.path.removesuffix("/render"), msgspec.json.decode(raw))
        return json_response({"request_id": "r", "token_ids": self._prompt(body)})

    async def _embeddings(self, request: HttpRequest) -> Response:
        return await self._pooled(request, self._embedded)

    async def _rerank(self, request: HttpRequest) -> Response:
        return await self._pooled(
            request,
            lambda body: fake_forms.reranked(body["query"], body["documents"], self.model),
        )

    def _embedded(self, body: dict[str, Any]) -> dict[str, Any]:
        given = body["input"]
        texts = [given] if isinstance(given, str) else given
        return fake_forms.embeddings(
            [self._text.encode(it, add_bos=True) for it in texts], body["model"]
        )

    async def _pooled(
        self, request: HttpRequest, made: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Response:
        body = await self._noted(request)
        request.cancel_on_disconnect()
        self.running += 1
        try:
            if (status := self.statuses.popleft() if self.statuses else 200) != 200:
                return Refused(status, "told to", self.headers).response
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(self.delay_s)
            return json_response(made(body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _noted(self, request: HttpRequest) -> dict[str, Any]:
        """The body of a request, which `calls` has from now on."""
        raw = await request.body()
        body: dict[str, Any] = msgspec.json.decode(raw)
        now_s = asyncio.get_running_loop().time()
        self.calls.append(Call(request.path, dict(request.headers), body, raw, now_s))
        return body

    async def _metrics(self, request: HttpRequest) -> Response:
        of = f'engine="0",model_name="{self.model}"'
        lines = [
            f"vllm:num_requests_running{{{of}}} {float(self.running)}",
            f"vllm:num_requests_waiting{{{of}}} 0.0",
            f"vllm:kv_cache_usage_perc{{{of}}} 0.0",
            f'vllm:cache_config_info{{block_size="{self.block_size}",enable_prefix_caching="True",'
            f'engine="0",num_gpu_blocks="1024"}} 1.0',
        ]
        return Response(body="\n".join([*lines, ""]).encode(), content_type="text/plain")

    # Generations.

    async def _completion(self, request: HttpRequest) -> Response | StreamingResponse:
        return await self._generate(request, chat=False)

    async def _chat(self, request: HttpRequest) -> Response | StreamingResponse:
        return await self._generate(request, chat=True)

    async def _generate(self, request: HttpRequest, chat: bool) -> Response | StreamingResponse:
        body = await self._noted(request)
        request.cancel_on_disconnect()
        named = request.path in (fake_forms.RESPONSES, fake_forms.MESSAGES)
        status = self.statuses.popleft() if self.statuses else 200
        self.running += 1
        streamed = False
        try:
            if status != 200:
                raise Refused(status, "told to", self.headers)
            rank = self._rank(request)
            body = fake_forms.as_chat(request.path, body) if named else body
            job = _Job(self, body, chat, request.headers.get("x-request-id"), rank)
            if self.hold is not None:
                await self.hold.wait()
            if self.script:
                return json_response(self.script.popleft())
            await asyncio.sleep(self.delay_s)
            await job.transfer()
            if not body.get("stream"):
                whole = fake_forms.whole(request.path, job, self.model) if named else None
                return json_response(whole or await job.whole())
            streamed = True
            named_chunks = fake_forms.chunks(request.path, job, self.model) if named else None
            return StreamingResponse(_Stream(self, named_chunks or job.chunks()))
        except Refused as refused:
            return refused.response
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            if not streamed:
                self.running -= 1

    def _rank(self, request: HttpRequest) -> int:
        given = request.headers.get("x-data-parallel-rank", "0")
        rank = int(given) if given.isdecimal() else 0
        if rank >= self.dp_size:
            raise Refused(400, f"data_parallel_rank {rank} is out of range [0, {self.dp_size}).")
        return rank

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            parts = [{"role": m["role"], "content": str(m["content"])} for m in body["messages"]]
            tools = msgspec.json.encode(body["tools"]).decode() if body.get("tools") else ""
            return self._text.encode(tools + self._text.render_chat(parts), add_bos=False)
        prompt = body["prompt"]
        return self._text.encode(prompt, add_bos=True) if isinstance(prompt, str) else prompt

    def cached(self, prompt: Sequence[int], rank: int = 0) -> int:
        """How many tokens of the prompt this rank had cached; from now on it has all of them."""
        count, whole, cache = 0, True, self._caches[rank]
        for at in range(self.block_size, len(prompt) + 1, self.block_size):
            key = sha256(str(list(prompt[:at])).encode()).digest()
            whole = whole and key in cache and at < len(prompt)
            count += self.block_size * whole
            cache.add(key)
        self.computed(prompt, rank)
        return count

    def computed(self, prompt: Sequence[int], rank: int) -> None:
        """Note that a rank has this prompt. For subclasses."""


class _Job:
    """One generation: it is checked, and its KV is pulled or computed."""

    def __init__(
        self, engine: FakeVllm, body: dict[str, Any], chat: bool, given: str | None, rank: int
    ) -> None:
        self.engine, self.body, self.chat = engine, body, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{given or secrets.token_hex(8)}"
        self.engine_id, self.rank = engine.engine_ids[rank], rank
        self.prompt = engine._prompt(body)
        self.n = body.get("n") or 1
        asked = body.get("max_completion_tokens") if chat else None
        self.max_tokens = asked or body.get("max_tokens") or 16
        self.params: dict[str, Any] = body.get("kv_transfer_params") or {}
        self.kv, self.cached = b"", 0
        ids = [it for it in self.prompt if isinstance(it, int)]  # else it is a list of prompts
        own = [it for it in ids if it < _WORD]
        self.said = [it for it in ids if it >= _WORD]
        """Tokens of the answer that the prompt has already."""
        whole = sum(it < _HALF for it in self.said)
        self.left = spoken(own, whole + self.max_tokens)[whole:]
        self.torn = bool(self.said) and self.said[-1] >= _HALF
        """Whether the prompt ends within a character: vLLM then repeats the prompt's text."""
        self._judge()

    def _judge(self) -> None:
        body = self.body
        if body.get("model") not in (None, self.engine.model):
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        if self.max_tokens < 1:
            raise Refused(400, f"max_tokens must be at least 1, got {self.max_tokens}.")
        if body.get("stream_options") and not body.get("stream"):
            raise Refused(400, "Stream options can only be defined when `stream=True`.")
        if (body.get("min_tokens") or 0) > self.max_tokens:
            raise Refused(400, "min_tokens must be less than or equal to max_tokens")
        if len(self.prompt) + self.max_tokens > self.engine.max_len:
            raise Refused(400, f"maximum context length is {self.engine.max_len} tokens")

    async def transfer(self) -> None:
        """Pull KV if the parameters say so. KV that nobody has, or that is another prompt's, is
        wrong."""
        engine, params = self.engine, self.params
        self.cached = engine.cached(self.prompt, self.rank)
        await asyncio.sleep(engine.prompt_token_s * (len(self.prompt) - self.cached))
        if engine.connector == "sglang":
            rooms, ports = self.body["bootstrap_room"], self.body["bootstrap_port"]
            if self.n == 1:
                rooms, ports = [rooms], [ports]
            assert len(set(rooms)) == len(ports) == len(self.body["bootstrap_host"]) >= self.n or (
                self.n == 1
            )
            await asyncio.gather(*map(self._meet, rooms, ports))
        if engine.connector == "none" or not params.get("do_remote_prefill"):
            return
        remote, fabric = params.get("remote_engine_id"), engine.fabric
        if remote not in fabric.ready:
            raise Refused(500, "Internal server error")
        name = params.get("remote_request_id") or ""
        self.cached = params.get("remote_prefill_cached_tokens") or 0
        if engine.connector == "mooncake":
            name = params.get("transfer_id") or "unnamed"
            await fabric.wait(remote, name)
            self.cached = len(self.prompt)
        if fabric.pull(remote, name) != tuple(self.prompt):
            self.kv = b"somebody else's"

    async def _meet(self, room: int, port: int) -> None:
        """Meet the other half as by SGLang's default: the room's number selects the rank that
        prefills."""
        engine = self.engine
        ranks = engine.fabric.ranks[port]
        if port == engine.bootstrap_port:
            if self.rank != room % ranks:
                raise Refused(500, f"follow_bootstrap_room conflict: dispatched to {self.rank}")
            await engine.fabric.meet((room, self.rank))
            return
        told = self.body.get("disagg_prefill_dp_rank", room % ranks)
        await engine.fabric.meet((room, told))
        self.cached = 0

    def handed_over(self) -> dict[str, Any] | None:
        """The reply's parameters for a decode engine; the KV is ready for it from now on."""
        engine, params = self.engine, self.params
        if not params.get("do_remote_decode"):
            return None
        lost, engine.lost_handovers = engine.lost_handovers, max(0, engine.lost_handovers - 1)
        if lost and engine.connector == "mooncake":
            return None
        if engine.connector == "mooncake":
            if "transfer_id" in params:
                engine.fabric.put(self.engine_id, params["transfer_id"], self.prompt, _HANG_S)
            return None
        if engine.connector != "nixl":
            return None
        name = f"{self.id}-{'' if self.chat else '0-'}{secrets.token_hex(4)}"
        engine.fabric.put(self.engine_id, name, self.prompt, LEASE_S)
        renewed = {"remote_blocks_expiry_time": None} if engine.renews else {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 - (-len(self.prompt) // engine.block_size)))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(self.prompt),
            **renewed,
            "remote_prefill_cached_tokens": self.cached,
        }

    def words(self, choice: int) -> list[str]:
        """The words of one choice."""
        if self.said and not self.kv:
            return self.left[: self.max_tokens]
        return spoken(self.prompt, self.max_tokens, choice, self.kv)

    def tokens(self, choice: int) -> list[tuple[int, str]]:
        """The tokens of one choice, each with the text that it completes."""
        made: list[tuple[int, str]] = []
        for word in self.words(choice):
            number = _WORDS.index(word[1:])
            if self.engine.halves and len(made) < self.max_tokens:
                made.append((_HALF + number, ""))
            made.append((_WORD + number, word))
        if self.torn:
            made[0] = (made[0][0], "the whole prompt, once more")
        return made[: self.max_tokens]

    def events(self, choice: int) -> list[tuple[list[int], str, str | None, str | None]]:
        """The events of one choice: ids, text, finish_reason and stop_reason. As in vLLM, text
        that may begin a stop string is held back."""
        given = self.body.get("stop") or []
        stops = [given] if isinstance(given, str) else given
        hold = max(map(len, stops), default=1) - 1
        made: list[tuple[list[int], str, str | None, str | None]] = []
        tokens, size = self.tokens(choice), self.engine.together
        said, sent = "", 0
        for at in range(0, len(tokens), size):
            ids: list[int] = []
            finish: str | None = "length" if at + size >= len(tokens) else None
            met: str | None = None
            for number, text in tokens[at : at + size]:
                ids.append(number)
                said += text
                found = [(said.find(it) + len(it), it) for it in stops if it in said]
                if found:
                    end, met = min(found)
                    said, finish = said[: end - len(met)], "stop"
                    break
            until = len(said) if finish else max(sent, len(said) - hold)
            made.append((ids, said[sent:until], finish, met))
            sent = until
            if met is not None:
                break
        return made

    def usage(self, said: int | None = None) -> dict[str, Any]:
        """Usage as vLLM counts it; said: tokens so far, None: all."""
        said = self.max_tokens * self.n if said is None else said
        details = {"cached_tokens": self.cached, "created_cache_tokens": None}
        return {
            "prompt_tokens": len(self.prompt),
            "total_tokens": len(self.prompt) + said,
            "completion_tokens": said,
            "prompt_tokens_details": details if self.engine.prompt_details else None,
            "completion_tokens_details": None,
        }

    def head(self, kind: str) -> dict[str, Any]:
        """The fields with which every object of the reply begins."""
        created = int(time.time())
        return {"id": self.id, "object": kind, "created": created, "model": self.engine.model}

    def logprobs(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Logprobs, if the request asks for them."""
        if not self.body.get("logprobs"):
            return None
        if self.chat:
            return {"content": [{"token": word, "logprob": -0.5} for word in words]}
        return {"tokens": list(words), "token_logprobs": [-0.5] * len(words)}

    def message(self, text: str) -> dict[str, Any]:
        """A chat message. If a tool must be called, it calls the first."""
        tools = self.body.get("tools")
        if not tools or self.body.get("tool_choice") != "required":
            return {"role": "assistant", "content": text, "refusal": None}
        call = {"name": tools[0]["function"]["name"], "arguments": '{"usage": {"a": 1}}'}
        calls = [{"id": "call-1", "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    async def whole(self) -> dict[str, Any]:
        """The reply as one object."""
        choices = []
        for index in range(self.n):
            words = self.words(index)
            said = {"message": self.message("".join(words))} if self.chat else {}
            if not self.chat:
                said = {"text": "".join(words)}
            logprobs = self.logprobs(words)
            end = {"logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
            choices.append({"index": index, **said, **end})
        await asyncio.sleep(self.engine.token_s * self.max_tokens)
        reply = self.head("chat.completion" if self.chat else "text_completion")
        return {
            **reply,
            "choices": choices,
            "usage": self.usage(),
            "kv_transfer_params": self.handed_over(),
        }

    async def pieces(self, choice: int) -> AsyncIterator[str]:
        """The words as they are made, until the connection is cut."""
        for at, word in enumerate(self.words(choice)):
            await asyncio.sleep(self.engine.token_s)
            if self.engine.cut_after is not None and at >= self.engine.cut_after:
                raise ConnectionResetError("cut as told")
            yield word

    async def chunks(self) -> AsyncIterator[bytes]:
        """The reply as events. A streamed prefill hands no KV on, as in vLLM."""
        head = self.head("chat.completion.chunk" if self.chat else "text_completion")

        def event(**fields: Any) -> bytes:
            return b"data: %b\n\n" % msgspec.json.encode({**head, **fields})

        wants = bool(self.body.get("return_token_ids"))
        if self.chat:
            role = {"role": "assistant", "content": ""}
            ids = {"prompt_token_ids": self.prompt if wants else None}
            for i in range(self.n):
                yield event(choices=[{"index": i, "delta": role}], **ids)
        made = [self.events(index) for index in range(self.n)]
        told = 0
        for at in range(len(made[0])):
            for index in range(self.n):
                ids_now, word, finish, reason = made[index][at]
                await asyncio.sleep(self.engine.token_s)
                if self.engine.cut_after is not None and told >= self.engine.cut_after:
                    raise ConnectionResetError("cut as told")
                if self.engine.error_after is not None and told >= self.engine.error_after:
                    error = {"message": "EngineCore died", "type": "InternalServerError"}
                    yield b"data: %b\n\n" % msgspec.json.encode({"error": error})
                    yield b"data: [DONE]\n\n"
                    return
                aborts = self.engine.abort_after is not None and told >= self.engine.abort_after
                if aborts:
                    ids_now, finish, reason = [], "abort", None
                    word = " held back" if self.body.get("stop") else ""
                said: dict[str, Any] = {"delta": {"content": word}} if self.chat else {}
                if self.chat and self.engine.parsers and at == 0:
                    said = {"delta": {"reasoning": word}}
                said = said or {"text": word}
                end = {"logprobs": self.logprobs([word]), "finish_reason": finish}
                if finish or not self.chat:
                    end["stop_reason"] = reason
                if not self.chat:
                    end["prompt_token_ids"] = self.prompt if wants and at == 0 else None
                end["token_ids"] = ids_now if wants else None
                usage: dict[str, Any] = {}
                if (self.body.get("stream_options") or {}).get("continuous_usage_stats"):
                    usage = {"usage": self.usage(told + len(ids_now))}
                yield event(choices=[{"index": index, **said, **end}], **usage)
                if aborts:
                    yield b"data: [DONE]\n\n"
                    return
            told += len(made[0][at][0])
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield event(choices=[], usage=self.usage(told * self.n))
        yield b"data: [DONE]\n\n"


class _Stream:
    """A stream that counts as running until it is closed, and as aborted if that comes early."""

    def __init__(self, engine: FakeVllm, chunks: AsyncIterator[bytes]) -> None:
        self._engine, self._chunks, self._ended = engine, chunks, False

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            self._ended = True
            raise

    async def aclose(self) -> None:
        """The HTTP server calls it on every path."""
        self._engine.running -= 1
        self._engine.aborted += not self._ended
        with contextlib.suppress(RuntimeError):
            await self._chunks.aclose()  # type: ignore[attr-defined]


async def _serve(token_s: float) -> None:
    engine = await FakeVllm(token_s=token_s).start()
    print(engine.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":  # a process of its own, which prints its URL; argv: seconds for a token
    asyncio.run(_serve(float(sys.argv[1])))

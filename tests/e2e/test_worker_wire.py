"""Workers over their HTTP wire: a prefill and a decode worker in one process, fake engines.

What a router sees: vLLM's shapes, equal tokens whatever the store did, nothing left held.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from moonserve.core.kv.keys import chain_keys
from moonserve.core.schedule.cost import Cost
from moonserve.core.schedule.facts import Role
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import SegmentId
from moonserve.live.clock import LoopClock
from moonserve.live.engine.fake import FakeEngine, fake_cost
from moonserve.live.http.auth import bearer
from moonserve.live.http.client import ClientResponse, HttpClient, sse_events
from moonserve.live.ports import KVStore
from moonserve.live.process.worker import Worker
from moonserve.live.store.admin import ledgers
from moonserve.live.store.client import StoreClient, StoreSettings
from moonserve.live.store.server import MasterService
from moonserve.live.text.tokenizer import Tokenizer
from moonserve.live.text.vocab import vocabulary_of_gguf
from moonserve.live.worker.config import WorkerConfig
from tests.support.kvstore import DictStore

TOKEN = "secret"
BLOCK = 4
LEASE = "kv_transfer_params.lease"
ZEROS = {
    "running": 0,
    "waiting": 0,
    "streams": 0,
    "blocks_used": 0,
    "pending_puts": 0,
    "held_leases": 0,
    "ahead": 0,
}
FAST = fake_cost(0, 0, 0)


class Site:
    """Some workers around one store, and a client."""

    def __init__(self, store: KVStore | None, stack: AsyncExitStack) -> None:
        self.store = store
        """For the workers made from now on."""
        self.http = HttpClient()
        self._stack = stack

    async def worker(
        self,
        name: str,
        role: Role = "both",
        blocks: int = 256,
        cost: Cost = FAST,
        tokenizer: Tokenizer | None = None,
        words: range = range(1000, 8000),
    ) -> Worker:
        engine = FakeEngine(
            block_size=BLOCK, num_blocks=blocks, max_len=512, cost=cost, words=words
        )
        config = WorkerConfig(
            name=name, role=role, model="m", max_seqs=8, chunk_tokens=16, token=TOKEN
        )
        made = await Worker.start(config, engine, self.store, model="m", tokenizer=tokenizer)
        self.push(lambda: made.stop(1.0))
        return made

    def push(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call this at the end."""
        self._stack.push_async_callback(close)

    async def post(self, worker: Worker, id: str = "r", **body: Any) -> ClientResponse:
        return await self.http.request(
            "POST",
            f"{worker.info.url}/v1/completions",
            headers={"x-request-id": id} | bearer(TOKEN),
            body=json.dumps(body).encode(),
            timeout_s=20,
        )

    async def complete(self, worker: Worker, id: str = "r", **body: Any) -> dict[str, Any]:
        """A non-streamed completion that must succeed."""
        reply = await self.post(worker, id, return_token_ids=True, temperature=0, **body)
        assert reply.status == 200, reply.body
        parsed: dict[str, Any] = json.loads(reply.body)
        return parsed

    async def events(
        self, worker: Worker, id: str = "r", stop_after: int | None = None, **body: Any
    ) -> list[dict[str, Any]]:
        """A streamed completion's events; disconnects after `stop_after` of them."""
        body = {"return_token_ids": True, "temperature": 0, "stream": True, **body}
        got: list[dict[str, Any]] = []
        async with self.http.stream(
            "POST",
            f"{worker.info.url}/v1/completions",
            headers={"x-request-id": id} | bearer(TOKEN),
            body=json.dumps(body).encode(),
            timeout_s=20,
            idle_timeout_s=20,
        ) as reply:
            assert reply.status == 200, await reply.read()
            async for data in sse_events(reply):
                got.append(json.loads(data))
                if len(got) == stop_after:
                    break
        return got

    async def through(
        self, prefill: Worker, decode: Worker, prompt: list[int], new: int, id: str
    ) -> tuple[list[int], int]:
        """A request as a router sends it: prefill, then decode. Its tokens and cached_tokens."""
        first = await self.complete(
            prefill,
            id,
            prompt=prompt,
            max_tokens=1,
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        )
        events = await self.events(
            decode,
            id,
            prompt=prompt,
            max_tokens=new,
            ignore_eos=True,
            kv_transfer_params=first["kv_transfer_params"],
        )
        tokens = tokens_of(events)
        assert tokens[:1] == first["choices"][0]["token_ids"], "decode gives the first one again"
        return tokens, first["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def idle(self, *workers: Worker) -> None:
        """Wait until the ledgers are zero; fails with what is left."""
        for worker in workers:
            for _ in range(200):
                ledger = await self.get(worker, "/debug/ledger")
                if ledger == ZEROS:
                    break
                await asyncio.sleep(0.01)
            assert ledger == ZEROS

    async def get(self, worker: Worker, path: str) -> Any:
        reply = await self.http.request(
            "GET", worker.info.url + path, headers=bearer(TOKEN), timeout_s=5
        )
        assert reply.status == 200
        return json.loads(reply.body) if path != "/metrics" else reply.body.decode()


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    """All token ids of a stream."""
    return [t for e in events for c in e["choices"] for t in c["token_ids"]]


@asynccontextmanager
async def site(store: KVStore | None) -> AsyncIterator[Site]:
    """A site that is torn down after the test."""
    async with AsyncExitStack() as stack:
        made = Site(store, stack)
        stack.push_async_callback(made.http.close)
        yield made


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test, with a deadline."""
    asyncio.run(asyncio.wait_for(main, 60))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Some tokens; other seeds share no block."""
    return [(seed * 7919 + i * 104729) % 40000 for i in range(length)]


def reference(prompt: list[int], count: int) -> list[int]:
    """The tokens of greedy decoding on one engine."""
    return FakeEngine(block_size=BLOCK).reference(prompt, count)


@pytest.mark.parametrize("length", [1, 4, 37, 64])
def test_cold_warm_and_published_elsewhere(length: int) -> None:
    """Prefill then decode gives the reference cold, warm, and with another worker's blocks."""

    async def main() -> None:
        async with site(store := DictStore()) as it:
            p0, p1, d0 = [await it.worker(name) for name in ("p0", "p1", "d0")]
            prompt = prompt_of(length)
            reusable = (length - 1) // BLOCK * BLOCK
            expected = reference(prompt, 9)
            assert await it.through(p0, d0, prompt, 9, "cold") == (expected, 0)
            await it.idle(p0, d0)
            assert await it.through(p0, d0, prompt, 9, "warm") == (expected, reusable)
            assert await it.through(p1, d0, prompt, 9, "other") == (expected, reusable)
            await it.idle(p0, p1, d0)
            assert store.leases == []
            assert "kv_recomputed_tokens_total" in (page := await it.get(d0, "/metrics"))
            assert 'recomputed_tokens_total{engine="0",model_name="m"} 0.0' in page

    run(main())


def test_a_store_that_loses_everything_but_names() -> None:
    """Blocks lost between find and read, or evicted before, are computed again: equal tokens."""

    async def main() -> None:
        async with site(store := DictStore()) as it:
            p0, d0 = await it.worker("p0"), await it.worker("d0")
            prompt = prompt_of(30)
            count = 0

            def every_third(key: bytes) -> bool:
                nonlocal count
                count += 1
                return count % 3 == 0

            store.lost = every_third
            for turn in range(6):
                tokens, _ = await it.through(p0, d0, prompt, 9, f"r{turn}")
                assert tokens == reference(prompt, 9)
                if turn % 2:
                    store.data.clear()
            await it.idle(p0, d0)

    run(main())


def test_real_segments_with_room_for_a_fraction() -> None:
    """Over real segments that must evict and refuse, tokens are equal and no lease is left."""

    async def main() -> None:
        service = MasterService(Master(Terms(), 1), LoopClock().now_us)

        async def rpc(op: str, body: bytes, end_s: float) -> bytes:
            return service.handle(op, body)

        async with site(None) as it:
            workers = []
            for name in ("p0", "p1", "d0"):
                settings = StoreSettings(
                    segment=SegmentId(name), epoch=1, capacity_bytes=2 << 10, token=b"x" * 16
                )
                it.store = await StoreClient.open(rpc, settings)
                it.push(it.store.close)
                workers.append(await it.worker(name))
            p0, p1, d0 = workers
            prompts = [prompt_of(40 + i % 5, i % 8) for i in range(24)]
            got = await asyncio.gather(
                *(
                    it.through((p0, p1)[i % 2], d0, prompt, 9, f"r{i}")
                    for i, prompt in enumerate(prompts)
                )
            )
            for prompt, (tokens, _) in zip(prompts, got, strict=True):
                assert tokens == reference(prompt, 9)
            await it.idle(*workers)
            pool = ledgers(service.master)
            assert (pool["leases"], pool["pending_puts"]) == (0, 0)
            assert pool["evicted"] > 0, "the segments were too large to say anything"

    run(main())


def test_sixteen_at_once_half_of_them_leave() -> None:
    """Of 16 concurrent requests 8 disconnect: the others are right, and all ledgers are zero."""

    async def main() -> None:
        async with site(store := DictStore()) as it:
            cost = fake_cost(500, 5, 100)
            p0, d0 = await it.worker("p0", cost=cost), await it.worker("d0", cost=cost)
            prompts = [prompt_of(10 + 3 * i, i) for i in range(16)]

            async def leaver(i: int) -> None:
                first = await it.complete(
                    p0,
                    f"r{i}",
                    prompt=prompts[i],
                    max_tokens=1,
                    kv_transfer_params={"do_remote_decode": True},
                )
                got = await it.events(
                    d0,
                    f"r{i}",
                    stop_after=1 + i % 4,
                    prompt=prompts[i],
                    max_tokens=200,
                    kv_transfer_params=first["kv_transfer_params"],
                )
                assert len(got) == 1 + i % 4

            stayers = [
                asyncio.create_task(it.through(p0, d0, prompts[i], 40, f"r{i}"))
                for i in range(0, 16, 2)
            ]
            await asyncio.gather(*(leaver(i) for i in range(1, 16, 2)))
            for i, task in zip(range(0, 16, 2), stayers, strict=True):
                assert (await task)[0] == reference(prompts[i], 40)
            await it.idle(p0, d0)
            assert store.leases == []
            page = await it.get(d0, "/metrics")
            reasons = (
                'vllm:request_success_total{engine="0",finished_reason="%s",model_name="m"} 8.0'
            )
            assert reasons % "abort" in page
            assert reasons % "length" in page

    run(main())


def test_a_tiny_pool_preempts() -> None:
    """With blocks for barely one request, several at once still give equal tokens."""

    async def main() -> None:
        async with site(DictStore()) as it:
            d0 = await it.worker("d0", blocks=12)
            prompts = [prompt_of(9, i) for i in range(6)]
            replies = await asyncio.gather(
                *(it.complete(d0, f"r{i}", prompt=p, max_tokens=30) for i, p in enumerate(prompts))
            )
            for prompt, reply in zip(prompts, replies, strict=True):
                assert reply["choices"][0]["token_ids"] == reference(prompt, 30)
            preempted = 'vllm:num_preemptions_total{engine="0",model_name="m"} 0.0'
            assert preempted not in await it.get(d0, "/metrics")
            await it.idle(d0)

    run(main())


def test_a_disconnect_before_the_first_token() -> None:
    """A client that disconnects during a prefill frees all and releases the lease."""

    async def main() -> None:
        async with site(store := DictStore()) as it:
            p0 = await it.worker("p0", cost=fake_cost(100_000, 0, 0))
            await it.complete(p0, "warm", prompt=prompt_of(40), max_tokens=1)
            for stream in (False, True):
                task = asyncio.create_task(
                    it.post(
                        p0,
                        "x",
                        prompt=prompt_of(40) + prompt_of(40, 2 + stream),
                        max_tokens=1,
                        stream=stream,
                        kv_transfer_params={"do_remote_decode": True},
                    )
                )
                while not store.leases:
                    await asyncio.sleep(0.005)
                [lease] = store.leases
                assert lease.startswith("x/")
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await it.idle(p0)
                assert store.leases == []

    run(main())


def test_reply_shapes_are_vllms() -> None:
    """Whole and streamed replies carry vLLM's fields, usage and ids."""

    async def main() -> None:
        async with site(DictStore()) as it:
            p0 = await it.worker("p0", "prefill")
            prompt = prompt_of(10)
            whole = await it.complete(
                p0,
                "abc",
                prompt=prompt,
                max_tokens=1,
                kv_transfer_params={"do_remote_decode": True, "lease": "mine", "tp_size": 1},
            )
            port = p0.info.url.rpartition(":")[2]
            [token] = reference(prompt, 1)
            assert isinstance(whole.pop("created"), int)
            times = whole.pop("prefill_times")  # ours, beside vLLM's fields
            assert sorted(times) == ["compute_us", "load_us", "publish_us", "queue_us"]
            assert min(times.values()) >= 0
            assert whole == {
                "id": "cmpl-abc",
                "object": "text_completion",
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "text": "",
                        "logprobs": None,
                        "finish_reason": "length",
                        "stop_reason": None,
                        "token_ids": [token],
                        "prompt_token_ids": prompt,
                    }
                ],
                "usage": {
                    "prompt_tokens": 10,
                    "total_tokens": 11,
                    "completion_tokens": 1,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "connector": "moonserve",
                    "remote_engine_id": "p0",
                    "remote_host": "127.0.0.1",
                    "remote_port": int(port),
                    "remote_num_tokens": 10,
                    "first_token_id": token,
                    "lease": "mine",
                    "segment": None,  # this store has none
                },
            }
            events = await it.events(
                p0, prompt=prompt, max_tokens=3, stream_options={"include_usage": True}
            )
            assert [len(event["choices"]) for event in events] == [1, 1, 1, 0]
            assert tokens_of(events) == reference(prompt, 3)
            firsts = [event["choices"][0] for event in events[:3]]
            assert [choice["prompt_token_ids"] for choice in firsts] == [prompt, None, None]
            assert [choice["finish_reason"] for choice in firsts] == [None, None, "length"]
            assert events[3]["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
            assert events[3]["usage"]["completion_tokens"] == 3
            third = reference(prompt, 3)[2]
            stopped = await it.complete(p0, prompt=prompt, max_tokens=9, stop_token_ids=[third])
            choice = stopped["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
            assert len(choice["token_ids"]) == 3

    run(main())


def test_leases_that_the_worker_names_are_unique() -> None:
    """A router that names no lease, and sends one id twice, gets two leases."""

    async def main() -> None:
        async with site(store := DictStore()) as it:
            p0, p1 = await it.worker("p0"), await it.worker("p1")
            names = []
            for worker in (p0, p0, p1):
                params = {"do_remote_decode": True}
                reply = await it.complete(
                    worker, prompt=prompt_of(9), max_tokens=1, kv_transfer_params=params
                )
                names.append(reply["kv_transfer_params"]["lease"])
            assert len(set(names)) == 3
            assert store.leases == names

    run(main())


def test_a_caller_that_knows_the_prompt_gets_no_ids_of_it() -> None:
    """A gateway of ours says so. Others, with a connector too, get them as from vLLM."""

    async def main() -> None:
        async with site(DictStore()) as it:
            w0 = await it.worker("w0")
            prompt = prompt_of(9)
            routed: dict[str, Any] = {"kv_transfer_params": {}}
            known: dict[str, Any] = {**routed, "knows_prompt": True}
            for more, echo in (({}, prompt), (routed, prompt), (known, None)):
                whole = await it.complete(w0, prompt=prompt, max_tokens=2, **more)
                first, *_ = await it.events(w0, prompt=prompt, max_tokens=2, **more)
                for reply in (whole, first):
                    assert reply["choices"][0]["prompt_token_ids"] == echo
                    assert reply["choices"][0]["token_ids"]

    run(main())


@pytest.mark.parametrize("given", ["", "Bearer wrong", "secret", "Bearer secret2", "Bearer é"])
def test_a_worker_needs_the_token(given: str) -> None:
    """Without the cluster's token a worker answers /health and /metrics only."""

    async def main() -> None:
        async with site(DictStore()) as it:
            w0 = await it.worker("w0")
            body = json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode()
            url = f"{w0.info.url}/v1/completions"
            headers = {"authorization": given} if given else {}
            reply = await it.http.request("POST", url, headers=headers, body=body, timeout_s=5)
            assert reply.status == 401
            assert json.loads(reply.body)["error"]["param"] == "authorization"
            for path, status in (
                ("/health", 200),
                ("/metrics", 200),
                ("/debug/ledger", 401),
                ("/debug/stages", 401),
                ("/v1/models", 401),
            ):
                reply = await it.http.request(
                    "GET", w0.info.url + path, headers=headers, timeout_s=5
                )
                assert (path, reply.status) == (path, status)
            right = bearer(TOKEN)
            reply = await it.http.request("POST", url, headers=right, body=body, timeout_s=5)
            assert reply.status == 200

    run(main())


def test_a_worker_reports_its_longest_request() -> None:
    """Its longest request is the pool's size where that is below the context."""

    async def main() -> None:
        async with site(None) as it:
            small, large = await it.worker("s", blocks=12), await it.worker("l")
            assert (small.info.max_len, large.info.max_len) == (12 * BLOCK, 512)
            [card] = (await it.get(small, "/v1/models"))["data"]
            assert card["max_model_len"] == 12 * BLOCK
            reply = await it.complete(small, prompt=prompt_of(40), max_tokens=8)
            assert reply["usage"]["total_tokens"] == small.info.max_len
            assert small.info.max_requests == 8 + 256

    run(main())


def bytes_tokenizer() -> Tokenizer:
    """One token a byte, from id 3 on."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1],
    }
    return Tokenizer(vocabulary_of_gguf(metadata), (2,))


def test_text_and_stop_strings() -> None:
    """With a tokenizer, deltas join to the text, and a stop string ends and frees a request."""

    async def main() -> None:
        async with site(DictStore()) as it:
            letters = range(3 + ord("a"), 3 + ord("z") + 1)
            w0 = await it.worker("w0", tokenizer=bytes_tokenizer(), words=letters)
            prompt = bytes_tokenizer().encode("once upon a time")
            expected = FakeEngine(words=letters).reference(prompt, 40)
            text = "".join(chr(token - 3) for token in expected)
            whole = await it.complete(w0, prompt="once upon a time", max_tokens=40)
            assert whole["choices"][0]["text"] == text
            for stop, reason in ((text[10:13], "stop"), (text[30:35] + "?", "length")):
                cut = text.index(stop) if reason == "stop" else 40
                whole = await it.complete(w0, prompt=prompt, max_tokens=40, stop=["!", stop])
                events = await it.events(w0, prompt=prompt, max_tokens=40, stop=["!", stop])
                [choice] = whole["choices"]
                assert choice["text"] == text[:cut]
                assert "".join(e["choices"][0]["text"] for e in events) == text[:cut]
                for last in (choice, events[-1]["choices"][0]):
                    assert last["finish_reason"] == reason
                    assert last["stop_reason"] == (stop if reason == "stop" else None)
            await it.idle(w0)
            labels = '{engine="0",finished_reason="stop",model_name="m"}'
            assert f"vllm:request_success_total{labels} 2.0" in await it.get(w0, "/metrics")

    run(main())


def test_other_paths() -> None:
    """Health, models and metrics answer as vLLM's do."""

    async def main() -> None:
        async with site(None) as it:
            w0 = await it.worker("w0")
            assert (await it.get(w0, "/health"))["status"] == "ok"
            [card] = (await it.get(w0, "/v1/models"))["data"]
            assert (card["id"], card["max_model_len"]) == ("m", 512)
            await it.complete(w0, prompt=prompt_of(5), max_tokens=2)
            page = await it.get(w0, "/metrics")
            labels = '{engine="0",model_name="m"}'
            for line in (
                f"vllm:num_requests_running{labels} 0.0",
                f"vllm:num_requests_waiting{labels} 0.0",
                f"vllm:kv_cache_usage_perc{labels} 0.0",
                f"vllm:prompt_tokens_total{labels} 5.0",
                f"vllm:generation_tokens_total{labels} 2.0",
                f"vllm:prefix_cache_queries_total{labels} 5.0",
                f"vllm:external_prefix_cache_hits_total{labels} 0.0",
                f"vllm:time_to_first_token_seconds_count{labels} 1.0",
                f"vllm:inter_token_latency_seconds_count{labels} 1.0",
            ):
                assert line in page
            await it.idle(w0)

    run(main())


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": []}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "text"}, 400, "prompt"),
        ({"prompt": [1, True]}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [1, 49152]}, 400, "prompt"),
        ({"prompt": [[1], [2]]}, 400, "prompt"),
        ({"prompt": [1] * 512}, 400, "prompt"),
        ({"prompt": [1], "max_tokens": 512}, 400, "max_tokens"),
        ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [1], "max_tokens": "1"}, 400, "max_tokens"),
        ({"prompt": [1], "temperature": -1}, 400, "temperature"),
        ({"prompt": [1], "top_p": 0}, 400, "top_p"),
        ({"prompt": [1], "cache_salt": 5}, 400, "cache_salt"),
        ({"prompt": [1], "cache_salt": ""}, 400, "cache_salt"),
        ({"prompt": [1], "cache_salt": "x" * 1_025}, 400, "cache_salt"),
        ({"prompt": [1], "n": 2}, 400, "n"),
        ({"prompt": [1], "stop": "a"}, 400, "stop"),
        ({"prompt": [1], "model": "other"}, 404, "model"),
        ({"prompt": [1], "kv_transfer_params": {"lease": "x" * 257}}, 400, LEASE),
        ({"prompt": [1], "kv_transfer_params": {"do_remote_decode": True}}, 400, "max_tokens"),
        (
            {
                "prompt": [1],
                "max_tokens": 1,
                "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True},
            },
            400,
            "kv_transfer_params",
        ),
        (
            {
                "prompt": [1],
                "kv_transfer_params": {"do_remote_prefill": True, "first_token_id": 49152},
            },
            400,
            "kv_transfer_params",
        ),
    ],
)
def test_bad_requests_name_their_field(body: dict[str, Any], status: int, param: str) -> None:
    """A wrong request is refused at once, streamed or not, in OpenAI's error shape."""

    async def main() -> None:
        async with site(DictStore()) as it:
            w0 = await it.worker("w0")
            for stream in (False, True):
                reply = await it.post(w0, **body, stream=stream)
                error = json.loads(reply.body)["error"]
                assert (reply.status, error["param"]) == (status, param), error
                assert error["type"] == "invalid_request_error"
            assert await it.get(w0, "/debug/ledger") == ZEROS

    run(main())


def test_a_hint_prefetches_kv() -> None:
    """A hint waits for its decode call or a disconnect; bad tokens and bodies are refused."""

    async def main() -> None:
        async with site(DictStore()) as it:
            p0 = await it.worker("p0", "prefill")
            d0 = await it.worker("d0", "decode")
            prompt = prompt_of(30)
            keys = chain_keys(d0.info.namespace.root(), prompt, BLOCK)

            def hint(lease: str, body: bytes = b"", token: str = TOKEN) -> Any:
                return it.http.request(
                    "POST",
                    f"{d0.info.url}/internal/prefetch",
                    headers={"authorization": f"Bearer {token}"},
                    body=body or msgspec.msgpack.encode({"lease": lease, "keys": keys}),
                    timeout_s=20,
                )

            assert (await hint("x", token="wrong")).status == 401
            assert (await hint("x", b"\xc1")).status == 400
            short = msgspec.msgpack.encode({"lease": "x", "keys": [b"short"]})
            assert (await hint("x", short)).status == 400
            await it.complete(
                p0,
                prompt=prompt,
                max_tokens=1,
                kv_transfer_params={"do_remote_decode": True, "lease": "x"},
            )
            asked = asyncio.create_task(hint("x"))
            while (await it.get(d0, "/debug/ledger"))["blocks_used"] < 7:
                await asyncio.sleep(0.01)
            assert not asked.done()
            [stage] = await it.get(d0, "/debug/stages")
            assert (stage["what"], stage["lease"], stage["blocks"]) == ("ahead", "x", 7)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await it.idle(d0)

    run(main())

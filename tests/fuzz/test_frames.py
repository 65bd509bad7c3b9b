"""Frames and messages between processes: each is served, or refused by its declared error."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import typing
from typing import Any

import msgspec
from hypothesis import example
from hypothesis import strategies as st

from moonserve.core.errors import MoonserveError
from moonserve.core.kv.events import KvEvent, StoredEvent
from moonserve.core.kv.keys import Namespace
from moonserve.core.schedule.conductor import Conductor
from moonserve.core.schedule.facts import InstanceInfo, InstanceLoad
from moonserve.core.store.master import Master
from moonserve.core.store.words import Terms
from moonserve.core.units import InstanceId
from moonserve.live.control.join import Internal
from moonserve.live.control.loop import ConductorLoop
from moonserve.live.external.member import read_page
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.client import HttpClient
from moonserve.live.http.server import App, serve
from moonserve.live.kubernetes.objects import (
    BadAnswer,
    Condition,
    EndpointSlice,
    Expired,
    InferencePool,
    Known,
    Pod,
    PodStatus,
    PoolPort,
    PoolSpec,
)
from moonserve.live.kubernetes.sources import Source
from moonserve.live.kvevents.wire import BadFrame, encode_batch, read_live, read_replayed
from moonserve.live.registry.entries import ConductorEntry, MasterEntry, decoded
from moonserve.live.rpc.connection import CALL, DONE, FAILED, HEAD, HELLO, NOTICES, RpcConnection
from moonserve.live.rpc.joins import BeatBody, BlocksBody, LeaveBody
from moonserve.live.store.operations import OPERATIONS
from moonserve.live.store.server import MasterService
from moonserve.live.transfer import frames
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer
from tests.fuzz.cases import (
    HANG_S,
    Looped,
    damaged,
    fuzz,
    in_time,
    no_bug_logged,
    numbers,
    trees,
    words,
)

TOKEN = "secret"
PROTOCOL = "moonserve-fuzz/1"


def like(shape: Any) -> st.SearchStrategy[Any]:
    """Values that msgpack decodes as this type, and some that it does not."""
    wrong = trees
    return st.one_of(_like(shape), _like(shape), _like(shape), wrong)


def _like(shape: Any) -> st.SearchStrategy[Any]:
    """Plain values (maps, lists, numbers) of the shape of a struct or another type."""
    if isinstance(shape, typing.NewType):
        return _like(shape.__supertype__)
    origin = typing.get_origin(shape)
    inner = typing.get_args(shape)
    if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
        return _struct(shape)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin in (list, tuple, typing.Sequence) or str(origin).endswith("Sequence'>"):
        if origin is tuple and (not inner or inner[-1] is not ...):
            return st.tuples(*map(_like, inner)).map(list)
        return st.lists(_like(inner[0]), max_size=3)
    if origin is dict or str(origin).endswith("Mapping'>"):
        return st.dictionaries(_like(inner[0]), _like(inner[1]), max_size=2)
    if inner:  # a union, or Annotated
        return st.one_of(*(_like(it) for it in inner if it is not None))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 3)
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | numbers.filter(lambda it: -(1 << 63) <= it < 1 << 64),
        float: st.floats(),
        bool: st.booleans(),
        str: words.map(lambda it: it.encode("utf-8", "replace").decode()),
        bytes: st.sampled_from([b"", b"k", b"k" * 32]) | st.binary(max_size=9),
        type(None): st.none(),
    }
    return simple.get(shape, trees)


def _struct(shape: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = msgspec.structs.fields(shape)
    config = shape.__struct_config__
    parts = {it.encode_name: st.deferred(lambda kind=it.type: _like(kind)) for it in fields}
    if config.array_like:
        head = [st.just(config.tag)] if config.tag is not None else []
        return st.tuples(*head, *parts.values()).map(list)
    tag = {} if config.tag is None else {config.tag_field: st.just(config.tag)}
    needed = {it.encode_name: parts[it.encode_name] for it in fields if it.required}
    optional = {name: it for name, it in parts.items() if name not in needed}
    return st.fixed_dictionaries(tag | needed, optional=optional)


def packed(value: Any) -> bytes:
    """msgpack; numbers beyond 64 bits become text."""
    return msgspec.msgpack.encode(_small(value))


def _small(value: Any) -> Any:
    match value:
        case bool() | None | float() | bytes():
            return value
        case int():
            return value if -(1 << 63) <= value < 1 << 64 else str(value)
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_small(key): _small(it) for key, it in value.items()}
        case _:
            return [_small(it) for it in value]


def in_json(value: Any) -> bytes:
    """JSON; bytes become base64."""
    return msgspec.json.encode(_small(value))


INFO = InstanceInfo(
    id=InstanceId("p0"), epoch=1, role="prefill", url="http://127.0.0.1:1", model="m",
    namespace=Namespace("m", "r", "l", 16), kv_blocks=8, block_bytes=64, max_seqs=2,
    chunk_tokens=64, max_len=128,
)  # fmt: skip
GOOD_INFO = msgspec.to_builtins(INFO)
BODIES: dict[str, st.SearchStrategy[bytes]] = {
    "join": (
        like(InstanceInfo)
        | st.dictionaries(st.sampled_from(list(GOOD_INFO)), numbers | trees, max_size=2).map(
            lambda it: GOOD_INFO | it
        )
    ).map(packed)
    | damaged(msgspec.msgpack.encode(INFO)),
    "beat": (
        like(BeatBody)
        | _like(InstanceLoad).map(lambda load: {"id": "p0", "epoch": 1, "load": load})
    ).map(packed),
    "leave": like(LeaveBody).map(packed),
    "blocks": like(BlocksBody).map(packed),
}


def test_control() -> None:
    """/internal/*: a message is taken or refused by a 4xx, and the Conductor stays consistent."""
    client: HttpClient
    loop_: ConductorLoop
    url = ""

    async def opening() -> Any:
        nonlocal client, loop_, url
        loop_ = ConductorLoop(Conductor(), lambda lease: None)
        internal = Internal(loop_, ["m"])
        internal.admit(INFO)
        client = HttpClient()
        server = await serve(App(internal.routes()), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.port}/internal/"

        async def close() -> None:
            await client.close()
            await server.stop(0)

        return close

    with Looped(opening) as loop, no_bug_logged():

        @example(("join", b"\x81\xa2id\xa2\xff\xfe"))
        @example(("join", msgspec.msgpack.encode(GOOD_INFO | {"url": "http://["})))
        @example(("leave", b"\x91\xa2\xff\xfe"))
        @fuzz(
            st.sampled_from(list(BODIES)).flatmap(
                lambda op: st.tuples(st.just(op), BODIES[op] | st.binary(max_size=20))
            )
        )
        def check(case: tuple[str, bytes]) -> None:
            op, body = case
            reply = loop.run(client.request("POST", url + op, body=body, timeout_s=HANG_S))
            assert reply.status < 500, (case, reply)
            loop.run(asyncio.sleep(0))  # the Conductor's step
            loop_.core.view.check()

        check()


STORE = {name: like(it._decode_request.__self__.type) for name, it in OPERATIONS.items()}
CALLS = st.lists(
    st.sampled_from(list(STORE)).flatmap(
        lambda op: st.tuples(st.just(op), STORE[op].map(packed) | st.binary(max_size=12))
    ),
    min_size=1,
    max_size=6,
)


@example([("drain", b"\x91\xa2\xff\xfe")])
@fuzz(CALLS)
def test_store_operations(calls: list[tuple[str, bytes]]) -> None:
    """The store's master answers each call, or refuses it by an operating error."""
    now_us = 0
    service = MasterService(Master(Terms(), 1), lambda: now_us)
    with in_time(), no_bug_logged():
        for op, body in calls:
            now_us += 1_000
            with contextlib.suppress(MoonserveError):
                service.handle(op, body)
        service.reap()


class Word(msgspec.Struct, frozen=True, tag=True):
    """A notice."""

    text: str


class End(RpcConnection):
    """An accepting end that answers by echo."""

    def noticed(self, message: Word) -> None:
        """Ignore it."""


def rpc_frame(size: int | None, number: int, kind: int, body: bytes) -> bytes:
    """A frame; size None: the right one."""
    return HEAD.pack(len(body) if size is None else size, number, kind) + body


RPC_BODIES = (
    PROTOCOL.encode(), b"\x90", b"\x91\xa2\xff\xfe", msgspec.msgpack.encode([Word("a")])
)  # fmt: skip
FRAME = st.builds(
    rpc_frame,
    st.none() | st.integers(0, (1 << 32) - 1),
    st.integers(0, 3) | st.integers(0, (1 << 64) - 1),
    st.sampled_from([HELLO, NOTICES, DONE, FAILED, CALL | 1, CALL | 4, CALL]) | st.integers(0, 255),
    st.sampled_from(RPC_BODIES) | st.binary(max_size=12) | trees.map(packed),
)
GREETING = HEAD.pack(len(PROTOCOL), 0, HELLO) + PROTOCOL.encode()


def test_rpc_frames() -> None:
    """A peer's bytes are answered, or end its connection; no bug is met, and others are served."""
    port = 0

    async def opening() -> Any:
        nonlocal port
        server = await asyncio.get_running_loop().create_server(
            lambda: End(
                "peer", PROTOCOL, answer=lambda op, body: body, notices=Word, accepted=True
            ),
            "127.0.0.1",
            0,
        )
        port = server.sockets[0].getsockname()[1]

        async def close() -> None:
            server.close()

        return close

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            with contextlib.suppress(OSError):
                writer.write(data)
                writer.write_eof()
                return await reader.read()
            return b""
        finally:
            writer.transport.abort()

    with Looped(opening) as loop, no_bug_logged():

        @example(b"\x91\xa2\xff\xfe", [HEAD.pack(4, 0, NOTICES) + b"\x91\xa2\xff\xfe"])
        @fuzz(
            st.sampled_from([GREETING, b""]), st.lists(FRAME | st.binary(max_size=20), max_size=5)
        )
        def check(greeting: bytes, sent: list[bytes]) -> None:
            loop.run(send(greeting + b"".join(sent)))

        check()
        assert b"echo" in loop.run(send(GREETING + HEAD.pack(5, 1, CALL | 1) + b"xecho"))


EVENTS: st.SearchStrategy[Any] = like(typing.Any) | st.lists(
    st.floats() | numbers | st.none() | st.lists(_like(KvEvent) | trees, max_size=3), max_size=4
)
STORED = encode_batch(
    1.5, [StoredEvent([1, b"k" * 32], None, [1, 2, 3, 4], 2, extra_keys=[["salt"], None])], 0
)


@fuzz(
    st.lists(st.binary(max_size=9) | st.just(bytes(8)), max_size=3),
    EVENTS.map(packed) | damaged(STORED) | st.binary(max_size=20),
)
def test_kv_events(head: list[bytes], payload: bytes) -> None:
    """A message of an engine is a batch, or a BadFrame."""
    with in_time():
        for read in (read_live, read_replayed):
            for message in (
                [*head, payload],
                [b"", bytes(8), payload],
                [b"", b"t", bytes(8), payload],
            ):
                with contextlib.suppress(BadFrame):
                    read(message)


PAGE = (
    b"# TYPE vllm:num_requests_running gauge\n"
    b'vllm:num_requests_running{engine="0",model_name="m"} 3.0 1700000000.5\n'
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
)
LINES = st.lists(
    st.tuples(
        st.sampled_from(["vllm:num_requests_running", "sglang:num_queue_reqs", "#", ""]) | words,
        st.sampled_from(["", "{}", "{", '{a="', '{engine="1"}', '{engine="x"}']) | words,
        st.sampled_from(["NaN", "+Inf", "1e999", "-1", "9" * 5_000]) | words,
    ).map(" ".join),
    max_size=4,
).map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))


@fuzz(damaged(PAGE) | LINES | st.binary(max_size=40))
def test_metrics_of_engines(page: bytes) -> None:
    """An engine's metrics are read as far as they can be."""
    with in_time():
        read_page(page.decode("utf-8", "replace"))


OBJECT = st.sampled_from([Pod, EndpointSlice, InferencePool]).flatmap(like)
EVENT = st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "x"])
ENDPOINTS = b"""{"type": "ADDED", "object": {"metadata": {"name": "s", "labels": {"r": "decode"}},
 "addressType": "IPv6", "ports": [{"name": "http", "port": 8000}], "endpoints": [{"addresses":
 ["fd00::1"], "conditions": {"ready": true}, "targetRef": {"kind": "Pod", "name": "p0"}}]}}"""
POD = b"""{"type": "ADDED", "object": {"metadata": {"name": "p", "annotations":
 {"moonserve/dp_size": "2"}}, "status": {"podIP": "10.0.0.1", "conditions":
 [{"type": "Ready", "status": "True"}]}}}"""
SOURCE = Source(pool="p", role_label="r", each={"connector": "nixl"})
READY = (Condition("Ready", "True"),)
POOL = InferencePool(spec=PoolSpec(target_ports=(PoolPort(8000), PoolPort(8001))))


@fuzz(
    st.tuples(EVENT, OBJECT).map(lambda it: in_json({"type": it[0], "object": it[1]}))
    | damaged(ENDPOINTS)
    | damaged(POD)
    | st.lists(like(Pod), max_size=3).map(
        lambda items: in_json({"metadata": {"resourceVersion": "5"}, "items": items})
    )
    | st.binary(max_size=40)
)
def test_answers_of_kubernetes(answer: bytes) -> None:
    """An event or a page is taken in or refused; an object makes engines, or says why not."""
    slices, pods, pools = Known(EndpointSlice), Known(Pod), Known(InferencePool)
    with in_time():
        for known in (slices, pods, pools):
            for take in (known.line, known.page):
                with contextlib.suppress(BadAnswer, Expired):
                    take(answer)
        for one in slices.objects.values():
            SOURCE.of_slice(one)
        for pod in pods.objects.values():
            SOURCE.of_pod(pod, POOL)
        for pool in pools.objects.values():
            SOURCE.of_pod(Pod(status=PodStatus("10.0.0.1", READY)), pool)


@fuzz(
    st.sampled_from([InstanceInfo, ConductorEntry, MasterEntry, InstanceSpec]).flatmap(
        lambda shape: st.tuples(st.just(shape), like(shape).map(in_json) | st.binary(max_size=20))
    )
)
def test_registry_entries(entry: tuple[type, bytes]) -> None:
    """An entry of the registry is decoded, or left out."""
    shape, value = entry
    with in_time():
        found = decoded({"a/b": value}, "a/", shape)
    assert all(isinstance(it, shape) for it in found.values())


SLICES = st.lists(
    st.tuples(
        st.integers(0, 5_000) | st.integers(0, (1 << 64) - 1),
        st.integers(0, 300) | st.integers(0, (1 << 64) - 1),
    ),
    max_size=4,
)


def transfer_frame(op: int, count: int | None, slices: list[tuple[int, int]], more: bytes) -> bytes:
    """A request of a member, with its padding; count None: the right one."""
    count = len(slices) if count is None else count
    head = frames.HEADER.pack(op, count) + b"".join(frames.SLICE.pack(*it) for it in slices)
    return head + bytes(max(0, frames.request_bytes(min(count, 4)) - len(head))) + more


TRANSFERS = st.builds(
    transfer_frame,
    st.sampled_from([frames.READ, frames.WRITE]) | st.integers(0, 255),
    st.none() | st.integers(0, 65_535),
    SLICES,
    st.binary(max_size=64),
)
GUARD = b"\xa5"


def test_transfer_frames() -> None:
    """Strangers and members may send anything: no thread dies, and the server serves others."""
    memory = Region.create(4096)
    server = TransferServer(memory, TOKEN.encode(), idle_s=5, frame_s=5)
    try:
        with no_bug_logged():

            @fuzz(st.booleans(), st.lists(TRANSFERS | st.binary(max_size=70), max_size=3))
            def check(member: bool, sent: list[bytes]) -> None:
                with (
                    in_time(),
                    socket.create_connection(("127.0.0.1", server.port), HANG_S) as peer,
                ):
                    talk_to(server, peer, member, b"".join(sent))

            check()
            with socket.create_connection(("127.0.0.1", server.port), HANG_S) as peer:
                got = talk_to(server, peer, True, transfer_frame(frames.READ, None, [(0, 8)], b""))
            assert len(got) == frames.STATUS.size + 8
    finally:
        server.close()
        memory.close()


def talk_to(server: TransferServer, peer: socket.socket, member: bool, sent: bytes) -> bytes:
    """Prove the token or not, send, close our half, and read to the end."""
    nonce = peer.recv(len(frames.MAGIC) + frames.NONCE_BYTES, socket.MSG_WAITALL)[
        len(frames.MAGIC) :
    ]
    got = b""
    with contextlib.suppress(OSError):
        if member:
            identity = server.address("").identity
            peer.sendall(identity + frames.proof(TOKEN.encode(), nonce, identity))
            assert peer.recv(frames.WELCOME.size, socket.MSG_WAITALL)[0] == frames.OK
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        while piece := peer.recv(1 << 16):
            got += piece
    return got

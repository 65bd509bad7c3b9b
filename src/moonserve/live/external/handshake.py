"""The handshake: what an external engine is asked before it is used, and why it may be refused.

If an answer contradicts the description, the engine is refused (Mismatch: field, answer, remedy).
What only costs speed is a warning. Nothing is kept here; EngineMonitor repeats the handshake after
every loss. Which parts of SGLang were run against this code: docs/explanation/external-engines.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from moonserve.core.errors import UNREADABLE, BadRequest, EngineFailed
from moonserve.core.units import Tokens, whole_number
from moonserve.live.external.member import ASK_S, Member, Mismatch, Page
from moonserve.live.http.client import ClientResponse
from moonserve.live.text.tools import TextTools

_CONNECT_S = 1.0
_CANARY = "Grüße, 世界! 12345  +1\n\tdef f(x): return x"
_CHAT: list[dict[str, str]] = [{"role": "user", "content": _CANARY}]
_KV_TOKENS: Tokens = 1 << 20
_BLOCK_SIZE: Tokens = 16
_SMALL: Tokens = 8
"""Smaller blocks, SGLang's default among them, make a key for every token or few."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine reports of itself."""

    model: str
    max_len: Tokens
    block_size: Tokens
    kv_tokens: Tokens
    version: str
    started_s: float | None
    hash_algorithm: str
    """Hash algorithm of its prefix cache; empty: unknown."""
    events: bool
    """Whether its KV events can be followed."""
    warnings: tuple[str, ...]


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """The base model, of a LoRA adapter."""


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int] = []


async def handshake(member: Member, tools: TextTools | None) -> EngineFacts:
    """Ask everything. Raises Mismatch, or another MoonserveError if it does not answer (yet)."""
    spec, warnings = member.spec, list[str]()
    health = await member.ask("/health")
    if health.status != 200:
        raise EngineFailed(f"GET /health answered {health.status}")
    card = await _card(member)
    page = await _page(member, warnings)
    server = await _server(member, warnings)
    max_len = _max_len(member, card.max_model_len or server.context_length)
    block_size = _block_size(member, page, server, warnings)
    _check_ranks(member, page, server, warnings)
    if spec.engine == "sglang":
        _check_sglang(member, server, warnings)
    if member.bootstrap:
        await _check_bootstrap(member)
    if tools is not None:
        await _check_text(member, card.id, tools, warnings)
    algorithm = page.cache.get("prefix_caching_hash_algo", "")
    if spec.shared_store and not algorithm:
        warnings.append(
            "its hash algorithm is unknown: whether it can share a store was not checked"
        )
    events = await _listens(spec.events_of(0)) if spec.events == "auto" else spec.events != "off"
    if events and page.cache.get("enable_prefix_caching") == "False":
        warnings.append("its prefix cache is off: start it without --no-enable-prefix-caching")
    return EngineFacts(
        model=card.id,
        max_len=max_len,
        block_size=block_size,
        kv_tokens=_kv_tokens(member, page, server, block_size, warnings),
        version=server.version,
        started_s=page.started_s,
        hash_algorithm=algorithm,
        events=events and tools is not None,
        warnings=(*warnings, *_of_events(member, events, tools)),
    )


def _of_events(member: Member, events: bool, tools: TextTools | None) -> list[str]:
    spec = member.spec
    if spec.events == "off":
        return ["events: off: the gateway guesses what it holds from what was sent there"]
    if tools is None:
        return ["events need a tokenizer: name the model's files in tokenizer"]
    if not events:
        where = spec.events_of(0)
        return [
            f"events: {where} accepts no connection: start it with --kv-events-config, or set the "
            "address where it publishes; until then the gateway guesses what it holds"
        ]
    return [] if spec.replay else ["replay is not set: lost events make its blocks unknown"]


async def models(member: Member, timeout_s: float = ASK_S) -> ClientResponse:
    """Its list of models. Raises as Member.ask, and Mismatch if it refuses our key."""
    reply = await member.ask("/v1/models", timeout_s=timeout_s)
    if reply.status in (401, 403):
        remedy = "name the variable with its key in api_key_env"
        if member.headers:
            remedy = f"correct the key in {member.spec.api_key_env}, which api_key_env names"
        raise Mismatch(f"it answers {reply.status} to GET /v1/models; {remedy}", "api_key_env")
    return reply


async def _card(member: Member) -> _Card:
    reply = await models(member)
    if reply.status != 200:
        raise Mismatch(f"GET /v1/models answered {reply.status}; is this an OpenAI server?", "url")
    try:
        cards = msgspec.json.decode(reply.body, type=_Cards).data
    except UNREADABLE as error:
        raise Mismatch(f"GET /v1/models gave no list of models: {error}", "url") from None
    wanted = member.spec.model
    found = [card for card in cards if (card.id == wanted if wanted else card.parent is None)]
    if not found:
        served = ", ".join(card.id for card in cards) or "nothing"
        raise Mismatch(
            f"it serves {served}, not {wanted}: correct model, or start it with "
            f"--served-model-name {wanted}",
            "model",
        )
    return found[0]


async def _page(member: Member, warnings: list[str]) -> Page:
    try:
        page = await member.page()
    except EngineFailed:
        page = Page()
    if not page.ranks:
        remedy = ": start it with --enable-metrics" if member.spec.engine == "sglang" else ""
        warnings.append(f"/metrics has no load: work that others send there is not seen{remedy}")
    return page


async def _server(member: Member, warnings: list[str]) -> ServerInfo:
    """The engine's version; from SGLang, also its arguments, whose path has changed once."""
    of_sglang = member.spec.engine == "sglang"
    for path in ("/server_info", "/get_server_info") if of_sglang else ("/version",):
        reply = await member.ask(path)
        try:
            if reply.status == 200:
                return msgspec.json.decode(reply.body, type=ServerInfo)
        except UNREADABLE:
            pass
    if of_sglang:
        warnings.append(
            f"no server info of SGLang at /server_info or /get_server_info ({reply.status}): "
            "block_size, kv_tokens, role and bootstrap were not checked"
        )
    return ServerInfo()


def _max_len(member: Member, said: Tokens | None) -> Tokens:
    wanted = member.spec.max_len
    if said is None and wanted is None:
        raise Mismatch("its context length is unknown: set max_len", "max_len")
    if said is not None and wanted is not None and wanted > said:
        raise Mismatch(
            f"it takes {said} tokens, not {wanted}: correct max_len, or start it with "
            f"--max-model-len {wanted}",
            "max_len",
        )
    return wanted or said or 0


def _block_size(member: Member, page: Page, server: ServerInfo, warnings: list[str]) -> Tokens:
    wanted = member.spec.block_size
    flag = "--page-size" if member.spec.engine == "sglang" else "--block-size"
    labels = [page.cache.get(name, "") for name in ("hash_block_size", "block_size")]
    said = next(filter(None, map(whole_number, labels)), server.page_size)
    if said and wanted and said != wanted:
        raise Mismatch(
            f"its KV blocks have {said} tokens, not {wanted}: correct block_size, or start it "
            f"with {flag} {wanted}",
            "block_size",
        )
    if 0 < (said or wanted or _BLOCK_SIZE) < _SMALL:
        warnings.append(
            f"KV blocks of {said or wanted} tokens make the index slow and large: start it with "
            f"{flag} {_BLOCK_SIZE}"
        )
    if not said:
        taken = (
            f"{wanted}, as described, was not checked" if wanted else f"{_BLOCK_SIZE} is assumed"
        )
        warnings.append(f"its block_size is unknown: {taken}" + ("" if wanted else "; set it"))
    return said or wanted or _BLOCK_SIZE


def _kv_tokens(
    member: Member, page: Page, server: ServerInfo, block_size: Tokens, warnings: list[str]
) -> Tokens:
    if member.spec.kv_tokens:
        return member.spec.kv_tokens
    size = whole_number(page.cache.get("kv_cache_size_tokens", ""))
    blocks = whole_number(page.cache.get("num_gpu_blocks", ""))
    if size is not None:
        return size
    if blocks is not None:
        allocated = whole_number(page.cache.get("block_size", ""))
        return blocks * (allocated or block_size)  # keys may be of smaller blocks
    if not server.max_total_num_tokens:
        warnings.append(f"its KV memory is unknown: {_KV_TOKENS} tokens are assumed; set kv_tokens")
    return server.max_total_num_tokens or _KV_TOKENS


def _check_ranks(member: Member, page: Page, server: ServerInfo, warnings: list[str]) -> None:
    count, wanted = len(page.ranks), member.spec.dp_size
    if member.spec.engine == "sglang":  # its page may have one rank only
        count = server.dp_size or (count if count > 1 else 0)
    if not count and wanted > 1:
        warnings.append(f"its ranks are unknown: dp_size {wanted} was not checked")
    if count and count != wanted:
        raise Mismatch(
            f"it has {count} data-parallel ranks, not {wanted}: set it to {count}", "dp_size"
        )


async def _check_bootstrap(member: Member) -> None:
    if member.spec.connector == "sglang":
        return  # its decode side asks there, with a protocol of its own
    try:
        await member.requery()
        for rank in range(member.spec.dp_size):
            member.engine_id(rank)
    except EngineFailed as error:
        raise Mismatch(
            f"{error}; say where it listens (VLLM_MOONCAKE_BOOTSTRAP_PORT on the engine's host)",
            "bootstrap",
        ) from None


async def _check_text(member: Member, model: str, tools: TextTools, warnings: list[str]) -> None:
    """Check that the engine and our tokenizer make the same tokens of a text and of a chat."""
    text = {"model": model, "prompt": _CANARY, "add_special_tokens": True}
    theirs = await _tokenized(member, text)
    if theirs is None:
        warnings.append("it has no /tokenize: whether its tokenizer is ours was not checked")
        return
    if theirs != tools.encode(_CANARY, add_bos=True):
        raise Mismatch(
            f"it makes other tokens of the same text than {member.spec.tokenizer}: name the files "
            "of the model that it serves, or leave tokenizer out and set events: off",
            "tokenizer",
        )
    chat = {"model": model, "messages": _CHAT, "add_generation_prompt": True}
    theirs = await _tokenized(member, chat)
    try:
        ours = tools.encode(tools.render_chat(_CHAT), add_bos=False)
    except BadRequest:
        ours = None
    if theirs is not None and theirs != ours:
        warnings.append(
            f"its chat template is not that of {member.spec.tokenizer}: chats will not find their "
            "prefixes; start it with --chat-template, or name the files that it serves"
        )


async def _tokenized(member: Member, body: Mapping[str, Any]) -> Sequence[int] | None:
    reply = await member.ask("/tokenize", body)
    try:
        found = msgspec.json.decode(reply.body, type=_Tokens) if reply.status == 200 else None
    except UNREADABLE:
        found = None
    return None if found is None else found.tokens


async def _listens(endpoint: str) -> bool:
    """Whether this address accepts connections."""
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def beside(
    member: Member, found: EngineFacts, others: Sequence[tuple[Member, EngineFacts]]
) -> EngineFacts:
    """Compare an engine with the others of its model. Returns its facts, perhaps with warnings
    added. Raises Mismatch if they cannot serve together."""
    warnings = list(found.warnings)
    for other, theirs in others:
        mine, name = member.spec, other.spec.name
        if theirs.block_size != found.block_size:
            raise Mismatch(
                f"its KV blocks have {found.block_size} tokens, those of {name} "
                f"{theirs.block_size}: start all of {found.model} with one --block-size",
                "block_size",
            )
        if other.spec.tokenizer and mine.tokenizer not in ("", other.spec.tokenizer):
            raise Mismatch(
                f"is {mine.tokenizer}, that of {name} {other.spec.tokenizer}: name the same for "
                f"all of {found.model}",
                "tokenizer",
            )
        algorithms = [it for it in (found.hash_algorithm, theirs.hash_algorithm) if it]
        if mine.shared_store and other.spec.shared_store and len({*algorithms}) > 1:
            raise Mismatch(
                f"it names blocks by {algorithms[0]}, {name} by {algorithms[1]}, so they share no "
                "store: start both with one --prefix-caching-hash-algo",
                "shared_store",
            )
        if theirs.max_len != found.max_len:
            warnings.append(
                f"it takes {found.max_len} tokens, {name} {theirs.max_len}: the longer requests "
                "fail at the other; start all with one --max-model-len"
            )
    return msgspec.structs.replace(found, warnings=tuple(warnings))


class ServerInfo(msgspec.Struct):
    """The part of SGLang's /server_info that is read."""

    page_size: int | None = None
    max_total_num_tokens: int | None = None
    context_length: int | None = None
    version: str = ""
    dp_size: int | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    enable_cache_report: bool = True


def _check_sglang(member: Member, server: ServerInfo, warnings: list[str]) -> None:
    """Check that it was started in the role of its description. Raises Mismatch."""
    spec, mode = member.spec, server.disaggregation_mode
    if not server.enable_cache_report:
        warnings.append("replies do not say what was cached: start it with --enable-cache-report")
    if mode is None:
        return
    wanted = "null" if spec.role == "both" else spec.role
    if mode != wanted:
        role = "both" if mode == "null" else mode
        raise Mismatch(
            f"it runs with --disaggregation-mode {mode}, not {wanted}: set it to {role}, or start "
            "it so",
            "role",
        )
    port = server.disaggregation_bootstrap_port
    assumed = urlsplit(member.bootstrap).port
    if member.bootstrap and not spec.bootstrap and port not in (None, assumed):
        where = f"http://{urlsplit(member.url).hostname}:{port}"
        raise Mismatch(f"its bootstrap server is at port {port}: set it to {where}", "bootstrap")

"""Mooncake's Conductor Indexer API: /register, /unregister, /query, /query_by_hash.

The gateway process mounts it. It follows the KV events of every stream
that was registered, and answers how much of a prompt each instance has. It shares only the Follow
function with the Conductor's side; see docs/reference/indexer-api.md, and docs/adr/0019.

What never happens here: a decision of the Conductor changed by what was registered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from moonserve.core.errors import BadRequest, ConfigError, Conflict, Overloaded
from moonserve.core.kv.index import MAX_ENTRIES
from moonserve.core.kv.indexer import (
    SEED,
    BlockSource,
    Key,
    RollingIndexer,
    Space,
    TieredIndex,
    block_keys,
    mask,
    rolling,
    salted,
    token_keys,
)
from moonserve.core.units import SegmentId, Tokens
from moonserve.live.external.spec import check_tcp
from moonserve.live.http.message import HttpRequest, Response, decode_open, json_response
from moonserve.live.http.server import Handler
from moonserve.live.kvevents.follower import Feed, FeedCounts, Follow, Followers
from moonserve.live.kvevents.wire import EventAddress

MAX_STREAMS = 4_096
_U64 = (1 << 64) - 1

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
_BlockSize: TypeAlias = Annotated[Tokens, msgspec.Meta(ge=1, le=65_536)]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Seed: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class NotRegistered(BadRequest):
    """No stream is registered with this name, model, tenant or block size."""

    status = 404


class _SpaceFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The model, under any of its names on the wire, and the other fields of a space."""

    model: _Name | None = None
    model_name: _Name | None = None
    modelname: _Name | None = None
    tenant_id: _Text | None = None
    lora_name: _Text | None = None
    lora_id: int | None = None
    cache_salt: _Text | None = None
    additionalsalt: _Text | None = None

    def named(self, wire: str) -> str:
        """The model's name. Raises BadRequest, with the field `wire`, if it is missing."""
        found = self.model or self.model_name or self.modelname
        if found is None:
            raise BadRequest(f"{wire}: is missing", wire)
        if self.lora_id not in (None, -1):
            raise BadRequest(
                "lora_id: send lora_name instead; each engine numbers adapters in its own way",
                "lora_id",
            )
        return found

    @property
    def tenant(self) -> str:
        """The tenant, by default the standard's."""
        return self.tenant_id or "default"

    @property
    def salt(self) -> str:
        """One salt of both fields: that of a registration and that of requests count alike."""
        return salted(self.additionalsalt or "", self.cache_salt or "")

    @property
    def cover(self) -> int:
        """The mask of the keys that are asked for; see core.kv.indexer.mask."""
        return mask(self.lora_name or "", self.salt)


class Register(_SpaceFields, kw_only=True):
    """POST /register."""

    endpoint: _Text
    instance_id: _Name | int
    block_size: _BlockSize
    replay_endpoint: _Text | None = None
    type: Literal["vLLM", "SGLang", "Mooncake"] = "vLLM"
    topic: _Text = ""
    dp_rank: _Rank = 0
    seed: _Seed = SEED


class Unregister(_SpaceFields, kw_only=True):
    """POST /unregister."""

    instance_id: _Name | int
    dp_rank: _Rank | None = None


class Query(_SpaceFields, kw_only=True):
    """POST /query and /query_by_hash."""

    block_size: _BlockSize | None = None
    instance_id: _Name | int | None = None
    token_ids: list[int] | None = None
    seq_hashes: list[int] | None = None
    block_hash: list[int] | None = None
    """An older name of seq_hashes."""
    block_hashes: list[int] | None = None
    """Local hashes, as dynamo's indexer takes them."""


class Registered(msgspec.Struct, frozen=True):
    """One stream as it was registered. The same again changes nothing; another is a conflict."""

    endpoint: str
    replay_endpoint: str
    type: str
    topic: str
    modelname: str
    lora_name: str
    additionalsalt: str
    block_size: Tokens
    seed: int


_Key: TypeAlias = tuple[str, str, int]
"""(instance, tenant, rank): the standard's name of a stream."""


class _Registration(msgspec.Struct, eq=False):
    """One stream that is followed: its events go into its space."""

    key: _Key
    registered: Registered
    source: BlockSource
    space: Space
    tiered: TieredIndex
    indexer: RollingIndexer
    feed: Feed | None = None


class IndexerApi:
    """Handlers of the four paths, and of GET /services; `close` it."""

    def __init__(self, follow: Follow | None = None, max_blocks: int = MAX_ENTRIES) -> None:
        """`follow`: the process's own, if it also follows engines elsewhere; None: a new one.
        `max_blocks`: how many blocks the index of each space knows at most."""
        self._max_blocks = max_blocks
        self._follow = follow or Followers().follow
        self._registrations: dict[_Key, _Registration] = {}
        self._spaces: dict[Space, TieredIndex] = {}
        self._evicted = 0
        """Blocks that were forgotten in spaces that are gone."""
        self._numbers = count()

    def routes(self) -> dict[tuple[str, str], Handler]:
        """Exact paths."""
        return {
            ("POST", "/register"): self._register,
            ("POST", "/unregister"): self._unregister,
            ("POST", "/query"): self._query,
            ("POST", "/query_by_hash"): self._query_by_hash,
            ("GET", "/services"): self._services,
        }

    def metrics(self) -> Iterator[Metric]:
        """How many blocks the indexes of all spaces know, and how many they have forgotten."""
        spaces = self._spaces.values()
        yield GaugeMetricFamily(
            "moonserve_indexer_blocks",
            "Blocks that the Indexer API knows, each counted once for each stream and tier.",
            value=sum(space.entries for space in spaces),
        )
        yield CounterMetricFamily(
            "moonserve_indexer_evicted_blocks",
            "Blocks that the Indexer API forgot because the index of their space was full.",
            value=self._evicted + sum(space.evicted for space in spaces),
        )

    async def close(self) -> None:
        """Stop following all streams."""
        await asyncio.gather(*[self._drop(it) for it in list(self._registrations.values())])

    async def _register(self, request: HttpRequest) -> Response:
        asked = decode_open(await request.body(), Register)
        _check_address(asked.endpoint, "endpoint")
        if asked.replay_endpoint:
            _check_address(asked.replay_endpoint, "replay_endpoint")
        name = str(asked.instance_id)
        space = Space(asked.named("modelname"), asked.tenant, asked.block_size)
        new = Registered(
            asked.endpoint,
            asked.replay_endpoint or "",
            asked.type,
            asked.topic,
            space.model,
            asked.lora_name or "",
            asked.salt,
            asked.block_size,
            asked.seed,
        )
        key = (name, asked.tenant, asked.dp_rank)
        if key in self._registrations:
            _check_same(key, new, self._registrations[key].registered)
        else:
            await self._begin(key, new, space)
        return json_response({"status": "registered successfully", "instance_id": name})

    async def _begin(self, key: _Key, new: Registered, space: Space) -> None:
        if len(self._registrations) >= MAX_STREAMS:
            raise Overloaded(
                f"{len(self._registrations)} streams are registered, which is the limit",
                "streams",
                60.0,
            )
        instance, _, rank = key
        own = SegmentId(f"{instance} {rank} {next(self._numbers)}")
        source = BlockSource(own, instance, rank, shared=new.type == "Mooncake")
        made_for = TieredIndex(space.block_size, new.seed, self._max_blocks)
        tiered = self._spaces.setdefault(space, made_for)
        if tiered.seed != new.seed:
            what = f"other streams of this model, tenant and block size have {tiered.seed}"
            raise Conflict(f"seed: {what}", "seed")
        indexer = RollingIndexer(source, tiered, new.lora_name, new.additionalsalt)
        made = self._registrations[key] = _Registration(key, new, source, space, tiered, indexer)
        tiered.join(source)
        address = EventAddress(new.endpoint, new.replay_endpoint, new.topic)
        try:
            made.feed = await self._follow(address, made.indexer)
        except ConfigError as error:
            await self._drop(made)
            raise BadRequest(f"endpoint: {error}", "endpoint") from None
        if self._registrations.get(key) is not made:  # unregistered meanwhile
            await made.feed.close()

    async def _unregister(self, request: HttpRequest) -> Response:
        asked = decode_open(await request.body(), Unregister)
        name, rank = str(asked.instance_id), asked.dp_rank
        model = asked.model or asked.model_name or asked.modelname
        gone = [
            it
            for key, it in self._registrations.items()
            if key[:2] == (name, asked.tenant) and rank in (None, key[2])
            if model in (None, it.space.model)
        ]
        if not gone:
            what = f"{name!r} of tenant {asked.tenant!r} is not registered with these fields"
            raise NotRegistered(f"instance_id: {what}", "instance_id")
        await asyncio.gather(*[self._drop(it) for it in gone])
        names = ["{}|{}|{}".format(*it.key) for it in gone]
        return json_response({"status": "unregistered successfully", "removed_instances": names})

    async def _drop(self, made: _Registration) -> None:
        """Stop following a stream, and remove its blocks."""
        if self._registrations.get(made.key) is made:
            del self._registrations[made.key]
        if made.feed is not None:
            await made.feed.close()
        is_last = not made.tiered.leave(made.source)
        if is_last and self._spaces.get(made.space) is made.tiered:
            del self._spaces[made.space]
            self._evicted += made.tiered.evicted

    async def _query(self, request: HttpRequest) -> Response:
        asked = decode_open(await request.body(), Query)
        space, tiered = self._space(asked)
        if asked.token_ids is None:
            raise BadRequest("token_ids: is missing", "token_ids")
        try:
            keys = token_keys(asked.cover, asked.token_ids, tiered.block_size, tiered.seed)
        except OverflowError:
            raise BadRequest("token_ids: each must be from 0 to 2^32 - 1", "token_ids") from None
        return self._answer(asked, space, keys)

    async def _query_by_hash(self, request: HttpRequest) -> Response:
        asked = decode_open(await request.body(), Query)
        space, tiered = self._space(asked)
        rolled = asked.seq_hashes if asked.seq_hashes is not None else asked.block_hash
        field = "seq_hashes" if rolled is not None else "block_hashes"
        hashes = rolled if rolled is not None else asked.block_hashes
        if hashes is None:
            raise BadRequest("seq_hashes: is missing", "seq_hashes")
        low = min(hashes, default=0)
        high = max(hashes, default=0)
        if not -(1 << 63) <= low <= high <= _U64:
            raise BadRequest(f"{field}: each must be of 64 bits", field)
        if low < 0:
            hashes = [each & _U64 for each in hashes]
        if rolled is None:
            hashes = rolling(hashes, tiered.seed)
        return self._answer(asked, space, block_keys(asked.cover, hashes))

    def _answer(self, asked: Query, space: Space, keys: Sequence[Key]) -> Response:
        tiered = self._spaces[space]
        tiered.touch(keys)
        answer: dict[str, Any] = dict(tiered.instances)
        answer.update(tiered.hits(keys))
        if asked.instance_id is not None:
            name = str(asked.instance_id)
            if name not in answer:
                what = f"{name!r} is not registered with this model, block size and tenant"
                raise NotRegistered(f"instance_id: {what}", "instance_id")
            answer = {name: answer[name]}
        return json_response({space.tenant: answer})

    async def _services(self, request: HttpRequest) -> Response:
        rows = [_row(it) for it in self._registrations.values()]
        return json_response({"count": len(rows), "services": rows})

    def _space(self, asked: Query) -> tuple[Space, TieredIndex]:
        """The space that a query means. Raises BadRequest, NotRegistered."""
        model = asked.named("model")
        if asked.block_size is None:
            found = [it for it in self._spaces if (it.model, it.tenant) == (model, asked.tenant)]
            if len(found) > 1:
                sizes = ", ".join(str(it.block_size) for it in sorted(found))
                raise BadRequest(f"block_size: is needed, since there are {sizes}", "block_size")
            space = found[0] if found else None
        else:
            space = Space(model, asked.tenant, asked.block_size)
        if space is None or space not in self._spaces:
            raise self._unknown(model, asked)
        return space, self._spaces[space]

    def _unknown(self, model: str, asked: Query) -> NotRegistered:
        """The error for the first field of a query with which no stream is registered."""
        models = [it for it in self._spaces if it.model == model]
        if not models:
            return NotRegistered(f"model: no stream is registered with {model!r}", "model")
        if all(it.tenant != asked.tenant for it in models):
            what = f"no stream of model {model!r} is registered with {asked.tenant!r}"
            return NotRegistered(f"tenant_id: {what}", "tenant_id")
        what = f"no stream of model {model!r} is registered with {asked.block_size}"
        return NotRegistered(f"block_size: {what}", "block_size")


def _row(made: _Registration) -> dict[str, Any]:
    counts = FeedCounts() if made.feed is None else made.feed.counts()
    instance, tenant, rank = made.key
    return {
        "instance_id": instance,
        "tenant_id": tenant,
        "dp_rank": rank,
        **msgspec.structs.asdict(made.registered),
        "events": made.indexer.stats,
        "their_block_size": made.indexer.mismatch,
        "resets": counts.resets + counts.restarts,
        "connected": counts.connected,
    }


def _check_address(text: str, field: str) -> None:
    try:
        check_tcp(text, field)
    except ConfigError as error:
        raise BadRequest(str(error), field) from None


def _check_same(key: _Key, new: Registered, before: Registered) -> None:
    for field in Registered.__struct_fields__:
        mine = getattr(new, field)
        theirs = getattr(before, field)
        if mine != theirs:
            what = "{}|{}|{} is registered".format(*key)
            raise Conflict(f"{field}: {what} with {theirs!r}; unregister it first", field)

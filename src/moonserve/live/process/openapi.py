"""What /openapi.json says: every route of a gateway, a front or a Conductor, by what it serves.

live.process.about makes the document of its process. `OPERATIONS` describes each route once; the
schemas are those of the structs that the handlers decode and encode. A route is described only
where it is served. Nothing here serves a request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec

from moonserve import __version__
from moonserve.core.schedule.advice import Advice
from moonserve.core.schedule.facts import InstanceInfo
from moonserve.core.schedule.shown import ListedRequest
from moonserve.live.access.scopes import scope_of
from moonserve.live.api.front import ModelEntry, ModelList
from moonserve.live.control.advice import AdviceReply
from moonserve.live.control.drains import DrainStatus
from moonserve.live.control.history import HistoryAsked
from moonserve.live.control.placement_api import PlacementBody, ReleaseBody
from moonserve.live.control.standby import TermBody
from moonserve.live.control.views import DecisionsAsked, ExplanationReply
from moonserve.live.external.indexer_api import Query, Register, Unregister
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.http.message import JSON, ErrorReply
from moonserve.live.openai.headers import PRIORITY, TBT, TENANT, TTFT, Ms, Priority, Tenant
from moonserve.live.openai.messages import TokenCount
from moonserve.live.openai.reply import Reply
from moonserve.live.openai.request import BodyShape
from moonserve.live.openai.tokenizing import DetokenizeReply, TokenizeReply
from moonserve.live.process.profiles import ProfileAsked, ProfileReply
from moonserve.live.record.recent import RecentRows, RowsAsked
from moonserve.live.record.recorder import RecordingStatus
from moonserve.live.rpc.joins import CONTENT_TYPE, BeatBody, BlocksBody, LeaveBody
from moonserve.live.store.admin import SegmentsAsked

Route: TypeAlias = tuple[str, str]
"""A method, and a path with its parts that vary in braces."""
Document: TypeAlias = dict[str, Any]
_Schema: TypeAlias = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_HEX = "in hex"


class RouteText(msgspec.Struct, frozen=True):
    """What one route does."""

    summary: str
    takes: Any = None
    """The type of the body; None: there is none, or the process knows its shape."""
    gives: Any = None
    """The type of a JSON reply; None: see `kind`."""
    kind: str = JSON
    """The media type of the reply."""
    others: tuple[str, ...] = ()
    """Further media types that the reply may have."""
    of_body: str = JSON
    """The media type of the body."""
    query: Mapping[str, str] = {}
    """Parameters of the query, each with what it is."""
    asks: Any = None
    """The struct that the query is decoded as; None: `query` has text only."""
    headers: Mapping[str, tuple[Any, str]] = {}
    """Headers of the request, each with its type and what it is."""
    status: Literal[101, 200, 204] = 200


_OBJECTIVES = {
    TTFT: (Ms, "objective for the time to the first token, in milliseconds"),
    TBT: (Ms, "objective for the time between tokens, in milliseconds"),
    PRIORITY: (Priority, "higher ones go first; 0 by default"),
    TENANT: (Tenant, "tenants receive equal shares when capacity is short"),
    "x-request-id": (str, "the id of the request; without it the gateway makes one"),
}
_STREAMED = ("text/event-stream",)
_CLUSTER = "For processes of the cluster: "

OPERATIONS: Mapping[Route, RouteText] = {
    ("GET", "/"): RouteText(
        "What this process is, and where to go from here.",
        kind="text/html",
        others=(JSON, "text/plain"),
    ),
    ("GET", "/openapi.json"): RouteText("This document."),
    ("POST", "/v1/chat/completions"): RouteText(
        "OpenAI's chat completions; with `stream` as server-sent events.",
        gives=Reply,
        others=_STREAMED,
        headers=_OBJECTIVES,
    ),
    ("POST", "/v1/completions"): RouteText(
        "OpenAI's completions; with `stream` as server-sent events.",
        gives=Reply,
        others=_STREAMED,
        headers=_OBJECTIVES,
    ),
    ("POST", "/v1/responses"): RouteText(
        "OpenAI's Responses; with `stream` as server-sent events.",
        others=_STREAMED,
        headers=_OBJECTIVES,
    ),
    ("POST", "/v1/messages"): RouteText(
        "Anthropic's Messages; with `stream` as server-sent events.",
        others=_STREAMED,
        headers=_OBJECTIVES,
    ),
    ("POST", "/v1/messages/count_tokens"): RouteText(
        "How many tokens a prompt of Messages has.", gives=TokenCount
    ),
    ("POST", "/v1/embeddings"): RouteText(
        "OpenAI's embeddings, by external engines.", headers=_OBJECTIVES
    ),
    ("POST", "/v1/rerank"): RouteText(
        "Documents by their relevance to a query, by external engines.", headers=_OBJECTIVES
    ),
    ("POST", "/score"): RouteText("How alike texts are, by external engines.", headers=_OBJECTIVES),
    ("POST", "/tokenize"): RouteText("A prompt's token ids.", gives=TokenizeReply),
    ("POST", "/detokenize"): RouteText("The text of token ids.", gives=DetokenizeReply),
    ("GET", "/v1/models"): RouteText("The models that are served.", gives=ModelList),
    ("GET", "/v1/models/{model}"): RouteText("One model.", gives=ModelEntry),
    ("OPTIONS", "/v1/{path}"): RouteText(
        "What a web page of another site may send (CORS).", status=204
    ),
    ("GET", "/health"): RouteText("200 while the process lives, with the alarms about others."),
    ("GET", "/ready"): RouteText("200 when it can serve, else 503 with the reason."),
    ("GET", "/metrics"): RouteText("Metrics for Prometheus.", kind="text/plain"),
    ("GET", "/api/health"): RouteText("200 while the process lives."),
    ("GET", "/api/stats"): RouteText("The ledgers; all zero when nothing runs."),
    ("GET", "/api/instances"): RouteText("Every instance: load, promises, fitted costs."),
    ("POST", "/api/instances"): RouteText(
        "Add or change external engines.", takes=InstanceSpec | list[InstanceSpec]
    ),
    ("DELETE", "/api/instances/{name}"): RouteText("Remove an external engine."),
    ("GET", "/api/instances/{name}"): RouteText(
        "Whether an instance is drained, and what it still has.", gives=DrainStatus
    ),
    ("POST", "/api/instances/{name}/{order}"): RouteText(
        "drain: give an instance no new work, and move its blocks away. resume: use it again.",
        gives=DrainStatus,
    ),
    ("GET", "/api/decisions"): RouteText(
        "The latest requests, the latest first.",
        gives=list[ListedRequest],
        asks=DecisionsAsked,
        query={
            "limit": "at most so many",
            "outcome": "only those with this outcome",
            "tenant": "only those of this tenant",
            "instance": "only those that this instance prefilled or decoded",
            "late": "true: only those that missed their objectives",
        },
    ),
    ("GET", "/api/recording"): RouteText(
        "Whether requests are recorded, and where.", gives=RecordingStatus
    ),
    ("POST", "/api/recording"): RouteText("Record again.", gives=RecordingStatus),
    ("DELETE", "/api/recording"): RouteText("Record no more.", gives=RecordingStatus),
    ("GET", "/api/recording/rows"): RouteText(
        "The latest requests as rows of a recording, and those under way, for the twin.",
        gives=RecentRows,
        asks=RowsAsked,
        query={"after": "only rows after this number: `last` of the reply before"},
    ),
    ("GET", "/api/advice"): RouteText(
        "What the twin found last: which other cluster would have served the load better.",
        gives=AdviceReply,
    ),
    ("GET", "/api/decisions/{request}"): RouteText(
        "Why a request went where it went, and what came of it.", gives=ExplanationReply
    ),
    ("POST", "/start_profile"): RouteText(
        "Profile this process; with several fronts at one port, their Conductor.",
        gives=ProfileReply,
        asks=ProfileAsked,
        query={"seconds": "after how long it ends by itself"},
    ),
    ("POST", "/stop_profile"): RouteText("End the profile and write it.", gives=ProfileReply),
    ("GET", "/api/tenants"): RouteText("What each tenant used since this process started."),
    ("GET", "/api/targets"): RouteText("The metrics pages of all instances, for Prometheus."),
    ("GET", "/api/segments"): RouteText(
        "The store: its segments, one object, or a list of objects.",
        asks=SegmentsAsked,
        query={
            "key": f"an object, {_HEX}",
            "prefix": f"objects whose keys begin so, {_HEX}; may be empty",
            "after": f"with prefix: the last key of the list before, {_HEX}",
            "limit": "with prefix: most objects",
        },
    ),
    ("GET", "/ui"): RouteText("The page for operators.", kind="text/html"),
    ("GET", "/ui/{file}"): RouteText("A file of the page.", kind="text/javascript"),
    ("GET", "/api/history"): RouteText(
        "The last minute in a sentence, and samples and events of the last hours.",
        asks=HistoryAsked,
        query={
            "step": "seconds of a sample: 1 (a quarter of an hour) or 15 (four hours)",
            "since": "only what is later, in milliseconds since 1970",
            "heat": "true: also how full each instance was, and the pairs that worked together",
        },
    ),
    ("GET", "/api/prefixes"): RouteText(
        "Prefixes that requests asked for lately, as a tree, and who holds them now."
    ),
    ("GET", "/api/conductor"): RouteText("This Conductor's entry in the registry; its term."),
    ("POST", "/api/select"): RouteText("Where a request would be placed.", takes=PlacementBody),
    ("POST", "/api/reserve"): RouteText("Place a request of another router.", takes=PlacementBody),
    ("POST", "/api/release"): RouteText("The outcome of a reserved request.", takes=ReleaseBody),
    ("POST", "/register"): RouteText("Follow the KV events of an engine.", takes=Register),
    ("POST", "/unregister"): RouteText("Follow an engine no more.", takes=Unregister),
    ("POST", "/query"): RouteText("Who holds how much of these tokens.", takes=Query),
    ("POST", "/query_by_hash"): RouteText("Who holds how much of these blocks.", takes=Query),
    ("GET", "/services"): RouteText("The engines whose KV events are followed."),
    ("POST", "/internal/join"): RouteText(
        _CLUSTER + "a worker joins.", takes=InstanceInfo, of_body=CONTENT_TYPE, kind=CONTENT_TYPE
    ),
    ("POST", "/internal/beat"): RouteText(
        _CLUSTER + "a worker's heartbeat.", takes=BeatBody, of_body=CONTENT_TYPE, kind=CONTENT_TYPE
    ),
    ("POST", "/internal/leave"): RouteText(
        _CLUSTER + "a worker leaves.", takes=LeaveBody, of_body=CONTENT_TYPE, kind=CONTENT_TYPE
    ),
    ("POST", "/internal/blocks"): RouteText(
        _CLUSTER + "what a worker has put into Mooncake's pool.",
        takes=BlocksBody,
        of_body=CONTENT_TYPE,
        kind=CONTENT_TYPE,
    ),
    ("POST", "/internal/advice"): RouteText(_CLUSTER + "what the twin has found.", takes=Advice),
    ("GET", "/internal/store"): RouteText(
        _CLUSTER + "the connection of a member of the store.", status=101
    ),
    ("GET", "/internal/front"): RouteText(_CLUSTER + "the connection of a front.", status=101),
    ("GET", "/internal/standby"): RouteText(_CLUSTER + "the connection of a standby.", status=101),
    ("POST", "/internal/term"): RouteText(_CLUSTER + "a Conductor leads.", takes=TermBody),
    ("GET", "/internal/index"): RouteText(
        _CLUSTER + "the prefix index, for another Conductor.", kind="application/octet-stream"
    ),
}
"""What each route does, in the order of the document."""


def served(routes: Collection[Route], prefixes: Collection[Route]) -> list[Route]:
    """The entries of OPERATIONS that a process with these routes and path prefixes serves."""
    return [
        (method, path)
        for method, path in OPERATIONS
        if mounted(method, path) in (prefixes if "{" in path else routes)
    ]


def mounted(method: str, path: str) -> Route:
    """The route, or the path prefix, that serves this entry of OPERATIONS."""
    return method, path.partition("{")[0]


def document(process: str, routes: Collection[Route], shapes: Mapping[str, BodyShape]) -> Document:
    """The document of a process that serves these entries of OPERATIONS.

    process: its role; shapes: of the bodies that its backend takes, by path.
    """
    schemas = _Schemas([OPERATIONS[route] for route in routes], shapes.values())
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        body = schemas.of_shape(shapes[path]) if path in shapes else None
        described = _described(method, path, OPERATIONS[method, path], schemas, body)
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": f"moonserve {process}", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def joined(own: Document, other: Document) -> Document:
    """The document of a process that passes what it does not serve itself on to another one."""
    paths = {path: dict(operations) for path, operations in own["paths"].items()}
    for path, operations in other["paths"].items():
        paths[path] = operations | paths.get(path, {})
    components = {
        kind: other["components"].get(kind, {}) | named for kind, named in own["components"].items()
    }
    return own | {"paths": paths, "components": components}


class _Schemas:
    """The JSON schemas of all types that some operations use."""

    def __init__(self, operations: Collection[RouteText], shapes: Collection[BodyShape]) -> None:
        types = [ErrorReply, *(_plain(shape.struct) for shape in shapes)]
        for operation in operations:
            types += [it for it in (operation.takes, operation.gives) if it is not None]
        found, self.components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        self._of = list(zip(types, found, strict=True))

    def of(self, wanted: Any) -> _Schema:
        """The schema of a type."""
        found: list[_Schema] = [schema for kind, schema in self._of if kind == wanted]
        return found[0]

    def of_shape(self, shape: BodyShape) -> _Schema:
        """The schema of a body."""
        whole = self.components[self.of(_plain(shape.struct))["$ref"].rpartition("/")[2]]
        properties = {
            name: field for name, field in whole["properties"].items() if name not in shape.hidden
        }
        for name, values in shape.harmless.items():
            properties[name] = {"enum": [None, *values], "description": "accepted, not served"}
        return {**whole, "properties": properties}


@cache
def _plain(kind: Any) -> Any:
    """A type with fields of any JSON where its structs keep raw JSON, which has no schema."""
    if kind is msgspec.Raw:
        return Any
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields: list[Any] = [
            (it.encode_name, _plain(it.type), *([] if it.required else [None]))
            for it in msgspec.structs.fields(kind)
        ]
        named = kind.__name__.lstrip("_")
        return msgspec.defstruct(named, fields, namespace={"__doc__": kind.__doc__}, kw_only=True)
    if not (parts := get_args(kind)):
        return kind
    plain = tuple(map(_plain, parts))
    return Union[plain] if isinstance(kind, UnionType) else get_origin(kind)[plain]  # noqa: UP007


def _described(
    method: str, path: str, operation: RouteText, schemas: _Schemas, body: _Schema | None
) -> dict[str, Any]:
    """One operation of the document."""
    found: dict[str, Any] = {"summary": operation.summary, "operationId": _name(method, path)}
    if parameters := [*_parameters(path, operation)]:
        found["parameters"] = parameters
    if operation.takes is not None:
        body = schemas.of(operation.takes)
    if body is not None:
        content = {operation.of_body: {"schema": body}}
        found["requestBody"] = {"required": True, "content": content}
    if (scope := scope_of(path)) is not None:
        found["security"] = [{"bearer": []}, *([] if scope == "admin" else [{}])]
    good: dict[str, Any] = {"description": operation.summary}
    if operation.status == 200:
        schema = {} if operation.gives is None else {"schema": schemas.of(operation.gives)}
        others: dict[str, _Schema] = {kind: {} for kind in operation.others}
        good["content"] = {operation.kind: schema, **others}
    bad = {JSON: {"schema": schemas.of(ErrorReply)}}
    found["responses"] = {
        str(operation.status): good,
        "default": {"description": "It failed; the error says why.", "content": bad},
    }
    return found


def _parameters(path: str, operation: RouteText) -> Iterator[dict[str, Any]]:
    text = {"type": "string"}
    for name in re.findall(r"\{(\w+)\}", path):
        yield {"name": name, "in": "path", "required": True, "schema": text}
    schemas = {} if operation.asks is None else _fields(operation.asks)
    for name, what in operation.query.items():
        yield {"name": name, "in": "query", "description": what, "schema": schemas.get(name, text)}
    for name, (kind, what) in operation.headers.items():
        schema = msgspec.json.schema(kind)
        yield {"name": name, "in": "header", "description": what, "schema": schema}


def _fields(shape: type[msgspec.Struct]) -> Mapping[str, _Schema]:
    """The schema of each field of a struct that has plain fields only. A parameter of a query that
    may be left out is not null, as JSON would have it."""
    _, components = msgspec.json.schema_components([shape])
    fields: Mapping[str, _Schema] = components[shape.__name__]["properties"]
    return {
        name: next(it for it in field.get("anyOf", [field]) if it != {"type": "null"})
        for name, field in fields.items()
    }


def _name(method: str, path: str) -> str:
    words = re.findall(r"\w+", path) or ["root"]
    return "_".join([method.lower(), *words])

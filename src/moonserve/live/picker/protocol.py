"""The endpoint picker protocol for one request: a proxy's messages in, our replies out.

Proposal 004 (1.0.0) of the Gateway API Inference Extension, over Envoy's external processing
(`envoy.service.ext_proc.v3`). `server` has one PickerStream per request of a client. Nothing here
waits, sends or reads a clock, and nothing knows the Conductor.

The body of a request must come whole before an endpoint is picked. So the proxy sends bodies as
FULL_DUPLEX_STREAMED (it gets headers and body back together) or as BUFFERED (it gets the headers'
reply first, and the endpoint with the body's). Replies of engines may pass by (any mode of
response bodies) or not (NONE).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias
from urllib.parse import unquote

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from moonserve.core.errors import BadRequest, BodyTooLarge, MoonserveError
from moonserve.core.units import Bytes
from moonserve.live.http.message import error_response

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key in the metadata: the endpoints for the request, the first one first."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key in the metadata: the only endpoints that may be picked."""
SERVED = "x-gateway-destination-endpoint-served"
"""Key in the metadata of a reply: the endpoint that made it."""
PREFILLER = "x-prefiller-host-port"
"""Header: where the sidecar of a decode engine has the prompt prefilled."""
RANK = "x-data-parallel-rank"
"""Header: the data-parallel rank of an engine."""
NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_ADDRESS = "upstream.address"
"""Envoy's attribute: the endpoint that made a reply, if the proxy sends no SERVED."""
_OURS = (DESTINATION, PREFILLER, RANK)
"""Headers that no client may set."""
_CHUNK_BYTES: Bytes = 62_000
"""A body goes back in pieces of this size: proxies take less than 64 KiB at once."""
_WHOLE = (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED)
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class ProxiedHead(msgspec.Struct, frozen=True):
    """The headers of a request, as a proxy has received them."""

    headers: Mapping[str, str]
    """Lower-case names; those of HTTP/2 (":path") too."""

    @property
    def method(self) -> str:
        """In capitals."""
        return self.headers.get(":method", "")

    @property
    def path(self) -> str:
        """Percent-decoded, without the query."""
        return unquote(self.headers.get(":path", "").partition("?")[0])


class PickerMisconfigured(MoonserveError):
    """The proxy does not send what the protocol needs; its operator has to change that."""

    status = 500
    kind = "picker_error"


class Headed(msgspec.Struct, frozen=True):
    """The headers of a request have come, and a body will follow."""

    head: ProxiedHead


class PickAsked(msgspec.Struct, frozen=True):
    """A request is whole: pick an endpoint for it."""

    head: ProxiedHead
    body: bytes | None
    """None: it has none."""
    subset: tuple[str, ...] | None
    """The only endpoints that may be picked; None: all may."""


class Answered(msgspec.Struct, frozen=True):
    """The headers of a reply have come."""

    status: int
    served: str
    """The endpoint that made it; empty: the proxy does not say."""
    shown: bool
    """Whether the reply's body passes by here."""
    over: bool
    """Whether it has no body."""


class ReplyPiece(msgspec.Struct, frozen=True):
    """A piece of a reply has passed. over: the last one."""

    data: bytes
    over: bool


Event: TypeAlias = Headed | PickAsked | Answered | ReplyPiece


class Pick(msgspec.Struct, frozen=True):
    """Where a request goes, and with what."""

    endpoints: Sequence[str]
    """Of the form ip:port; those after the first are tried in order if it cannot be reached."""
    body: bytes | None
    """As the engine gets it; None: there is none."""
    changed: bool = False
    """Whether it differs from what the client sent."""
    headers: Mapping[str, str] = {}
    """Further headers for the engine."""
    removed: Sequence[str] = ()
    """Headers of the client that the engine does not get."""


class PickerStream:
    """One request of a client, from its headers to the last piece of its reply."""

    def __init__(self, most: Bytes) -> None:
        """most: the largest body of a request."""
        self._most = most
        self._began = False
        self._mode = ProcessingMode.FULL_DUPLEX_STREAMED
        self._shows = False
        """Whether replies' bodies pass by."""
        self._duplex_reply = False
        self._head = ProxiedHead({})
        self._subset: tuple[str, ...] | None = None
        self._body: list[bytes] = []
        self._size: Bytes = 0
        self._is_whole = False
        """Whether the request has come to its end."""
        self._has_body = False
        self._has_trailers = False

    def take(self, message: ProcessingRequest) -> tuple[list[ProcessingResponse], Event | None]:
        """Take one message; return what to answer at once, and what has happened.

        Raises BadRequest, BodyTooLarge: answer with `refused`. Raises PickerMisconfigured too.
        """
        match message.WhichOneof("request"):
            case "request_headers":
                return self._begin(message, message.request_headers)
            case "request_body":
                return self._more(message.request_body)
            case "request_trailers":
                self._has_trailers = True
                if self._is_whole or not self._began:  # the pick has been asked for already
                    return [ProcessingResponse(request_trailers=TrailersResponse())], None
                return [], self._whole()
            case "response_headers":
                return self._answered(message)
            case "response_body":
                return self._passed(message.response_body)
            case "response_trailers":
                reply = ProcessingResponse(response_trailers=TrailersResponse())
                return [reply], ReplyPiece(b"", True)
            case _:
                raise PickerMisconfigured("the proxy sent a message of an unknown kind")

    def _begin(
        self, message: ProcessingRequest, head: HttpHeaders
    ) -> tuple[list[ProcessingResponse], Event | None]:
        if self._began:
            raise PickerMisconfigured("the proxy sent the headers of a request twice")
        self._began = True
        self._head = ProxiedHead(read_headers(head.headers))
        self._subset = _subset(message)
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            reply_mode = message.protocol_config.response_body_mode
            self._shows = reply_mode != ProcessingMode.NONE
            self._duplex_reply = reply_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        if head.end_of_stream:
            return [], self._whole()
        if self._mode not in _WHOLE:
            name = ProcessingMode.BodySendMode.Name(self._mode)
            raise PickerMisconfigured(
                f"request_body_mode is {name} in the proxy's filter, so no body can be read; set it"
                " to FULL_DUPLEX_STREAMED"
            )
        self._has_body = True
        if self._mode == ProcessingMode.BUFFERED:
            go_on = ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))
            return [go_on], Headed(self._head)
        return [], Headed(self._head)

    def _more(self, piece: HttpBody) -> tuple[list[ProcessingResponse], Event | None]:
        if not self._began or self._is_whole:
            raise PickerMisconfigured("the proxy sent a body that belongs to no request")
        self._size += len(piece.body)
        if self._size > self._most:
            self._body.clear()
            raise BodyTooLarge(f"body is over the limit of {self._most} bytes")
        self._has_body = True
        self._body.append(piece.body)
        return [], self._whole() if piece.end_of_stream else None

    def _whole(self) -> PickAsked:
        self._is_whole = True
        body = b"".join(self._body) if self._has_body else None
        self._body.clear()
        return PickAsked(self._head, body, self._subset)

    def picked(self, pick: Pick) -> list[ProcessingResponse]:
        """The replies that send the request on to where it goes."""
        assert self._is_whole, "a pick answers a whole request"
        fields = {**pick.headers, DESTINATION: ",".join(pick.endpoints)}
        if pick.changed and pick.body is not None:
            fields["content-length"] = str(len(pick.body))
        mutation = _mutation(fields, (*_OURS, *pick.removed))
        common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
        told = _metadata({DESTINATION: fields[DESTINATION]})
        if self._has_body and self._mode == ProcessingMode.BUFFERED:
            if pick.changed:
                common.body_mutation.CopyFrom(BodyMutation(body=pick.body))
            answer = BodyResponse(response=common)
            return [ProcessingResponse(request_body=answer, dynamic_metadata=told)]
        head = HeadersResponse(response=common)
        replies = [ProcessingResponse(request_headers=head, dynamic_metadata=told)]
        if pick.body is not None:
            replies += [
                ProcessingResponse(request_body=piece)
                for piece in _pieces(pick.body, ends=not self._has_trailers)
            ]
        if self._has_trailers:
            replies.append(ProcessingResponse(request_trailers=TrailersResponse()))
        return replies

    def _answered(
        self, message: ProcessingRequest
    ) -> tuple[list[ProcessingResponse], Event | None]:
        head = message.response_headers
        status = read_headers(head.headers).get(":status", "")
        reply = ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse()))
        return [reply], Answered(
            int(status) if status.isdecimal() else 0,
            _served(message),
            self._shows,
            head.end_of_stream,
        )

    def _passed(self, piece: HttpBody) -> tuple[list[ProcessingResponse], Event | None]:
        """A piece of a reply passes on unchanged."""
        common = CommonResponse()
        if self._duplex_reply:
            common.body_mutation.CopyFrom(_streamed(piece.body, piece.end_of_stream))
        reply = ProcessingResponse(response_body=BodyResponse(response=common))
        return [reply], ReplyPiece(piece.body, piece.end_of_stream)


def refused(error: MoonserveError, path: str) -> ProcessingResponse:
    """The reply by which the proxy answers the client itself, in the shape of the path."""
    answer = error_response(error, path)
    fields = {"content-type": answer.content_type, **answer.headers}
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=answer.status),
            headers=HeaderMutation(set_headers=_options(fields)),
            body=answer.body,
            details=f"moonserve_{error.kind}",
        )
    )


def read_headers(found: HeaderMap) -> dict[str, str]:
    """The headers by lower-case name; repeated ones are joined by commas (RFC 9110, 5.3)."""
    headers: dict[str, str] = {}
    for one in found.headers:
        name = one.key.lower()
        value = one.value or one.raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _subset(message: ProcessingRequest) -> tuple[str, ...] | None:
    """The only endpoints that may be picked; None: all may. Raises BadRequest."""
    found = message.metadata_context.filter_metadata.get(_SUBSET_NAMESPACE)
    if found is None or SUBSET not in found.fields:
        return None
    value = found.fields[SUBSET]
    match value.WhichOneof("kind"):
        case "list_value":
            given = [it.string_value for it in value.list_value.values]
        case "string_value":
            given = value.string_value.split(",")
        case _:
            raise BadRequest(f"{SUBSET}: must be a list of endpoints such as 10.0.0.5:8000", SUBSET)
    return tuple(it.strip() for it in given if it.strip())


def _served(message: ProcessingRequest) -> str:
    """The endpoint that made a reply; empty: the proxy does not say."""
    found = message.metadata_context.filter_metadata.get(NAMESPACE)
    if found is not None and SERVED in found.fields:
        return str(found.fields[SERVED].string_value).strip()
    for attributes in message.attributes.values():
        if _ADDRESS in attributes.fields:
            return str(attributes.fields[_ADDRESS].string_value).strip()
    return ""


def _mutation(fields: Mapping[str, str], foreign: Sequence[str]) -> HeaderMutation:
    """Set these headers, and remove those of the client that the engine may not get from it."""
    foreign = [name for name in foreign if name not in fields]
    return HeaderMutation(set_headers=_options(fields), remove_headers=foreign)


def _options(fields: Mapping[str, str]) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode("latin-1")),
            append_action=_OVERWRITE,
        )
        for name, value in fields.items()
    ]


def _metadata(fields: Mapping[str, str]) -> Struct:
    told = Struct()
    told.update({NAMESPACE: dict(fields)})
    return told


def _pieces(body: bytes, ends: bool) -> list[BodyResponse]:
    """A body in pieces that proxies take. ends: whether nothing follows the last one."""
    starts = range(0, len(body), _CHUNK_BYTES) or range(1)
    return [
        BodyResponse(
            response=CommonResponse(
                body_mutation=_streamed(
                    body[start : start + _CHUNK_BYTES],
                    ends and start + _CHUNK_BYTES >= len(body),
                )
            )
        )
        for start in starts
    ]


def _streamed(body: bytes, ends: bool) -> BodyMutation:
    return BodyMutation(streamed_response=StreamedBodyResponse(body=body, end_of_stream=ends))

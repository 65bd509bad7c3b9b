"""The endpoint picker protocol without a network: messages in, replies out."""

from __future__ import annotations

import msgspec
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from moonserve.core.errors import BadRequest, BodyTooLarge, NobodyAlive, Overloaded
from moonserve.live.picker.protocol import (
    DESTINATION,
    PREFILLER,
    RANK,
    Answered,
    Headed,
    Pick,
    PickAsked,
    PickerMisconfigured,
    PickerStream,
    ProxiedHead,
    ReplyPiece,
    refused,
)
from tests.support.picker_proxy import (
    BUFFERED,
    DUPLEX,
    NONE,
    destinations,
    mutated,
    reply_body,
    reply_head,
    request_body,
    request_head,
    request_trailers,
)

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


HEAD = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}


def asked(stream: PickerStream, *messages: ProcessingRequest) -> PickAsked:
    """Take these; the last one makes the request whole, and none is answered."""
    event = None
    for message in messages:
        replies, event = stream.take(message)
        assert replies == []
    assert isinstance(event, PickAsked)
    return event


def body_of(replies: list[ProcessingResponse]) -> bytes:
    """The body that goes back to the proxy in pieces."""
    pieces = [it.request_body.response.body_mutation.streamed_response for it in replies]
    assert all(len(piece.body) < 64 << 10 for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return b"".join(piece.body for piece in pieces)


def test_a_body_comes_in_pieces_and_goes_back_in_pieces() -> None:
    """With FULL_DUPLEX_STREAMED nothing is answered before the body is whole; then the headers come
    first, with the endpoints, and the whole body follows."""
    stream = PickerStream(1 << 20)
    sent = bytes(range(256)) * 900
    pieces = [sent[at : at + 9_000] for at in range(0, len(sent), 9_000)]
    assert stream.take(request_head()) == (
        [],
        Headed(ProxiedHead(HEAD)),
    )
    for piece in pieces[:-1]:
        assert stream.take(request_body(piece, ends=False)) == ([], None)
    found = asked(stream, request_body(pieces[-1]))
    assert found.body == sent
    assert found.subset is None
    head, *back = stream.picked(Pick([A, B], sent))
    assert head.WhichOneof("response") == "request_headers"
    assert destinations(head) == [A, B]
    assert head.request_headers.response.clear_route_cache
    assert "content-length" not in mutated(head)
    assert body_of(back) == sent


def test_a_changed_body_has_its_own_length() -> None:
    """If the engine gets another body than the client sent, content-length says so."""
    stream = PickerStream(100)
    asked(stream, request_head({"content-length": "2"}), request_body(b"{}"))
    head, *back = stream.picked(Pick([A], b'{"a":1}', True))
    assert mutated(head)["content-length"] == "7"
    assert body_of(back) == b'{"a":1}'


def test_a_buffered_body_is_answered_with_the_pick() -> None:
    """With BUFFERED the headers are answered at once, and the body's answer has the endpoints."""
    stream = PickerStream(100)
    [go_on], event = stream.take(request_head(mode=BUFFERED))
    assert isinstance(event, Headed)
    assert go_on.WhichOneof("response") == "request_headers"
    assert not go_on.HasField("dynamic_metadata")
    assert asked(stream, request_body(b"{}")).body == b"{}"
    [reply] = stream.picked(Pick([A], b"{}"))
    assert destinations(reply) == [A]
    assert not reply.request_body.response.HasField("body_mutation")
    [reply] = stream.picked(Pick([A], b"[1]", True))
    assert reply.request_body.response.body_mutation.body == b"[1]"


def test_trailers_end_a_body_too() -> None:
    """A body that trailers follow is whole with them, and they are answered last."""
    stream = PickerStream(100)
    assert stream.take(request_head())[0] == []
    assert stream.take(request_body(b"{}", ends=False)) == ([], None)
    assert asked(stream, request_trailers()).body == b"{}"
    *_, piece, trailers = stream.picked(Pick([A], b"{}"))
    assert not piece.request_body.response.body_mutation.streamed_response.end_of_stream
    assert trailers.WhichOneof("response") == "request_trailers"


def test_a_request_without_a_body_is_whole_at_once() -> None:
    """Its headers are answered with the pick."""
    stream = PickerStream(100)
    found = asked(stream, request_head(path="/v1/models", method="GET", ends=True))
    assert found.body is None
    [reply] = stream.picked(Pick([A], None))
    assert destinations(reply) == [A]


def test_no_client_sets_the_headers_of_the_picker() -> None:
    """Headers by which engines are chosen are set or removed, whatever the client sent; they
    replace those of the client."""
    stream = PickerStream(100)
    asked(stream, request_head({PREFILLER: "evil:1", RANK: "7"}), request_body(b"{}"))
    head = stream.picked(Pick([A], b"{}", headers={RANK: "1"}))[0]
    mutation = head.request_headers.response.header_mutation
    assert list(mutation.remove_headers) == [PREFILLER]
    assert mutated(head) == {RANK: "1", DESTINATION: A}
    overwrite = 2
    assert {it.append_action for it in mutation.set_headers} == {overwrite}


@pytest.mark.parametrize(
    ("given", "read"),
    [([A, B], (A, B)), (f"{A}, {B}", (A, B)), ([], ()), ("", ())],
)
def test_the_proxy_may_name_the_endpoints_to_pick_from(
    given: list[str] | str, read: tuple[str, ...]
) -> None:
    """The subset hint is a list, or text with commas; an empty one allows none."""
    assert asked(PickerStream(100), request_head(subset=given), request_body(b"{}")).subset == read


def test_a_subset_that_is_no_list_is_refused() -> None:
    """The error names the key."""
    message = request_head(subset=[A])
    fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
    fields["x-gateway-destination-endpoint-subset"].number_value = 3
    with pytest.raises(BadRequest, match="x-gateway-destination-endpoint-subset: must be a list"):
        PickerStream(100).take(message)


def test_replies_pass_unchanged_and_are_noted() -> None:
    """The status, the endpoint that served, and each piece of a reply that passes by."""
    stream = PickerStream(100)
    asked(stream, request_head(reply_mode=DUPLEX), request_body(b"{}"))
    [go_on], event = stream.take(reply_head(200, served=B))
    assert go_on.WhichOneof("response") == "response_headers"
    assert event == Answered(200, B, True, False)
    [passed], event = stream.take(reply_body(b"data: 1\n\n", ends=True))
    assert event == ReplyPiece(b"data: 1\n\n", True)
    streamed = passed.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"data: 1\n\n", True)


def test_the_endpoint_that_served_may_come_as_an_attribute() -> None:
    """Envoy has no metadata of that name; it has the attribute upstream.address."""
    stream = PickerStream(100)
    asked(stream, request_head(), request_body(b"{}"))
    message = reply_head(503, ends=True)
    message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = A
    assert stream.take(message)[1] == Answered(503, A, False, True)


def test_a_body_over_the_limit_is_refused_before_its_end() -> None:
    """413 as soon as it is too large."""
    stream = PickerStream(10)
    stream.take(request_head())
    with pytest.raises(BodyTooLarge, match="over the limit of 10 bytes"):
        stream.take(request_body(b"x" * 11, ends=False))


@pytest.mark.parametrize("name", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
def test_a_filter_that_sends_no_whole_body_is_named(name: str) -> None:
    """The operator reads which setting of the proxy to change."""
    mode = {"NONE": NONE, "STREAMED": 1, "BUFFERED_PARTIAL": 3}[name]
    with pytest.raises(PickerMisconfigured, match=rf"request_body_mode is {name} .* set it to"):
        PickerStream(100).take(request_head(mode=mode))


def test_messages_out_of_order_are_refused() -> None:
    """A body without headers, headers twice, and an empty message."""
    with pytest.raises(PickerMisconfigured, match="belongs to no request"):
        PickerStream(100).take(request_body(b"{}"))
    stream = PickerStream(100)
    stream.take(request_head())
    with pytest.raises(PickerMisconfigured, match="twice"):
        stream.take(request_head())
    with pytest.raises(PickerMisconfigured, match="unknown kind"):
        stream.take(ProcessingRequest())


def test_a_refusal_is_answered_by_the_proxy_itself() -> None:
    """Status, headers and body are those that a gateway would send."""
    reply = refused(
        Overloaded("too many", "instances_full", 2.4), "/v1/completions"
    ).immediate_response
    assert reply.status.code == 429
    fields = {it.header.key: it.header.raw_value for it in reply.headers.set_headers}
    assert fields["retry-after"] == b"3"
    assert fields["content-type"] == b"application/json"
    assert fields["x-moonserve-reject-reason"] == b"instances_full"
    assert msgspec.json.decode(reply.body)["error"]["code"] == "instances_full"
    assert refused(NobodyAlive("none"), "/v1/completions").immediate_response.status.code == 503

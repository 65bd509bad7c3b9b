"""Objects of Kubernetes, as far as they are read here, and the state that a list and a watch make.

Reflector feeds `Known` with the bytes of the API server; sources.py makes engines of the objects.
Pure: nothing here opens a connection, waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from moonserve.core.errors import UNREADABLE, MoonserveError

MAX_OBJECTS = 4_096
"""Of one collection. Each has some hundred bytes here; a fleet has 1,024 engines at most."""


class Expired(MoonserveError):
    """The server no longer has the version from which a watch should go on: list again."""


class BadAnswer(MoonserveError):
    """The server's bytes are not what a list or a watch consists of."""


class TooMany(MoonserveError):
    """A collection has more objects than are kept."""


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of an object."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    """Set once its deletion has begun."""


class ApiObject(msgspec.Struct, frozen=True, rename="camel"):
    """An object of the API server."""

    metadata: Meta = Meta()


class Condition(msgspec.Struct, frozen=True):
    """One condition of a pod."""

    type: str = ""
    status: str = ""
    """True, False or Unknown."""


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The state of a pod."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[Condition, ...] | None = None


class Pod(ApiObject, frozen=True):
    """A pod."""

    status: PodStatus = PodStatus()

    @property
    def ready(self) -> bool:
        """Whether it takes new requests: it has an address, is ready, and is not being deleted."""
        if not self.status.pod_ip or self.metadata.deletion_timestamp:
            return False
        conditions = self.status.conditions or ()
        return any(it.type == "Ready" and it.status == "True" for it in conditions)


class EndpointConditions(msgspec.Struct, frozen=True):
    """The state of one endpoint; None: the server does not know, which counts as good."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """The object behind an endpoint."""

    kind: str = ""
    name: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One endpoint of a slice."""

    addresses: tuple[str, ...] = ()
    conditions: EndpointConditions = EndpointConditions()
    target_ref: TargetRef | None = None

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.conditions.ready is not False and not self.conditions.terminating


class SlicePort(msgspec.Struct, frozen=True):
    """One port of a slice's endpoints."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(ApiObject, frozen=True, rename="camel"):
    """Some of the endpoints of a Service, whose labels it has."""

    address_type: str = "IPv4"
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """Which pods belong to a pool: those that have all these labels."""

    match_labels: dict[str, str] = {}


class PoolPort(msgspec.Struct, frozen=True):
    """One port at which the pods of a pool serve."""

    number: int


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What an InferencePool describes."""

    selector: Selector = Selector()
    target_ports: tuple[PoolPort, ...] = ()


class InferencePool(ApiObject, frozen=True):
    """An InferencePool of the Gateway API Inference Extension, in version v1."""

    spec: PoolSpec = PoolSpec()


T = TypeVar("T", bound=ApiObject)


class ListMeta(msgspec.Struct, rename="camel"):
    """The metadata of one page of a list."""

    resource_version: str = ""
    more: str | None = msgspec.field(default=None, name="continue")
    """Asks for the next page; none: this is the last."""


class ListPage(msgspec.Struct, Generic[T]):
    """One page of a list."""

    metadata: ListMeta
    items: list[T] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class Status(msgspec.Struct):
    """Why the server did not do as asked."""

    code: int = 0
    message: str = ""


class Known(Generic[T]):
    """The objects of one collection, by name, and the version from which a watch goes on.

    `page` takes the pages of a list; the objects are replaced with the last. `line` takes a watch's
    lines. If either raises an error, the objects stay as they were, and the caller lists again.
    """

    def __init__(self, shape: type[T]) -> None:
        self.objects: dict[str, T] = {}
        self.version = ""
        """Empty: list first."""
        self._coming: dict[str, T] = {}
        """The objects of the pages so far."""
        page: Any = ListPage
        self._page = msgspec.json.Decoder(page[shape]).decode
        self._object = msgspec.json.Decoder(shape).decode

    def page(self, body: bytes) -> str:
        """Take in one page; return what asks for the next one, empty after the last. Raises
        BadAnswer, TooMany."""
        try:
            found: ListPage[T] = self._page(body)
        except UNREADABLE as error:
            raise BadAnswer(f"no list of objects: {error}") from None
        self._put(self._coming, found.items or ())
        if found.metadata.more:
            return found.metadata.more
        if not found.metadata.resource_version:
            raise BadAnswer("a list without a resourceVersion")
        self.objects = self._coming
        self._coming = {}
        self.version = found.metadata.resource_version
        return ""

    def begin(self) -> None:
        """A list begins, perhaps after one that was broken off."""
        self._coming = {}
        self.version = ""

    def line(self, line: bytes) -> bool:
        """Take in one event; return whether the objects changed. Raises Expired, BadAnswer,
        TooMany."""
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "BOOKMARK":
                mark = msgspec.json.decode(event.object, type=ApiObject)
                self.version = mark.metadata.resource_version
                return False
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=Status)
                raise (Expired if status.code == 410 else BadAnswer)(said(status))
            found = self._object(event.object)
        except UNREADABLE as error:
            raise BadAnswer(f"no event of a watch: {error}") from None
        if event.type == "DELETED":
            self.objects.pop(found.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._put(self.objects, (found,))
        else:
            raise BadAnswer(f"no event of a watch: its type is {event.type[:40]!r}")
        self.version = found.metadata.resource_version
        return True

    def _put(self, into: dict[str, T], found: Iterable[T]) -> None:
        for it in found:
            if it.metadata.name not in into and len(into) >= MAX_OBJECTS:
                raise TooMany(f"there are more than {MAX_OBJECTS} objects; select fewer")
            into[it.metadata.name] = it


def said(status: Status) -> str:
    """The words of a Status, for a log."""
    text = " ".join(status.message.split())[:200]
    return f"the API server answered {status.code}" + (f": {text}" if text else "")

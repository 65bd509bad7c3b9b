"""Sources: which objects of Kubernetes have external engines, and the engines that they describe.

An entry of the setting `kubernetes` is one source: a Service, whose EndpointSlices are read, or an
InferencePool, whose pods are read. An endpoint that is ready is an engine; one that is not ready,
or terminates, is none, so that it gets no new request. Pure: nothing here opens a connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.invalid import in_words
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.kubernetes.objects import EndpointSlice, InferencePool, Pod

PREFIX = "moonserve/"
"""How the names of our annotations and labels begin; the rest is a field of `instances`."""
_HOST = "HOST"
"""In an address of `each` or an annotation it stands for the address of the endpoint."""
_ADDRESSES = ("events", "replay", "bootstrap")
_OWN = ("name", "url")
_NAME_CHARACTERS = 63
_ROLES: Mapping[str, str] = {"prefill-decode": "both", "encode-prefill-decode": "both"}
"""Roles by the words of llm-d's label."""
_FAMILIES = {"IPv4": 0, "IPv6": 1, "FQDN": 2}
_PortNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the setting `kubernetes`. See `checked`."""

    service: str = ""
    """The name of a Service; its EndpointSlices are read."""
    pool: str = ""
    """The name of an InferencePool; the pods that it selects are read."""
    namespace: str = ""
    """Empty: that of the pod in which this process runs."""
    port: _PortNumber | str | None = None
    """Number or, with `service`, name of the port; None: the pool's ports, or the Service's
    first."""
    https: bool = False
    """Whether the engines speak TLS."""
    role_label: str = PREFIX + "role"
    """The label that says which role an engine has: of pods, or of the Service."""
    each: dict[str, object] = {}
    """Fields of `instances` that all engines of the source have."""

    def checked(self) -> Source:
        """The same. Raises ConfigError, with field and remedy."""
        if bool(self.service) == bool(self.pool):
            raise ConfigError(
                "name a Service with `service`, or an InferencePool with `pool`", "service"
            )
        for field in ("service", "pool", "namespace"):
            value = getattr(self, field)
            if value and not _is_name(value):
                raise ConfigError(f"{value[:80]!r} is no name of an object", field)
        if self.pool and isinstance(self.port, str):
            raise ConfigError("must be a number, since pods are read with `pool`", "port")
        for own in _OWN:
            if own in self.each:
                raise ConfigError("leave it out: Kubernetes has it", f"each.{own}")
        try:
            self._spec(_Place("sample", "10.0.0.1", 8000), {})
        except ConfigError as error:
            what = str(error).removeprefix(f"{error.field}: ")
            raise ConfigError(what, f"each.{error.field}") from None
        return self

    def of_slice(self, one: EndpointSlice) -> dict[str, Found]:
        """The engines of one slice of the Service, by name: one for each ready endpoint."""
        labels = one.metadata.labels or {}
        return {it.name: self._found(it, labels, {}) for it in _ready(one, self._slice_port(one))}

    def _slice_port(self, one: EndpointSlice) -> int | None:
        ports = [it for it in one.ports or () if it.port is not None]
        if isinstance(self.port, str):
            ports = [it for it in ports if it.name == self.port]
        elif self.port is not None:
            return self.port
        return ports[0].port if ports else None

    def of_pod(self, pod: Pod, pool: InferencePool) -> dict[str, Found]:
        """The engines of one pod of the pool, by name: one for each port if it is ready."""
        if not pod.ready:
            return {}
        meta = pod.metadata
        ports = [it.number for it in pool.spec.target_ports]
        if isinstance(self.port, int):
            ports = [self.port]
        found: dict[str, Found] = {}
        for port in ports:
            name = meta.name if len(ports) == 1 else f"{meta.name}.{port}"
            place = _Place(name, pod.status.pod_ip, port)
            found[name] = self._found(place, meta.labels or {}, meta.annotations or {})
        return found

    def _found(
        self, place: _Place, labels: Mapping[str, str], annotations: Mapping[str, str]
    ) -> Found:
        """The description of one engine. Raises nothing: what is wrong is said in the result."""
        own: dict[str, object] = {
            name.removeprefix(PREFIX): value
            for name, value in annotations.items()
            if name.startswith(PREFIX)
        }
        if role := labels.get(self.role_label):
            own["role"] = _ROLES.get(role, role)
        try:
            for field in _OWN:
                if field in own:
                    raise ConfigError("leave it out: Kubernetes has it", field)
            if "api_key_env" in own:
                InstanceSpec(name="", url="", api_key_env=str(own["api_key_env"])).untrusted()
            return self._spec(place, own)
        except ConfigError as error:
            what = str(error).removeprefix(f"{error.field}: ")
            if error.field in own:
                origin = f"label {self.role_label}" if error.field == "role" else ""
                origin = origin or f"annotation {PREFIX}{error.field}"
                return Unusable(origin, what)
            return Unusable(error.field, what)

    def _spec(self, place: _Place, own: Mapping[str, object]) -> InstanceSpec:
        """Raises ConfigError, which names the field."""
        host = f"[{place.host}]" if ":" in place.host else place.host
        scheme = "https" if self.https else "http"
        given: dict[str, Any] = {**self.each, **own}
        fields = dict(given)
        for field in _ADDRESSES:
            if isinstance(given.get(field), str):
                fields[field] = given[field].replace(_HOST, host, 1)
        if fields.get("events") is False:  # YAML reads off as False
            fields["events"] = "off"
        fields["name"] = place.name
        fields["url"] = f"{scheme}://{host}:{place.port}"
        try:
            return msgspec.convert(fields, InstanceSpec, strict=False).checked()
        except msgspec.ValidationError as error:
            field, what = in_words(error, InstanceSpec)
            raise ConfigError(what, field) from None
        except ConfigError as error:
            if fields.get(error.field) == given.get(error.field):
                raise
            what = str(error).removeprefix(f"{error.field}: ").replace(host, _HOST)
            raise ConfigError(what, error.field) from None


class Unusable(msgspec.Struct, frozen=True):
    """An endpoint whose description is wrong."""

    field: str
    why: str


Found: TypeAlias = InstanceSpec | Unusable


class _Place(msgspec.Struct, frozen=True):
    """Where one engine is."""

    name: str
    host: str
    port: int


def _ready(one: EndpointSlice, port: int | None) -> Iterator[_Place]:
    for it in one.endpoints or ():
        if port is not None and it.ready and it.addresses:
            host = it.addresses[0]
            ref = it.target_ref
            is_pod = ref is not None and ref.kind == "Pod"
            name = ref.name if ref is not None and is_pod else host.replace(":", "-").strip("-")
            yield _Place(name, host, port)


def by_family(one: EndpointSlice) -> tuple[int, str]:
    """Sorts slices: if a Service has two addresses of one endpoint, that of the first counts."""
    return _FAMILIES.get(one.address_type, len(_FAMILIES)), one.metadata.name


def _is_name(text: str) -> bool:
    """Whether an object may have this name, so that it is safe in a path."""
    plain = text.replace("-", "").replace(".", "")
    long = 4 * _NAME_CHARACTERS + 1
    return plain.isascii() and plain.isalnum() and text == text.lower() and len(text) <= long

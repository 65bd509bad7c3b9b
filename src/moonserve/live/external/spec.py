"""InstanceSpec: the description of one external engine (vLLM, SGLang), its address and its role.

The cluster file, flags, HTTP and the registry all have the same struct. The handshake asks the
engine for the rest. Nothing here opens a connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.schedule.facts import Role
from moonserve.core.units import MAX_BYTES, InstanceId
from moonserve.invalid import without_password

Handover: TypeAlias = Literal["none", "nixl", "mooncake", "sglang"]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
_Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BOOTSTRAP_PORT = {"mooncake": 8998, "sglang": 8998}
_EVENTS_PORT = 5557
_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65_535
_KEYS = "MOONSERVE_KEY_"


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: an address with `dp_size` instances behind it. See `checked`."""

    name: str
    """Unique in the cluster; its instances are NAME, or NAME/dp0, NAME/dp1, …"""
    url: str
    """Base URL of its OpenAI-compatible server, such as http://10.0.0.5:8000."""
    engine: Literal["vllm", "sglang"] = "vllm"
    role: Role = "both"
    connector: Handover = "none"
    """How KV moves from a prefill to a decode instance; none: it serves whole requests."""
    model: str = ""
    """The name under which the engine serves it; empty: the only one that it serves."""
    tokenizer: str = ""
    """Model files (name, folder or .gguf) of its tokenizer; needed to follow its KV events."""
    block_size: _Count | None = None
    """Tokens per KV block; None: as the engine says."""
    rack: str = ""
    bootstrap: str = ""
    """URL of Mooncake's or SGLang's bootstrap server; empty: the engine's host, port 8998."""
    dp_size: _Ranks = 1
    """Data-parallel ranks behind the address; rank N publishes its events on the port N higher."""
    events: str = "auto"
    """Where rank 0 publishes KV events, such as tcp://10.0.0.5:5557; off: events are not followed;
    auto: at port 5557 of its host, if that accepts connections."""
    replay: str = ""
    """Where rank 0 replays them; empty: nowhere."""
    topic: str = ""
    """The topic of its events; empty: all."""
    events_curve: bool = False
    """Whether its events are encrypted by CURVE, as those of our workers may be."""
    api_key_env: str = ""
    """Environment variable that holds the engine's API key; empty: it needs none."""
    max_seqs: _Count | None = None
    """Requests in one pass; None: 256."""
    chunk_tokens: _Count | None = None
    """The most prompt tokens in one pass; None: 8,192."""
    kv_tokens: _Count | None = None
    """Tokens of KV that fit; None: as the engine reports."""
    max_len: _Count | None = None
    """Prompt and output together; None: as the engine says."""
    shared_store: bool = False
    """Whether its prefill also loads KV from a store that engines share (Mooncake Store)."""

    def checked(self) -> InstanceSpec:
        """The same. Raises ConfigError, with field and remedy, if fields contradict each other."""
        if not _NAME.fullmatch(self.name):
            remedy = "use 1 to 64 letters, digits, dots, dashes and underscores, "
            remedy += "beginning with a letter or digit"
            raise ConfigError(f"{self.name!r} is not a valid name; {remedy}", "name")
        _http(self.url, "url")
        if self.url.rstrip("/").endswith("/v1"):
            raise ConfigError(f"{self.url!r} ends with /v1; leave that out", "url")
        if self.bootstrap:
            _http(self.bootstrap, "bootstrap")
        if self.role != "both" and self.connector == "none":
            remedy = "set connector to nixl or mooncake (sglang: sglang), or role to both"
            raise ConfigError(f"role {self.role} needs a way to move KV; {remedy}", "connector")
        if (self.engine == "sglang") != (self.connector == "sglang") and self.connector != "none":
            remedy = f"with engine: {self.engine} use " + (
                "sglang or none" if self.engine == "sglang" else "nixl, mooncake or none"
            )
            raise ConfigError(
                f"{self.engine} does not have {self.connector}; {remedy}", "connector"
            )
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):
            remedy = "name the environment variable that holds the key, never the key itself"
            raise ConfigError(f"is not the name of a variable; {remedy}", "api_key_env")
        if self.events not in ("auto", "off"):
            check_tcp(self.events, "events", self.dp_size)
        if self.replay:
            check_tcp(self.replay, "replay", self.dp_size)
            if self.events == "off":
                raise ConfigError("leave it out with events: off", "replay")
        if self.events not in ("auto", "off") and not self.tokenizer:
            remedy = "name the model's files (catalog name, folder or .gguf), or set events: off"
            raise ConfigError(f"is needed to read KV events; {remedy}", "tokenizer")
        return self

    def untrusted(self) -> InstanceSpec:
        """The same, for a description that does not come from the gateway's operator.

        Raises ConfigError if it names an environment variable that is not an engine's key: the
        gateway would send its value to the described URL.
        """
        if self.api_key_env and not self.api_key_env.startswith(_KEYS):
            remedy = f"name one that begins with {_KEYS}, or describe it in the cluster file"
            raise ConfigError(
                f"{self.api_key_env} may not be sent to an engine; {remedy}", "api_key_env"
            )
        return self

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the engine's name into the field of a ConfigError that is raised here."""
        try:
            yield
        except ConfigError as error:
            what = str(error).removeprefix(f"{error.field}: ")
            raise ConfigError(what, f"{self.name}.{error.field}") from None

    def place(self) -> str:
        """Its URL in one spelling; see `normal`."""
        return normal(self.url)

    def ids(self) -> list[InstanceId]:
        """Its instances, one per data-parallel rank, in the order of ranks."""
        if self.dp_size == 1:
            return [InstanceId(self.name)]
        return [InstanceId(f"{self.name}/dp{rank}") for rank in range(self.dp_size)]

    def bootstrap_url(self) -> str:
        """URL of the bootstrap server of its prefill side; empty: its connector has none."""
        port = _BOOTSTRAP_PORT.get(self.connector)
        if port is None or self.role == "decode":
            return ""
        return self.bootstrap.rstrip("/") or f"http://{_host(self.url)}:{port}"

    def events_of(self, rank: int) -> str:
        """Where that rank publishes; empty: nowhere. For `auto`, the address to try."""
        if self.events == "off":
            return ""
        base = f"tcp://{_host(self.url)}:{_EVENTS_PORT}" if self.events == "auto" else self.events
        return _higher(base, rank)

    def replay_of(self, rank: int) -> str:
        """Where that rank replays; empty: nowhere."""
        return _higher(self.replay, rank) if self.replay else ""


def normal(url: str) -> str:
    """An engine's URL in one spelling, so that one engine is not used twice."""
    parts, port = _parts(url)
    if parts is None or not parts.hostname:
        return url
    port = port or _PORTS.get(parts.scheme, 80)
    return f"{parts.scheme}://{_host(url)}:{port}{parts.path.rstrip('/')}"


def _parts(text: str) -> tuple[SplitResult | None, int | None]:
    try:
        parts = urlsplit(text)
        return parts, parts.port
    except ValueError:
        return None, None


def _http(text: str, field: str) -> None:
    parts, _ = _parts(text)
    if parts is None or parts.scheme not in _PORTS or not parts.hostname or parts.query:
        what = f"{without_password(text)!r} is no address"
        raise ConfigError(f"{what}; write it like http://10.0.0.5:8000", field)
    _check_no_password(parts, field)


def _check_no_password(parts: SplitResult, field: str) -> None:
    if "@" in parts.netloc:
        what = (
            f"{without_password(parts.geturl())!r} has a name or a password, which lists would show"
        )
        remedy = "leave them out, and name the variable that holds the engine's key in api_key_env"
        raise ConfigError(f"{what}; {remedy}", field)


def check_tcp(text: str, field: str, ranks: int = 1) -> None:
    """Check an address where `ranks` ranks publish or replay. Raises ConfigError with a remedy.

    ZMQ's other kinds of address are inside this machine or this process, so they are refused.
    """
    parts, port = _parts(text)
    if parts is None or parts.scheme != "tcp" or not parts.hostname or not port:
        or_else = ", off or auto" if field == "events" else ""
        remedy = f"write it like tcp://10.0.0.5:{_EVENTS_PORT}{or_else}"
        raise ConfigError(f"{without_password(text)!r} is not an endpoint; {remedy}", field)
    _check_no_password(parts, field)
    if port + ranks - 1 > _MAX_PORT:
        remedy = f"rank N is at the port N higher, and {ranks} ranks do not fit below 65536"
        raise ConfigError(f"{text!r} is too high; {remedy}", field)


def _host(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def _higher(endpoint: str, rank: int) -> str:
    parts = urlsplit(endpoint)
    assert parts.port is not None, "checked"
    return f"tcp://{_host(endpoint)}:{parts.port + rank}"

"""Settings of one member of the pool, for live.store and the processes that open it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.store.words import Card, PutOptions
from moonserve.core.units import Bytes, SegmentId
from moonserve.live.tls.contexts import Tls

WILDCARD: Final = ("0.0.0.0", "::")
"""Hosts that mean all addresses of a machine."""


TransportName: TypeAlias = Literal["tcp", "mooncake"]
"""How bytes travel between hosts. With mooncake, tcp stays for peers that do not have it."""
MooncakeProtocol: TypeAlias = Literal["tcp", "rdma"]


def check_reachable(host: str) -> None:
    """Raise ConfigError if others cannot reach that host, and no other address is set."""
    if host in WILDCARD:
        raise ConfigError(
            f"others cannot reach {host}; set --advertise-host to an address that they can",
            "advertise_host",
        )


def url_of(host: str, port: int, tls: Tls | None = None) -> str:
    """The base URL of an HTTP server. tls: of its process; None: it has none."""
    scheme = "https" if tls else "http"
    return f"{scheme}://{address(host, port)}"


def address(host: str, port: int) -> str:
    """The host and port of a server, as URLs have them."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


class StoreTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How often a member acts, and how long it waits. Tests choose shorter ones."""

    beat_s: float = 0.5
    """Longest time between two beats of a segment; copies may wait for one."""
    beat_call_s: float = 2.0
    """Longest call of a beat; after it a new beat is better."""
    stop_copies_s: float = 1.0
    """Longest time that a mount waits for copies to its segment to end."""
    unnamed_s: float = 300.0
    """A client without segments forgets the address of a segment that no reply has named for this
    long. It is longer than a lease, as the replicas found there may be read that long."""
    stall_s: float = 3.0
    """A member that leaves gives up if no object has moved away for this long: all others may be
    leaving too."""


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One member of the pool: its segments, and how others reach it."""

    segment: SegmentId
    """Name of its segment in memory; the name of its segment on disk is derived from it."""
    epoch: int
    """Larger at every start of this member, such as its start time in microseconds."""
    capacity_bytes: Bytes
    """Bytes of memory; 0: a client without a segment in memory."""
    token: bytes
    """The cluster's shared secret. A process that has it may read and write segments over TCP."""
    disk_dir: Path | None = None
    """Folder of its segment on disk; None: it has none."""
    disk_bytes: Bytes = 0
    node: str = ""
    """Name of what fails together with it, such as a host; empty: this member alone."""
    rack: str = ""
    options: PutOptions = PutOptions()
    """Options of every put of blocks."""
    host: str = "127.0.0.1"
    """Host at which its segments' TCP servers listen."""
    port: int = 0
    """Port of the segment in memory; 0 takes any free one."""
    advertise_host: str | None = None
    """Host to which peers connect; None: `host`."""
    cards: tuple[Card, ...] = ()
    """All its addresses, if it has several. It listens on all of them, unless `host` is a wildcard.
    """
    shared_memory: bool = True
    transport: TransportName = "tcp"
    mooncake_protocol: MooncakeProtocol = "tcp"
    mooncake_device: str = ""
    """Device for rdma; empty: all that are found."""
    threads: int = 4
    call_s: float = 5.0
    """Longest call to the master, including a recovery of it."""
    transfer_s: float = 10.0
    """Longest transfer of one batch; below the master's put_ttl_us."""
    tls: Tls | None = None
    """For bytes over TCP; None: without TLS."""
    times: StoreTimes = StoreTimes()

    def __post_init__(self) -> None:
        """Raises ConfigError: only one of disk_dir and disk_bytes is set."""
        if bool(self.disk_dir) != bool(self.disk_bytes):
            raise ConfigError("a folder and its size go together", "disk_dir and disk_bytes")

    def listened(self) -> list[Card]:
        """Return the cards that the listener on `host` does not serve."""
        wildcard = self.host in WILDCARD
        return [] if wildcard else [it for it in self.cards if it.host != self.host]

"""The Transfer Engine for the store's client: it finds segments by their owners' addresses.

live.store calls it. It never raises for a lost peer.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import msgspec

from moonserve.core.store.words import Address, Card
from moonserve.core.transfer.lanes import SPARE
from moonserve.live.tls.contexts import ServerTrust
from moonserve.live.transfer.batch import EngineSettings, LaneStats
from moonserve.live.transfer.engine import TransferEngine
from moonserve.live.transfer.memory import LocalTransport, ShmTransport
from moonserve.live.transfer.mooncake import MooncakeTransport
from moonserve.live.transfer.ports import Path, Transport
from moonserve.live.transfer.ports import Slice as Slice
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.tcp import TcpTransport


class Transfer:
    """Reads and writes slices of segments.

    It uses shared memory on the owner's host, else Mooncake's engine if both sides have it, else
    TCP. Its calls block; several threads may call it at once. An event loop may call it only where
    `is_near` is true: then it is a plain memory copy. If a peer is lost, the answer says which
    slices arrived. Their bytes may be stale or torn, so callers verify checksums.
    """

    def __init__(
        self,
        token: bytes,
        *,
        shared_memory: bool = True,
        settings: EngineSettings | None = None,
        cards: Sequence[Card] = (),
        mooncake: MooncakeTransport | None = None,
        trust: ServerTrust | None = None,
    ) -> None:
        """`shared_memory` False: never use shared memory, for tests and measurements. `cards`: this
        host's cards. A peer's card is reached from the card of the same rail; such pairs are used
        first. `trust`: which peers it trusts over TCP; None: without TLS.
        """
        self._rails = {it.rail: it.host for it in cards if it.rail}
        self._local = LocalTransport()
        self._mooncake = mooncake
        self._ways = ("local", "shm", "tcp") if shared_memory else ("tcp",)
        transports: dict[str, Transport] = {
            "local": self._local,
            "shm": ShmTransport(),
            "tcp": TcpTransport(token, trust=trust),
        }
        if mooncake is not None:
            transports["mooncake"] = mooncake
        self.engine = TransferEngine(transports, settings)
        self._known_as: dict[bytes, tuple[Address, str]] = {}
        self._naming = threading.Lock()

    def adopt(self, region: Region) -> None:
        """Use a region of this process directly; its owner closes it."""
        self._local.adopt(region)

    def offer(self, region: Region) -> Address | None:
        """Serve a region of this process by Mooncake's engine too; None: there is no such engine.

        Raises ConfigError.
        """
        return None if self._mooncake is None else self._mooncake.serve(region)

    def withdraw(self, region: Region) -> None:
        """End `offer`, before the region is closed."""
        if self._mooncake is not None:
            self._mooncake.withdraw(region)

    def is_near(self, address: Address) -> bool:
        """Whether the segment's memory is mapped: then a read is a plain copy and cannot wait."""
        return self.engine.is_near(_location(address))

    def read(self, address: Address, slices: Sequence[Slice], deadline_s: float) -> list[bool]:
        """Fill each slice's memory from the segment; True where all its bytes arrived.

        `deadline_s` is on time.monotonic's scale.
        """
        return self.engine.transfer("read", self._known(address), slices, deadline_s)

    def write(self, address: Address, slices: Sequence[Slice], deadline_s: float) -> list[bool]:
        """Copy each slice's memory into the segment; True where the peer has all of it."""
        return self.engine.transfer("write", self._known(address), slices, deadline_s)

    def view(self, address: Address, offset: int, length: int) -> memoryview:
        """See TransferEngine.view."""
        return self.engine.view(self._known(address), offset, length)

    def stats(self) -> list[LaneStats]:
        """See TransferEngine.stats. The location is the name that the segment's owner gave."""
        lanes = self.engine.stats()
        return [it._replace(location=it.location.rpartition("@")[0]) for it in lanes]

    def retain(self, live: Collection[Address]) -> None:
        """Forget every region and connection except those of these addresses."""
        kept = {address.identity for address in live}
        with self._naming:
            for identity, (_, location) in list(self._known_as.items()):
                if identity not in kept:
                    del self._known_as[identity]
                    self.engine.forget(location)

    def close(self) -> None:
        """Forget everything."""
        self.engine.close()

    def _known(self, address: Address) -> str:
        with self._naming:
            known = self._known_as.get(address.identity)
            if known is not None and known[0] == address:
                return known[1]
            location = _location(address)
            self.engine.register(location, self._paths(address))
            self._known_as[address.identity] = (address, location)
            return location

    def _paths(self, address: Address) -> list[Path]:
        paths = []
        spare = 0
        if self._mooncake is not None and address.mooncake is not None:
            paths.append(Path("mooncake", address.mooncake))
            spare = SPARE
        for way in self._ways:
            if way != "tcp" or not address.cards:
                paths.append(Path(way, address, spare))
                continue
            for card in address.cards:
                reached = msgspec.structs.replace(address, host=card.host)
                source = self._rails.get(card.rail, "")
                far = bool(self._rails) and not source
                paths.append(Path(way, reached, spare + int(far), source))
        return paths


def _location(address: Address) -> str:
    """Return the engine's name of a segment: the owner's name, with a suffix for this start."""
    return f"{address.location or 'unnamed:segment'}@{address.identity.hex()}"

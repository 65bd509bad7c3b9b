"""A process that owns a segment and serves it: run as a script, with the kind of transport.

Prints the address that peers use, then waits for the end of its input. The tests also attach to its
shared memory, to see what is really there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from moonserve.core.store.words import Address
from moonserve.live.transfer.ports import Path
from moonserve.live.transfer.region import Region
from moonserve.live.transfer.server import TransferServer

TOKEN = b"secret"
SIZE = 8 << 20
_MARK = "address "


class Owner:
    """Such a process, as a test holds it."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith(_MARK))
        self.address, shared = msgspec.json.decode(
            line.removeprefix(_MARK), type=tuple[Address, str]
        )
        self.path = Path(kind, self.address)
        region = Region.attach(shared, self.address.identity)
        assert region is not None
        self.region = region

    def stop(self) -> None:
        """End it, whatever state it is in."""
        self.process.kill()
        self.process.communicate(timeout=10)
        self.region.close()


def main(kind: str) -> None:
    """Be that process."""
    region = Region.create(SIZE)
    if kind == "mooncake":
        from moonserve.live.transfer.mooncake import MooncakeTransport

        transport = MooncakeTransport()
        address = transport.serve(region)
    else:
        server = TransferServer(region, TOKEN)
        address = server.address("127.0.0.1")
    said = msgspec.json.encode((address, region.name)).decode()
    print(f"{_MARK}{said}", flush=True)
    sys.stdin.read()
    region.close()
    os._exit(0)  # Mooncake's threads do not end


if __name__ == "__main__":
    main(sys.argv[1])

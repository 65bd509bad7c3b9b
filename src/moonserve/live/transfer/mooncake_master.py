"""Mooncake's own parts: whether they are installed, and its master as a process of ours.

Run as a script by the supervisor, this becomes the master. Nothing here loads Mooncake's library
into the process that asks: that starts threads and takes over signals.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import select
import signal
import sys
from pathlib import Path

from moonserve.core.errors import ConfigError

_LEASE_MS = 20_000
"""The time to live of Mooncake's leases, which a client cannot end: as long as a worker's load may
take. A longer one keeps unused objects in the pool."""
_PR_SET_PDEATHSIG = 1


def require(field: str = "store") -> Path:
    """Return the folder of the installed package.

    Raises ConfigError, with the remedy, if a part is missing. `field`: the setting that needs it.
    """
    spec = importlib.util.find_spec("mooncake")
    folder = Path((spec.submodule_search_locations or [""])[0]) if spec is not None else Path()
    if spec is None or not (folder / "mooncake_master").is_file():
        raise ConfigError(
            "mooncake needs Mooncake's wheel; install it with: pip install 'moonserve[mooncake]'",
            field,
        )
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise ConfigError(
            "mooncake needs libibverbs.so.1, even without RDMA; on Debian and Ubuntu:"
            " apt-get install libibverbs1",
            field,
        ) from None
    return folder


def command(host: str, port: int, lease_ms: int = _LEASE_MS) -> tuple[str, ...]:
    """Return the command of a master that listens at this address and ends with its parent."""
    return (sys.executable, "-m", __name__, host, str(port), str(lease_ms))


def main(host: str, port: str, lease_ms: str) -> None:
    """Become the master. It is killed when the process that started it ends."""
    folder = require()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([0], [], [], 0)[0]:  # end of file: the parent has ended already
        return
    flags = (
        f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_host={host}",
        "--metrics_port=0", f"--default_kv_lease_ttl={lease_ms}", "--logtostderr",
        "--minloglevel=2",
    )  # fmt: skip
    program = str(folder / "mooncake_master")
    os.execv(program, (program, *flags))


if __name__ == "__main__":
    main(*sys.argv[1:])

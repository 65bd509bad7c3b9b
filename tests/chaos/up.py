"""`moonserve up` whose workers are reached through proxies: only addresses in their argv differ.

Run as a program: the first argument is JSON, {"gateway": {worker: URL of the gateway for it},
"workers": {worker: [address that it advertises, port of its HTTP server]}}; the others are `up`'s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import msgspec

from moonserve.cli import main
from moonserve.cli import up as program
from moonserve.config import Settings
from moonserve.live.process.supervise import Child

_cluster = program.cluster


def through_proxies(
    plan: dict[str, dict[str, object]], settings: Settings, port: int, environ: dict[str, str]
) -> list[Child]:
    """The children of `up`, with the addresses of the plan."""
    children = []
    for child in _cluster(settings, port, environ):
        argv = list(child.argv)
        if child.name in plan["workers"]:
            advertised, listened = plan["workers"][child.name]  # type: ignore[misc]
            argv[argv.index("--gateway") + 1] = str(plan["gateway"][child.name])
            argv += ["--advertise-host", str(advertised), "--listen", str(listened)]
        children.append(msgspec.structs.replace(child, argv=tuple(argv)))
    return children


def end_with(parent: int) -> None:
    """Stop the cluster if the harness has been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    plan = json.loads(sys.argv.pop(1))
    program.cluster = lambda *args: through_proxies(plan, *args)
    main()

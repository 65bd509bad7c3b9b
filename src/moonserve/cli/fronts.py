"""`moonserve gateway --workers N`: starts the fronts and the Conductor's process, and stops them.

The unix socket between them is in a folder of its own, which only this user may enter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from moonserve.cli.settings import child_env
from moonserve.cli.tls import scheme_of
from moonserve.cli.token import TOKEN
from moonserve.config import ENV_PREFIX
from moonserve.core.errors import ConfigError
from moonserve.logs import LINES

if TYPE_CHECKING:
    from moonserve.config import Settings
    from moonserve.live.process.supervise import Child

_KILL_AFTER_S = 10.0
_ORPHANS_S = 6.0
"""The fronts of a killed gateway still listen for so long; the next gateway waits for them."""
_LISTENING = "listening on "


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Reserve a port (0: any free one) for processes that listen on it together and may restart.

    Raises ConfigError.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("this system cannot share a port among processes; use 1", "workers")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        deadline_s = time.monotonic() + _ORPHANS_S
        while True:
            try:
                held.bind((host, port))  # fails if any process listens, also one that shares
                break
            except OSError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline_s:
                    time.sleep(0.2)
                    continue
                from moonserve.live.http.server import bind_error

                raise bind_error(error, host, port, "port") from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield held.getsockname()[1]


def flags_of(params: Mapping[str, Any], settings: Settings) -> list[str]:
    """The flags of a command that child processes need as words, since the environment lacks them.

    They are the flags that are no settings, the settings file, and --model: whether it was given
    matters for external engines.
    """
    words: list[str] = []
    file = params["config"] or os.environ.get(ENV_PREFIX + "CONFIG")
    for name, given in {**params, "config": file}.items():
        if given and (name not in settings.__struct_fields__ or name == "model"):
            for one in given if isinstance(given, tuple) else (given,):
                words += ["--" + name.replace("_", "-"), str(one)]
    return words


def children_of(
    settings: Settings, port: int, path: str, token: str, words: Sequence[str] = ()
) -> list[Child]:
    """The processes of one gateway. path: of the unix socket between them; words: see flags_of."""
    from moonserve.live.process.supervise import Child

    settings = msgspec.structs.replace(settings, port=port)
    environ = child_env(settings, **{TOKEN: token})
    argv = (sys.executable, "-m", "moonserve", "gateway", "--link", path, *words, "--part")
    grace_s = settings.drain_s + _KILL_AFTER_S
    # Fronts stop first, so that the Conductor still runs when their requests end.
    fronts = [
        Child(f"front{i}", (*argv, "front"), environ, 0, grace_s) for i in range(settings.workers)
    ]
    return [Child("conductor", (*argv, "conductor"), environ, 1, _KILL_AFTER_S), *fronts]


async def serve_fronts(settings: Settings, token: str, words: Sequence[str] = ()) -> None:
    """Run until a signal comes or the start fails; words: see flags_of.

    Raises ConfigError, GaveUp.
    """
    from moonserve.live.fronts.folder import meeting_folder
    from moonserve.live.process.access import check_clients
    from moonserve.live.process.supervise import Supervisor, beat, say

    check_clients(settings.host, settings.keys, settings.registry, settings.open)
    ready: set[str] = set()

    def tell(name: str, line: str) -> None:
        LINES.put(sys.stderr, f"{name}: {line}")
        if line.startswith(_LISTENING) and name not in ready:
            ready.add(name)
            if len(ready) == settings.workers + 1:
                say(f"{_LISTENING}{scheme_of(settings)}://{settings.host}:{port}")
                beat()

    with _reserved(settings.host, settings.port) as port, meeting_folder() as folder:
        boss = Supervisor(children_of(settings, port, str(folder / "link"), token, words), tell)
        boss.stop_on_signals(
            lambda: say("draining: new requests are refused, running ones may finish"),
            lambda: say("not waiting any longer"),
        )
        await boss.run()
    say("stopped")

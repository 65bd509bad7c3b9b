"""`--workers N`: starts N gateways or pickers and, unless --conductor names one, a Conductor.

The unix socket between them is in a folder of its own, which only this user may enter. Nothing here
serves anything: every child is `moonserve gateway --conductor`, `moonserve picker --conductor` or
`moonserve conductor`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

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

Command: TypeAlias = Literal["gateway", "picker"]
"""What each front runs."""
_KILL_AFTER_S = 10.0
_ORPHANS_S = 6.0
"""The fronts of a killed gateway still listen for so long; the next gateway waits for them."""
_LISTENING = "listening on "
_FOR_EVER_S = 3600.0
"""How long fronts wait for the Conductor that is started with them: it may read much first."""


@contextlib.contextmanager
def _reserved(host: str, port: int, setting: str = "port") -> Iterator[int]:
    """Reserve a port (0: any free one) for processes that listen on it together and may restart.

    setting: the port's name. Raises ConfigError.
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

                raise bind_error(error, host, port, setting) from None
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield held.getsockname()[1]


def flags_of(params: Mapping[str, Any], settings: Settings) -> list[str]:
    """The flags of a command that the Conductor needs as words, since the environment lacks them.

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


class Cast(msgspec.Struct, frozen=True):
    """The processes of one gateway or picker, once the ports of its fronts and their folder are
    known."""

    command: Command
    children: Callable[[Settings, Path], list[Child]]
    """Makes them, by the settings with these ports, and the folder."""


def fronts_only(command: Command, token: str, config: Path | None) -> Cast:
    """The fronts of a Conductor elsewhere. config: the file of the settings."""
    words = ["--config", str(config)] if config is not None else []
    return Cast(command, lambda settings, folder: _fronts(settings, command, token, words))


def conductor_and_fronts(command: Command, token: str, words: Sequence[str] = ()) -> Cast:
    """A Conductor and its fronts, which meet at a unix socket. words: see flags_of."""

    def children(settings: Settings, folder: Path) -> list[Child]:
        path = str(folder / "link")
        where = msgspec.structs.replace(settings, conductor=path, conductor_s=_FOR_EVER_S)
        file = words[words.index("--config") :][:2] if "--config" in words else []
        return [
            _conductor(settings, path, token, words),
            *_fronts(where, command, token, file),
        ]

    return Cast(command, children)


def _conductor(settings: Settings, path: str, token: str, words: Sequence[str]) -> Child:
    """A Conductor for the fronts at this port of this machine, who forward what others ask of it.

    It ends after the fronts, so that it still runs when their requests end.
    """
    from moonserve.live.process.supervise import Child

    argv = [sys.executable, "-m", "moonserve", "conductor", *words, "--socket", path]
    argv += ["--host", "127.0.0.1", "--port", "0", "--kept", f"{path}.engines"]
    if settings.registry:
        argv += ["--advertise-port", str(settings.port)]
        if "--advertise-host" not in words:
            from moonserve.live.store.settings import check_reachable

            check_reachable(settings.host)
            argv += ["--advertise-host", settings.host]
    environ = child_env(settings, **{TOKEN: token})
    return Child("conductor", tuple(argv), environ, 1, _KILL_AFTER_S)


def _fronts(settings: Settings, command: Command, token: str, words: Sequence[str]) -> list[Child]:
    """Fronts that share their ports. When all end, they listen until their requests have ended:
    workers reach the Conductor through them."""
    from moonserve.live.process.supervise import ALL_END, Child

    environ = child_env(settings, **{TOKEN: token})
    argv = (sys.executable, "-m", "moonserve", command, "--shared", *words)
    grace_s = settings.drain_s + _KILL_AFTER_S
    return [
        Child(f"front{i}", argv, environ, 0, grace_s, stop_signal=ALL_END)
        for i in range(settings.workers)
    ]


async def serve_fronts(settings: Settings, cast: Cast) -> None:
    """Run these processes until a signal comes or the start fails. Raises ConfigError, GaveUp."""
    from moonserve.live.fronts.folder import meeting_folder
    from moonserve.live.process.access import check_clients
    from moonserve.live.process.supervise import Supervisor, beat, proxy_line, say
    from moonserve.live.store.settings import address

    if cast.command == "gateway":
        check_clients(settings.host, settings.keys, settings.registry, settings.open)
    ready: set[str] = set()

    def tell(name: str, line: str) -> None:
        LINES.put(sys.stderr, f"{name}: {line}")
        if line.startswith(_LISTENING) and name not in ready:
            ready.add(name)
            if len(ready) == len(children):
                if cast.command == "picker":
                    say(proxy_line(address(settings.host, here.picker_port)))
                say(f"{_LISTENING}{scheme_of(settings)}://{settings.host}:{here.port}")
                beat()

    with contextlib.ExitStack() as held:
        port = held.enter_context(_reserved(settings.host, settings.port))
        here = msgspec.structs.replace(settings, port=port)
        if cast.command == "picker":
            taken = _reserved(settings.host, settings.picker_port, "picker_port")
            here = msgspec.structs.replace(here, picker_port=held.enter_context(taken))
        children = cast.children(here, held.enter_context(meeting_folder()))
        boss = Supervisor(children, tell)
        boss.stop_on_signals(
            lambda: say("draining: new requests are refused, running ones may finish"),
            lambda: say("not waiting any longer"),
        )
        await boss.run()
    say("stopped")

"""`moonserve up`: the whole cluster on this machine, one process per role.

Starts the processes, waits until all have joined, prints where the gateway is, and stops them.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moonserve.cli.client import Client
from moonserve.cli.output import by_tenths
from moonserve.cli.settings import (
    child_env,
    read_settings,
    settings_options,
)
from moonserve.cli.tls import member_tls, scheme_of, tls_of
from moonserve.cli.token import TOKEN, own_token
from moonserve.core.errors import ConfigError, DeadlineExceeded, MoonserveError
from moonserve.logs import LINES

if TYPE_CHECKING:
    from moonserve.config import Settings
    from moonserve.live.process.supervise import Child

_POLL_S = 0.2
_KILL_AFTER_S = 10.0
_TWIN_S = 2.0


@click.command()
@settings_options("up")
def up(config: Path | None, **flags: str | None) -> None:
    """Start a gateway, prefill workers and decode workers on this machine.

    Only the gateway listens on --host; the workers can be reached from this machine only.

    A named model that is not on this machine is fetched first. Ctrl-C lets running requests finish
    and then stops all processes; a second Ctrl-C does not wait.
    """
    import asyncio

    settings = read_settings(config, flags)
    if settings.instances is not None:
        raise ConfigError("is read by `moonserve gateway` only; leave it out with up", "instances")
    if settings.registry:
        why = "is not needed: up gives its processes their addresses; leave it out"
        raise ConfigError(why, "registry")
    if settings.profile:
        from moonserve.sim.axes import read_profile

        read_profile(settings.profile)  # report a wrong one now, before workers start
    if settings.engine == "torch":
        from moonserve.live.engine import installed

        installed.require()
    if settings.transport == "mooncake":
        from moonserve.live.transfer import mooncake_master

        mooncake_master.require("transport")
    from moonserve.live.process.access import check_clients
    from moonserve.live.record.traces import trace_settings

    trace_settings(settings.otlp_traces_endpoint, os.environ)  # report a wrong one now
    check_clients(settings.host, settings.keys, settings.registry, settings.open)
    member_tls(settings, "gateway")  # report a wrong file now, before processes start
    if settings.record:
        from moonserve.live.record.files import folder_of, make_folder

        make_folder(folder_of(settings.record))  # likewise
    if settings.advise and settings.ttft_slo is None and settings.tbt_slo is None:
        raise ConfigError("needs objectives: set --ttft-slo or --tbt-slo too", "advise")
    port = _free_port(settings.host, settings.port)
    _fetch_model(settings.model)
    asyncio.run(_serve(settings, port))


def _free_port(host: str, port: int) -> int:
    """Check that nobody listens at the port; 0 finds a free one. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            from moonserve.live.http.server import bind_error

            raise bind_error(error, host, port, "port") from None
        return int(trial.getsockname()[1])


def _fetch_model(ref: str) -> None:
    """Fetch the model unless it is on this machine, and print how far the download is."""
    from moonserve.live.model import catalog

    found = catalog.ensure(ref, by_tenths(lambda line: _tell("model", line)))
    _tell("model", f"{found.name}: {found.path}")


def cluster(settings: Settings, port: int, environ: dict[str, str]) -> list[Child]:
    """The processes of one cluster. All of them inherit `environ`, which includes the secrets."""
    from moonserve.live.process.supervise import Child

    program = (sys.executable, "-m", "moonserve")
    url = _url(settings, port)
    names = [("prefill", f"p{i}") for i in range(settings.prefill)]
    names += [("decode", f"d{i}") for i in range(settings.decode)]
    # Threads of several workers that spin on the same cores slow each other down many times.
    threads = max(1, _cores() // len(names))
    environ = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads), **environ}
    gateway = (
        *(*program, "gateway", "--port", str(port)),
        *("--ready-instances", str(len(names)), "--ready-s", str(settings.start_s)),
    )
    # The gateway stops first: it refuses new requests and lets the running ones finish.
    children = [Child("gateway", gateway, environ, 0, settings.drain_s + _KILL_AFTER_S)]
    for role, name in names:
        # Workers listen on loopback, whatever --host is: only the gateway is for other machines.
        named = ("--role", role, "--name", name, "--gateway", url, "--host", "127.0.0.1")
        argv = (*program, "worker", *named)
        children.append(Child(name, argv, environ, 1, _KILL_AFTER_S))
    if settings.advise:
        children.append(Child("twin", (*program, "twin", "--url", url), environ, 0, _TWIN_S))
    return children


def _mooncake(settings: Settings, environ: dict[str, str]) -> tuple[Settings, list[Child]]:
    """Settings with the address of Mooncake's master, and its process unless it runs already."""
    from moonserve.live.process.supervise import Child
    from moonserve.live.transfer import mooncake_master

    mooncake_master.require()
    if settings.mooncake_master:
        return settings, []
    port = _free_port("127.0.0.1", 0)
    argv = mooncake_master.command("127.0.0.1", port)
    settings = msgspec.structs.replace(settings, mooncake_master=f"127.0.0.1:{port}")
    return settings, [Child("mooncake", argv, environ, 2, _KILL_AFTER_S)]


async def _serve(settings: Settings, port: int) -> None:
    import asyncio

    from moonserve.live.process.supervise import Supervisor
    from moonserve.live.transfer.region import clean_stale

    token = own_token(lambda line: _tell("up", line))
    environ = child_env(settings, **{TOKEN: token})
    master: list[Child] = []
    if settings.store == "mooncake":
        settings, master = _mooncake(settings, environ)
        environ = child_env(settings, **{TOKEN: token})
    children = master + cluster(settings, port, environ)
    boss = Supervisor(children, _tell)
    _tell("up", f"starting {', '.join(child.name for child in children)}")
    running = asyncio.create_task(boss.run())
    boss.stop_on_signals(
        lambda: _tell("up", "stopping: running requests may finish; a second signal does not wait"),
        lambda: _tell("up", "not waiting any longer"),
    )
    client = _client(settings, port)
    ready = asyncio.create_task(_until_ready(client, settings.start_s))
    try:
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not running.done():
            ready.result()
            _say_hello(settings, port)
        await running
    finally:
        ready.cancel()
        running.cancel()  # if it still runs, this ends the children
        await asyncio.gather(running, ready, return_exceptions=True)
        clean_stale()  # a killed worker leaves its shared memory
    _tell("up", "stopped; no process is left")


def _client(settings: Settings, port: int) -> Client:
    """A client of the gateway, which may be called before the gateway listens."""
    tls = tls_of(settings, "client")
    context = None if tls is None else tls.client()
    return Client(_url(settings, port), timeout_s=2.0, context=context)


async def _until_ready(client: Client, deadline_s: float) -> None:
    """Poll the gateway until it is ready: all workers have joined it."""
    import asyncio

    try:
        async with asyncio.timeout(deadline_s):
            while not await asyncio.to_thread(_is_ready, client):  # noqa: ASYNC110 - no Event spans processes
                await asyncio.sleep(_POLL_S)
    except TimeoutError as err:
        raise DeadlineExceeded(
            f"not ready within {deadline_s:g} s; the lines above show how far the start came; a "
            "larger --start-s waits longer"
        ) from err


def _is_ready(client: Client) -> bool:
    """Whether the gateway answers that it is ready."""
    try:
        client.get_as("/ready", dict[str, Any])
    except MoonserveError:
        return False
    return True


def _say_hello(settings: Settings, port: int) -> None:
    from moonserve.live.model import catalog

    url = _url(settings, port)
    name = catalog.resolve(settings.model).name
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hi!"}}]}}'
    program = "moonserve" if shutil.which("moonserve") else f"{sys.executable} -m moonserve"
    hint = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    options = known = ""
    if ca := _authority(settings):
        options = f" --cacert {ca}"
        known = f"MOONSERVE_TLS_CA={ca} "
        if settings.tls_client_auth == "required":
            folder = settings.tls_dir or "."
            options += f" --cert {folder}/client.crt --key {folder}/client.key"
            known += f"MOONSERVE_TLS_CERT={folder}/client.crt "
            known += f"MOONSERVE_TLS_KEY={folder}/client.key "
    if settings.keys:
        options += ' -H "authorization: Bearer $MOONSERVE_API_KEY"'
    LINES.put(
        sys.stdout,
        f"\nReady at {url}\n\n"
        f"  curl{options} {url}/v1/chat/completions -H 'content-type: application/json'"
        f" -d '{body}'\n"
        f'  {known}{program} ask "Why is the sky blue?"{hint}\n',
    )


def _authority(settings: Settings) -> str:
    """The file of the authority that clients have to trust; empty: there is no TLS."""
    tls = tls_of(settings, "client")
    return "" if tls is None else str(tls.files.ca)


def _tell(name: str, line: str) -> None:
    """Print one line of one process, with its name before it."""
    text = line.removeprefix(f"{name}: ")  # a worker prints its name, for a start by hand
    styled = click.style(f"{name:>7} | ", dim=True) + text
    LINES.put(sys.stderr, styled if sys.stderr.isatty() else click.unstyle(styled))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _url(settings: Settings, port: int) -> str:
    """The gateway's URL for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"{scheme_of(settings)}://{f'[{host}]' if ':' in host else host}:{port}"

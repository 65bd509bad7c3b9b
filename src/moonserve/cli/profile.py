"""`moonserve profile`: profile the processes of a running cluster.

The command line alone imports this.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.settings import Seconds
from moonserve.core.errors import EngineFailed, MoonserveError

_AT_ONCE = 64
"""Threads that start profiles."""


class _Profiled(msgspec.Struct):
    """A row of /api/instances."""

    id: str
    url: str
    engine: str = ""
    """Of an external engine; empty: it is a worker of ours."""


class _Begun(msgspec.Struct):
    """What /start_profile returns."""

    file: str
    seconds: float


@click.command()
@url_option("The gateway.")
@click.option(
    "--seconds",
    type=Seconds(0, 60, min_open=True),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="How long the profiles run.",
)
def profile(url: str, seconds: float) -> None:
    """Profile the gateway and the workers of a running cluster for some seconds.

    All of them must have been started with --profile-folder FOLDER. All profiles start together, so
    that they show the same time; with torch a start takes some seconds. A worker writes what torch
    does in its passes, for ui.perfetto.dev. The gateway writes a page with what its event loop
    runs. The command prints where, and does not wait. External engines have the same routes
    themselves.

    \b
    Examples:
      moonserve up --profile-folder ~/profiles
      moonserve profile --seconds 5
    """
    gateway = Client(url)
    instances = gateway.get_as("/api/instances", list[_Profiled])
    ours = [it for it in instances if not it.engine]  # no other may receive the cluster's token
    places = [("gateway", gateway), *((it.id, Client(it.url)) for it in ours)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        replies = list(threads.map(partial(_started, seconds), [client for _, client in places]))
    for (name, _), reply in zip(places, replies, strict=True):
        if isinstance(reply, _Begun):
            click.echo(f"{name}: {reply.file}")
        else:
            click.echo(f"{name}: {reply}", err=True)
    if not any(isinstance(it, _Begun) for it in replies):
        raise EngineFailed("no process could be profiled")
    click.echo(f"The files are there in {seconds:g} seconds.")


def _started(seconds: float, client: Client) -> _Begun | MoonserveError:
    """The profile of one process, or why there is none."""
    try:
        return client.send("POST", f"/start_profile?seconds={seconds:g}", _Begun)
    except MoonserveError as error:
        return error

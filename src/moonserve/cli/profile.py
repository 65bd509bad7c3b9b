"""`moonserve profile`: profile the processes of a running cluster.

The command line alone imports this.
"""

from __future__ import annotations

import click
import msgspec

from moonserve.cli.client import URL, Client
from moonserve.core.errors import EngineFailed, MoonserveError


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
@click.option("--url", default=URL, show_default=True, help="Address of the gateway.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 60, min_open=True),
    default=10.0,
    show_default=True,
    help="How long the profiles run.",
)
def profile(url: str, seconds: float) -> None:
    """Profile the gateway and the workers of a running cluster for some seconds.

    All of them must have been started with --profile-folder FOLDER. A worker writes what torch does
    in its passes, for ui.perfetto.dev; the gateway writes a page with what its event loop runs. The
    command prints where, and does not wait. External engines have the same routes themselves.

    \b
    Examples:
      moonserve up --profile-folder ~/profiles
      moonserve profile --seconds 5
    """
    gateway = Client(url)
    instances = gateway.get_as("/api/instances", list[_Profiled])
    ours = [it for it in instances if not it.engine]  # no other may receive the cluster's token
    places = [("gateway", gateway), *((it.id, Client(it.url)) for it in ours)]
    begun = 0
    for name, client in places:
        try:
            reply = client.send("POST", f"/start_profile?seconds={seconds:g}", _Begun)
        except MoonserveError as error:
            click.echo(f"{name}: {error}", err=True)
        else:
            begun += 1
            click.echo(f"{name}: {reply.file}")
    if not begun:
        raise EngineFailed("no process could be profiled")
    click.echo(f"The files are there in {seconds:g} seconds.")

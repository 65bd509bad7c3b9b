"""`moonserve record`: start, stop and look at the recording of a running gateway.

The command line alone imports this.
"""

from __future__ import annotations

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import json_option, print_json


class _Status(msgspec.Struct):
    """What /api/recording returns."""

    recording: bool
    folder: str
    file: str | None
    rows: int
    dropped: int
    bytes: int
    failure: str


_url = url_option("The gateway.")


@click.group()
def record() -> None:
    """Record what becomes of each request of a running gateway.

    A gateway or Conductor that was started with --record FOLDER records from its start on, into
    compressed files of that folder. A row is a row of a trace, with the decision, its candidates,
    and the time of each stage. It has no text and no token ids. The commands simulate, replay,
    plan, sweep and trace read FOLDER, or one of its files, like any trace.

    \b
    Examples:
      moonserve up --record ~/recordings
      moonserve record status
      moonserve simulate ~/recordings --prefill 2 --decode 3
    """


@record.command()
@_url
@json_option
def status(url: str, as_json: bool) -> None:
    """Show whether requests are recorded, where, and how many were."""
    _show(Client(url).get_as("/api/recording", _Status), as_json)


@record.command()
@_url
@json_option
def start(url: str, as_json: bool) -> None:
    """Record again, after `stop`."""
    _show(Client(url).send("POST", "/api/recording", _Status), as_json)


@record.command()
@_url
@json_option
def stop(url: str, as_json: bool) -> None:
    """Record no more requests; rows that wait are still written."""
    _show(Client(url).send("DELETE", "/api/recording", _Status), as_json)


def _show(status: _Status, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.structs.asdict(status))
        return
    if not status.folder:
        click.echo("not recording: the gateway was started without --record FOLDER")
        return
    state = "recording to" if status.recording else "stopped; recordings are in"
    click.echo(f"{state} {status.folder}")
    written = f"{status.rows:,} requests, {status.bytes / 1e6:,.1f} MB since the start"
    click.echo(written + (f"; {status.dropped:,} dropped" if status.dropped else ""))
    if status.failure:
        click.echo(f"rows cannot be written now: {status.failure}")

"""`moonserve top`: the overview of a running cluster in the terminal, updated every second."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.core.errors import EngineFailed, NobodyAlive

if TYPE_CHECKING:
    from moonserve.show.top import HistoryReply, InstanceReply, Top

_EVERY_S = 1.0
_TIMEOUT_S = 10.0
_ENTER = "\x1b[?1049h\x1b[?25l"
"""Another screen, without a cursor; `_LEAVE` brings the first one back as it was."""
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_REST_OF_LINE = "\x1b[K"
_REST_OF_SCREEN = "\x1b[J"


@click.command()
@url_option("The gateway.")
@click.option("--once", is_flag=True, help="Print the overview once, and end.")
def top(url: str, once: bool) -> None:
    """Show whether requests are in time, what binds, and each instance; update every second.

    Ctrl-C ends it. The numbers are of the last minute, as on the page /ui. It needs the cluster's
    token, or an API key of the scope admin, in MOONSERVE_TOKEN.
    """
    from moonserve.show.top import Top

    client = Client(url, _TIMEOUT_S)
    shown = Top()
    first = _asked(client, shown)
    if once:
        click.echo("\n".join(shown.lines(*first)))
        return
    try:
        with _screen():
            _print(f"moonserve at {url}", shown.lines(*first, *_size()))
            while True:
                time.sleep(_EVERY_S)
                _refresh(client, shown, url)
    except KeyboardInterrupt:
        return  # this is how it ends


def _refresh(client: Client, shown: Top, url: str) -> None:
    """Print the overview, or that the gateway is away: it may come back."""
    try:
        lines: Iterator[str] = shown.lines(*_asked(client, shown), *_size())
    except (EngineFailed, NobodyAlive) as error:
        lines = iter([f"{error}; asking again"])
    _print(f"moonserve at {url}", lines)


def _asked(client: Client, shown: Top) -> tuple[HistoryReply, Sequence[InstanceReply]]:
    """Raises NobodyAlive, EngineFailed."""
    from moonserve.show.top import HistoryReply, InstanceReply

    history = client.get(f"/api/history?since={shown.since_ms:.0f}")
    instances = client.get_as("/api/instances", list[dict[str, Any]])
    try:
        return (
            msgspec.convert(history, HistoryReply),
            msgspec.convert(instances, list[InstanceReply]),
        )
    except msgspec.ValidationError as error:
        raise EngineFailed(
            f"the gateway answers in a form that this version cannot read: {error}"
        ) from error


@contextmanager
def _screen() -> Iterator[None]:
    """On a terminal, a screen of its own; elsewhere nothing."""
    if not sys.stdout.isatty():
        yield
        return
    click.echo(_ENTER, nl=False)
    try:
        yield
    finally:
        click.echo(_LEAVE, nl=False)


def _size() -> tuple[int, int | None]:
    """Columns, and lines below the title; None: as many as there are."""
    columns, lines = shutil.get_terminal_size()
    return (columns, lines - 1) if sys.stdout.isatty() else (columns, None)


def _print(title: str, lines: Iterator[str]) -> None:
    """On a terminal over what stands there, cut to its size; elsewhere below, after an empty
    line."""
    titled = [f"{title}, {time.strftime('%H:%M:%S')}", *lines]
    if not sys.stdout.isatty():
        click.echo("\n".join([*titled, ""]))
        return
    width, height = shutil.get_terminal_size()
    shown = [line[:width] + _REST_OF_LINE for line in titled[:height]]
    click.echo(_HOME + "\n".join(shown) + _REST_OF_SCREEN, nl=False)

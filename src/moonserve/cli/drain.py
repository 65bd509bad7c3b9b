"""`moonserve drain`: give an instance no new work, and say when it may be stopped.

It asks a gateway, front or Conductor over HTTP. The command line alone imports this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import quote

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import json_option, print_json
from moonserve.core.errors import ConfigError, DeadlineExceeded
from moonserve.core.units import MICROS_PER_SECOND

_POLL_S = 0.5
_DEADLINE = "10m"


class _Drained(msgspec.Struct):
    """What the gateway returns, as far as it is read here."""

    instance: str
    state: str
    requests: int
    blocks: int
    warning: str = ""


@click.command()
@click.argument("name")
@click.option("--wait", is_flag=True, help="Return only when the instance is idle.")
@click.option(
    "--timeout",
    metavar="TIME",
    help=f"With --wait: the longest wait, such as 90s or 5m.  [default: {_DEADLINE}]",
)
@click.option("--resume", is_flag=True, help="Give the instance work again.")
@url_option("A gateway, front or Conductor.")
@json_option
def drain(
    name: str, wait: bool, timeout: str | None, resume: bool, url: str, as_json: bool
) -> None:
    """Give instance NAME no new work, so that it may be stopped without loss.

    Requests that it has go on. Blocks of the store that its segment holds move to other members.
    `moonserve instances` lists the names. The order holds until NAME is started again.

    Then stop the process where it was started, by systemd for example. `moonserve up` starts each
    worker again that ends: there, to stop the process is to restart it.

    \b
    Examples:
      moonserve drain d0 --wait && systemctl restart moonserve-worker@d0
      moonserve drain d0 --resume
    """
    if wait and resume:
        raise ConfigError("contradicts --resume: leave one of the two out", "--wait")
    if timeout is not None and not wait:
        raise ConfigError("is for --wait; add --wait, or leave it out", "--timeout")
    longest_s = _seconds(timeout or _DEADLINE)
    client = Client(url)
    path = f"/api/instances/{quote(name, safe='')}/{'resume' if resume else 'drain'}"
    status = client.send("POST", path, _Drained)
    if status.warning:
        click.echo(f"warning: {status.warning}", err=True)
    if wait:
        # each call repeats the order, also to a store's master that was restarted meanwhile
        status = _until_idle(lambda: client.send("POST", path, _Drained), status, longest_s)
    if as_json:
        print_json(msgspec.structs.asdict(status))
    else:
        click.echo(_shown(status))


def _seconds(timeout: str) -> float:
    """Raises ConfigError."""
    from moonserve.quantity import parse_duration_us

    try:
        return parse_duration_us(timeout) / MICROS_PER_SECOND
    except ValueError as err:
        raise ConfigError(str(err), "--timeout") from None


def _until_idle(ask: Callable[[], _Drained], status: _Drained, longest_s: float) -> _Drained:
    """The status once the instance is idle. Raises DeadlineExceeded."""
    end_s = time.monotonic() + longest_s
    last = ""
    while status.state != "idle":
        if time.monotonic() > end_s:
            raise DeadlineExceeded(f"{_shown(status)} after {longest_s:g} s{_remedy(status)}")
        if (now := _shown(status)) != last:
            click.echo(now, err=True)
            last = now
        time.sleep(_POLL_S)
        status = ask()
    return status


def _remedy(status: _Drained) -> str:
    """What helps an instance that is not idle yet, as a further clause."""
    if status.blocks:
        return (
            "; a block moves only if another segment has room for it: start one with `moonserve"
            " segment`, or stop the instance, and what only it has is computed again"
        )
    return "; its requests go on: wait longer, with --timeout"


def _shown(status: _Drained) -> str:
    if status.state == "serving":
        return f"{status.instance} gets new work"
    if status.state == "idle":
        return f"{status.instance} is idle and may be stopped"
    requests = _counted(status.requests, "request")
    return f"{status.instance} still has {requests} and {_counted(status.blocks, 'block')}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

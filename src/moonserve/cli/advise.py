"""`moonserve advise`: what the twin of a running cluster found last."""

from __future__ import annotations

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import json_option, print_json
from moonserve.core.errors import NobodyAlive
from moonserve.core.schedule.advice import Advice


class _ShownAdvice(msgspec.Struct):
    """What GET /api/advice answers."""

    advice: Advice | None
    age_s: float | None
    is_stale: bool


@click.command()
@url_option("The gateway.")
@json_option
def advise(url: str, as_json: bool) -> None:
    """Show with which other cluster more requests would have been in time.

    A process simulates the last minutes under alternatives: start it with `moonserve up --advise`
    or `moonserve twin`. Its sentence comes first, then the figures behind it, beside what happened.
    """
    reply = Client(url).get_as("/api/advice", _ShownAdvice)
    if as_json:
        print_json(reply)
        return
    if reply.advice is None or reply.age_s is None:
        raise NobodyAlive(
            f"no twin has reported to {url} yet; if one runs, as with `moonserve up --advise`, ask"
            f" again after its first round; else start one with `moonserve twin --url {url}`"
        )
    from moonserve.show.advice import lines

    for line in lines(reply.advice, reply.age_s, reply.is_stale):
        click.echo(line)

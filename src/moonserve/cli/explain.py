"""`moonserve explain`: why a request went where it went, and what came of it."""

from __future__ import annotations

import click
import msgspec

from moonserve.cli.client import URL, Client
from moonserve.cli.output import print_json
from moonserve.core.errors import EngineFailed


@click.command(short_help="Say why a request went where it went.")
@click.argument("request_id")
@click.option("--url", default=URL, show_default=True, help="The gateway.")
@click.option("--json", "as_json", is_flag=True, help="Print what the gateway says, as it is.")
def explain(request_id: str, url: str, as_json: bool) -> None:
    """Say why REQUEST_ID went where it went: every candidate, what was predicted, what came of it.

    The id is in the x-request-id header of the reply. A gateway keeps the latest 2,000 requests.
    """
    said = Client(url).decision(request_id)
    if as_json:
        print_json(said)
        return
    from moonserve.core.schedule.explain import Explanation
    from moonserve.show.explain import lines

    try:
        told = msgspec.convert(said, Explanation)
    except msgspec.ValidationError as err:
        raise EngineFailed(f"{url} says it in another way than this version: {err}") from err
    for line in lines(told):
        click.echo(line)

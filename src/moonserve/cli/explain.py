"""`moonserve explain`: why the Conductor placed a request as it did, and how the request went."""

from __future__ import annotations

import click
import msgspec

from moonserve.cli.client import URL, Client
from moonserve.cli.output import print_json
from moonserve.core.errors import EngineFailed


@click.command()
@click.argument("request_id")
@click.option("--url", default=URL, show_default=True, help="The gateway.")
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's JSON unchanged.")
def explain(request_id: str, url: str, as_json: bool) -> None:
    """Show why REQUEST_ID was placed as it was: every candidate, the predictions and the result.

    The id is in the x-request-id header of the reply. A gateway keeps the latest 500 requests, and
    all that are under way.
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
        raise EngineFailed(f"{url} answers in a form that this version cannot read: {err}") from err
    for line in lines(told):
        click.echo(line)

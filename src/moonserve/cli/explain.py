"""`moonserve explain`: why the Conductor placed a request as it did, and how the request went."""

from __future__ import annotations

from typing import BinaryIO

import click
import msgspec

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import OutputFile, print_json
from moonserve.core.errors import ConfigError, EngineFailed


@click.command()
@click.argument("request_id")
@url_option("The gateway.")
@click.option("--json", "as_json", is_flag=True, help="Print the gateway's JSON unchanged.")
@click.option(
    "--perfetto",
    type=OutputFile("wb"),
    metavar="FILE",
    help="Write its stages as a Chrome trace, which ui.perfetto.dev opens.",
)
def explain(request_id: str, url: str, as_json: bool, perfetto: BinaryIO | None) -> None:
    """Show why REQUEST_ID was placed as it was: every candidate, the predictions and the result.

    The id is in the x-request-id header of the reply. A gateway keeps the latest 500 requests, and
    all that are under way.
    """
    if not request_id:
        what = "must not be empty; take the x-request-id of a reply"
        raise ConfigError(what, "REQUEST_ID")
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
    if perfetto is not None:
        from moonserve.show.perfetto import chrome_trace

        perfetto.write(chrome_trace([told]))
        return
    for line in lines(told):
        click.echo(line)

"""`moonserve model`: fetch and list the models that have a name.

A thin layer over live/model/catalog; no other module imports it. Heavy imports stay inside
functions.
"""

from __future__ import annotations

from pathlib import Path

import click

from moonserve.cli.output import by_tenths, json_option, print_json


@click.group()
def model() -> None:
    """Fetch and list models."""


@model.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Fetch model NAME (default: smollm2-135m-instruct) into the user's cache."""
    from moonserve.live.model import catalog

    # Progress goes to stderr: stdout has only the path, for scripts.
    progress = by_tenths(lambda line: click.echo(line, err=True))
    click.echo(str(catalog.pull(name or catalog.DEFAULT_MODEL, progress).path))


@model.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the named models and where they lie."""

    from moonserve.live.model import catalog

    models = catalog.list_models()
    if as_json:
        print_json(models)
        return
    for entry in models:
        place = entry.path or f"not pulled; moonserve model pull {entry.name}"
        click.echo(f"{entry.name}  {entry.size >> 20} MiB  {entry.licence}  {place}")


@model.command()
@click.argument("ref")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype",
    metavar="NAME",
    default="float32",
    show_default=True,
    help="float32 or bfloat16, for the weights.",
)
def export(ref: str, folder: Path, dtype: str) -> None:
    """Write REF (a name or a .gguf file) into FOLDER as Hugging Face's files.

    For engines that read no GGUF, such as vLLM: `vllm serve FOLDER`.
    """
    from moonserve.live.engine import installed

    installed.require("export")
    from moonserve.live.engine.export import export_folder
    from moonserve.live.model.catalog import resolve

    export_folder(resolve(ref).path, folder, dtype, lambda stage: click.echo(stage, err=True))
    click.echo(str(folder))

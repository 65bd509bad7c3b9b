"""Prints docs/reference/cli.md: `make docs` writes the file, and a test compares both."""

from __future__ import annotations

from collections.abc import Iterator

import click

from moonserve.cli import cli


def render() -> str:
    """Every command's help text, as one Markdown page."""
    parts = ["# The command line\n\nWritten by `make docs` from the program's own help.\n"]
    for path, text in walk(cli, fixed_width(cli, "moonserve", None)):
        parts.append(f"## {path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def walk(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Yield (command path, help text) of a command and all commands below it, in their order."""
    yield ctx.command_path, command.get_help(ctx).rstrip()
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            inner = fixed_width(below, name, ctx)
            yield from walk(below, inner)


def fixed_width(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    """A context of fixed width, whatever terminal this runs in."""
    names = cli.context_settings["help_option_names"]
    return click.Context(
        command, parent, name, terminal_width=88, max_content_width=88, help_option_names=names
    )


if __name__ == "__main__":
    print(render(), end="")

"""What a command says of wrong flags and arguments: one line, as for every other wrong setting.

Click finds such faults while it reads the command line; the group of all commands calls
`in_one_line` around that. The line has the flag or the argument, what is wrong, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import click

_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""A command without arguments that prints its help; Click 8.1 has no error for it."""
_PLAIN = {
    "a valid integer range": "a whole number",
    "a valid integer": "a whole number",
    "a valid float range": "a number",
    "a valid float": "a number",
}
"""Click's words for a type, and plain ones."""


class _Refused(click.ClickException):
    """An error of the command line; Click calls `show`, and exits with `exit_code`."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """See ClickException."""
        click.echo(f"error: {self.message}", file=file, err=True)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn Click's errors in this block into such lines."""
    try:
        yield
    except click.ClickException as err:
        if isinstance(err, (_Refused, _HELP)):
            raise
        raise _Refused(_line(err)) from None


def _line(err: click.ClickException) -> str:
    ctx = err.ctx if isinstance(err, click.UsageError) else None
    path = "moonserve" if ctx is None else ctx.command_path
    see = f"see `{path} --help`"
    if isinstance(err, click.NoSuchOption):
        return f"{err.option_name}: is no flag of `{path}`; {_remedy(err) or see}"
    if isinstance(err, click.BadOptionUsage):
        what = err.message.removeprefix(f"Option {err.option_name!r} ").rstrip(".")
        return f"{err.option_name}: {what}"
    if isinstance(err, click.BadParameter) and err.param is not None:
        name = _name(err.param)
        if isinstance(err, click.MissingParameter):
            return f"{name}: is missing; {see}"
        return f"{name}: {_in_plain_words(err.message).rstrip('.')}; {see}"
    command = getattr(err, "command_name", "")  # Click 8.1 has no error of its own for it
    if command and ctx is not None and isinstance(ctx.command, click.Group):
        known = ctx.command.list_commands(ctx)
        close = get_close_matches(command, known, 1)
        remedy = f"did you mean {close[0]}?" if close else see
        return f"{command}: is no command of `{path}`; {remedy}"
    message = err.format_message().rstrip(".")
    return f"{message[:1].lower()}{message[1:]}" + ("" if ctx is None else f"; {see}")


def _remedy(err: click.NoSuchOption) -> str:
    """The commands that have the flag, or a flag that is written alike; empty: there is none."""
    from moonserve.config import all_flags

    flag = all_flags().get(err.option_name.removeprefix("--").replace("-", "_"))
    if flag is None:
        return f"did you mean {err.possibilities[0]}?" if err.possibilities else ""
    names = {"serve": "store serve"}
    # a front is a gateway with --conductor
    owners = sorted(flag.commands - {"front"})
    return "give it to " + " or ".join(f"`moonserve {names.get(it, it)}`" for it in owners)


def _name(param: click.Parameter) -> str:
    """The longest name of a flag, or the name of an argument as the help has it."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.human_readable_name


def _in_plain_words(message: str) -> str:
    for words, plain in _PLAIN.items():
        message = message.replace(words, plain)
    return message

"""The command line: one module per command, found in the dict below.

Commands may import every room, heavy ones only inside functions: help must come at once.
Users never see a traceback for an operating error; anything else that escapes is a bug.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module

import click

from moonserve import CORE, __version__
from moonserve.cli.usage import in_one_line
from moonserve.core.errors import ConfigError, MoonserveError
from moonserve.interrupt import INTERRUPTED, importing_ended
from moonserve.logs import LINES
from moonserve.native import VARIABLE

_COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("moonserve.cli.up:up", "Start a whole cluster on this machine."),
    "ask": ("moonserve.cli.ask:ask", "Stream an answer from a running gateway."),
    "explain": ("moonserve.cli.explain:explain", "Show why a request was placed as it was."),
    "top": ("moonserve.cli.top:top", "Watch a running cluster in the terminal."),
    "profile": ("moonserve.cli.profile:profile", "Profile the processes of a running cluster."),
    "advise": ("moonserve.cli.advise:advise", "Show which other cluster would serve better."),
    "twin": (
        "moonserve.cli.twin:twin",
        "Simulate the last minutes of a running cluster, and advise.",
    ),
    "record": ("moonserve.cli.record:record", "Record the requests of a running gateway."),
    "doctor": ("moonserve.cli.doctor:doctor", "Check that this machine can run moonserve."),
    "model": ("moonserve.cli.model:model", "Fetch and list models."),
    "trace": (
        "moonserve.cli.trace:trace",
        "Check, cut, scale, measure and make traces of requests.",
    ),
    "sweep": ("moonserve.cli.sweep:sweep", "Simulate every combination of settings."),
    "plan": (
        "moonserve.cli.plan:plan",
        "Search the best split of instances, and its highest speed.",
    ),
    "simulate": (
        "moonserve.cli.simulate:simulate",
        "Serve a trace by the real Conductor on a simulated cluster.",
    ),
    "replay": (
        "moonserve.cli.replay:replay",
        "Send a trace's requests to a running cluster; measure.",
    ),
    "gateway": ("moonserve.cli.roles:gateway", "Run one gateway."),
    "conductor": (
        "moonserve.cli.roles:conductor",
        "Run the Conductor alone, for fronts on any host.",
    ),
    "picker": ("moonserve.cli.roles:picker", "Pick endpoints for Envoy and its kin."),
    "worker": ("moonserve.cli.roles:worker", "Run one prefill or decode worker."),
    "instances": (
        "moonserve.cli.fleet:instances",
        "List the instances of a cluster, and its Conductors.",
    ),
    "drain": ("moonserve.cli.drain:drain", "Give an instance no new work, before it is stopped."),
    "register": ("moonserve.cli.register:register", "Put external engines into a registry."),
    "unregister": ("moonserve.cli.register:unregister", "Take external engines out of a registry."),
    "key": ("moonserve.cli.key:key", "Make, list and revoke the API keys of clients."),
    "store": (
        "moonserve.cli.store:store",
        "Run the KV store's master alone, and look into its pool.",
    ),
    "tls": ("moonserve.cli.tls:tls", "Make the certificates of a cluster."),
    "segment": (
        "moonserve.cli.store:segment",
        "Give memory and disk space to a KV store, without an engine.",
    ),
}
"""Where each command is, and what it does in one line; `moonserve --help` imports none of them."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Cli(click.Group):
    """Loads a command when a user calls it, and turns operating errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with in_one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            importing_ended()
            if CORE.problem is not None:
                raise ConfigError(CORE.problem, VARIABLE)
            with in_one_line():
                return super().invoke(ctx)
        except MoonserveError as err:
            LINES.flush()  # the error may name the lines above it
            click.echo(f"error: {err}", err=True)
            ctx.exit(2 if isinstance(err, ConfigError) else 1)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.group(
    cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88}
)
@click.version_option(__version__, message=f"moonserve %(version)s ({CORE.name})")
def cli() -> None:
    """A disaggregated LLM cluster that fits on a laptop, after Mooncake.

    \b
    The gateway takes OpenAI requests; its Conductor picks the workers for each.
    A prefill worker computes the KV that is not cached yet, and puts it into the store.
    A decode worker reads it from there, and streams the answer.

    \b
    Examples:
      moonserve up                          start it all, with a small real model
      moonserve ask "Why is the sky blue?"  ask it; see what was reused, and why
      moonserve up --prefill 2 --decode 2   more of everything
      moonserve doctor                      can this machine run it?
    """


def main() -> None:
    """Run the program. If the output has no room to go to, print one line and end with code 1."""
    try:
        try:
            cli(prog_name="moonserve")
        finally:
            sys.stdout.flush()
    except OSError as err:
        if err.errno not in _NO_ROOM:
            raise
        # for what is still in its buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"error: cannot write: {os.strerror(err.errno)}", err=True)
        sys.exit(1)

"""`moonserve instances`: the instances of a cluster, and with a registry its Conductors.

It asks the processes over HTTP and changes nothing. The command line alone imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from click.core import ParameterSource

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import json_option, print_json
from moonserve.cli.register import opened_registry
from moonserve.cli.settings import read_settings, settings_options
from moonserve.cli.tls import tls_of
from moonserve.core.errors import ConfigError, MoonserveError, NobodyAlive

if TYPE_CHECKING:
    from moonserve.config import Settings
    from moonserve.live.registry.entries import ConductorEntry

_ANSWER_S = 3.0
_HEAD = ("instance", "role", "model", "url", "running", "waiting", "free blocks", "heard")


class Standing(msgspec.Struct):
    """One Conductor, as it answers."""

    name: str
    url: str
    model: str
    """Empty: it serves external engines."""
    leads: bool = False
    term: int = 0
    """In which it leads; 0: it does not."""
    instances: int = 0
    """How many have joined it."""
    index: str = ""
    """Where its index came from."""
    problem: str = ""
    """Why it does not answer; empty: it does."""


class _Reply(msgspec.Struct):
    """What /api/conductor returns, as far as it is read here."""

    leads: bool
    term: int
    instances: int
    index: str


class _Listed(msgspec.Struct):
    """What /api/instances returns of one instance, as far as it is read here."""

    id: str
    role: str
    model: str
    url: str
    running: int | None = None
    waiting: int | None = None
    free_blocks: int | None = None
    heard_ms_ago: float | None = None
    """None, as the three above: it is an external engine that has not joined, or not again."""
    drained: bool = False
    state: str = ""
    """Of an external engine; empty: it is a worker of ours."""
    why: str = ""
    """Why an external engine is in that state; empty: it is up, or nobody knows yet."""

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        counts = (self.running, self.waiting, self.free_blocks)
        numbers = ("" if it is None else str(it) for it in counts)
        return (self.id, self.role, self.model, self.url, *numbers, self._heard())

    def _heard(self) -> str:
        if self.heard_ms_ago is None:
            return self.state
        return f"{self.heard_ms_ago / 1_000:.1f} s ago" + (", drained" if self.drained else "")


@click.command()
@url_option("A gateway, front or Conductor; unused with a registry.")
@json_option
@settings_options("instances")
def instances(config: Path | None, url: str, as_json: bool, **flags: str | None) -> None:
    """List the instances of a cluster: role, load, and when the Conductor heard of each last.

    With --registry also its Conductors: which one leads, in which term, and how many instances have
    joined each. The list of instances is then the leader's, or that of a standby if the leader does
    not answer. An external engine that is not used is listed with its state, such as `lost`, and
    below the table with the reason.
    """
    settings = read_settings(config, flags)
    source = click.get_current_context().get_parameter_source("url")
    if settings.registry and source is ParameterSource.COMMANDLINE:
        raise ConfigError("contradicts --registry: leave one of the two out", "--url")
    client = _clients(settings)
    conductors: list[Standing] = []
    asked: str | None = url
    if settings.registry:
        conductors = _conductors(settings, client)
        asked = next((it.url for it in conductors if not it.problem), None)
    rows = [] if asked is None else _rows(client(asked))
    if as_json:
        print_json({"conductors": conductors, "instances": rows})
    else:
        for line in (*_shown(conductors), *_listed(rows)):
            click.echo(line)
    if asked is None:
        raise NobodyAlive("no Conductor of the registry answers; see to these processes")


def _clients(settings: Settings) -> Callable[[str], Client]:
    """What makes a client of a URL."""
    tls = tls_of(settings, "client")
    context = None if tls is None else tls.client()
    return lambda url: Client(url, _ANSWER_S, context=context if "https:" in url else None)


def _conductors(settings: Settings, client: Callable[[str], Client]) -> list[Standing]:
    """All Conductors of the registry, the leader first. Raises ConfigError, NobodyAlive."""
    import asyncio

    leader, entries = asyncio.run(_registered(settings))
    if not entries:
        raise NobodyAlive(
            f"no Conductor is in {settings.registry}; start one with: moonserve conductor"
            f" --registry {settings.registry}"
        )
    found = [_asked(it, client(it.url)) for it in entries]
    return sorted(found, key=lambda it: (it.name != leader, it.name))


async def _registered(settings: Settings) -> tuple[str, list[ConductorEntry]]:
    """The name of the Conductor that leads, and the entries of all."""
    from moonserve.live.registry.entries import (
        CONDUCTORS,
        LEADER,
        ConductorEntry,
        decoded,
        leader_of,
    )

    async with opened_registry(settings) as registry:
        leader = leader_of((await registry.read(LEADER)).get(LEADER, b"")).name
        found = decoded(await registry.read(CONDUCTORS), CONDUCTORS, ConductorEntry)
        return leader, list(found.values())


def _asked(entry: ConductorEntry, client: Client) -> Standing:
    known = Standing(entry.name, entry.url, entry.model)
    try:
        said = client.get_as("/api/conductor", _Reply)
    except MoonserveError as error:
        known.problem = str(error)
        return known
    known.leads, known.term = said.leads, said.term
    known.instances, known.index = said.instances, said.index
    return known


def _rows(client: Client) -> list[_Listed]:
    return sorted(client.get_as("/api/instances", list[_Listed]), key=lambda it: it.id)


def _shown(conductors: Sequence[Standing]) -> list[str]:
    """The lines about Conductors; none without a registry."""
    from moonserve.show.table import table

    if not conductors:
        return []
    rows = [("conductor", "url", "state", "index", "instances")]
    for it in conductors:
        state = f"leads in term {it.term}" if it.leads else "stands by"
        joined = "" if it.problem else str(it.instances)
        rows.append((it.name, it.url, "no answer" if it.problem else state, it.index, joined))
    problems = [f"{it.name}: {it.problem}" for it in conductors if it.problem]
    return [*table(rows, 4), *problems, ""]


def _listed(rows: Sequence[_Listed]) -> list[str]:
    from moonserve.show.table import table

    if not rows:
        return ["no instance has joined"]
    problems = [f"{it.id}: {it.state}: {it.why}" for it in rows if it.why]
    return [*table([_HEAD, *(it.cells() for it in rows)], 4), *problems]

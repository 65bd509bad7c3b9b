"""`moonserve register` and `unregister`: external engines in a registry, for its Conductor.

The command line alone imports this. Heavy imports stay inside the functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moonserve.cli.instances import Named, by_address, engines_of, instances_options, named_by_flags
from moonserve.cli.settings import read_settings, settings_options
from moonserve.cli.tls import tls_of
from moonserve.core.errors import ConfigError

if TYPE_CHECKING:
    from moonserve.config import Settings
    from moonserve.live.external.spec import InstanceSpec
    from moonserve.live.ports import Registry


@click.command()
@settings_options("register")
@instances_options
@click.option(
    "--name",
    metavar="NAME",
    help="name of the engine, if the flags name one engine [default: HOST-PORT]",
)
def register(
    config: Path | None,
    name: str | None,
    named: Named,
    **flags: str | None,
) -> None:
    """Put external engines, such as vLLM, into the registry.

    The engines are those of `instances` in FILE and those that the flags name. The Conductor for
    external engines with this --registry uses them until they are unregistered. An engine of the
    same name is replaced; the output says so.
    """
    import asyncio

    import msgspec

    settings = read_settings(config, flags)
    urls = named_by_flags(named, halves=True)
    if name is not None and len(urls) != 1:
        raise ConfigError("is for one engine: give one address, or write names in a file", "--name")
    urls = [msgspec.structs.replace(it, name=name or by_address(it.url)) for it in urls]
    engines = engines_of(settings, config, urls, model="")
    if not engines:
        raise ConfigError(
            "there is no engine: list some in the file, or name one by --url", "instances"
        )
    replaced = asyncio.run(_put(settings, [it.checked().untrusted() for it in engines]))
    for it in engines:
        old = replaced.get(it.name)
        click.echo(f"registered: {it.name}" + (f" (replaced the one at {old})" if old else ""))


@click.command()
@click.argument("names", nargs=-1, required=True)
@settings_options("unregister")
def unregister(config: Path | None, names: tuple[str, ...], **flags: str | None) -> None:
    """Take the engines NAMES out of the registry. They still finish their running requests."""
    import asyncio

    settings = read_settings(config, flags)
    asyncio.run(_remove(settings, names))
    click.echo(f"unregistered: {', '.join(names)}")


@contextlib.asynccontextmanager
async def opened_registry(settings: Settings) -> AsyncIterator[Registry]:
    """The registry of these settings. Raises ConfigError."""
    from moonserve.live.registry.entries import open_registry

    registry = await open_registry(settings.registry, tls_of(settings, "client"))
    if registry is None:
        raise ConfigError("is needed: write it like etcd://127.0.0.1:2379", "registry")
    try:
        yield registry
    finally:
        await registry.close()


async def _put(settings: Settings, engines: Sequence[InstanceSpec]) -> dict[str, str | None]:
    """Register engines; return the URLs of replaced ones, by name. Raises ConfigError."""
    from moonserve.live.external.registry_engines import register

    async with opened_registry(settings) as registry:
        return await register(registry, engines)


async def _remove(settings: Settings, names: Sequence[str]) -> None:
    from moonserve.live.registry.entries import ENGINES

    async with opened_registry(settings) as registry:
        absent = [name for name in names if not await registry.remove(ENGINES + name)]
    if absent:
        raise ConfigError(f"no engine of that name was registered: {', '.join(absent)}", "names")

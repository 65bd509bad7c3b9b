"""`moonserve register` and `unregister`: foreign engines in a registry, for all gateways there.

A face over live/registry; nothing else imports it. Heavy imports stay inside the functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moonserve.cli.instances import Named, by_address, engines_of, instances_options, named_by_flags
from moonserve.cli.settings import read_settings, settings_options
from moonserve.core.errors import ConfigError

if TYPE_CHECKING:
    from moonserve.live.external.spec import InstanceSpec


@click.command()
@settings_options("register")
@instances_options
@click.option(
    "--name", metavar="NAME", help="of the one engine that flags name [default: HOST-PORT]"
)
def register(
    config: Path | None,
    name: str | None,
    named: Named,
    **flags: str | None,
) -> None:
    """Put engines, such as vLLM, into the registry: those that FILE's `instances` or flags name.

    Every gateway with that --registry which serves foreign engines uses them, until they are
    unregistered. One of the same name is replaced, which is said.
    """
    import msgspec

    settings = read_settings(config, flags)
    urls = named_by_flags(named, halves=True)
    if name is not None and len(urls) != 1:
        raise ConfigError("is for one engine: give one address, or a file", "--name")
    urls = [msgspec.structs.replace(it, name=name or by_address(it.url)) for it in urls]
    engines = engines_of(settings, config, urls, model="")
    if not engines:
        raise ConfigError("name engines, in the file or by --url and so on", "instances")
    replaced = asyncio.run(_put(settings.registry, [it.checked().untrusted() for it in engines]))
    for it in engines:
        old = replaced.get(it.name)
        click.echo(f"registered: {it.name}" + (f" (replaced the one at {old})" if old else ""))


@click.command()
@click.argument("names", nargs=-1, required=True)
@settings_options("unregister")
def unregister(config: Path | None, names: tuple[str, ...], **flags: str | None) -> None:
    """Take engines NAMES out of the registry; what they have they still finish."""
    settings = read_settings(config, flags)
    asyncio.run(_remove(settings.registry, names))
    click.echo(f"unregistered: {', '.join(names)}")


async def _put(url: str, engines: Sequence[InstanceSpec]) -> dict[str, str | None]:
    """The URLs of those replaced, by name. Raises ConfigError."""
    from moonserve.live.external.registry_engines import register
    from moonserve.live.registry.entries import open_registry

    registry = await open_registry(_given(url))
    assert registry is not None
    try:
        return await register(registry, engines)
    finally:
        await registry.close()


async def _remove(url: str, names: Sequence[str]) -> None:
    from moonserve.live.registry.entries import ENGINES, open_registry

    registry = await open_registry(_given(url))
    assert registry is not None
    try:
        absent = [name for name in names if not await registry.remove(ENGINES + name)]
    finally:
        await registry.close()
    if absent:
        raise ConfigError(f"no engine of that name was registered: {', '.join(absent)}", "names")


def _given(url: str) -> str:
    if not url:
        raise ConfigError("say where it is, like etcd://127.0.0.1:2379", "registry")
    return url

"""`moonserve key`: make, list and revoke the API keys of a gateway's clients.

The keys are in the file of --keys, or with `--keys registry` in etcd. Gateways notice a change
within a second. A key is printed once, when it is made; only its hash is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from moonserve.cli.output import json_option, print_json
from moonserve.cli.settings import read_settings, settings_options
from moonserve.cli.tls import tls_of
from moonserve.core.errors import ConfigError
from moonserve.quantity import parse_duration_us

if TYPE_CHECKING:
    from moonserve.config import Settings
    from moonserve.live.access.keys import ApiKey

_REGISTRY = "registry"
_COUNT = click.IntRange(1, 1_000_000_000)
_PRIORITY = click.IntRange(-100, 100)


@click.group()
def key() -> None:
    """Make, list and revoke the API keys of a gateway's clients."""


@key.command()
@click.argument("name")
@click.option("--tenant", metavar="NAME", help="Tenant of its requests. [default: NAME]")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(["infer", "metrics", "admin"]),
    multiple=True,
    default=("infer",),
    show_default=True,
    help="What it may do; repeatable. infer: use models; metrics: read /metrics; admin: all.",
)
@click.option("--requests-per-minute", type=_COUNT, metavar="N", help="Most requests in a minute.")
@click.option(
    "--tokens-per-minute", type=_COUNT, metavar="N", help="Most tokens of prompts and answers."
)
@click.option("--under-way", type=_COUNT, metavar="N", help="Most requests at one time.")
@click.option(
    "--least-priority", type=_PRIORITY, default=-100, show_default=True, metavar="N",
    help="Lowest priority that it may ask for.",
)  # fmt: skip
@click.option(
    "--highest-priority", type=_PRIORITY, default=100, show_default=True, metavar="N",
    help="Highest priority that it may ask for.",
)  # fmt: skip
@click.option(
    "--least-ttft-slo",
    metavar="TIME",
    help="Shortest TTFT objective that it may ask for, such as 500ms.",
)
@click.option(
    "--least-tbt-slo",
    metavar="TIME",
    help="Shortest TBT objective that it may ask for, such as 50ms.",
)
@settings_options("key")
def create(
    config: Path | None,
    name: str,
    tenant: str | None,
    scopes: tuple[Literal["infer", "metrics", "admin"], ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    under_way: int | None,
    least_priority: int,
    highest_priority: int,
    least_ttft_slo: str | None,
    least_tbt_slo: str | None,
    **flags: str | None,
) -> None:
    """Make a key named NAME and print it. It cannot be shown again."""
    from moonserve.live.access.keys import ApiKey, KeyLimits, drawn, hash_of

    secret = drawn()
    made = ApiKey(
        name=name,
        hash=hash_of(secret),
        tenant=tenant or name,
        scopes=tuple(dict.fromkeys(scopes)),
        limits=KeyLimits(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            under_way=under_way,
            least_priority=least_priority,
            highest_priority=highest_priority,
            least_ttft_slo_ms=_ms(least_ttft_slo, "--least-ttft-slo"),
            least_tbt_slo_ms=_ms(least_tbt_slo, "--least-tbt-slo"),
        ),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    ).checked()
    with _changed(read_settings(config, flags)) as keys:
        if any(old.name == name for old in keys):
            raise ConfigError(f"there is a key {name!r} already; revoke it first", "name")
        keys.append(made)
    click.echo(secret)


def _ms(text: str | None, option: str) -> float | None:
    """A time in milliseconds, as the file of keys has it. Raises ConfigError."""
    try:
        return None if text is None else parse_duration_us(text) / 1e3
    except ValueError as err:
        raise ConfigError(str(err), option) from None


@key.command("list")
@settings_options("key")
@json_option
def list_keys(config: Path | None, as_json: bool, **flags: str | None) -> None:
    """List all keys: names, tenants, scopes and limits, but no secrets."""
    import msgspec

    keys = _read(read_settings(config, flags))
    if as_json:
        print_json(keys)
        return
    for it in keys:
        limits = {
            name: value
            for name, value in msgspec.structs.asdict(it.limits).items()
            if value != getattr(type(it.limits)(), name)
        }
        said = [",".join(it.scopes), *(f"{name}={value}" for name, value in limits.items())]
        click.echo(f"{it.name:<20}  tenant {it.tenant:<20}  {'  '.join(said)}")


@key.command()
@click.argument("name")
@settings_options("key")
def revoke(config: Path | None, name: str, **flags: str | None) -> None:
    """Remove the key NAME. New requests with it get a 401; running ones may finish."""
    with _changed(read_settings(config, flags)) as keys:
        left = [it for it in keys if it.name != name]
        if len(left) == len(keys):
            raise ConfigError(f"there is no key {name!r}", "name")
        keys[:] = left
    click.echo(f"revoked: {name}")


def _place(settings: Settings) -> str:
    if not settings.keys:
        raise ConfigError("name the file with the keys, or write `registry`", "keys")
    if settings.keys == _REGISTRY and not settings.registry:
        raise ConfigError("is `registry`, so set `registry` too", "keys")
    return settings.keys


def _read(settings: Settings) -> list[ApiKey]:
    from moonserve.live.access.sources import read_file

    place = _place(settings)
    if place != _REGISTRY:
        return read_file(Path(place).expanduser())
    import asyncio

    return asyncio.run(_registered(settings, None, None))


@contextmanager
def _changed(settings: Settings) -> Iterator[list[ApiKey]]:
    """Yield all keys; what the block changes is kept. Raises ConfigError, RegistryError."""
    from moonserve.live.access.sources import changed_file

    place = _place(settings)
    if place != _REGISTRY:
        with changed_file(Path(place).expanduser()) as keys:
            yield keys
        return
    import asyncio

    before = asyncio.run(_registered(settings, None, None))
    after = [*before]
    yield after
    asyncio.run(_registered(settings, before, after))


async def _registered(
    settings: Settings, before: list[ApiKey] | None, after: list[ApiKey] | None
) -> list[ApiKey]:
    """Write the difference of two lists into the registry, and return all keys there."""
    import msgspec

    from moonserve.live.access.keys import read_key
    from moonserve.live.access.sources import ENTRIES
    from moonserve.live.registry.entries import open_registry

    registry = await open_registry(settings.registry, tls_of(settings, "client"))
    assert registry is not None, "checked"
    try:
        for gone in before or ():
            if gone not in (after or ()):
                await registry.remove(ENTRIES + gone.name)
        for new in after or ():
            if new not in (before or ()):
                await registry.put(ENTRIES + new.name, msgspec.json.encode(new))
        return [read_key(text) for text in (await registry.read(ENTRIES)).values()]
    finally:
        await registry.close()

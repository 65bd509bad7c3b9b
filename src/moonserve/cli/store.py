"""`moonserve store`: the store's master alone, and a look into a pool; `moonserve segment`.

A thin layer over live/store; no other module imports it. Heavy imports stay inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moonserve.cli.client import Client, url_option
from moonserve.cli.output import OutputFile, json_option, print_json
from moonserve.cli.roles import note, run_role
from moonserve.cli.settings import (
    Seconds,
    advertise_host_option,
    cards_option,
    listen_option,
    read_settings,
    settings_options,
    size_of,
    store_share,
)
from moonserve.cli.tls import client_trust, member_tls, scheme_of
from moonserve.cli.token import member_token, token_for
from moonserve.config import Settings, check_name, filled
from moonserve.core.errors import ConfigError, DeadlineExceeded, StoreError

if TYPE_CHECKING:
    from moonserve.core.store.words import Card
    from moonserve.live.store.client import StoreClient

T = TypeVar("T")

_POLL_S = 0.2
_MAX_KEY_BYTES = 256  # as in live.store.wire, whose import is slow
_url = url_option("The gateway, or the store's master if it has its own process.")
_text = click.option(
    "--text", "is_text", is_flag=True, help="Keys are given as text instead of hex."
)


@click.group()
def store() -> None:
    """Run the KV store's master alone, and look into its pool."""


@store.command()
@settings_options("serve")
@listen_option("the master", 8100)
@click.option(
    "--recover-s",
    type=Seconds(0, 600),
    metavar="SECONDS",
    default=3.0,
    show_default=True,
    help="How long the master collects what segments hold before it answers; 0: the pool is new.",
)
@click.option(
    "--segment-ttl-s",
    type=Seconds(0.1, 3600),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="After this silence the master drops a segment, and copies its objects from others.",
)
@click.option(
    "--quota",
    "quotas",
    metavar="TENANT=SIZE",
    multiple=True,
    help="Most bytes that a tenant may have in the pool, counting all copies; repeatable.",
)
@advertise_host_option
def serve(
    config: Path | None,
    listen: int,
    recover_s: float,
    segment_ttl_s: float,
    quotas: tuple[str, ...],
    advertise_host: str | None,
    **flags: str | None,
) -> None:
    """Run the master of a KV store. Gateways, workers and segments need its URL as --store-url."""
    settings = read_settings(config, flags)
    from moonserve.core.store.words import Terms
    from moonserve.live.process.store import MasterConfig, run_master

    terms = filled(
        Terms,
        settings,
        "serve",
        segment_ttl_us=round(segment_ttl_s * 1_000_000),
        quotas=dict(_quota(text) for text in quotas),
    )
    made = filled(
        MasterConfig,
        settings,
        "serve",
        port=listen,
        token=member_token(note, settings.host),
        tls=member_tls(settings, "store"),
        recover_s=recover_s,
        terms=terms,
        advertise_host=advertise_host,
    )
    run_role(run_master(made))


@click.command()
@click.option(
    "--name",
    metavar="NAME",
    required=True,
    help="Name of the segment, unique in the pool, such as s0.",
)
@listen_option("the segment's memory")
@advertise_host_option
@cards_option
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Port for /health and Prometheus' /metrics on --host; 0 takes a free one.",
)
@settings_options("segment")
def segment(
    config: Path | None,
    name: str,
    listen: int,
    advertise_host: str | None,
    cards: tuple[Card, ...],
    metrics_port: int | None,
    **flags: str | None,
) -> None:
    """Give memory and disk space to a KV store, without an engine.

    When it is asked to stop, the segment first moves the objects in its memory elsewhere.
    """
    settings = read_settings(config, flags)
    name = check_name(name)
    from moonserve.live.process.store import SegmentConfig, run_segment

    here = f"{scheme_of(settings)}://127.0.0.1:{Settings().port}"
    store_url = settings.store_url or ("" if settings.registry else here)
    share = store_share(
        settings,
        "segment",
        name,
        member_token(note, settings.host, *filter(None, [store_url])),
        port=listen,
        advertise_host=advertise_host,
        cards=cards,
    )
    made = filled(
        SegmentConfig,
        settings,
        "segment",
        settings=share,
        store_url=store_url,
        metrics_port=metrics_port,
    )
    run_role(run_segment(made))


@store.command()
@click.argument("prefix", default="")
@click.option("--after", default="", metavar="KEY", help="List only keys after this one.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@_text
@_url
@json_option
def ls(prefix: str, after: str, limit: int, is_text: bool, url: str, as_json: bool) -> None:
    """List objects whose keys start with PREFIX, in the order of keys."""
    query = {
        "prefix": _key(prefix, is_text).hex(),
        "after": _key(after, is_text).hex(),
        "limit": str(limit),
    }
    objects = _lookup(url, query)["objects"]
    if as_json:
        print_json(objects)
        return
    for it in objects:
        places = " ".join(replica["segment"] for replica in it["replicas"])
        click.echo(f"{it['key']}  {it['size']:>11}  {places}{_readable(it['key'])}")


@store.command()
@click.argument("key", default="")
@_text
@_url
@json_option
def stat(key: str, is_text: bool, url: str, as_json: bool) -> None:
    """Show the counts of the pool; with KEY, show where the replicas of that object are."""
    told = _lookup(url, {"key": _key(key, is_text).hex()} if key else {})
    if key and not told["exists"]:
        raise StoreError(f"there is no object {key}")
    if as_json:
        print_json(told)
        return
    if key:
        click.echo(f"{told['key']}  {told['size']} bytes  version {told['version']}")
        for replica in told["replicas"]:
            click.echo(f"  {replica['segment']} at {replica['offset']}")
        return
    for it in told["segments"]:
        share = it["used_bytes"] / it["capacity_bytes"]
        drains = "  draining" if it["draining"] else ""
        click.echo(
            f"{it['id']:<16} {it['tier']:<4} {share:>6.1%} of {it['capacity_bytes'] >> 20} MiB"
            f"  {it['objects']} objects  {it['address']}  node {it['node']}{drains}"
        )
    names = ("objects", "leases", "pending_puts", "pending_copies", "waiting", "evicted")
    click.echo("  ".join(f"{name} {told[name]}" for name in names))
    if told["recovering"]:
        click.echo("The master has just started, and asks segments what they hold.")


@store.command()
@click.argument("key")
@click.option("--output", "-o", type=OutputFile("wb"), default="-", help="Write it to this file.")
@_text
@_url
def get(key: str, output: Any, is_text: bool, url: str) -> None:
    """Write the bytes of object KEY to stdout. Needs the cluster's token."""
    from moonserve.live.store.objects import Objects

    name = _key(key, is_text)
    (got,) = _with_client(url, lambda client: Objects(client).get([name]))
    if got is None:
        raise StoreError(f"there is no object {key}")
    output.write(got)


@store.command()
@click.argument("segment")
@click.argument("size")
@_url
def evict(segment: str, size: str, url: str) -> None:
    """Free SIZE of SEGMENT, in the order of eviction. Needs the cluster's token.

    The objects move to the disk of the segment's node. If it has none, they are lost, unless
    another segment has a copy.
    """
    from moonserve.core.units import SegmentId

    much = size_of(size, "size")
    if not much:
        raise ConfigError("must be larger than 0", "size")
    _check_segment(url, segment)
    freed = _with_client(url, lambda client: client.evict(SegmentId(segment), much))
    click.echo(f"{freed} bytes are free now, or will be when they are on disk")


@store.command()
@click.argument("segment")
@click.option(
    "--wait-s",
    type=Seconds(0),
    metavar="SECONDS",
    help="Return when it is empty; fail after this.",
)
@_url
def drain(segment: str, wait_s: float | None, url: str) -> None:
    """Move all objects off SEGMENT, so that it may leave. Needs the cluster's token."""
    import time

    from moonserve.core.units import SegmentId

    _check_segment(url, segment)
    _with_client(url, lambda client: client.drain(SegmentId(segment)))
    if wait_s is None:
        click.echo(f"{segment} is being drained; `moonserve store stat` shows its progress")
        return
    end = time.monotonic() + wait_s
    while left := _objects_on(url, segment):
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"{segment} still holds {left} objects after {wait_s:g} s; an object moves only if"
                " another segment has room and no reader has a lease on it"
            )
        time.sleep(_POLL_S)
    click.echo(f"{segment} is empty")


def _lookup(url: str, query: dict[str, str]) -> dict[str, Any]:
    from urllib.parse import urlencode

    return Client(url).get("/api/segments" + (f"?{urlencode(query)}" if query else ""))


def _objects_on(url: str, segment: str) -> int:
    """How many objects a segment holds; 0 once it has left."""
    found = [it for it in _lookup(url, {})["segments"] if it["id"] == segment]
    return int(found[0]["objects"]) if found else 0


def _check_segment(url: str, segment: str) -> None:
    names = [it["id"] for it in _lookup(url, {})["segments"]]
    if segment not in names:
        known = ", ".join(names) or "none"
        raise ConfigError(f"the pool has no segment {segment!r}; it has {known}", "segment")


def _with_client(url: str, work: Callable[[StoreClient], Awaitable[T]]) -> T:
    """Run `work` with a store client that has no segment."""
    import time

    from moonserve.core.units import SegmentId
    from moonserve.live.http.client import HttpClient
    from moonserve.live.store.client import StoreClient, StoreSettings
    from moonserve.live.store.remote import HttpRpc

    token = token_for(url)

    import asyncio

    async def body() -> T:
        http = HttpClient(client_trust(url))
        settings = StoreSettings(
            segment=SegmentId(f"cli-{os.getpid()}"),
            epoch=time.time_ns() // 1_000,
            capacity_bytes=0,
            token=token.encode(),
        )
        client = await StoreClient.open(HttpRpc(http, url, token), settings)
        try:
            return await work(client)
        finally:
            await client.close()
            await http.close()

    try:
        return asyncio.run(body())
    except ConfigError as error:
        if error.field != "store_url":
            raise
        raise ConfigError(str(error).removeprefix("store_url: "), "url") from None


def _key(text: str, is_text: bool) -> bytes:
    try:
        key = text.encode() if is_text else bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not hex; add --text if the key is text", "key") from None
    if len(key) > _MAX_KEY_BYTES:
        raise ConfigError(f"must be at most {_MAX_KEY_BYTES} bytes, not {len(key)}", "key")
    return key


def _readable(key: str) -> str:
    """The key as text, where it is text."""
    raw = bytes.fromhex(key)
    return f"  {raw.decode()!r}" if raw.isascii() and raw.decode().isprintable() else ""


def _quota(text: str) -> tuple[str, int]:
    tenant, _, size = text.partition("=")
    if not tenant or not size:
        raise ConfigError(f"write it like team-a=20GiB, not {text!r}", "quota")
    return tenant, size_of(size, "quota")

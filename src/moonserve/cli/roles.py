"""`moonserve gateway` and `moonserve worker`: one process each.

`moonserve up` starts them so. For a cluster on several machines, start each by hand with the same
MOONSERVE_TOKEN in its environment; see cli.token.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from moonserve.cli.instances import Named, engines_of, instances_options, named_by_flags
from moonserve.cli.settings import (
    advertise_host_option,
    cards_option,
    listen_option,
    read_settings,
    settings_options,
    store_share,
)
from moonserve.cli.tls import curve_of, member_tls, scheme_of, tls_of
from moonserve.cli.token import member_token, own_token
from moonserve.config import Settings, check_name, filled
from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.core.units import Micros
from moonserve.logs import LINES

if TYPE_CHECKING:
    from moonserve.core.store.words import Card


@click.command()
@click.option("--part", type=click.Choice(["front", "conductor"]), hidden=True)
@click.option("--link", hidden=True, help="Unix socket between the processes of one gateway.")
@settings_options("gateway")
@instances_options
@advertise_host_option
def gateway(
    config: Path | None,
    advertise_host: str | None,
    named: Named,
    part: str | None,
    link: str | None,
    **flags: str | None,
) -> None:
    """Run one gateway.

    The Conductor runs in it and, without --store-url, also the KV store's master. Workers join it,
    or it serves with external engines such as vLLM. The list `instances` in FILE describes those
    (docs/reference/external-engines.md), or --prefill-url, --decode-url and --url name them.
    """
    settings = read_settings(config, flags)
    engines = engines_of(settings, config, named_by_flags(named), flags["model"])
    if settings.registry or settings.store_url:
        token = member_token(note, settings.host, *filter(None, [settings.store_url]))
    else:
        token = own_token(note)
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    if settings.workers > 1 and part is None:
        import asyncio

        from moonserve.cli.fronts import flags_of, serve_fronts

        words = flags_of(click.get_current_context().params, settings)
        asyncio.run(serve_fronts(settings, token, words))
        return
    from moonserve.core.schedule.tuning import Tuning
    from moonserve.live.control.config import LIVE, GatewayConfig
    from moonserve.live.process.gateway import run_gateway

    tls = tls_of(settings, "gateway") if engines is not None else member_tls(settings, "gateway")
    slo = Slo(_us(settings.ttft_slo_ms), _us(settings.tbt_slo_ms))
    tuning = filled(
        Tuning,
        settings,
        "gateway",
        kvcache_balancing_threshold=settings.threshold,
        slo=slo,
        bind_ahead_us=LIVE.bind_ahead_us,
    )
    made = filled(
        GatewayConfig,
        settings,
        "gateway",
        token=token,
        advertise_host=advertise_host,
        tls=tls,
        kv_events_curve=curve_of(settings),
        tuning=tuning,
    )
    if part is None:
        run_role(run_gateway(made, engines))
    else:
        from moonserve.live.process.fronts import run_conductor, run_front

        run_role((run_front if part == "front" else run_conductor)(made, link or "", engines))


@click.command()
@click.option("--role", type=click.Choice(["prefill", "decode", "both"]), required=True)
@click.option(
    "--name", required=True, help="Name of the worker, unique in the cluster, such as p0."
)
@click.option(
    "--gateway",
    show_default="http://127.0.0.1:8000",
    help="URL of the gateway to join.",
)
@listen_option("the worker")
@click.option(
    "--kv-events",
    default="off",
    show_default=True,
    metavar="ADDRESS[,REPLAY]",
    help="Publish which blocks this worker's segment holds, as KV events of vLLM; for example at"
    " tcp://127.0.0.1:5557,tcp://127.0.0.1:5558. The events contain the tokens of prompts.",
)
@click.option(
    "--kv-events-open",
    is_flag=True,
    help="Let other machines read KV events in clear, with the tokens of prompts and cache salts.",
)
@advertise_host_option
@cards_option
@settings_options("worker")
def worker(
    config: Path | None,
    role: Literal["prefill", "decode", "both"],
    name: str,
    gateway: str | None,
    listen: int,
    kv_events: str,
    kv_events_open: bool,
    advertise_host: str | None,
    cards: tuple[Card, ...],
    **flags: str | None,
) -> None:
    """Run one prefill or decode worker."""
    settings = read_settings(config, flags)
    name = check_name(name)
    if cards and settings.store == "mooncake":
        raise ConfigError(
            "is for the embedded store only; leave it out with store mooncake", "card"
        )
    pass_us = None
    if settings.profile:
        from moonserve.sim.axes import read_profile

        pass_us = read_profile(settings.profile).pass_us
    if gateway is None:
        gateway = f"{scheme_of(settings)}://127.0.0.1:{Settings().port}"
    urls = [url for url in ("" if settings.registry else gateway, settings.store_url) if url]
    token = member_token(note, settings.host, *urls)
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    from moonserve.live.http.client import check_url
    from moonserve.live.process.worker import run_worker
    from moonserve.live.worker.config import WorkerConfig

    check_url(gateway, "gateway")
    share = store_share(settings, "worker", name, token, advertise_host=advertise_host, cards=cards)
    made = filled(
        WorkerConfig,
        settings,
        "worker",
        name=name,
        role=role,
        port=listen,
        advertise_host=advertise_host,
        gateway=gateway,
        token=token,
        pass_us=pass_us,
        kv_events=kv_events,
        kv_events_open=kv_events_open,
        kv_events_curve=curve_of(settings),
        tls=share.tls,
    )
    run_role(run_worker(made, share))


def note(line: str) -> None:
    """Print a line about the start of a process. A stdout that nobody reads does not stop it."""
    LINES.put(sys.stdout, line)


def _us(ms: float | None) -> Micros | None:
    return None if ms is None else round(ms * 1_000)


def run_role(main: Coroutine[Any, Any, None]) -> None:
    """Run a role on uvloop, or on asyncio's loop where uvloop is not installed (Windows)."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        asyncio.run(main)
    else:
        uvloop.run(main)

"""`moonserve gateway` and `moonserve worker`: one role each, as `moonserve up` starts them.

Also for hand-made clusters: start them with one MOONSERVE_TOKEN in all of their environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from moonserve.cli.instances import Named, engines_of, instances_options, named_by_flags
from moonserve.cli.settings import (
    advertise_host_option,
    cards_option,
    read_profile,
    read_settings,
    read_token,
    settings_options,
)
from moonserve.config import check_name
from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.core.units import Micros

if TYPE_CHECKING:
    from moonserve.core.store.words import Card


@click.command()
@click.option("--part", type=click.Choice(["front", "conductor"]), hidden=True)
@click.option("--link", hidden=True, help="The socket where the parts of one gateway meet.")
@settings_options(
    "model", "host", "port", "workers", "registry", "store_url", "store", "eviction", "policy",
    "ttft_slo_ms", "tbt_slo_ms", "admission", "admission_low", "admission_high",
    "predictor", "cpp", "threshold", "spread_bytes", "alone_tokens", "max_body_bytes", "drain_s",
)  # fmt: skip
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
    """Run one gateway, with the Conductor and, without --store-url, the store's master in it.

    Workers of ours join it; or it serves with foreign engines, such as vLLM, which the list
    `instances` in FILE names (docs/engines.md), or else --prefill-url and so on.
    """
    settings = read_settings(config, flags)
    engines = engines_of(settings, config, named_by_flags(named), flags["model"])
    token = read_token()
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the imports that take their time
    if settings.workers > 1 and part is None:
        from moonserve.cli.fronts import flags_of, serve_fronts

        words = flags_of(click.get_current_context().params, settings)
        asyncio.run(serve_fronts(settings, token, words))
        return
    from moonserve.live.process.config import GatewayConfig
    from moonserve.live.process.gateway import run_gateway

    made = GatewayConfig(
        host=settings.host,
        port=settings.port,
        token=token,
        model=settings.model,
        registry=settings.registry,
        advertise_host=advertise_host,
        workers=settings.workers,
        store_url=settings.store_url,
        store=settings.store,
        eviction=settings.eviction,
        drain_s=settings.drain_s,
        threshold=settings.threshold,
        policy=settings.policy,
        slo=Slo(_us(settings.ttft_slo_ms), _us(settings.tbt_slo_ms)),
        admission=settings.admission,
        admission_low=settings.admission_low,
        admission_high=settings.admission_high,
        predictor=settings.predictor,
        spread_bytes=settings.spread_bytes,
        cpp=settings.cpp,
        alone_tokens=settings.alone_tokens,
        max_body_bytes=settings.max_body_bytes,
    )
    if part is not None:
        from moonserve.live.process.fronts import run_conductor, run_front

        run_role((run_front if part == "front" else run_conductor)(made, link or "", engines))
    elif engines is None:
        run_role(run_gateway(made))
    else:
        from moonserve.live.process.external import starting

        run_role(run_gateway(made, start=starting(engines)))


@click.command()
@click.option("--role", type=click.Choice(["prefill", "decode", "both"]), required=True)
@click.option("--name", required=True, help="Unique in the cluster, such as p0.")
@click.option("--gateway", default="http://127.0.0.1:8000", show_default=True, help="Whom to join.")
@click.option(
    "--listen",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="The worker's own port; 0 takes a free one.",
)
@click.option(
    "--kv-events",
    default="off",
    show_default=True,
    metavar="ADDRESS[,REPLAY]",
    help="Publish what lies in its part of the KV store, as vLLM's KV events, such as on"
    " tcp://127.0.0.1:5557,tcp://127.0.0.1:5558. They carry the prompts' tokens.",
)
@advertise_host_option
@cards_option
@settings_options(
    "model", "host", "rack", "engine", "profile", "dtype", "block_size", "segment_bytes",
    "disk_bytes", "disk_dir", "replicas", "node", "registry", "store_url", "store",
    "mooncake_master", "transport", "shared_memory", "mooncake_protocol", "mooncake_device",
    "max_seqs", "kv_memory_bytes", "decode_kv",
)  # fmt: skip
def worker(
    config: Path | None,
    role: Literal["prefill", "decode", "both"],
    name: str,
    gateway: str,
    listen: int,
    kv_events: str,
    advertise_host: str | None,
    cards: tuple[Card, ...],
    **flags: str | None,
) -> None:
    """Run one prefill or decode worker."""
    settings, name = read_settings(config, flags), check_name(name)
    if cards and settings.store == "mooncake":
        raise ConfigError("only the embedded store has cards; leave it out with mooncake", "card")
    pass_us = read_profile(settings.profile).pass_us if settings.profile else None
    token = read_token()
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the imports that take their time
    from moonserve.live.http.client import check_url
    from moonserve.live.process.worker import run_worker
    from moonserve.live.worker.config import WorkerConfig

    check_url(gateway, "gateway")
    run_role(
        run_worker(
            WorkerConfig(
                name=name,
                role=role,
                host=settings.host,
                port=listen,
                advertise_host=advertise_host,
                cards=cards,
                gateway=gateway,
                token=token,
                rack=settings.rack,
                model=settings.model,
                engine=settings.engine,
                pass_us=pass_us,
                dtype=settings.dtype,
                block_size=settings.block_size,
                segment_bytes=settings.segment_bytes,
                disk_dir=Path(settings.disk_dir) / name if settings.disk_bytes else None,
                disk_bytes=settings.disk_bytes,
                replicas=settings.replicas,
                node=settings.node,
                registry=settings.registry,
                store_url=settings.store_url,
                store=settings.store,
                mooncake_master=settings.mooncake_master,
                shared_memory=settings.shared_memory == "auto",
                transport=settings.transport,
                mooncake_protocol=settings.mooncake_protocol,
                mooncake_device=settings.mooncake_device,
                max_seqs=settings.max_seqs,
                kv_memory_bytes=settings.kv_memory_bytes,
                decode_kv=settings.decode_kv,
                kv_events=kv_events,
            )
        )
    )


def _us(ms: float | None) -> Micros | None:
    return None if ms is None else round(ms * 1_000)


def run_role(main: Coroutine[Any, Any, None]) -> None:
    """Run a role on uvloop, or on asyncio's own loop where there is none (Windows)."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)

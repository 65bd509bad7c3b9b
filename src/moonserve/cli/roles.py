"""`moonserve gateway`, `moonserve conductor` and `moonserve worker`: one process each.

`moonserve up` starts them so. For a cluster on several machines, start each by hand with the same
MOONSERVE_TOKEN in its environment; see cli.token.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from moonserve.cli.instances import (
    Named,
    engines_of,
    instances_options,
    named_by_flags,
    sources_of,
)
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
from moonserve.config import IN_ETCD, Settings, all_flags, check_name, filled
from moonserve.core.errors import ConfigError
from moonserve.core.request import Slo
from moonserve.logs import LINES

if TYPE_CHECKING:
    from moonserve.core.store.words import Card
    from moonserve.live.control.config import GatewayConfig


@click.command()
@click.option("--shared", is_flag=True, hidden=True, help="Other fronts listen at the same port.")
@settings_options("gateway")
@instances_options
@advertise_host_option
def gateway(
    config: Path | None,
    advertise_host: str | None,
    named: Named,
    shared: bool,
    **flags: str | None,
) -> None:
    """Run one gateway.

    The Conductor runs in it and, without --store-url, also the KV store's master. Workers join it,
    or it serves with external engines such as vLLM. The list `instances` in FILE describes those
    (docs/reference/external-engines.md), or --prefill-url, --decode-url and --url name them.

    With --conductor it is a front: it serves clients, and a Conductor elsewhere decides.
    """
    settings = read_settings(config, flags)
    if settings.conductor:
        if settings.conductor.startswith(IN_ETCD) and not settings.registry:
            settings = msgspec.structs.replace(settings, registry=settings.conductor)
        _check_front(settings, named, flags, advertise_host)
        _run_front("gateway", settings, config, shared)
        return
    engines = engines_of(settings, config, named_by_flags(named), flags["model"])
    sources = sources_of(settings)
    if settings.registry or settings.store_url:
        token = member_token(note, settings.host, *filter(None, [settings.store_url]))
    else:
        token = own_token(note)
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    if settings.workers > 1:
        import asyncio

        from moonserve.cli.fronts import conductor_and_fronts, flags_of, serve_fronts

        words = flags_of(click.get_current_context().params, settings)
        asyncio.run(serve_fronts(settings, conductor_and_fronts("gateway", token, words)))
        return
    from moonserve.live.process.gateway import run_gateway

    made = _config_of(
        settings,
        "gateway",
        token,
        engines is not None,
        advertise_host=advertise_host,
        kubernetes=sources,
    )
    run_role(run_gateway(made, engines))


@click.command()
@click.option("--advertise-port", type=int, hidden=True, help="Port of the fronts on this machine.")
@click.option("--kept", type=click.Path(path_type=Path), hidden=True, help="File with engines.")
@settings_options("conductor")
@instances_options
@advertise_host_option
def conductor(
    config: Path | None,
    advertise_host: str | None,
    named: Named,
    advertise_port: int | None,
    kept: Path | None,
    **flags: str | None,
) -> None:
    """Run the Conductor alone, for fronts on any host.

    It decides for all fronts (`moonserve gateway --conductor ADDRESS`). Workers join it, and
    without --store-url it has the KV store's master too. It serves no clients.
    """
    settings = read_settings(config, flags)
    engines = engines_of(settings, config, named_by_flags(named), flags["model"])
    sources = sources_of(settings)
    token = member_token(note, settings.host, *filter(None, [settings.store_url]))
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    from moonserve.live.process.fronts import run_conductor

    made = _config_of(
        settings,
        "conductor",
        token,
        engines is not None,
        advertise_host=advertise_host,
        kubernetes=sources,
    )
    run_role(run_conductor(made, engines, kept, advertise_port))


@click.command()
@click.option("--shared", is_flag=True, hidden=True, help="Other fronts listen at the same ports.")
@settings_options("picker")
@instances_options
@advertise_host_option
def picker(
    config: Path | None,
    advertise_host: str | None,
    named: Named,
    shared: bool,
    **flags: str | None,
) -> None:
    """Pick endpoints for Envoy and its kin.

    It speaks the endpoint picker protocol of the Gateway API Inference Extension: a proxy asks it
    over gRPC where to send each request, and sends it there itself. The Conductor runs in it, or
    elsewhere with --conductor. It needs external engines, and the extra moonserve[picker].
    """
    settings = read_settings(config, flags)
    if settings.port and settings.picker_port == settings.port:
        what = f"is {settings.port}, which is --port too; give the two different ports"
        raise ConfigError(what, "picker_port")
    if settings.conductor:
        if settings.conductor.startswith(IN_ETCD) and not settings.registry:
            settings = msgspec.structs.replace(settings, registry=settings.conductor)
        _check_front(settings, named, flags, advertise_host)
        _run_front("picker", settings, config, shared)
        return
    engines = engines_of(settings, config, named_by_flags(named), flags["model"])
    if engines is None:
        raise ConfigError(
            "is missing: a picker picks among external engines; describe them in a file, name them"
            " with --url, or name a Conductor that has some with --conductor",
            "instances",
        )
    sources = sources_of(settings)
    token = member_token(note, settings.host) if settings.registry else own_token(note)
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    if settings.workers > 1:
        import asyncio

        from moonserve.cli.fronts import conductor_and_fronts, flags_of, serve_fronts

        words = flags_of(click.get_current_context().params, settings)
        asyncio.run(serve_fronts(settings, conductor_and_fronts("picker", token, words)))
        return
    from moonserve.live.process.gateway import run_gateway

    made = _config_of(
        settings,
        "picker",
        token,
        True,
        advertise_host=advertise_host,
        kubernetes=sources,
        **_of_picker(settings),
    )
    run_role(run_gateway(made, engines))


def _of_picker(settings: Settings) -> dict[str, Any]:
    return {"picker_port": settings.picker_port, "objectives": settings.objectives}


def _check_front(
    settings: Settings, named: Named, flags: Mapping[str, str | None], advertised: str | None
) -> None:
    """Refuse flags that a front does not read: the Conductor has those. Raises ConfigError."""
    known = all_flags()
    given = [name for name, value in flags.items() if value is not None]
    others = [
        name for name in given if "front" not in known[name].commands and name != "picker_port"
    ]
    others += [name for name in Named.__struct_fields__ if getattr(named, name)]
    if advertised is not None:
        others.append("advertise_host")
    if others:
        remedy = "is for the process that has the Conductor: give it there; not with --conductor"
        raise ConfigError(remedy, others[0])


def _run_front(
    command: Literal["gateway", "picker"], settings: Settings, config: Path | None, shared: bool
) -> None:
    """Run a front, or several that share its ports. shared: it is one of those."""
    from moonserve.live.fronts.road import is_socket

    where = settings.conductor
    is_address = not (where.startswith(IN_ETCD) or is_socket(where))
    token = member_token(note, "127.0.0.1", *([where] if is_address else ()))
    from moonserve.live.process.supervise import die_with_parent

    die_with_parent()  # before the slow imports
    if settings.workers > 1 and not shared:
        import asyncio

        from moonserve.cli.fronts import fronts_only, serve_fronts

        asyncio.run(serve_fronts(settings, fronts_only(command, token, config)))
        return
    from moonserve.live.process.fronts import run_front

    others = _of_picker(settings) if command == "picker" else {}
    made = _config_of(settings, "front", token, False, **others)
    run_role(run_front(made, shared))


def _config_of(
    settings: Settings, role: str, token: str, external: bool, **others: Any
) -> GatewayConfig:
    """The settings of a gateway, a front or a Conductor. external: it has external engines, so that
    it need not be a member of a cluster with one authority. Raises ConfigError."""
    from moonserve.core.schedule.tuning import Tuning
    from moonserve.live.control.config import LIVE, GatewayConfig

    tls = tls_of(settings, "gateway") if external else member_tls(settings, "gateway")
    tuning = filled(
        Tuning,
        settings,
        role,
        kvcache_balancing_threshold=settings.threshold,
        slo=Slo(settings.ttft_slo, settings.tbt_slo),
        bind_ahead_us=LIVE.bind_ahead_us,
    )
    return filled(
        GatewayConfig,
        settings,
        role,
        token=token,
        tls=tls,
        kv_events_curve=curve_of(settings),
        tuning=tuning,
        **others,
    )


@click.command()
@click.option("--role", type=click.Choice(["prefill", "decode", "both"]), required=True)
@click.option(
    "--name",
    metavar="NAME",
    required=True,
    help="Name of the worker, unique in the cluster, such as p0.",
)
@click.option(
    "--gateway",
    metavar="URL",
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


def run_role(main: Coroutine[Any, Any, None]) -> None:
    """Run a role on uvloop, or on asyncio's loop where uvloop is not installed (Windows)."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        asyncio.run(main)
    else:
        uvloop.run(main)

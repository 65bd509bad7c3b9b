"""Installs torch for the Python that runs this, in a build that fits the machine.

`make up` runs it: install_torch.py torch==VERSION [--backend auto|cpu|cu130|…] [--index URL].
On Linux, PyPI's torch brings CUDA. There uv takes torch from PyTorch's own index: the build for the
GPU's driver, or the CPU build. If uv cannot, pip takes PyPI's build, after a line about its cost.
It finds that out within `PROBE_S`, and leaves alone what is installed already.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROBE_S = 20.0
"""The longest wait until PyTorch's index has answered uv."""
_IMPATIENT = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5"}
CUDA_COST = "2.7 GB to download, 6 GB of disk"
"""Of torch 2.13.0 for Linux on x86-64, with the 17 packages of CUDA that it needs."""


def is_installed(requirement: str) -> bool:
    """Whether this version is there, in whatever build; False if the requirement has another form
    than torch==VERSION."""
    name, _, wanted = requirement.partition("==")
    try:
        return version(name).partition("+")[0] == wanted
    except (PackageNotFoundError, ValueError):
        return False


class NoBuild(Exception):
    """uv offers no build; the message says why."""


def offered(uv: Path, requirement: str, backend: str) -> str:
    """The build that uv would install, such as torch==2.13.0+cpu. Raises NoBuild."""
    command = [*_uv(uv, requirement, backend), "--dry-run"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env={**os.environ, **_IMPATIENT},
            check=False,
        )
    except OSError:
        raise NoBuild("uv is not installed") from None
    except subprocess.TimeoutExpired:
        raise NoBuild(f"PyTorch's index did not answer within {PROBE_S:g} s") from None
    found = re.search(r"^ \+ (torch==\S+)", done.stderr, re.MULTILINE)
    if done.returncode or found is None:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise NoBuild(last.strip().removeprefix("cause: "))
    return found[1]


def _uv(uv: Path, requirement: str, backend: str) -> list[str]:
    into = ["--python", sys.executable]
    return [str(uv), "pip", "install", *into, f"--torch-backend={backend}", requirement]


def by_uv(uv: Path, requirement: str, backend: str) -> bool:
    """Install torch by uv; False, after a line that says why, if it cannot."""
    try:
        build = offered(uv, requirement, backend)
    except NoBuild as error:
        say(f"uv gets no torch from PyTorch's index: {error}")
        return False
    say(f"uv installs {build} (backend {backend}; `make up TORCH_BACKEND=cpu` takes the CPU build)")
    if subprocess.run(_uv(uv, requirement, backend), check=False).returncode == 0:
        return True
    say("uv failed, see above")
    return False


def by_pip(requirement: str, index: str) -> int:
    """Install torch by pip, from the indexes of its settings and from `index`; its exit code."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    command += ["--no-compile", requirement]
    command += ["--extra-index-url", index] if index else []
    return subprocess.run(command, check=False).returncode


def say(line: str) -> None:
    """Print one line at once, before a child prints."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Install torch, unless it is there; return the exit code."""
    parser = argparse.ArgumentParser(description="install torch")
    parser.add_argument("requirement")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--index", default="")
    parser.add_argument("--uv", type=Path, default=Path(sys.executable).with_name("uv"))
    given = parser.parse_args(argv)
    if is_installed(given.requirement):
        return 0
    if not given.index and sys.platform == "linux":
        if by_uv(given.uv, given.requirement, given.backend):
            return 0
        free = shutil.disk_usage(sys.prefix).free / 1e9
        say(
            "pip takes torch from your package index instead. PyPI's build for Linux has CUDA:"
            f" {CUDA_COST} ({free:.0f} GB are free). To avoid that, press Ctrl-C and give the"
            " address of an index of CPU wheels: make up TORCH_INDEX=…"
        )
    return by_pip(given.requirement, given.index)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

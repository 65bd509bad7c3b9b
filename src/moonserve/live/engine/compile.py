"""Compiles kernels.c for this machine's CPU, once, into the user's cache.

Only live/engine/kernels calls it. It uses the C compiler that the machine has: `CC` names another
one, and the flags in `CFLAGS` come last, so that `-march=haswell` there builds for AVX2 alone. It
contacts no network. A library under its final name in the cache is always complete.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from moonserve.core.errors import ConfigError
from moonserve.live.model.catalog import cache_dir

_SOURCE = Path(__file__).with_name("kernels.c")
_DEADLINE_S = 120.0


def library() -> Path:
    """Return the compiled library; the first time this takes about a second.

    Raises ConfigError if there is no compiler, or if it fails.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        name = compiler[0] if compiler else "cc"
        raise _failed(f"there is no C compiler {name}; install one, such as gcc")
    command = [*compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    command += shlex.split(os.environ.get("CFLAGS", ""))
    try:
        version = _run([*compiler, "--version"])
        known = (_SOURCE.read_text(), *command, version, _cpu())
        digest = sha256("\0".join(known).encode()).hexdigest()[:24]
        path = cache_dir().parent / "kernels" / f"{digest}.so"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder, path.name)
                _run([*command, str(_SOURCE), "-o", str(made), "-lm"])
                made.replace(path)  # two workers may compile at once: either one's file is right
    except OSError as error:
        raise _failed(str(error)) from error
    return path


def _check_owner(folder: Path) -> None:
    """Refuse a folder into which another user could put a library for this one to load."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise _failed(f"others may write into {folder}; make it yours alone (chmod 700)")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(f"{command[0]} took longer than {_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        reason = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
        raise _failed(f"{command[0]} failed: {reason}")
    return done.stdout


def _failed(reason: str) -> ConfigError:
    return ConfigError(f"cannot compile the kernels: {reason}, or use --kernels torch", "kernels")


def _cpu() -> str:
    """Return what the compiler's choice of instructions depends on: a home may have many CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

"""Looks for what a make target needs of the system, and says what to install.

A target calls it before its tests: needs.py TARGET. It ends with code 1 if the target cannot run
without what is missing, and with code 0 if only some of its tests are skipped.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple


def _library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _program(name: str) -> bool:
    return shutil.which(name) is not None


class Need(NamedTuple):
    """One thing that a target needs."""

    what: str
    """Also how to look for it, with `there`."""
    package: str
    """Debian's package that has it."""
    without: str
    """What happens without it."""
    there: Callable[[str], bool] = _program


_IBVERBS = "libibverbs.so.1"
NEEDS: dict[str, tuple[Need, ...]] = {
    "test-vllm": (Need(_IBVERBS, "libibverbs1", "", _library),),
    "test-mooncake": (Need(_IBVERBS, "libibverbs1", "its tests are skipped", _library),),
    "test-page": (
        Need("npm", "npm", "contrast and labels are not checked"),
        Need("node", "nodejs", "its tests are skipped"),
        Need("chromium", "chromium", "its tests are skipped"),
    ),
    "test-prometheus": (
        Need("prometheus", "prometheus", "its tests are skipped"),
        Need("promtool", "prometheus", "its tests are skipped"),
    ),
    "test-deploy": (Need("npm", "nodejs npm", ""),),
}
"""By target. An empty `without`: the target cannot run."""


def main(target: str) -> int:
    """Say what is missing; 1: the target cannot run."""
    missing = [need for need in NEEDS[target] if not need.there(need.what)]
    for need in missing:
        then = need.without or f"make {target} cannot run without it"
        print(
            f"{need.what} is not on this machine: {then}; on Debian and Ubuntu:"
            f" apt install {need.package}",
            file=sys.stderr,
        )
    return int(any(not need.without for need in missing))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))

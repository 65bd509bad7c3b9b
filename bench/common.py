"""What every benchmark prints first: on which machine and of which commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def machine_line() -> str:
    """Processor, cores, load, Python and commit, in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [li for li in cpuinfo.read_text().splitlines() if li.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return (
        f"{name}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}; commit {commit or 'unknown'}"
    )

"""What make targets need of the system: it is looked for first, and named with its package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = ROOT / "requirements" / "needs.py"
TARGETS = re.findall(r"needs-(test-[a-z]+)", (ROOT / "Makefile").read_text())


def looked(target: str, library: str = "") -> subprocess.CompletedProcess[str]:
    """Run it on a machine without any program. library: another name of the one that is needed."""
    program = NEEDS.read_text().replace("libibverbs.so.1", library or "libc.so.6")
    return subprocess.run(
        [sys.executable, "-c", program, target],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/nowhere"},
    )


def test_the_targets_that_need_something_are_known() -> None:
    """Each of them calls it by its own name."""
    makefile = (ROOT / "Makefile").read_text()
    assert {f"{it}: needs-{it} " for it in TARGETS} == {
        line.partition("$")[0] for line in makefile.splitlines() if ": needs-" in line
    }
    assert len(TARGETS) == 5


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"test-vllm", "test-mooncake"}))
def test_a_missing_program_is_named(target: str) -> None:
    """With its package; only a target that is of no use without it ends."""
    found = looked(target)
    assert "on Debian and Ubuntu: apt install" in found.stderr
    assert found.returncode == (target == "test-deploy")


def test_a_missing_library_is_named() -> None:
    """Real engines cannot start without it; tests of Mooncake's store are skipped."""
    for target, code in (("test-vllm", 1), ("test-mooncake", 0)):
        found = looked(target, "libnobodyhasthis.so.9")
        assert "libnobodyhasthis.so.9 is not on this machine" in found.stderr
        assert "apt install libibverbs1" in found.stderr
        assert found.returncode == code
        there = looked(target)
        assert (there.returncode, there.stderr) == (0, "")

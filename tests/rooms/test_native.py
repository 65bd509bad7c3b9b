"""Which form of core runs: compiled modules only if every file of core is the one compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from moonserve import native

SOURCE = Path(native.__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
ASK = """
import moonserve
core = moonserve.CORE
print(core.compiled, core.stale, core.problem)
from moonserve.core import units
from moonserve.sim import clock
print(units.__file__.endswith(".py") and clock.__file__.endswith(".py"))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Core and sim alone, with compiled modules that cannot be loaded: their use is seen."""
    made = tmp_path / "moonserve"
    for room in native.ROOMS:
        shutil.copytree(SOURCE / room, made / room, ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    for name in ("__init__.py", "interrupt.py", "native.py"):
        shutil.copy(SOURCE / name, made)
    (made / f"{native.LIBRARY}{SUFFIX}").write_bytes(b"")
    for name in ("core/units", "sim/clock"):
        (made / f"{name}{SUFFIX}").write_bytes(b"no library")
    (made / native.MANIFEST).write_text(json.dumps(native.digests(made)))
    return made


def asked(package: Path, wish: str = "") -> subprocess.CompletedProcess[str]:
    """What a program finds that imports the package."""
    return subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"PYTHONPATH": str(package.parent), native.VARIABLE: wish},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("wish", ["", "compiled"])
def test_what_belongs_to_the_source_runs(package: Path, wish: str) -> None:
    """Python loads the compiled module, which is no library here."""
    told = asked(package, wish)
    assert told.stdout == "True False None\n"
    assert told.returncode == 1
    assert f"units{SUFFIX}" in told.stderr


@pytest.mark.parametrize("changed", ["core/shares.py", "sim/setup.py"])
def test_what_is_older_than_its_source_never_runs(package: Path, changed: str) -> None:
    """A changed file is named, and all of core and sim runs as Python."""
    with (package / changed).open("a") as file:
        file.write("\n")
    told = asked(package)
    assert told.stdout == "False True None\nTrue\n"
    assert f"{changed} has changed" in told.stderr
    assert "make compile" in told.stderr


@pytest.mark.parametrize("how", ["new", "removed", "torn", "without"])
def test_files_that_come_and_go_are_changes(package: Path, how: str) -> None:
    """So are a manifest that is damaged and one that is missing."""
    if how == "new":
        (package / "core" / "kv" / "more.py").write_text("")
    elif how == "removed":
        (package / "core" / "quota.py").unlink()
    elif how == "torn":
        (package / native.MANIFEST).write_text('{"core/units.py"')
    else:
        (package / native.MANIFEST).unlink()
    told = asked(package)
    assert told.stdout == "False True None\nTrue\n"
    assert "core runs as Python" in told.stderr


def test_the_python_form_can_be_asked_for(package: Path) -> None:
    """Nobody is warned."""
    told = asked(package, "python")
    assert (told.stdout, told.stderr) == ("False False None\nTrue\n", "")


def test_a_package_that_is_not_compiled_says_nothing(package: Path) -> None:
    """This is how most people have it."""
    (package / f"{native.LIBRARY}{SUFFIX}").unlink()
    (package / native.MANIFEST).unlink()
    for path in package.rglob(f"*{SUFFIX}"):
        path.unlink()
    told = asked(package)
    assert (told.stdout, told.stderr) == ("False False None\nTrue\n", "")


@pytest.mark.parametrize(
    ("wish", "why"), [("fast", "write python or compiled"), ("compiled", "core/shares.py has")]
)
def test_a_wish_that_cannot_be_fulfilled_is_a_problem(package: Path, wish: str, why: str) -> None:
    """A library goes on as Python, with a warning; the command line ends with an error."""
    (package / "core" / "shares.py").write_text("")
    told = asked(package, wish)
    assert told.stdout.startswith("False False ")
    assert why in told.stdout
    assert why in told.stderr


def test_the_command_line_refuses_a_wrong_wish() -> None:
    """One line names the variable and what it takes."""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "moonserve", "doctor"],
        env=os.environ | {native.VARIABLE: "fast"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 2
    assert told.stderr == (
        'error: MOONSERVE_CORE: "fast" is no form of core; '
        "write python or compiled, or unset MOONSERVE_CORE\n"
    )

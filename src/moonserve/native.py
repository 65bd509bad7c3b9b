"""Which form of core and the simulator runs: Python modules, or the same as native code.

`hatch_build.py` compiles core and the busy modules of sim into a wheel, or in place (`make
compile`), and writes a manifest with the digest of every file of both rooms. Python prefers a
compiled module that lies beside its source. This module looks at the manifest before the first
import of core, and lets that happen only if the digests are still right; otherwise a finder leads
every import within the two rooms to the source. So they are never half compiled, and never older
than their source. "Core" in names and messages means both: they are compiled together or not.

Who may call it: the package calls `choose` once, at its import; others read `moonserve.CORE`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

VARIABLE = "MOONSERVE_CORE"
"""The environment variable that asks for one form: "python" or "compiled"."""
LIBRARY = "_core__mypyc"
"""The native library that all compiled modules share; it lies in the package's folder."""
ROOMS = ("core", "sim")
"""The folders of the package that have compiled modules."""
MANIFEST = f"{LIBRARY}.json"
REMEDY = "`make compile` compiles it again, `make uncompile` removes what was compiled"


class Core(NamedTuple):
    """The form that runs. `why` explains it; `problem` says why a wish could not be fulfilled."""

    compiled: bool
    why: str
    problem: str | None = None
    stale: bool = False
    """Whether compiled modules lie here that do not belong to the source, and are not used."""

    @property
    def name(self) -> str:
        """In two words."""
        return "compiled core" if self.compiled else "Python core"


class _FromSource(MetaPathFinder):
    """Finds the modules of the rooms among the Python files only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(tuple(f"moonserve.{room}." for room in ROOMS)):
            return None
        for folder in path or ():
            spec = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(fullname)
            if spec is not None:
                return spec
        return None


def digests(package: Path) -> dict[str, str]:
    """The digest of every Python file of the rooms, by its path below the package's folder."""
    return {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        for room in ROOMS
        for path in sorted((package / room).rglob("*.py"))
    }


def look(package: Path) -> Core:
    """The form that could run: compiled, if everything compiled belongs to the source of now."""
    if not (package / f"{LIBRARY}{EXTENSION_SUFFIXES[0]}").exists():
        return Core(False, "it is not compiled for this Python")
    try:
        known = json.loads((package / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return Core(False, "what is compiled is not complete")
    now = digests(package)
    changed = sorted(path for path in known.keys() | now.keys() if known.get(path) != now.get(path))
    if changed:
        return Core(False, f"{changed[0]} has changed since it was compiled")
    return Core(True, "the compiled modules belong to this source")


def choose(package: Path) -> Core:
    """Decide which form the imports of core find from now on; VARIABLE may ask for one.

    It warns about compiled modules that do not belong to the source, and of a wish that cannot be
    fulfilled. It never raises: the command line turns `problem` into an error.
    """
    wish = os.environ.get(VARIABLE, "")
    if wish == "python":
        core = Core(False, f"{VARIABLE} asks for it")
    else:
        core = look(package)
    if wish not in ("", "python", "compiled"):
        core = core._replace(
            problem=f'"{wish}" is no form of core; write python or compiled, or unset {VARIABLE}'
        )
    elif wish == "compiled" and not core.compiled:
        core = core._replace(problem=f"the compiled core cannot run: {core.why}")
    if not core.compiled and any(package.glob(f"{LIBRARY}*")):
        sys.meta_path.insert(0, _FromSource())
        core = core._replace(stale=not wish)
    if core.problem is not None:
        warnings.warn(core.problem, RuntimeWarning, stacklevel=2)
    elif core.stale:
        warnings.warn(f"core runs as Python: {core.why}; {REMEDY}", RuntimeWarning, stacklevel=2)
    return core

"""Compiles moonserve.core, and the busy modules of moonserve.sim, to native modules: for a wheel
(hatchling calls the hook), or in place.

    python hatch_build.py            compile the checkout's, beside their source
    python hatch_build.py --remove   remove what was compiled
    python hatch_build.py --list     print the modules that are compiled
    python hatch_build.py --missing  print what is missing here for a compiler, if something is

MOONSERVE_COMPILE=1 makes a wheel fail that cannot be compiled, MOONSERVE_COMPILE=0 makes it pure.
Without the variable a wheel is compiled if this machine has a C compiler and Python's headers. An
editable installation is never compiled by itself. `moonserve/native.py` decides at run time.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SRC = ROOT / "src"
PACKAGE = SRC / "moonserve"
NEEDS = ["mypy[mypyc]==2.4.1", "setuptools>=77"]
OPTIMIZE = os.environ.get("MOONSERVE_COMPILE_OPT", "2")
_spec = spec_from_file_location("native", PACKAGE / "native.py")
assert _spec is not None
assert _spec.loader is not None
native = module_from_spec(_spec)
_spec.loader.exec_module(native)


LEFT_OUT = ("core/errors.py", "core/schedule/observed.py")
"""Others derive classes from theirs, and Python code cannot derive from a native class."""
SIMULATOR = ("cache", "carrier", "clock", "cluster", "network", "node", "segments")
"""The modules of sim that are compiled with core: a simulation spends its time in them."""


def why_not(source: str) -> str | None:
    """What keeps a module from being compiled; None if nothing does.

    mypyc drops the options of a class and the type of a ClassVar: a struct would lose `frozen` and
    its tag, and gain a field.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base) for base in node.bases]
        options = {option.arg for option in node.keywords}
        if options - ({"frozen"} if bases == ["Frozen"] else set()):
            return f"class {node.name} has options, which the compiler ignores"
        struct = bool({"Frozen", "msgspec.Struct"} & set(bases))
        if struct and any("ClassVar" in ast.unparse(below) for below in node.body):
            return f"struct {node.name} has a ClassVar, which the compiler takes for a field"
    return None


def modules() -> list[Path]:
    """The files of core and sim that are compiled."""
    out = {PACKAGE / path for path in LEFT_OUT}
    core = [
        path
        for path in sorted((PACKAGE / "core").rglob("*.py"))
        if path.name != "__init__.py" and path not in out and why_not(path.read_text()) is None
    ]
    return [*core, *(PACKAGE / "sim" / f"{name}.py" for name in SIMULATOR)]


def can_compile() -> str | None:
    """What is missing here for a compiler; None if nothing is."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or ""
    if not compiler or shutil.which(compiler.split()[0]) is None:
        return "there is no C compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers (Python.h) are missing"
    return None


def compile_into(out: Path, work: Path) -> list[Path]:
    """Compile core into the folder `out`, laid out as below src, with the manifest last."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    before = native.digests(PACKAGE)
    os.chdir(SRC)  # mypyc names modules by their paths from here
    extensions = mypycify(
        [
            *("--strict", "--python-version=3.11", f"--cache-dir={work / 'types'}"),
            *(str(path.relative_to(SRC)) for path in modules()),
        ],
        opt_level=OPTIMIZE,
        debug_level="0",
        target_dir=str(work / "c"),
        group_name=f"moonserve.{native.LIBRARY.removesuffix('__mypyc')}",
        multi_file=True,
    )
    for extension in extensions:  # the shared headers lie where the group's name says
        extension.include_dirs.append(str(work / "c" / "moonserve"))
    command: Any = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(out), str(work / "o")
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    command.run()
    if before != native.digests(PACKAGE):
        raise SystemExit("a file changed while it was compiled; compile it again")
    manifest = out / "moonserve" / native.MANIFEST
    manifest.write_text(json.dumps(before, indent=0))
    return [*map(Path, command.get_outputs()), manifest]


def compiled_files() -> Iterator[Path]:
    """What was compiled in place, the manifest first, so that nothing half removed is believed."""
    yield from PACKAGE.glob(native.MANIFEST)
    for suffix in ("so", "pyd"):
        for room in native.ROOMS:
            yield from (PACKAGE / room).rglob(f"*.{suffix}")
        yield from PACKAGE.glob(f"{native.LIBRARY}*.{suffix}")


def remove() -> None:
    """Remove what was compiled in place."""
    for path in list(compiled_files()):
        path.unlink()


def in_place() -> None:
    """Compile the checkout's core; other programs see the old form or the new one, never half."""
    missing = can_compile()
    if missing is not None:
        raise SystemExit(f"core cannot be compiled: {missing}")
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "out")
        files = compile_into(out, Path(work))
        remove()
        for path in files:
            shutil.move(path, SRC / path.relative_to(out))


class CompileCore(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's hook: puts the compiled modules into a wheel beside their sources."""

    def _wish(self) -> bool:
        wish = os.environ.get("MOONSERVE_COMPILE", "")
        if wish not in ("", "0", "1"):
            raise SystemExit(f'MOONSERVE_COMPILE is "{wish}"; write 0 or 1, or unset it')
        missing = can_compile()
        if wish == "1" and missing is not None:
            raise SystemExit(f"MOONSERVE_COMPILE asks for a compiled core, but {missing}")
        return self.target_name == "wheel" and wish != "0" and missing is None

    def dependencies(self) -> list[str]:
        """What the build needs beside hatchling."""
        return NEEDS if self._wish() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the installation is editable."""
        if version == "editable" or not self._wish():
            return
        self._work = tempfile.TemporaryDirectory()
        out = Path(self._work.name, "out")
        told = subprocess.run([sys.executable, __file__, "--into", str(out)], check=False)
        if told.returncode != 0:
            if os.environ.get("MOONSERVE_COMPILE") == "1":
                raise SystemExit("core could not be compiled; the reason stands above")
            self.app.display_warning("core could not be compiled: the wheel is pure Python")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in out.rglob("*"):
            if path.is_file():
                build_data["force_include"][str(path)] = str(path.relative_to(out))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it now."""
        if hasattr(self, "_work"):
            self._work.cleanup()


def main(args: list[str]) -> None:
    """Do what the module's docstring says."""
    if args == ["--remove"]:
        remove()
    elif args == ["--list"]:
        print(*(path.relative_to(SRC) for path in modules()), sep="\n")
    elif args == ["--missing"]:
        print(can_compile() or "")
    elif len(args) == 2 and args[0] == "--into":
        with tempfile.TemporaryDirectory() as work:
            compile_into(Path(args[1]), Path(work))
    elif not args:
        in_place()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The house's rules that no linter knows, over every file; messages name the replacement.

A rule is a function from a file to its complaints. Each has a sample below that breaks it, so that
a rule that stopped working is seen.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from moonserve.config import FIELDS

ROOT = Path(__file__).parents[2]
PURE = {
    *("__future__", "abc", "array", "bisect", "collections", "contextlib", "dataclasses", "enum"),
    *("functools", "hashlib", "heapq", "itertools", "math", "operator", "pickle", "statistics"),
    *("string", "struct", "sys", "types", "typing"),
    *("msgspec", "xxhash", "blake3"),
}
HEAVY = {
    *("torch", "numpy", "uvloop", "httptools", "tokenizers", "jinja2"),
    *("safetensors", "prometheus_client", "yaml", "moonserve.live", "moonserve.sim"),
    "asyncio",
    "moonserve.show",
}
# In two halves, so that this file does not name what it forbids.
FORBIDDEN = [
    re.compile(left + right)
    for left, right in [
        (r"(?<![\w.])/wo", r"rk/"),
        (r"(?<![\w.])/tmp", r"/\w"),
        ("/opt/wh", "eels"),
        ("pypi", r"\.org"),
        (r"download\.py", r"torch\.org"),
        ("pythonhosted", r"\.org"),
    ]
]


FLOORS = {
    "core": (
        "units",
        "frozen",
        "liveness",
        "errors",
        "shares",
        "request",
        "quota",
        "kv",
        "engine",
        "transfer",
        "store",
        "schedule",
    ),
    "live": (
        *(
            "health",
            "clock",
            "ports",
            "tasks",
            "turns",
            "exposition",
            "tls",
            "http",
            "rpc",
            "model",
            "text",
            "openai",
            "registry",
            "access",
        ),
        *(
            "replay",
            "transfer",
            "engine",
            "kvevents",
            "store",
            "external",
            "kubernetes",
            "drive",
            "control",
            "record",
        ),
        *("record", "api", "picker", "fronts", "worker", "process"),
    ),
}
"""The rooms from the ground up; a room imports only rooms before it."""
LOOP = "src/moonserve/live/control/loop.py"
SPECIFIED_BY = ("greedy_reference",)
"""Plain loops that stand beside the fast ones as their specification."""


class File(NamedTuple):
    """One file: its path from the root, its text and, for Python, its tree."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)


def imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Every (line, module) imported below a node; `from a import b` gives a.b."""
    for below in ast.walk(node):
        if isinstance(below, ast.Import):
            yield from ((below.lineno, alias.name) for alias in below.names)
        elif isinstance(below, ast.ImportFrom):
            assert below.level == 0, "write absolute imports"
            yield from ((below.lineno, f"{below.module}.{alias.name}") for alias in below.names)


def within(module: str, rooms: set[str]) -> bool:
    """Whether a module is one of these, or below one."""
    return any(module == room or module.startswith(room + ".") for room in rooms)


def for_typing_only(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            lines |= set(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1))
    return lines


def core_is_pure(file: File) -> Iterator[str]:
    """Core imports itself, msgspec, hash functions and pure stdlib."""
    if not file.path.startswith("src/moonserve/core/"):
        return
    typing_only = for_typing_only(file.tree)
    for line, module in imports(file.tree):
        if line not in typing_only and not within(module, PURE | {"moonserve.core"}):
            yield f"{line}: core may not import {module}; take what it gives as an argument"


def rooms_keep_their_floor(file: File) -> Iterator[str]:
    """Live, sim and show import core, never each other nor the CLI."""
    match = re.match(r"src/moonserve/(live|sim|show)/", file.path)
    if match is None:
        return
    others = {"live", "sim", "show", "cli"} - {match[1]}
    for line, module in imports(file.tree):
        if within(module, {f"moonserve.{room}" for room in others}):
            yield f"{line}: {match[1]} may not import {module}; share it through core"


def rooms_keep_their_order(file: File) -> Iterator[str]:
    """Within core and within live, a room imports the rooms below it only: see FLOORS."""
    match = re.match(r"src/moonserve/(core|live)/(\w+)", file.path)
    if match is None or match[2] == "__init__":
        return
    floors = FLOORS[match[1]]
    if match[2] not in floors:
        yield f"1: {match[2]} is new: give it a place in FLOORS, above all that it imports"
        return
    for line, module in imports(file.tree):
        below = re.match(rf"moonserve\.{match[1]}\.(\w+)", module)
        if below and below[1] in floors and floors.index(below[1]) > floors.index(match[2]):
            yield f"{line}: {match[2]} may not import {below[1]}, which is above it"


def circles(files: list[File]) -> Iterator[str]:
    """No two files of the product import each other, not even by way of others."""
    modules = {_module(file.path): file for file in files if file.path.startswith("src/")}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        named = {name for _, name in imports(file.tree)}
        found = {it if it in modules else it.rpartition(".")[0] for it in named}
        graph[module] = (found & modules.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"{' <- '.join(error.args[1])}: move what they share into a file below them"


def _module(path: str) -> str:
    """The name under which a file is imported."""
    name = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def sim_and_show_never_wait(file: File) -> Iterator[str]:
    """The simulator and what shows a run have no clock, no sockets, no event loop."""
    if file.path.startswith(("src/moonserve/sim/", "src/moonserve/show/")):
        for line, module in imports(file.tree):
            if within(module, {"asyncio", "time", "socket", "threading"}):
                yield f"{line}: {module} waits or measures; time here is sim.clock's or an argument"


def torch_stays_in_the_engine(file: File) -> Iterator[str]:
    """Torch is imported in live/engine and nowhere else in the product."""
    if file.path.startswith("src/") and "/live/engine/" not in file.path:
        for line, module in imports(file.tree):
            if within(module, {"torch"}):
                yield f"{line}: torch lives in live/engine; go through live.ports.Engine"


def cli_is_light(file: File) -> Iterator[str]:
    """The CLI imports heavy things inside functions only."""
    if not file.path.startswith(("src/moonserve/cli/", "src/moonserve/config.py")):
        return
    inside = {
        line
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    } | for_typing_only(file.tree)
    for line, module in imports(file.tree):
        if line not in inside and within(module, HEAVY):
            yield f"{line}: import {module} inside the function that needs it; --help must be quick"


def core_iterates_no_set(file: File) -> Iterator[str]:
    """Core loops over no set, since its order changes from run to run."""
    if not file.path.startswith("src/moonserve/core/"):
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.For | ast.comprehension):
            over = node.iter
            called = over.func if isinstance(over, ast.Call) else None
            named = isinstance(called, ast.Name) and called.id in ("set", "frozenset")
            if named or isinstance(over, ast.Set | ast.SetComp):
                yield f"{over.lineno}: iterate sorted(…) or dict.fromkeys(…), not a set"


def modules_say_what_they_are_for(file: File) -> Iterator[str]:
    """Every module has a docstring: the notice on its door."""
    if not ast.get_docstring(file.tree) and file.text.strip():
        yield "1: say what this module is for and who may call it, in a docstring"


def nothing_is_caught_blindly(file: File) -> Iterator[str]:
    """A broad except says why in its noqa, logs the traceback, or raises again."""
    lines = file.text.splitlines()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            reason = re.search(r"noqa: BLE001\W+\w", lines[node.lineno - 1])
            broad = re.search(r"\b(Base)?Exception\b", caught)
            if broad and not (reason or _reraises(node) or _tells(node)):
                yield f"{node.lineno}: catch MoonserveError or what you expect; else noqa and why"


def _reraises(node: ast.ExceptHandler) -> bool:
    """Whether it ends in `raise` or `raise … from error`: nothing is hidden."""
    last = node.body[-1]
    return isinstance(last, ast.Raise) and (last.exc is None or last.cause is not None)


def _tells(node: ast.ExceptHandler) -> bool:
    """Whether a bug caught at an edge is logged with its traceback."""
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(isinstance(func, ast.Attribute) and func.attr == "exception" for func in calls)


def bytes_are_decoded_alike(file: File) -> Iterator[str]:
    """What decodes bytes by msgspec catches all errors that msgspec raises for them."""
    if not file.path.startswith("src/"):
        return
    tree = file.tree
    safe: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(it.type) for it in node.handlers if it.type)
            if re.search(r"UNREADABLE|\bException\b", caught):
                safe.update(below for line in node.body for below in ast.walk(line))
            if re.search(r"msgspec\.(DecodeError|MsgspecError)", caught):
                yield f"{node.lineno}: catch core.errors.UNREADABLE; DecodeError is not all"
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if re.fullmatch(r"msgspec\.\w+\.decode", called) and node not in safe:
            yield f"{node.lineno}: catch core.errors.UNREADABLE where bytes are decoded"


def unused(files: list[File]) -> Iterator[str]:
    """Nothing in src is there for tests only: functions and classes are used by the product or the
    bench. What a decorator registers is."""
    product = [file for file in files if file.path.startswith(("src/", "bench/"))]
    used: set[str] = set()
    for file in product:
        for node in ast.walk(file.tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    used.add(name)
                case ast.alias(name=name, asname=str()):
                    used.add(name)
                case ast.Constant(value=str(text)) if text.isidentifier():
                    used.add(text)  # a forward reference
    for file in product:
        for node in file.tree.body if file.path.startswith("src/") else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name not in used and not node.decorator_list and node.name not in SPECIFIED_BY:
                yield f"{file.path}:{node.lineno}: only tests use {node.name}; move it to them"


def declared_too_often(files: list[File]) -> Iterator[str]:
    """A setting is declared in the list of all settings and by the structs of its roles; no part
    below them declares it again, except for names that also mean something else there."""
    declared: dict[str, list[str]] = {}
    for file in files:
        if file.path.startswith(("src/moonserve/config.py", "src/moonserve/live/")):
            for made in ast.walk(file.tree):
                for node in made.body if isinstance(made, ast.ClassDef) else ():
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        declared.setdefault(node.target.id, []).append(file.path)
    for name in sorted({it for it in FIELDS if "_" in it} - {"block_size", "max_seqs"}):
        if len(places := declared.get(name, [])) > 4:
            yield f"{name} is declared in {', '.join(places)}: pass the struct that has it"


def unreached(files: list[File]) -> Iterator[str]:
    """Nor is a module, but for the command line's, which are loaded by name."""
    product = [file for file in files if file.path.startswith(("src/", "bench/"))]
    loaded = {module for file in product for _, module in imports(file.tree)}
    for path in [file.path for file in product]:
        module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        if path.startswith("src/moonserve/cli/") or module.endswith("__"):
            continue
        if path.startswith("src/") and not any(within(name, {module}) for name in loaded):
            yield f"{path}:1: only tests load it; move it to them, or have it used"


def settings_are_written_once(file: File) -> Iterator[str]:
    """No setting is copied by hand into the structs that are named after it."""
    if file.path.startswith("src/moonserve/cli/"):
        for node in ast.walk(file.tree):
            match node:
                case ast.keyword(
                    arg=str(name), value=ast.Attribute(attr=attr, value=ast.Name(id="settings"))
                ) if name == attr and name in FIELDS:
                    yield f"{node.lineno}: config.filled copies {name} and all others by name"


def the_conductor_is_read_by_its_port(file: File) -> Iterator[str]:
    """In live, only the Conductor's own loop reaches into the Conductor."""
    if file.path.startswith("src/moonserve/live/") and file.path != LOOP:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and node.attr == "core":
                yield f"{node.lineno}: read it through ports.ClusterRead, which {LOOP} implements"


def names_no_machine(file: File) -> Iterator[str]:
    """No machine's path and no registry's host is named anywhere."""
    for number, line in enumerate(file.text.splitlines(), 1):
        for pattern in FORBIDDEN:
            if found := pattern.search(line):
                yield f"{number}: {found[0]!r} belongs to one machine; take it as a setting"


PYTHON_RULES: list[Callable[[File], Iterator[str]]] = [
    core_is_pure,
    rooms_keep_their_floor,
    sim_and_show_never_wait,
    torch_stays_in_the_engine,
    bytes_are_decoded_alike,
    cli_is_light,
    core_iterates_no_set,
    modules_say_what_they_are_for,
    nothing_is_caught_blindly,
    settings_are_written_once,
    the_conductor_is_read_by_its_port,
    rooms_keep_their_order,
]
CORE, LIVE, CLI = (f"src/moonserve/{room}/x.py" for room in ("core/kv", "live/http", "cli"))
BROKEN = [
    (core_is_pure, CORE, "import time"),
    (core_is_pure, CORE, "def f():\n    from moonserve.live import ports"),
    (rooms_keep_their_floor, LIVE, "from moonserve import sim"),
    (rooms_keep_their_floor, LIVE, "import moonserve.cli"),
    (sim_and_show_never_wait, "src/moonserve/sim/x.py", "import time"),
    (torch_stays_in_the_engine, LIVE, "def f():\n    import torch.nn"),
    (cli_is_light, CLI, "from moonserve.live.process import gateway"),
    (cli_is_light, CLI, "import numpy"),
    (bytes_are_decoded_alike, LIVE, "x = msgspec.json.decode(y)"),
    (bytes_are_decoded_alike, LIVE, "try: pass\nexcept msgspec.DecodeError: pass"),
    (core_iterates_no_set, CORE, "for x in {1, 2}: pass"),
    (core_iterates_no_set, CORE, "y = [x for x in set(a)]"),
    (modules_say_what_they_are_for, LIVE, "x = 1"),
    (nothing_is_caught_blindly, LIVE, "try: pass\nexcept (OSError, Exception): pass"),
    (nothing_is_caught_blindly, LIVE, "try: pass\nexcept Exception: pass  # noqa: BLE001"),
    (settings_are_written_once, CLI, "GatewayConfig(eviction=settings.eviction)"),
    (rooms_keep_their_order, "src/moonserve/live/http/x.py", "import moonserve.live.store.x"),
    (rooms_keep_their_order, "src/moonserve/core/kv/x.py", "from moonserve.core.store import x"),
    (rooms_keep_their_order, "src/moonserve/live/annex/x.py", "x = 1"),
    (the_conductor_is_read_by_its_port, LIVE, "len(conductor.core.index)"),
    (names_no_machine, "README.md", "cd /wo" + "rk/main"),
    (names_no_machine, "Makefile", "pip --index https://pypi" + ".org/simple"),
]
FINE = [
    (core_is_pure, CORE, "if TYPE_CHECKING:\n    from random import Random"),
    (core_iterates_no_set, CORE, "for x in sorted({1, 2}): pass"),
    (cli_is_light, CLI, "def f():\n    import numpy"),
    (bytes_are_decoded_alike, LIVE, "try: msgspec.json.decode(y)\nexcept UNREADABLE: pass"),
    (nothing_is_caught_blindly, LIVE, "try: pass\nexcept Exception:  # noqa: BLE001 - why\n    0"),
    (nothing_is_caught_blindly, LIVE, "try: pass\nexcept BaseException:\n    raise"),
    (settings_are_written_once, CLI, "filled(WorkerConfig, settings, port=listen)"),
    (rooms_keep_their_order, LOOP, "from moonserve.live.store import remote"),
    (the_conductor_is_read_by_its_port, LOOP, "len(self.core.index)"),
    (names_no_machine, LIVE, "path = tmp_path / 'work/x'"),
]


def house() -> list[File]:
    """Every text file that is in the repository, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    endings = (".py", ".md", ".toml", ".yaml", ".yml", "Makefile", ".ci/run", ".json")
    paths = [path for path in listed if path.endswith(endings) and (ROOT / path).is_file()]
    assert "src/moonserve/core/units.py" in paths
    return [File(path, (ROOT / path).read_text()) for path in paths]


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_files_keep_the_rule(rule: Callable[[File], Iterator[str]]) -> None:
    """Every Python file keeps this rule."""
    files = [file for file in house() if file.path.endswith(".py")]
    complaints = [f"{file.path}:{complaint}" for file in files for complaint in rule(file)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_nothing_is_there_for_tests_only() -> None:
    """Code of src that the product does not use belongs to the tests."""
    files = [file for file in house() if file.path.endswith(".py")]
    complaints = [*unused(files), *unreached(files)]
    assert not complaints, "\n" + "\n".join(complaints)
    lone = [File(CORE, "def f(): ..."), File("tests/x.py", "from a import f\nf()")]
    assert len(list(unused(lone))) == 1
    assert not list(unused([*lone, File(LIVE, "from a import f\nf()")]))
    assert len(list(unreached([*lone, File(LIVE, "import moonserve.core.y")]))) == 2
    assert len(list(unreached([*lone, File(LIVE, "from moonserve.core.kv.x import f")]))) == 1


def test_no_setting_is_declared_again_and_again() -> None:
    """A new setting is one field in config.Settings and one in the struct of its role."""
    assert not list(declared_too_often([file for file in house() if file.path.endswith(".py")]))
    often = [File(f"src/moonserve/live/{n}.py", "class C:\n    decode_kv: str") for n in "abcde"]
    assert len(list(declared_too_often(often))) == 1
    assert not list(declared_too_often(often[:4]))


def test_no_files_import_each_other() -> None:
    """The files of the product have an order in which each can be read after what it uses."""
    files = [file for file in house() if file.path.endswith(".py")]
    complaints = list(circles(files))
    assert not complaints, "\n" + "\n".join(complaints)
    circle = [
        File("src/moonserve/a/__init__.py", ""),
        File("src/moonserve/a/b.py", "from moonserve.a import c"),
        File("src/moonserve/a/c.py", "def f():\n    from moonserve.a.b import g"),
    ]
    assert len(list(circles(circle))) == 1
    assert not list(circles(circle[:2]))


def test_a_class_name_stands_for_one_thing() -> None:
    """No two classes of the product share a name."""
    named: dict[str, list[str]] = {}
    for file in house():
        if file.path.startswith("src/") and file.path.endswith(".py"):
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ClassDef):
                    named.setdefault(node.name, []).append(file.path)
    twice = {name: paths for name, paths in named.items() if len(paths) > 1}
    assert not twice, f"give each its own name: {twice}"


def test_no_file_names_a_machine() -> None:
    """What is in the repository means the same on every machine."""
    complaints = [f"{file.path}:{text}" for file in house() for text in names_no_machine(file)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_each_rule_bites(rule: Callable[[File], Iterator[str]], path: str, text: str) -> None:
    """A file that breaks a rule is complained about."""
    assert list(rule(File(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), FINE)
def test_no_rule_bites_the_innocent(
    rule: Callable[[File], Iterator[str]], path: str, text: str
) -> None:
    """A file that keeps the rule is let alone."""
    assert not list(rule(File(path, text)))

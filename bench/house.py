"""The house in figures: code lines by room, circles, names, and the modules that a request meets.

    python bench/house.py [--root CHECKOUT] [--static]

The figures compare two checkouts: run it with --root for each. Code lines are lines without blanks,
comments and docstrings. The dynamic part starts a gateway with a prefill and a decode worker in one
process (tests/support/inproc.py of that checkout), sends requests, and notes which modules of
moonserve run a function; a module that runs in each of several repetitions counts.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "moonserve"
MANY = 7
"""Parameters that are many for one function."""
OFTEN = 3
"""A setting is written often if more files than this define it or pass it on."""


def code_lines(text: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*quiet, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


class Checkout:
    """The Python files of one checkout's product, parsed."""

    def __init__(self, root: Path) -> None:
        source = root / "src"
        self.texts: dict[str, str] = {}
        for path in sorted((source / PACKAGE).rglob("*.py")):
            name = ".".join(path.relative_to(source).with_suffix("").parts)
            self.texts[name.removesuffix(".__init__")] = path.read_text()
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.imports = {
            name: set(self._imported(tree)) - {name} for name, tree in self.trees.items()
        }

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        """The modules of the product that this one imports, for types and inside functions too."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in self.trees or node.module in self.trees:
                        yield whole if whole in self.trees else str(node.module)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)


def room(module: str) -> str:
    """The folder of a module, at most two deep: moonserve.live.store.client is in live.store."""
    parts = module.split(".")[1:-1]
    return ".".join(parts[:2]) or "top"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other (Tarjan's components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in sorted(graph.get(node, ())):
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def folder_arrows(checkout: Checkout) -> Counter[tuple[str, str]]:
    """How many imports go from folder to folder."""
    arrows: Counter[tuple[str, str]] = Counter()
    for name, targets in checkout.imports.items():
        for target in targets:
            if room(name) != room(target):
                arrows[room(name), room(target)] += 1
    return arrows


def arrows_up(arrows: Counter[tuple[str, str]]) -> int:
    """Imports between two folders that go against the direction that most of them take."""
    pairs = {tuple(sorted(pair)) for pair in arrows}
    return sum(min(arrows[one, other], arrows[other, one]) for one, other in pairs)


def setting_names(root: Path) -> set[str]:
    """Every flag of docs/cli.md as an identifier; words that mean many things are left out."""
    for path in (root / "docs/cli.md", root / "docs/reference/cli.md"):
        if path.is_file():
            flags = set(re.findall(r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)+)\b", path.read_text()))
            return {flag.replace("-", "_") for flag in flags}
    raise SystemExit(f"{root}: no docs/cli.md; run this on a whole checkout")


def written(tree: ast.Module) -> set[str]:
    """Names that a file defines or passes on: parameters, keywords, fields, and strings."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Constant(value=str(text)) if len(text) < 60:
                names |= set(re.findall(r"[a-z][a-z0-9_]+", text.replace("-", "_")))
    return names


def parameters(tree: ast.Module) -> Iterator[int]:
    """How many parameters each function has, `self` aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield sum(arg.arg not in ("self", "cls") for arg in args)


def static(root: Path) -> dict[str, object]:
    """What can be counted without running anything."""
    checkout = Checkout(root)
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, text in checkout.texts.items():
        lines[room(name)] += code_lines(text)
        files[room(name)] += 1
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in checkout.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    arrows = folder_arrows(checkout)
    folders: defaultdict[str, set[str]] = defaultdict(set)
    for one, other in arrows:
        folders[one].add(other)
    settings = setting_names(root)
    per_file = {name: written(tree) & settings for name, tree in checkout.trees.items()}
    times = Counter(name for names in per_file.values() for name in names)
    tuples = [
        node
        for tree in checkout.trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ]
    tests = [path.read_text() for path in sorted((root / "tests").rglob("*.py"))]
    counts = [count for tree in checkout.trees.values() for count in parameters(tree)]
    return {
        "code lines by room": dict(sorted(lines.items())),
        "code lines": sum(lines.values()),
        "code lines of tests": sum(map(code_lines, tests)),
        "files": sum(files.values()),
        "classes": sum(map(len, classes.values())),
        "class names that stand for two things": sum(len(at) > 1 for at in classes.values()),
        "circles of files": circles(checkout.imports),
        "circles of folders": circles(dict(folders)),
        "imports against the direction of their folders": arrows_up(arrows),
        "settings (flags of two words)": len(settings),
        f"settings written in more than {OFTEN} files": sum(at > OFTEN for at in times.values()),
        "files that write a setting, mean": round(sum(times.values()) / len(times), 2),
        f"functions of {MANY} or more parameters": sum(count >= MANY for count in counts),
        "tuple assignments of tuples": len(tuples),
        "monkeypatched private constants in tests": sum(
            len(re.findall(r"setattr\([^)]*[\"'.]_[A-Z]", text)) for text in tests
        ),
    }


SCENE = """
import asyncio, json, sys, threading
from tests.support.inproc import BLOCK, site

met, until, src = set(), [None], sys.argv[1]

def note(frame, event, arg):
    path = frame.f_code.co_filename
    if event == "call" and path.startswith(src):
        name = path[len(src):].removesuffix(".py")
        if until[0] is not None and until[0](name):
            stop()
        else:
            met.add(name)

def start(at=None):
    met.clear()
    until[0] = at
    threading.setprofile(note)
    sys.setprofile(note)

def stop():
    sys.setprofile(None)
    threading.setprofile(None)

OWN = ("live/worker/join", "live/worker/gateways", "live/worker/metrics", "live/worker/main")

def at_worker(name):
    return name.startswith("live/worker/") and name not in OWN

async def refused(it):
    body = {"model": it.gateway_model, "prompt": list(range(2, 402)), "max_tokens": 4}
    headers = {"x-moonserve-ttft-slo-ms": "0.001", "content-type": "application/json"}
    reply = await it.http.request("POST", it.url + "/v1/completions", headers=headers,
                                  body=json.dumps(body).encode(), timeout_s=10)
    return reply.status == 429

async def main():
    found = {"request": [], "block": [], "refusal": []}
    async with site() as it:
        from moonserve.live.model.catalog import DEFAULT_MODEL
        it.gateway_model = DEFAULT_MODEL
        await it.add("p0", "prefill")
        await it.add("d0", "decode")
        for turn in range(200):  # nothing is refused before its costs have been measured
            if await refused(it):
                break
        await it.settle()
        for turn in range(8):
            prompt = [2 + (turn * 7 + i) % 200 for i in range(BLOCK * 5)]
            start(at_worker)
            await it.tokens(prompt, 6)
            stop()
            found["request"].append(sorted(met))
            await it.settle()
            prompt = [2 + (turn * 11 + i) % 190 for i in range(BLOCK * 5)]
            start()
            await it.tokens(prompt, 6)
            await it.settle()
            stop()
            found["block"].append(sorted(met))
            start()
            assert await refused(it)
            stop()
            found["refusal"].append(sorted(met))
    print(json.dumps(found))

asyncio.run(main())
"""
BLOCK_ROOMS = re.compile(r"(live/(worker|store|transfer|engine)|core/(store|engine|transfer))/")
OLD_BLOCK = re.compile(
    r"core/(master|stock|shelf|segments|room|evict|chains|puts|leases|copies|repair|tiers|roster"
    r"|recovery|owner|pool|batch|blocks|lanes)$"
)


def dynamic(root: Path) -> dict[str, object]:
    """Modules that a request meets until a worker has it, a KV block on its way, and a refusal."""
    source = f"{root / 'src' / PACKAGE}/"
    ran = subprocess.run(
        [sys.executable, "-c", SCENE, source],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"the requests failed in {root}:\n{ran.stderr[-2_000:]}")
    found = json.loads(ran.stdout.splitlines()[-1])
    always = {way: set.intersection(*map(set, turns)) for way, turns in found.items()}
    always["block"] = {
        name for name in always["block"] if BLOCK_ROOMS.match(name) or OLD_BLOCK.match(name)
    }
    return {f"modules met by a {way}": sorted(names) for way, names in always.items()}


def shown(value: object) -> str:
    """A figure for people."""
    match value:
        case dict():
            return "".join(f"\n    {count:>7,}  {name}" for name, count in value.items())
        case list() if value and isinstance(value[0], list):
            return f"{len(value)}" + "".join(f"\n    {' - '.join(part)}" for part in value)
        case list():
            return f"{len(value)}" + "".join(f"\n    {name}" for name in value)
        case _:
            return f"{value:,}" if isinstance(value, int) else str(value)


def main(argv: Iterable[str] | None = None) -> None:
    """Print the figures of one checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--static", action="store_true", help="count only; start no cluster")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(None if argv is None else list(argv))
    root = args.root.resolve()
    figures = static(root) | ({} if args.static else dynamic(root))
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name}: {shown(value)}")


if __name__ == "__main__":
    main()

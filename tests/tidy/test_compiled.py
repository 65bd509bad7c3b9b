"""The busiest modules can be compiled, and the list of modules leaves out the others."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BUSY = {
    *("engine/batch", "kv/index", "shares"),
    *(
        f"schedule/{name}"
        for name in (
            *("admission", "conductor", "cost", "decide", "decode_forecast", "estimate"),
            *("forecast", "groups", "handoff", "hot", "objectives", "pipeline"),
            *("policies", "ranking", "residency", "retry_after", "search", "view", "waiting"),
        )
    ),
}
"""Where a decision spends its time, below core."""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """hatch_build.py, which belongs to no package."""
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["hatch_build"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(BUSY))
def test_busy_modules_can_be_compiled(build: ModuleType, name: str) -> None:
    """Structs with options move to a module that is not busy, or derive from core's Frozen."""
    path = build.PACKAGE / "core" / f"{name}.py"
    assert path.exists(), f"take {name} from BUSY, or write what it is called now"
    assert build.why_not(path.read_text()) is None


def test_the_simulators_modules_can_be_compiled(build: ModuleType) -> None:
    """They are named one by one, so no rule leaves one out by itself."""
    for name in build.SIMULATOR:
        assert build.why_not((build.PACKAGE / "sim" / f"{name}.py").read_text()) is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("class A(msgspec.Struct, eq=False):\n    a: int", "options"),
        ("class A(msgspec.Struct, frozen=True):\n    a: int", "options"),
        ("class A(Frozen, frozen=True, order=True):\n    a: int", "options"),
        ("class A(Frozen, frozen=True):\n    rank: ClassVar[int] = 1", "ClassVar"),
        ("class A(Frozen, frozen=True):\n    a: int", None),
        ("class A(msgspec.Struct):\n    a: int", None),
        ("class A:\n    rank: ClassVar[int] = 1", None),
    ],
)
def test_what_the_compiler_would_change_is_left_out(
    build: ModuleType, source: str, says: str | None
) -> None:
    """mypyc ignores a class's options and takes a struct's ClassVar for a field."""
    why = build.why_not(source)
    assert (why is None) == (says is None)
    assert says is None or says in why

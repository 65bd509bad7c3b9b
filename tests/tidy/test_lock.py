"""The locks of the development environment fit pyproject.toml, and every package has hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
AGAIN = "run: make lock"


def locked(name: str) -> dict[str, set[Version]]:
    """The versions of each package; several where systems or versions of Python differ."""
    text = (ROOT / "requirements" / name).read_text()
    found: dict[str, set[Version]] = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        requirement = Requirement(entry.partition(" \\\n")[0])
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{requirement} has no hash"
        (pinned,) = requirement.specifier
        assert pinned.operator == "=="
        found.setdefault(canonicalize_name(requirement.name), set()).add(Version(pinned.version))
    return found


def wanted(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for, except torch, which each machine takes from elsewhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    return [it for it in requirements if it.name not in ("torch", "moonserve")]


@pytest.mark.parametrize(
    ("name", "extras"),
    [("run.lock", ("engine",)), ("dev.lock", ("dev", "engine", "mooncake", "etcd", "tls"))],
)
def test_the_lock_has_what_the_project_asks_for(name: str, extras: tuple[str, ...]) -> None:
    """Every dependency is in the lock, in versions that pyproject.toml allows."""
    have = locked(name)
    assert "torch" not in have
    for requirement in wanted(*extras):
        versions = have.get(canonicalize_name(requirement.name), set())
        assert versions, f"{requirement.name} is not in {name}; {AGAIN}"
        assert all(map(requirement.specifier.contains, versions)), f"{requirement}; {AGAIN}"


def test_both_locks_have_one_version() -> None:
    """What is run and what is tested are the same."""
    run, dev = locked("run.lock"), locked("dev.lock")
    assert run == {name: dev[name] for name in run}, AGAIN


def test_the_tools_are_locked_too() -> None:
    """What writes and audits the locks has hashes."""
    assert {"uv", "pip-audit"} <= locked("tools.lock").keys(), AGAIN

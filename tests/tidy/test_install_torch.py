"""How `make up` gets torch: by uv where PyTorch's index answers, by pip and its price elsewhere."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "torch==0.0.1"
OFFERS = 'case "$*" in *--dry-run*) echo " + torch==0.0.1+cpu" >&2;; esac'
REFUSES = 'echo "error: Failed to fetch" >&2; echo "  cause: no such host" >&2; exit 1'
BREAKS = f'{OFFERS}\ncase "$*" in *--dry-run*) ;; *) exit 2;; esac'
HANGS = "exec sleep 60"
PRICE = "2.7 GB to download"


@pytest.fixture
def script() -> ModuleType:
    """requirements/install_torch.py, which belongs to no package."""
    spec = spec_from_file_location("install_torch", ROOT / "requirements" / "install_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """A uv and a pip that write down how they are called, and do as they are told."""

    def __init__(
        self, folder: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str
    ) -> None:
        self._folder = folder
        self._script = script
        self._log = folder / "calls"
        self._log.touch()
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(sys, "executable", str(self.program("python", "")))

    def program(self, name: str, does: str) -> Path:
        """A program of this name."""
        path = self._folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self._log}\n{does}\n')
        path.chmod(0o755)
        return path

    def install(self, *flags: str) -> int:
        """Run the script; return its exit code."""
        code: int = self._script.main([TORCH, *flags])
        return code

    @property
    def calls(self) -> list[str]:
        """Who was called, in order."""
        words = [line.split() for line in self._log.read_text().splitlines()]
        return [f"{name} dry" if "--dry-run" in given else name for name, *given in words]

    @property
    def last(self) -> str:
        """The last call with its arguments."""
        return self._log.read_text().splitlines()[-1]


@pytest.fixture
def linux(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine for which PyPI's torch is the one with CUDA."""
    return Machine(tmp_path, script, monkeypatch, "linux")


def test_uv_installs_the_build_that_it_offers(
    linux: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    """uv is asked first, then installs for this Python and backend; the build is named before."""
    linux.program("uv", OFFERS)
    assert linux.install("--backend", "cpu") == 0
    assert linux.calls == ["uv dry", "uv"]
    assert f"--python {sys.executable} --torch-backend=cpu {TORCH}" in linux.last
    said = capfd.readouterr().err
    assert "torch==0.0.1+cpu" in said
    assert PRICE not in said


@pytest.mark.parametrize(
    ("uv", "called", "why"),
    [
        (REFUSES, ["uv dry", "python"], "no such host"),
        (BREAKS, ["uv dry", "uv", "python"], "uv failed"),
        (HANGS, ["uv dry", "python"], "did not answer within 0.2 s"),
        ("exit 3", ["uv dry", "python"], "it printed nothing"),
        (None, ["python"], "uv is not installed"),
    ],
)
def test_pip_follows_where_uv_cannot(
    uv: str | None,
    called: list[str],
    why: str,
    linux: Machine,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whatever keeps uv from it, pip installs, after lines with the reason and the price."""
    monkeypatch.setattr(script, "PROBE_S", 0.2 if uv == HANGS else 20.0)
    if uv is not None:
        linux.program("uv", uv)
    assert linux.install() == 0
    assert linux.calls == called
    assert linux.last == f"python -m pip --disable-pip-version-check install --no-compile {TORCH}"
    said = capfd.readouterr().err
    assert why in said
    assert PRICE in said


def test_a_named_index_is_pips(linux: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    """With TORCH_INDEX nobody asks uv, and there is no price: the user chose the build."""
    linux.program("uv", OFFERS)
    assert linux.install("--index", "file:///wheels") == 0
    assert linux.calls == ["python"]
    assert linux.last.endswith(f"{TORCH} --extra-index-url file:///wheels")
    assert capfd.readouterr().err == ""


def test_other_systems_take_what_pypi_has(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's torch for macOS is a CPU build, so pip takes it."""
    mac = Machine(tmp_path, script, monkeypatch, "darwin")
    mac.program("uv", OFFERS)
    assert mac.install() == 0
    assert mac.calls == ["python"]


def test_the_failure_of_pip_is_the_failure(linux: Machine) -> None:
    """make stops where no torch could be installed."""
    linux.program("python", "exit 7")
    assert linux.install() == 7


def test_an_installed_torch_stays(
    linux: Machine, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build of the wanted version is kept, another version is replaced."""
    monkeypatch.setattr(script, "version", lambda name: "0.0.1+cu130")
    assert linux.install() == 0
    assert linux.calls == []
    monkeypatch.setattr(script, "version", lambda name: "0.0.2")
    assert linux.install() == 0
    assert linux.calls == ["python"]

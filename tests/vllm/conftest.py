"""What the tests of real engines need: an interpreter that has vLLM, and a model it can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonserve.live.engine.export import export_folder
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has vLLM."""
    named = os.environ.get("MOONSERVE_VLLM_PYTHON")
    if not named:
        pytest.skip("MOONSERVE_VLLM_PYTHON names no interpreter with vLLM: see make test-vllm")
    return Path(named)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in the form that vLLM reads."""
    at = tmp_path_factory.mktemp("model") / "smollm2"
    export_folder(resolve(DEFAULT_MODEL).path, at, "float32")
    return at

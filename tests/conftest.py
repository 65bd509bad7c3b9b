"""Shared by all tests: who may be skipped, and that it is said."""

from __future__ import annotations

import pytest

from moonserve.core.errors import ConfigError
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve

_NO_MODEL = f"{DEFAULT_MODEL} is not in the model cache; fetch it with: make model"


def _model_is_here() -> bool:
    try:
        resolve(DEFAULT_MODEL)
    except ConfigError:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `model` where the model was not pulled."""
    if not _model_is_here():
        for item in items:
            if item.get_closest_marker("model"):
                item.add_marker(pytest.mark.skip(reason=_NO_MODEL))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count aloud what the absent model kept from running."""
    skipped = terminalreporter.stats.get("skipped", [])
    lost = sum(_NO_MODEL in str(report.longrepr) for report in skipped)
    if lost:
        terminalreporter.write_line(f"{lost} tests did not run: {_NO_MODEL}", red=True, bold=True)

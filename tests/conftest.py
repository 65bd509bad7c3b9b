"""Shared by all tests: who may be skipped, and that it is said."""

from __future__ import annotations

import os
import signal
import tempfile
from shutil import which

import pytest
from hypothesis import settings

from moonserve import CORE
from moonserve.core.errors import ConfigError
from moonserve.live.model.catalog import DEFAULT_MODEL, resolve
from moonserve.live.transfer.mooncake_master import require
from tests.support.browser import lacking

# The tests draw a token of their own, and leave the one of the user who runs them alone.
_STATE = tempfile.TemporaryDirectory(prefix="moonserve-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name
os.environ.pop("MOONSERVE_TOKEN", None)
# No test fails for the time that it takes; on CI, hypothesis's own profile says that too.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")
_NO_MODEL = f"{DEFAULT_MODEL} is not in the model cache; fetch it with: make model"
_NO_PROMETHEUS = "prometheus and promtool are not installed; on Debian: apt install prometheus"


def pytest_configure() -> None:
    """End at once if MOONSERVE_CORE asks for a form of core that is not here. Heed Ctrl-C."""
    if CORE.problem is not None:
        raise pytest.UsageError(CORE.problem)
    # A shell starts its background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    """Heed Ctrl-C in each test: a loop of uvloop, once closed, leaves its handler behind."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Which form of core is tested."""
    return f"moonserve: {CORE.name}"


def _absent() -> dict[str, str]:
    """Marker -> why its tests cannot run here."""
    absent: dict[str, str] = {}
    if CORE.compiled:
        absent["python_core"] = "compiled core: no test can derive from its classes or replace them"
    try:
        resolve(DEFAULT_MODEL)
    except ConfigError:
        absent["model"] = _NO_MODEL
    try:
        require()
    except ConfigError as error:
        absent["mooncake"] = str(error)
    if which("prometheus") is None or which("promtool") is None:
        absent["prometheus"] = _NO_PROMETHEUS
    if lack := lacking():
        absent["page"] = lack
    return absent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked by what this machine has not got."""
    for marker, why in _absent().items():
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count aloud what that kept from running."""
    skipped = terminalreporter.stats.get("skipped", [])
    for why in _absent().values():
        lost = sum(why in str(report.longrepr) for report in skipped)
        if lost:
            terminalreporter.write_line(f"{lost} tests did not run: {why}", red=True, bold=True)

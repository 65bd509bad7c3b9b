"""The browser of tests/page: where it is, and what is missing."""

from __future__ import annotations

from pathlib import Path
from shutil import which

_MODULES = Path(__file__).parents[1] / "page" / "node_modules"
BROWSER = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = which("node")


def lacking() -> str:
    """Why these tests cannot run here; empty: they can."""
    if BROWSER is None:
        return "Chromium is not installed; on Debian: apt install chromium"
    if NODE is None:
        return "Node.js is not installed; on Debian: apt install nodejs npm"
    if not (_MODULES / "playwright-core").is_dir():
        return "the packages of tests/page are not there; fetch them with: make test-page"
    return ""

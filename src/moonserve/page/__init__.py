"""The page for operators, and the charts and the style that the simulator's report shares with it.

These are static files: live.control.page serves them, and sim.report copies two of them into its
file. They need no build step, and load nothing from another host. No logic is in Python here.
"""

from __future__ import annotations

from importlib.resources import files

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
"""Content type by the ending of a file's name."""


def names() -> list[str]:
    """The files, in the order of their names."""
    found = [it.name for it in files(__name__).iterdir()]
    return sorted(name for name in found if name.rpartition(".")[2] in TYPES)


def text(name: str) -> str:
    """The content of one of them."""
    return (files(__name__) / name).read_text("utf-8")


def path_of(request: str) -> str:
    """Where the page shows one request, on the gateway's port."""
    return f"/ui#/requests/{request}"


def pointer(request: str, has_page: bool) -> str:
    """What to add to a sentence about a request: where the page shows it; else nothing."""
    return f"; the page for operators shows it at {path_of(request)}" if has_page else ""

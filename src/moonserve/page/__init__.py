"""The charts and the style of pages for people: static files that sim.report copies into its own.

They need no build step, and load nothing from another host. No logic is in Python here.
"""

from __future__ import annotations

from importlib.resources import files


def text(name: str) -> str:
    """The content of one of the files."""
    return (files(__name__) / name).read_text("utf-8")

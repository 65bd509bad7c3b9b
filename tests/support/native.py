"""What tests need because core may be compiled: a compiled object has no `__dict__`."""

from __future__ import annotations


def attributes(of: object) -> dict[str, object]:
    """An object's attributes by name, and those of its class that are no methods."""
    named = {name: getattr(of, name) for name in dir(of) if not name.startswith("__")}
    return {name: value for name, value in named.items() if not callable(value)}

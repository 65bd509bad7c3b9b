"""Whether the packages of the torch engine are installed; moonserve runs without them otherwise.

The commands ask before they start processes or open files, and the worker before it loads a model.
Nothing here imports torch, which takes a second.
"""

from __future__ import annotations

from importlib.util import find_spec

from moonserve.core.errors import ConfigError

_PACKAGES = ("torch", "safetensors")
"""What the extra `engine` in pyproject.toml installs."""


def require(field: str = "engine") -> None:
    """Return if the torch engine can run. `field`: the setting or argument that asks for it.

    Raises ConfigError, with the remedy, if a package is missing.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        other = "; or take the fake engine (--engine fake)" if field == "engine" else ""
        raise ConfigError(
            f"a real model needs {' and '.join(missing)}; install with:"
            f" pip install 'moonserve[engine]'{other}",
            field,
        )

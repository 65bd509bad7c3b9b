"""Where a command writes what it found: looked at before it works for minutes, not after.

For `moonserve simulate`, `sweep` and `replay`. Writes nothing itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import click

from moonserve.core.errors import ConfigError


class Output(click.File):
    """An option's file that is replaced as a whole once it is written; "-" is stdout."""

    def __init__(self, mode: str = "w") -> None:
        super().__init__(mode, atomic=True)

    def convert(
        self,
        value: str | os.PathLike[str] | IO[Any],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> IO[Any]:
        """See ParamType. Raises ConfigError."""
        if isinstance(value, str | os.PathLike) and os.fspath(value) != "-":
            check_writable(Path(value), param.opts[0] if param else "output")
        return super().convert(value, param, ctx)


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigError naming the option where no file could be written. Leaves none there."""
    if not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif path.exists() and not path.is_file():
        why = "it is no regular file"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        why = f"folder {path.parent} is not writable"
    elif path.exists() and not os.access(path, os.W_OK):
        why = "the file is not writable"
    else:
        return
    raise ConfigError(f"cannot write {path}: {why}", option)

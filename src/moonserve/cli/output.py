"""What commands print and write: JSON for programs, and output files.

A command checks its output files before it works for minutes, not after. All commands use this.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

import click
import msgspec

from moonserve.core.errors import ConfigError

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: object) -> None:
    """One JSON document on stdout; paths and other values become text."""
    click.echo(msgspec.json.encode(value, enc_hook=str))


def by_tenths(tell: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """A catalog.Progress that sends each tenth of each stage to `tell` as one line."""
    told: set[tuple[str, int]] = set()

    def progress(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total)
        if (stage, tenth) not in told:
            told.add((stage, tenth))
            tell(f"{stage} {10 * tenth}% of {total >> 20} MiB")

    return progress


def write_csv(rows: Sequence[Mapping[str, object]], out: TextIO) -> None:
    """Write rows below a header that has every name of any row."""
    import csv

    names = dict.fromkeys(name for row in rows for name in row)
    table = csv.DictWriter(out, list(names), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


class OutputFile(click.File):
    """An option's file, replaced as a whole when it is written; "-" is stdout."""

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


def input_path(file: Path) -> Path:
    """The file to read: "-" is stdin."""
    return Path("/dev/stdin") if str(file) == "-" else file


def check_apart(
    read: Mapping[str, str | os.PathLike[str] | None], **written: IO[Any] | Path | None
) -> None:
    """Raise ConfigError if two outputs are one file, or if an output is a file that is read.

    Files are named by option; None means not given. "-" among outputs is stdout, for one of them
    only.
    """
    taken = {_real(path): option for option, path in read.items() if path is not None}
    for name, file in written.items():
        if file is None:
            continue
        option = "--" + name.replace("_", "-")
        path = file if isinstance(file, Path) else getattr(file, "name", "")
        real = "stdout" if path in ("-", "<stdout>") else _real(path)
        if real in taken:
            raise ConfigError(f"{path} is also {taken[real]}; name another file", option)
        taken[real] = option


def _real(path: str | os.PathLike[str]) -> str:
    """An identity that is equal for all names of one file."""
    found = Path(path)
    if not found.exists():
        return str(found.resolve())
    is_now = found.stat()
    return f"{is_now.st_dev}:{is_now.st_ino}"


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigError that names the option if the file cannot be written. Creates no file."""
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

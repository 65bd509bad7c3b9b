"""The public traces that tests read: in the repository, compressed."""

from __future__ import annotations

import lzma
import tempfile
from functools import cache
from pathlib import Path

_PACKED = Path(__file__).parents[1] / "fixtures" / "traces"
_UNPACKED = tempfile.TemporaryDirectory(prefix="moonserve-traces-")
"""Removed when the run of the tests ends."""


@cache
def public_trace(name: str) -> Path:
    """The file of a public trace, as "conversation"; unpacked once in a run of the tests."""
    packed = _PACKED / f"mooncake_{name}.jsonl.xz"
    path = Path(_UNPACKED.name) / packed.stem
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path

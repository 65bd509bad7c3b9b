"""Where the public traces lie: beside the checkout, or where MOONSERVE_TRACES says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[3] / "shared" / "traces"


def public_trace(name: str) -> Path:
    """The file of a public trace, as "conversation"; skips the test where it is not here."""
    path = Path(os.environ.get("MOONSERVE_TRACES", _BESIDE)) / f"mooncake_{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name} here; MOONSERVE_TRACES names the folder of public traces")
    return path

"""The folder of a gateway's processes, and what killed supervisors left."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moonserve.live.fronts.folder import meeting_folder

KILLED = (
    "import os, sys; from moonserve.live.fronts.folder import meeting_folder\n"
    "with meeting_folder() as path:\n"
    "    (path / 'link').touch(); print(path, flush=True); os.kill(os.getpid(), 9)"
)


def test_what_a_killed_supervisor_left_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: neither a locked folder, nor one with a similar name."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    users = tmp_path / "moonserve-link-mine"
    users.mkdir()
    (tmp_path / "moonserve-link-abcd1234").symlink_to(users)
    died = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, check=False)
    left = Path(died.stdout.decode().strip())
    assert (left / "link").exists()
    with meeting_folder() as one, meeting_folder() as two:
        assert not left.exists()
        assert one.stat().st_mode & 0o077 == 0
        assert len({one, two}) == 2
        assert one.exists()
        assert users.exists()
    assert not one.exists()
    assert not two.exists()

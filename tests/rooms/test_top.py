"""`moonserve top`: what it prints, once, again and again, and while its gateway is away."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import msgspec
import pytest
from click.testing import CliRunner, Result

from moonserve.cli import cli
from moonserve.show.top import HistoryReply, InstanceReply, Top

HISTORY: dict[str, Any] = {
    "now_ms": 1_000_000,
    "verdict": {"level": "late", "text": "97% of 1,204 requests …", "binding": "prefill"},
    "alarms": ["worker p1: 3 of 9 calls failed"],
    "standby": "",
    "ttft_slo_ms": 2_000.0,
    "tbt_slo_ms": None,
    "pools": {
        "prefills": 2,
        "decodes": 1,
        "prefill_busy": 0.75,
        "queue_ms": 310.0,
        "decode_slots": 0.41,
        "decode_kv": 0.12,
        "step_ms": 22.0,
        "waiting": 4,
        "under_way": 31,
    },
    "minute": {
        "seconds": 60,
        "in_time": 1_168,
        "late": 24,
        "failed": 2,
        "cancelled": 1,
        "refused": {"tbt_slo": 2, "ttft_slo": 8},
        "output_tokens": 192_000,
        "ttft_p50_ms": 180.0,
        "ttft_p99_ms": 2_930.0,
        "tbt_p50_ms": 3.1,
        "tbt_p99_ms": None,
    },
    "columns": {
        "at_ms": [998_000, 999_000],
        "prompt_tokens": [600, 400],
        "held_tokens": [500, 250],
        "chosen_tokens": [300, 200],
        "promised_tokens": [400, 200],
        "delivered_tokens": [400, 100],
    },
}
INSTANCES: list[dict[str, Any]] = [
    {
        "id": f"p{number}",
        "role": "prefill",
        "queue_ms": 100.0 * number,
        "prefills_promised": number,
        "running": 1,
        "max_seqs": 16,
        "free_blocks": 30,
        "kv_blocks": 40,
        "tbt_ms": 12.5,
        "heard_ms_ago": 200.0,
        "trust": {"share": 0.5},
    }
    for number in range(3)
]
DOWN = {"id": "e0", "state": "down", "why": "connection refused"}


def screen(
    history: dict[str, Any], instances: list[dict[str, Any]], height: int | None = None
) -> list[str]:
    """The lines that a new Top shows."""
    reply = msgspec.convert(history, HistoryReply)
    return list(Top().lines(reply, msgspec.convert(instances, list[InstanceReply]), 100, height))


def test_the_screen_has_all_that_an_operator_looks_at_first() -> None:
    """Outcomes, latency against goals, the funnel, the pool that binds, instances and alarms."""
    assert screen(HISTORY, [*INSTANCES, DOWN]) == [
        "97% of 1,204 requests …",
        "",
        "60 s: 1,168 in time, 24 late, 10 refused (ttft_slo 8, tbt_slo 2), 2 failed, 1 cancelled,"
        " 0 refused by engines",
        "now: 31 under way, 4 wait; 3,200 tokens/s generated",
        "TTFT     p50     180 ms   p99   2,930 ms   goal 2,000 ms  LATE",
        "mean TBT p50     3.1 ms   p99          -   no goal",
        "",
        "prompt tokens      ######################## 100%         1,000",
        "held by anyone     ##################......  75%           750",
        "held where placed  ############............  50%           500",
        "promised           ##############..........  60%           600",
        "delivered          ############............  50%           500",
        "",
        "prefill            ##################......  75% busy, queue 310 ms, instances: 2"
        "  << binds",
        "decode             ##########..............  41% full (places 41%, KV 12%), TBT 22 ms,"
        " instances: 1",
        "",
        "instance  role                  queue  prefills  decodes  places  KV free    TBT   heard"
        "  trust",
        "e0        down     connection refused",
        "p2        prefill              200 ms         2        1      16      75%  12 ms  200 ms"
        "    50%",
        "p1        prefill              100 ms         1        1      16      75%  12 ms  200 ms"
        "    50%",
        "p0        prefill                0 ms         0        1      16      75%  12 ms  200 ms"
        "    50%",
        "",
        "alarm: worker p1: 3 of 9 calls failed",
    ]


def test_instances_that_do_not_fit_are_counted() -> None:
    """Those with trouble and with the longest queues stay."""
    lines = screen(HISTORY, INSTANCES, height=22)
    assert len(lines) == 22
    assert [line.partition(" ")[0] for line in lines[16:]] == [
        *("instance", "p2", "p1", "and", "", "alarm:"),
    ]
    assert lines[19] == "and 1 more"


def test_a_drained_instance_is_marked() -> None:
    """Behind the time since it was heard of, as in `moonserve instances`."""
    lines = screen(HISTORY, [{**INSTANCES[0], "drained": True}, INSTANCES[1]])
    marked = [line.split()[0] for line in lines if "200 ms, drained" in line]
    assert marked == ["p0"]


def test_a_long_verdict_takes_several_lines() -> None:
    """It is not cut, and leaves fewer lines to instances."""
    told = {**HISTORY, "verdict": {**HISTORY["verdict"], "text": "word " * 50}}
    lines = screen(told, INSTANCES, height=24)
    assert lines[:3] == [" ".join(["word"] * count) for count in (20, 20, 10)]
    assert len(lines) == 24
    assert "and 1 more" in lines


def test_an_empty_cluster_is_shown_too() -> None:
    """No division by zero, and no table without rows."""
    empty = {**HISTORY, "columns": {}, "minute": {}, "pools": {}, "alarms": [], "standby": "waits"}
    lines = screen(empty, [])
    assert lines[1] == "waits"
    assert "0 s: 0 in time, 0 late, 0 refused, 0 failed, 0 cancelled, 0 refused by engines" in lines
    assert lines[-1] == "no instance is there"


def test_only_the_samples_of_the_last_minute_count() -> None:
    """Later answers have new samples only; old ones leave."""
    shown = Top()
    for at_ms in range(0, 100_000, 1_000):
        columns = {name: [1] for name in HISTORY["columns"]} | {"at_ms": [at_ms]}
        reply = msgspec.convert({**HISTORY, "columns": columns}, HistoryReply)
        lines = list(shown.lines(reply, []))
        assert shown.since_ms == at_ms
    assert next(line for line in lines if line.startswith("prompt tokens")).endswith(" 60")


class Gateway(BaseHTTPRequestHandler):
    """Answers as a gateway would; `paths` has what it was asked."""

    paths: ClassVar[list[str]] = []
    history: ClassVar[dict[str, Any]] = HISTORY

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        """History and instances."""
        self.paths.append(self.path)
        told: Any = self.history if self.path.startswith("/api/history") else INSTANCES
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    """Where the gateway answers."""
    Gateway.paths.clear()
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*argv: str) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(cli, argv, prog_name="moonserve")


def test_once_prints_one_and_ends(url: str) -> None:
    """For scripts: no control characters, and code 0."""
    result = run("top", "--once", "--url", url)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == screen(HISTORY, INSTANCES)
    assert Gateway.paths == ["/api/history?since=0", "/api/instances"]


def test_a_gateway_that_is_away_or_of_another_version_is_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start it is an error that names the remedy."""
    result = run("top", "--url", "http://127.0.0.1:1")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "start one with: moonserve up" in result.stderr
    monkeypatch.setattr(Gateway, "history", {"now_ms": 1})
    result = run("top", "--once", "--url", url)
    assert result.exit_code == 1
    assert "in a form that this version cannot read" in result.stderr


def started(url: str, stdout: int) -> subprocess.Popen[bytes]:
    """`moonserve top` as a process."""
    command = [sys.executable, "-m", "moonserve", "top", "--url", url]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)


def read_until(fd: int, wanted: bytes) -> bytes:
    """What comes until it has these bytes."""
    got = b""
    deadline_s = time.monotonic() + 20
    while wanted not in got:
        assert select.select([fd], [], [], deadline_s - time.monotonic())[0], got
        got += os.read(fd, 1 << 16)
    return got


def test_a_terminal_has_a_screen_of_its_own_and_gets_its_own_back(url: str) -> None:
    """It is drawn again each second from the top; Ctrl-C ends it with code 0."""
    ours, theirs = pty.openpty()
    process = started(url, theirs)
    os.close(theirs)
    got = read_until(ours, b"alarm: ")
    assert got.startswith(b"\x1b[?1049h")
    read_until(ours, b"\x1b[H")  # once more
    assert Gateway.paths[2] == "/api/history?since=999000"
    process.send_signal(signal.SIGINT)
    assert read_until(ours, b"\x1b[?1049l")
    _, errors = process.communicate(timeout=20)
    os.close(ours)
    assert (process.returncode, errors) == (0, b"")


def test_a_pipe_gets_plain_text_and_may_end(url: str) -> None:
    """`moonserve top | head` ends without a traceback."""
    ours, theirs = os.pipe()
    process = started(url, theirs)
    os.close(theirs)
    got = read_until(ours, b"alarm: ")
    os.close(ours)
    assert b"\x1b" not in got
    _, errors = process.communicate(timeout=20)
    assert errors == b""

"""Real processes in need: nobody reads their lines, the log's disk is full, or file descriptors
are few."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.up import PROGRAM, START_S, STOP_S, Up, children_of, gone

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end of a pipe into which not one byte more can be written."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    for size in (4096, 1):
        try:
            while os.write(write_fd, b"x" * size):
                pass
        except BlockingIOError:
            pass
    os.set_blocking(write_fd, True)
    yield write_fd
    os.close(write_fd)
    os.close(read_fd)


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def get(url: str, within_s: float = START_S) -> bytes:
    """The page, as soon as it is there."""
    end = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return bytes(reply.read())
        except OSError:
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gateway_with_a_full_pipe_answers(full_pipe: int, tmp_path: Path, workers: int) -> None:
    """Neither the first line of a process nor a supervisor's stops it if nobody reads."""
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"instances: []\nport: {(port := free_port())}\nworkers: {workers}\n")
    argv = [*PROGRAM, "gateway", "--config", str(settings)]
    with subprocess.Popen(argv, stdout=full_pipe, stderr=full_pipe) as process:
        try:
            get(f"http://127.0.0.1:{port}/health")
            assert b"moonserve_log_lines_dropped_total 0" in get(f"http://127.0.0.1:{port}/metrics")
            process.terminate()
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()


def test_a_full_disk_for_the_log_stops_nobody(tmp_path: Path) -> None:
    """Lines that the disk does not take are counted, and requests are served."""
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"instances: []\nport: {(port := free_port())}\n")
    argv = [*PROGRAM, "gateway", "--config", str(settings)]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(argv, stdout=full, stderr=full)
    try:
        page = get(f"http://127.0.0.1:{port}/metrics").decode()
        (lost,) = re.findall(r"^moonserve_log_lines_dropped_total (\S+)$", page, re.MULTILINE)
        assert float(lost) >= 1, "the line that says where it listens, at least"
    finally:
        process.kill()
        process.wait(STOP_S)


def test_few_descriptors_cost_no_spinning(tmp_path: Path) -> None:
    """While connections use up all descriptors the gateway is idle, and later it answers again."""
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"instances: []\nport: {(port := free_port())}\n")
    argv = [*PROGRAM, "gateway", "--config", str(settings)]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    idle: list[socket.socket] = []
    try:
        get(f"http://127.0.0.1:{port}/health")
        most = len(os.listdir(f"/proc/{process.pid}/fd")) + 20
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, most))
        idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(80)]
        before_s = cpu_s(process.pid)
        time.sleep(3)
        assert cpu_s(process.pid) - before_s < 1
        for one in idle:
            one.close()
        get(f"http://127.0.0.1:{port}/health", STOP_S)
        assert len(log.read_text().splitlines()) < 100
    finally:
        for one in idle:
            one.close()
        process.kill()
        process.wait(STOP_S)


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.model
def test_a_cluster_with_a_full_pipe_serves(full_pipe: int) -> None:
    """`moonserve up` starts all, and starts a dead process again, although nobody reads it."""
    port = free_port()
    argv = [*PROGRAM, "up", "--port", str(port), "--engine", "fake", "--segment-bytes", "64MiB"]
    with subprocess.Popen(argv, stdout=full_pipe, stderr=full_pipe) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            get(url + "/ready")
            gateway = min(children_of(process.pid))
            os.kill(gateway, signal.SIGKILL)
            get(url + "/ready")
            assert not process.poll()
            children = children_of(process.pid)
            process.terminate()
            assert process.wait(STOP_S) == 0
            assert all(map(gone, children))
        finally:
            process.kill()


@pytest.mark.model
def test_a_stopped_supervisor_stops_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are served while the reader of their log lines stands still; then all lines come."""
    monkeypatch.setenv("MOONSERVE_LOGGING__LEVEL", "DEBUG")
    up = Up("--engine", "fake", "--segment-bytes", "64MiB")
    try:
        at = urlsplit(up.url)
        name = up.get("/v1/models")["data"][0]["id"]
        up.process.send_signal(signal.SIGSTOP)
        connection = http.client.HTTPConnection(at.hostname or "", at.port or 0, timeout=20)
        for number in range(600):
            body = {"model": name, "prompt": [number, 1, 2, 3], "max_tokens": 1}
            headers = {"x-request-id": f"a-request-with-a-long-name-{number:06d}" + "x" * 60}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            reply.read()
        connection.close()
        up.process.send_signal(signal.SIGCONT)
        up.until(lambda: "a-request-with-a-long-name-000599" in up.output, STOP_S)
        assert all(f"-name-{number:06d}" in up.output for number in range(600))
    finally:
        up.process.send_signal(signal.SIGCONT)
        up.end()

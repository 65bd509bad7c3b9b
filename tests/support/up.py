"""A cluster of real processes for end-to-end tests: one `moonserve up` and what it printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

PROGRAM = (sys.executable, "-m", "moonserve")
HIDES_TORCH = Path(__file__).parent / "without_torch"
"""In PYTHONPATH, this folder makes a process one without the extra `engine`."""
TOKEN = "the-tests-own-token"
START_S = 120.0
STOP_S = 30.0
NOTHING: Mapping[str, str] = {}


class Up:
    """One `moonserve up`; `end` it, whatever happens."""

    def __init__(
        self,
        *args: str,
        program: Sequence[str] = PROGRAM,
        port: int = 0,
        environ: Mapping[str, str] = NOTHING,
    ) -> None:
        """program: what takes the words of `moonserve up`; environ: more variables for it."""
        self.process = subprocess.Popen(
            [*program, "up", "--port", str(port), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "CI": "true", "MOONSERVE_TOKEN": TOKEN, **environ},
        )
        self.lines: list[str] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        """All it has printed so far."""
        return "".join(self.lines)

    def until(self, true: Callable[[], object], within_s: float = START_S) -> None:
        """Poll until it holds, or fail with what was printed."""
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, "waited in vain; it said:\n" + self.output
            time.sleep(0.05)

    @property
    def url(self) -> str:
        """Where it is ready; waits for that."""
        self.until(lambda: self._ready_line() or self.process.poll() is not None)
        found = self._ready_line()
        assert found, "ended before it was ready; it said:\n" + self.output
        return found[1]

    def _ready_line(self) -> re.Match[str] | None:
        return re.search(r"^Ready at (http\S+)$", self.output, re.MULTILINE)

    def get(self, path: str) -> Any:
        """The JSON of a GET on the gateway."""
        return get(self.url + path)

    def post(self, path: str, body: dict[str, Any], base: str = "", **headers: str) -> Any:
        """The JSON of a POST on the gateway, or on another base URL."""
        with send(base or self.url, path, body, headers) as reply:
            return json.load(reply)

    def children(self) -> dict[str, int]:
        """Pids of the cluster's processes, by name."""
        return {_name(pid): pid for pid in children_of(self.process.pid)}

    def settle(self) -> None:
        """Wait until every ledger of the cluster is at zero.

        An instance that was killed may be listed for some seconds more; it has no ledger then.
        """

        def settled() -> bool:
            try:
                return not any(self.ledgers().values())
            except urllib.error.URLError:
                return False

        self.until(settled, STOP_S)

    def ledgers(self) -> dict[str, int]:
        """Every ledger of the cluster by name; all zero when idle."""
        stats = self.get("/api/stats")
        ledger = {key: stats[key] for key in stats if key == "requests" or "promised" in key}
        ledger |= {key: stats["store"].get(key, 0) for key in ("leases", "pending_puts")}
        for instance in self.get("/api/instances"):
            own = get(instance["url"] + "/debug/ledger")
            ledger |= {f"{instance['id']}.{key}": value for key, value in own.items()}
        return ledger

    def end(self) -> None:
        """Stop it as Ctrl-C does; whatever is left then is killed."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        left = [*children_of(self.process.pid), self.process.pid]
        for pid in left:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(10)


def get(url: str) -> Any:
    """The JSON of a GET with the cluster's token."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def send(base: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    """The open reply of a POST, on the gateway or a worker; workers want the cluster's token."""
    own = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), own | headers)
    return urllib.request.urlopen(request, timeout=300)


def children_of(pid: int) -> list[int]:
    """Pids of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _name(pid: int) -> str:
    argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if argv[0].endswith("mooncake_master"):
        return "mooncake"
    return argv[argv.index("--name") + 1] if "--name" in argv else "gateway"


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def shared_memory_of(pids: Iterable[int]) -> list[str]:
    """The regions these processes made; a region's name has its maker's pid."""
    made = {f"moonserve-kv-{pid}-" for pid in pids}
    return [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(tuple(made))]

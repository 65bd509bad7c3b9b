"""docs/tutorial.md does what it says: its blocks run in order, as a reader would type them.

A block that begins with "sh first terminal" runs a program that stays; the next such block stops it
with Ctrl-C first. A block of text after commands is what they print, with other numbers; "text for
example" may differ in its words too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
STEP_S = 120.0
PRELUDE = """
make() { moonserve "$1" ${2#ARGS=}; }
moonserve() {
  case "$1" in
    ask | explain | replay | instances | record) "$PYTHON" -m moonserve "$@" --url "$URL" ;;
    *) "$PYTHON" -m moonserve "$@" ;;
  esac
}
"""
"""The commands of the page, on the port of this test and with this interpreter."""
_NUMBER = re.compile(r"req-[0-9a-f]+|\d[\d,.]*")
_VARIES = re.compile(r", from [pd]\d")
"""Whether a prefix came from another worker depends on the machine."""


class Block(NamedTuple):
    """One block of the page."""

    kind: str
    """sh, sh first terminal, sh third terminal, text, or text for example."""
    text: str


def blocks() -> list[Block]:
    """All blocks of the page, in order."""
    found = re.findall(r"^```(\w[\w ]*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*it) for it in found]


class Terminal:
    """A shell that reads commands from this test."""

    def __init__(self, folder: Path, port: int) -> None:
        self.log = folder / f"terminal-{time.monotonic_ns()}.log"
        self._port = port
        environ = {**os.environ, "MOONSERVE_PORT": str(port), "PYTHON": sys.executable}
        environ |= {"URL": f"http://127.0.0.1:{port}", "XDG_STATE_HOME": str(folder / "state")}
        environ.pop("MOONSERVE_TOKEN", None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-s"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env=environ,
                start_new_session=True,
            )
        self._type(PRELUDE)

    def _type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}") + "\n")
        self.process.stdin.flush()

    def begin(self, text: str, until: str) -> None:
        """Run a program that stays; wait until it has printed this."""
        self._type(text)
        self.await_output(lambda said: until in said)

    def run(self, text: str) -> str:
        """Run commands to their end; return what they printed."""
        before = len(self.log.read_text())
        self._type(f"{text}\necho; echo 'ended: 'here")
        said = self.await_output(lambda said: said[before:].endswith("ended: here\n"))
        return said[before:].removesuffix("ended: here\n")

    def await_output(self, true: Callable[[str], bool]) -> str:
        """All that the terminal shows, once this holds of it."""
        end_s = time.monotonic() + STEP_S
        while not true(said := self.log.read_text()):
            assert time.monotonic() < end_s, "waited in vain; the terminal shows:\n" + said
            assert self.process.poll() is None, "the shell ended:\n" + said
            time.sleep(0.05)
        return said

    def interrupt(self) -> str:
        """Press Ctrl-C; what the terminal shows at the end."""
        self.close()
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(STEP_S)
        return self.log.read_text()

    def close(self) -> None:
        """Type no more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Reader:
    """Who follows the page, with three terminals and a browser."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.first: Terminal | None = None
        self.second = Terminal(folder, self.port)
        self.third: Terminal | None = None
        self.said = ""
        """What the last commands printed."""

    def do(self, block: Block) -> None:
        """Follow one block."""
        if block.kind == "text for example":
            return
        if block.kind == "text":
            assert_shown(block.text, self.said)
        elif block.kind == "sh first terminal":
            if self.first is not None:
                assert "no process is left" in self.first.interrupt()
            self.first = Terminal(self.folder, self.port)
            self.first.begin(block.text, f"Ready at http://127.0.0.1:{self.port}")
            self.said = self.first.log.read_text()
        elif block.kind == "sh third terminal":
            self.third = Terminal(self.folder, self.port)
            self.third.begin(block.text, "joined")
        else:
            assert block.kind == "sh"
            self.said = self.second.run(block.text)

    def browse(self, path: str) -> Any:
        """What the page reads from the gateway, with the token that the reader copied."""
        token = (self.folder / "state" / "moonserve" / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as it:
            return json.load(it)

    def until(self, path: str, true: Callable[[Any], bool]) -> Any:
        """The page's poll, once this holds of it."""
        end_s = time.monotonic() + STEP_S
        while not true(found := self.browse(path)):
            assert time.monotonic() < end_s, found
            time.sleep(0.2)
        return found

    def end(self) -> None:
        """Close all terminals; nothing is left."""
        for terminal in (self.third, self.first, self.second):
            if terminal is None or terminal.process.poll() is not None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                terminal.interrupt()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(terminal.process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def assert_shown(promised: str, said: str) -> None:
    """Each line that the page shows was printed, with any numbers in the place of its own."""
    there = _plain(said)
    for line in promised.splitlines():
        start, cut, _ = line.partition("…")
        pattern = _NUMBER.sub("0", _plain(start)).strip()
        assert pattern in _NUMBER.sub("0", there), f"{line!r} is not in:\n{said}"
        assert not cut or start


def _plain(text: str) -> str:
    return " ".join(_VARIES.sub("", text).split())


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A reader in a folder of its own, which has the environment that `make up` makes."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    one = Reader(tmp_path)
    try:
        yield one
    finally:
        one.end()


def reused(reader: Reader) -> None:
    """608 tokens of the second prompt, also on the page."""
    assert "reused 0 of 650 prompt tokens" in reader.said
    assert "reused 608 of 649 prompt tokens" in reader.said
    found = reader.until("/api/history", lambda it: sum(it["columns"]["delivered_tokens"]) == 608)
    assert sum(found["columns"]["prompt_tokens"]) == 650 + 649


def killed(reader: Reader) -> None:
    """The answer is whole, and the page has the loss and the join in its lane."""
    assert "150 tokens, reused 0 of" in reader.said
    lane = reader.browse("/api/history")["lane"]
    events = [it["what"] for it in lane if it["subject"] == "d0"]
    assert events[0] == "join"
    assert {"loss", "epoch"} & {*events}


def overloaded(reader: Reader) -> None:
    """Some of the 40 are served, and most are refused."""
    counts = dict(re.findall(r"(\d+) HTTP (\d+)", reader.said))
    counted = {status: int(count) for count, status in counts.items()}
    assert sum(counted.values()) == 40
    assert 1 <= counted["200"] <= 15
    assert {*counted} == {"200", "429"}


def refused(reader: Reader) -> None:
    """The body of the 429 names the address on the page, where the same request is explained."""
    name, path = re.findall(r"shows it at (/ui#/requests/(burst-\d+))", reader.said)[0][::-1]
    assert f"request {name}: refused" in reader.said
    assert "misses the objective of 2000 ms" in reader.said
    found = reader.browse(f"/api/decisions/{name}")
    assert (found["page"], found["reject_reason"]) == (path, "ttft_slo")


def recorded(reader: Reader) -> None:
    """Each request is a row."""
    completed, refused = re.findall(r"(\d+) completed, (\d+) refused, 0 failed", reader.said)[-1]
    assert int(completed) + int(refused) == 100
    assert f"recording to {reader.folder}/recording" in reader.said
    reader.until("/api/recording", lambda it: it["rows"] == 100)


def simulated(reader: Reader) -> None:
    """One more prefill worker serves more of the same load."""
    one, two = (float(it) for it in re.findall(r"both goals ([\d.]+)% of requests", reader.said))
    assert one < two


def planned(reader: Reader) -> None:
    """One sentence names the split and its speed, without a warning of a short trace."""
    split = r"^[12] prefill \+ [12] decode: \d+\.\d+x, [\d.]+ requests/s; "
    assert re.search(split, reader.said, re.M)
    assert "warning" not in reader.said


def grown(reader: Reader) -> None:
    """The worker is there, and its join is on the page."""
    assert [line.split()[0] for line in reader.said.splitlines() if " http" in line] == [
        *("d0", "p0", "p1")
    ]
    lane = reader.browse("/api/history")["lane"]
    assert ("join", "p1") in [(it["what"], it["subject"]) for it in lane]


FACTS: dict[str, Callable[[Reader], None]] = {
    "What is the moon?": reused,
    "kill -9": killed,
    "seq 40); do\n  curl": overloaded,
    "moonserve explain $REFUSED": refused,
    "moonserve record status": recorded,
    "moonserve simulate": simulated,
    "moonserve plan": planned,
    "moonserve instances": grown,
}
"""What a block's commands must have done, by words in it that no other block has."""


@pytest.mark.slow
@pytest.mark.model
def test_the_tutorial_does_what_it_says(reader: Reader) -> None:
    """Every block runs, prints what the page shows, and has the effect that the page describes."""
    assert shutil.which("curl")
    left = dict(FACTS)
    for block in blocks():
        reader.do(block)
        for words in [it for it in left if block.kind == "sh" and it in block.text]:
            left.pop(words)(reader)
    assert not left, "the page has no block with these words"
    assert reader.third is not None
    reader.third.interrupt()
    assert reader.first is not None
    assert "no process is left" in reader.first.interrupt()

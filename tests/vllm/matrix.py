"""Run the tests of real engines with several versions of vLLM, and print a table of the results.

    python -m tests.vllm.matrix 0.32.0 0.28.0

Each version gets a virtual environment of its own by `make test-vllm VLLM=VERSION`, which takes
3 GB of disk and about ten minutes. It ends with code 1 if a test failed, or if a version cannot be
run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

_FATES = ("passed", "failure", "error", "skipped")


def row(version: str) -> tuple[str, bool]:
    """The table's row of one version, and whether nothing failed."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        begun_s = time.monotonic()
        command = ["make", "test-vllm", f"VLLM={version}", f"ARGS=--junitxml={report}"]
        subprocess.run(command, stdout=sys.stderr, check=False)
        minutes = (time.monotonic() - begun_s) / 60
        if not report.exists():
            return f"| {version} | could not be installed or begun | | | | {minutes:.0f} |", False
        cases = list(ElementTree.parse(report).iter("testcase"))
    fate_of = {case.get("name"): fate(case) for case in cases}
    fates = Counter(fate_of.values())
    failed = fates["failure"] + fates["error"]
    others = ", ".join(f"{name} ({it})" for name, it in fate_of.items() if it != "passed")
    counts = f"{fates['passed']} | {failed} | {fates['skipped']}"
    line = f"| {version} | {counts} | {others} | {minutes:.0f} |"
    return line, fates["passed"] > 0 and not failed


def fate(case: ElementTree.Element) -> str:
    """What became of a test."""
    return next((it.tag for it in case if it.tag in _FATES), "passed")


def main(versions: list[str]) -> int:
    """Print the table; 1: something failed."""
    found = [row(version) for version in versions]
    print("| vLLM | passed | failed | skipped | which | minutes |", "|" + "---|" * 6, sep="\n")
    for line, _ in found:
        print(line)
    return int(not all(good for _, good in found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Compares the locked packages, and torch, with PyPI's list of known vulnerabilities.

`make audit` runs it: audit.py PIP-AUDIT TORCH. It ends with code 1 if a package has a known
vulnerability. It names what could not be looked up, since a network may answer only in part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOCKS = ("run.lock", "dev.lock", "tools.lock")


def audited(program: str, requirements: Path, flag: str) -> list[dict[str, Any]] | str:
    """The packages with what is known of each; if nobody answers, why."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        argv = [program, "--progress-spinner", "off", "--disable-pip", flag]
        argv += ["-r", str(requirements), "-f", "json", "-o", str(report)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if not report.exists():
            return (done.stderr.splitlines() or ["pip-audit printed nothing"])[-1][:200]
        found: list[dict[str, Any]] = json.loads(report.read_text())["dependencies"]
        return found


def show(name: str, found: list[dict[str, Any]] | str) -> bool:
    """Print what was found; return whether there is a vulnerability."""
    if isinstance(found, str):
        print(f"{name}: skipped, since the list of vulnerabilities cannot be had: {found}")
        return False
    unknown = [it["name"] for it in found if "skip_reason" in it]
    bad = [it for it in found if it.get("vulns")]
    for it in bad:
        ids = ", ".join(f"{vuln['id']} (fixed in {vuln['fix_versions']})" for vuln in it["vulns"])
        print(f"{name}: {it['name']} {it['version']}: {ids}")
    if len(unknown) == len(found):
        print(f"{name}: skipped, since PyPI lists no vulnerabilities on this network")
        return False
    known = len(found) - len(unknown)
    print(f"{name}: {known} packages looked up, {len(bad)} with known vulnerabilities")
    if unknown:
        print(f"{name}: PyPI had no answer about {', '.join(unknown)}")
    return bool(bad)


def main(program: str, torch: str) -> int:
    """Audit all locks and torch; return the exit code."""
    bad = [show(lock, audited(program, HERE / lock, "--require-hashes")) for lock in LOCKS]
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "torch.txt")
        alone.write_text(torch)
        bad.append(show("torch", audited(program, alone, "--no-deps")))
    return int(any(bad))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

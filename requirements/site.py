"""Copies the tree's documents, from which `make site` builds a site; see mkdocs.yml.

    python requirements/site.py FOLDER

Pages link to files outside docs/, so the copy has the tree's structure. Links to the folder of
decision records lead to an index that is made here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("*.md", "LICENSE", "docs", "deploy")
RECORDS = "docs/adr"


def main(folder: Path) -> None:
    """Fill `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", *COPIED], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    lines = ["# Decision records", ""]
    for record in sorted((folder / RECORDS).glob("*.md")):
        title = record.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({record.name})")
    (folder / RECORDS / "index.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

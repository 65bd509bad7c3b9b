"""The papers' figures on the public traces, and the table of policies: measured, tabulated, drawn.

    python -m bench.paper.make [FIGURE …] [--jobs N] [--traces DIR] [--out DIR] [--quick] [--draw]
        [--only POLICY …]

Each figure leaves NAME.json (what was measured), NAME.md (tables) and NAME.svg in docs/paper.
--only measures some policies again for `policies`, `goodput` and `shapes`, and keeps the others'
figures. --draw tabulates and draws anew what is measured already. --quick does everything on the
first few hundred requests, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from bench.paper import caches, cpp, hotspot, overload, policies, serving
from bench.paper.lab import ROOT, Lab, Page, where


class Figure(NamedTuple):
    """How one figure is made."""

    title: str
    measure: Callable[[Lab], Any]
    show: Callable[[Any, Page], None]
    draw: Callable[[Any], Any]
    """Gives a matplotlib figure."""


FIGURES = {
    "fig01": Figure("FAST'25 Fig. 1: disaggregated against coupled", *serving.FIG01),
    "fig05": Figure("FAST'25 Fig. 5: mean TTFT by placement policy", *serving.FIG05),
    "fig09": Figure("FAST'25 Fig. 9: hit rate against capacity", *caches.FIG09),
    "fig10": Figure("FAST'25 Fig. 10: a global pool against local caches", *caches.FIG10),
    "fig15": Figure("FAST'25 Fig. 15: the ratio of prefill to decode nodes", *serving.FIG15),
    "table1": Figure("arXiv 2407.00079, Table 1: eviction policies", *caches.TABLE1),
    "policies": Figure("How fast each policy may be driven", *policies.SPEEDS),
    "goodput": Figure("Goodput under load", *policies.GOODPUT),
    "shapes": Figure("Goodput on other shapes of load", *policies.OTHERS),
    "rejections": Figure("arXiv 2407.00079, Table 3: early rejection", *overload.REJECTIONS),
    "seesaw": Figure("arXiv 2407.00079, Fig. 9 and 10: the see-saw", *overload.SEESAW_FIGURE),
    "cpp": Figure("One prompt on several nodes (arXiv 2407.00079, section 5.1)", *cpp.ALONE),
    "cpp_load": Figure("Long prompts among others, shared or not", *cpp.AMONG),
    "hotspot": Figure("A hot prefix, with and without copies of it", *hotspot.HOTSPOT),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    beside = Path(os.environ.get("MOONSERVE_TRACES", ROOT.parent / "shared" / "traces"))
    parser.add_argument("--traces", type=Path, default=beside)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "paper")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="POLICY", default=[])
    asked = parser.parse_args()
    unknown = [name for name in asked.figures if name not in FIGURES]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(FIGURES)}")
    if find_spec("matplotlib") is None:
        parser.error("matplotlib draws the figures and is missing: pip install 'moonserve[paper]'")
    asked.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(asked.traces, asked.jobs, asked.quick, asked.out, asked.only)
    for name in asked.figures or (["policies", "goodput"] if asked.only else FIGURES):
        if not asked.draw:
            print(f"{name}: {FIGURES[name].title}", flush=True)
            measure(name, lab, asked.out, asked.only)
        show(name, asked.out, asked.format)


def measure(name: str, lab: Lab, out: Path, only: Sequence[str]) -> None:
    """Run what a figure needs, and keep it."""
    path = out / f"{name}.json"
    began_s = time.monotonic()
    found = FIGURES[name].measure(lab)
    kept = {**where(), "took_s": round(time.monotonic() - began_s)}
    if only and path.exists():
        before = json.loads(path.read_text())
        again = {**before.get("again", {}), **dict.fromkeys(only, kept["commit"])}
        kept = {**{k: before[k] for k in kept}, "again": again}
    path.write_text(json.dumps({**kept, "found": found}, indent=1) + "\n")


def show(name: str, out: Path, form: str) -> None:
    """Write a figure's page and its plot from what was kept."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "font.family": "sans-serif",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e0e0e0",
            "legend.frameon": False,
            "savefig.bbox": "tight",
            "figure.dpi": 100,
        }
    )
    figure = FIGURES[name]
    kept = json.loads((out / f"{name}.json").read_text())
    page = Page(name, figure.title)
    page.say(
        f"Written by `make paper ARGS={name}` in {kept['took_s']} s at commit "
        f"{kept['commit']} ({kept['machine']}); the raw figures are in [{name}.json]({name}.json)."
        + _measured_again(kept.get("again", {}))
    )
    page.say(f"![{figure.title}]({name}.{form})")
    figure.show(kept["found"], page)
    (out / f"{name}.md").write_text(page.text())
    drawn = figure.draw(kept["found"])
    drawn.savefig(out / f"{name}.{form}", metadata={"Date": None} if form == "svg" else None)


def _measured_again(again: dict[str, str]) -> str:
    """Names the policies that were measured later than the rest, by commit."""
    by_commit: dict[str, list[str]] = {}
    for policy, commit in again.items():
        by_commit.setdefault(commit, []).append(policy)
    return "".join(
        f" Measured at {commit}: {', '.join(measured)}." for commit, measured in by_commit.items()
    )


if __name__ == "__main__":
    main()

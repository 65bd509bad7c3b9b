"""The names of all metrics are frozen, and keep Prometheus's conventions."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from moonserve.live.control.views import target
from tests.support.cluster import info
from tests.support.metric_names import FROZEN, of_all_processes

_ABBREVIATED = {"ms", "us", "sec", "secs", "mb", "gb", "kb", "pct", "percent", "perc"}


@pytest.mark.model  # for its tokenizer and chat template
def test_names_labels_and_help_of_all_metrics_are_frozen() -> None:
    """Boards and alerts of users read them, so no change goes unnoticed."""
    now = list(asyncio.run(of_all_processes()).values())
    then = FROZEN.read_text().splitlines()
    changed = [f"- {line}" for line in then if line not in now]
    changed += [f"+ {line}" for line in now if line not in then]
    assert not changed, (
        "metrics changed, which boards and alerts of users read:\n"
        + "\n".join(changed)
        + f"\nIf that is meant: describe it in CHANGELOG.md and docs/reference/metrics.md, then run"
        f"\npython -m tests.support.metric_names > tests/fixtures/{FROZEN.name}"
    )


def complaints(line: str) -> list[str]:
    """What is against the conventions in the line of one metric."""
    match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\w+): (.*)", line)
    assert match, line
    name, labels, kind, text = match.groups()
    found = []
    if not re.fullmatch(r"(moonserve|process)(_[a-z0-9]+)+", name):
        found.append("write moonserve_ and words in small letters")
    if (kind == "counter") != name.endswith("_total"):
        found.append("counters end in _total, and nothing else does")
    if _ABBREVIATED & set(name.split("_")):
        found.append("use seconds, bytes, or a ratio from 0 to 1, and write them out")
    if {"instance", "job", "le", "quantile"} & set((labels or "").split(",")):
        found.append("Prometheus sets this label itself")
    if not re.fullmatch(r"[A-Z0-9].*\.", text):
        found.append("the help is a sentence")
    return found


def test_names_keep_the_conventions_of_prometheus() -> None:
    """Except vLLM's names, which gateways and boards for vLLM know."""
    lines = [line for line in FROZEN.read_text().splitlines() if not line.startswith("vllm:")]
    assert len(lines) > 80
    assert not {line: wrong for line in lines if (wrong := complaints(line))}


@pytest.mark.parametrize(
    ("url", "scheme", "where", "page"),
    [
        ("http://10.0.0.1:8000", "http", "10.0.0.1:8000", "/metrics"),
        ("https://user:secret@gpu.example/a/", "https", "gpu.example", "/a/metrics"),
        ("http://[::1]:9/v", "http", "[::1]:9", "/v/metrics"),
    ],
)
def test_prometheus_discovers_the_page_of_an_instance(
    url: str, scheme: str, where: str, page: str
) -> None:
    """By its URL, also below a path; a password in it is not shown."""
    made = target(msgspec.structs.replace(info("p0", "prefill"), url=url))
    assert made == {
        "targets": [where],
        "labels": {
            "__scheme__": scheme,
            "__metrics_path__": page,
            "instance_id": "p0",
            "role": "prefill",
        },
    }


@pytest.mark.parametrize(
    "line",
    [
        "moonserve:x gauge: A.",
        "moonserve_x counter: A.",
        "moonserve_x_total gauge: A.",
        "moonserve_x_ms gauge: A.",
        "moonserve_x{instance} gauge: A.",
        "moonserve_x gauge: A",
    ],
)
def test_a_name_against_the_conventions_is_found(line: str) -> None:
    """The check above can fail."""
    assert len(complaints(line)) == 1

"""The queries of deploy/: those of the Grafana board, and those of the alerts for Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "moonserve.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
RULES_TEST = DEPLOY / "prometheus" / "rules_test.yml"


class Query(NamedTuple):
    """One expression, and where it is."""

    where: str
    text: str

    def selectors(self) -> list[tuple[str, str]]:
        """Each metric that it reads, with the matchers of its labels."""
        names = r"(?<![\w:])((?:moonserve|process)_\w+|vllm:\w+|up)\b(?:\{(.*?)\})?"
        return re.findall(names, self.text)

    def grouped_by(self) -> set[str]:
        """The labels by which it groups."""
        lists = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", self.text)
        return {label.strip() for labels in lists for label in labels.split(",")} - {""}


def panels() -> list[dict[str, Any]]:
    """The panels of the board, rows included."""
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def of_board() -> Iterator[Query]:
    """Every query of the board."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"])


def alerts() -> list[dict[str, Any]]:
    """The alerts, as their file has them."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_alerts() -> Iterator[Query]:
    """Every query of the alerts."""
    for alert in alerts():
        yield Query(alert["alert"], alert["expr"])

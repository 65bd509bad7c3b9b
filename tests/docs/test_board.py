"""The board and the alerts of deploy/ read metrics that exist, and say what to do."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_docs import commands, complaint
from tests.support.board import Query, alerts, of_alerts, of_board, panels
from tests.support.metric_names import frozen

_OF_PROMETHEUS = {"instance", "job"}


def labels_of(name: str) -> set[str]:
    """The labels of a metric, of its parts if it is a histogram."""
    line = frozen()[re.sub(r"_(?:bucket|sum|count)$", "", name)]
    parts = {"le"} if name.endswith("_bucket") else set()
    match = re.match(r"[\w:]+\{(.*?)\}", line)
    return parts | set(match[1].split(",") if match else ()) | _OF_PROMETHEUS


def wrong(query: Query) -> list[str]:
    """Metrics and labels of a query that do not exist."""
    known: set[str] = set()
    found = []
    for name, matchers in query.selectors():
        if name == "up":
            known |= _OF_PROMETHEUS
            continue
        stem = re.sub(r"_(?:bucket|sum|count)$", "", name)
        kind = re.sub(r"^[^ ]* ", "", frozen().get(stem, " absent:")).partition(":")[0]
        if (kind == "histogram") != (stem != name) or kind == "absent":
            found.append(name)
            continue
        known |= labels_of(name)
        matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        found += [f"{name}{{{label}}}" for label in matched if label not in labels_of(name)]
    return found + sorted(query.grouped_by() - known)


@pytest.mark.parametrize("query", [*of_board(), *of_alerts()], ids=lambda query: query.where)
def test_every_query_reads_metrics_that_exist(query: Query) -> None:
    """Names and labels are in the list that is frozen, so a renamed metric is noticed."""
    assert query.selectors()
    assert wrong(query) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("rate(moonserve_gone_total[5m])", "moonserve_gone_total"),
        ("moonserve_ttft_seconds > 1", "moonserve_ttft_seconds"),
        ("moonserve_alarms_bucket", "moonserve_alarms_bucket"),
        ('moonserve_requests_total{code="200"}', "moonserve_requests_total{code}"),
        ("sum by (role) (moonserve_alarms)", "role"),
    ],
)
def test_a_query_of_what_does_not_exist_is_found(text: str, what: str) -> None:
    """The check above can fail."""
    assert wrong(Query("", text)) == [what]


def test_the_board_is_one_that_grafana_loads() -> None:
    """Each panel has an id, a place of its own, and words about what it shows; none overlap."""
    shown = panels()
    assert len({panel["id"] for panel in shown}) == len(shown)
    rows = [panel["title"] for panel in shown if panel["type"] == "row"]
    assert rows == [
        *("Are requests in time?", "Why not?", "Hits", "Instances", "Store", "Tenants"),
        "Processes",
    ]
    taken: set[tuple[int, int]] = set()
    for panel in shown:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_every_alert_says_what_to_do() -> None:
    """A summary, a severity, and a runbook with a command or a place to look at."""
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert alert["labels"]["severity"] in ("page", "warn"), alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]
        runbook = alert["annotations"]["runbook"]
        assert re.search(r"`.+`", runbook), f"{alert['alert']}: name a command"
        assert not [text for words in commands(runbook) if (text := complaint(words))]

"""The dashboard for Grafana: it shows every metric that `dash-guard watch --metrics` serves, and no other."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dash_guard.monitor.metrics import Metrics

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The labels of every metric, by name, as the client of Prometheus is told them."""
    found: dict[str, set[str]] = {}

    def gauge(name: str, text: str, labels: tuple[str, ...], registry: object) -> None:
        found[name] = set(labels)

    client = SimpleNamespace(CollectorRegistry=object, Gauge=gauge, start_http_server=lambda *args, **options: None)
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    Metrics(("127.0.0.1", 9464))
    return found


def test_every_metric_is_shown_with_its_labels(served: dict[str, set[str]]) -> None:
    variables = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    found = {name for query in (*QUERIES, *variables) for name in re.findall(r"dash_guard_\w+", query)}
    assert found == served.keys()
    for panel in PANELS:
        for target in panel["targets"]:
            labels = {label for name in re.findall(r"dash_guard_\w+", target["expr"]) for label in served[name]}
            of_query = {word for group in re.findall(r"by \((.*?)\)", target["expr"]) for word in group.split(", ")}
            used = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) | of_query
            assert used <= labels | {"instance"}, panel["title"]


def test_queries_are_of_the_chosen_jobs() -> None:
    for query in QUERIES:
        assert len(re.findall(r'dash_guard_\w+{instance=~"\$instance"', query)) == query.count("dash_guard_"), query


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert {source["uid"] for panel in PANELS for source in (panel["datasource"],)} == {"${source}"}

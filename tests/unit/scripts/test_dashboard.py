"""The dashboard in the package is that of the table, and one that Grafana can lay out."""

import json
import re

import pytest

from scripts import dashboard
from scripts.panels import ROWS

DASHBOARD = json.loads(dashboard.FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_file_is_up_to_date():
    assert dashboard.FILE.read_text() == dashboard.text(), "run make docs"


def test_every_panel_of_the_table_is_there_once():
    titles = [panel.title for _, panels in ROWS for panel in panels]
    assert [panel["title"] for panel in PANELS] == titles
    assert len(set(titles)) == len(titles)
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_no_panel_lies_on_another_or_outside():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_of_every_query_is_of_the_chosen_engines():
    for panel in PANELS:
        for target in panel["targets"]:
            metrics = re.findall(r"vllm:\w+(\{[^}]*\})?", target["expr"])
            assert metrics
            assert all('instance=~"$instance"' in selector for selector in metrics)
            assert "[R]" not in target["expr"]


@pytest.mark.parametrize(
    ("query", "selected"),
    [
        ("sum(vllm:a)", "sum(vllm:a{S})"),
        ('rate(vllm:a_total{x="y"}[R])', 'rate(vllm:a_total{x="y",S}[$__rate_interval])'),
    ],
)
def test_selectors_join_the_labels_of_a_query(query, selected):
    engines = 'model_name=~"$model_name",instance=~"$instance"'
    assert dashboard.selected(query) == selected.replace("S", engines)


def test_units_of_right_axes_match_a_legend():
    for panel in PANELS:
        legends = [target["legendFormat"] for target in panel["targets"]]
        for override in panel["fieldConfig"]["overrides"]:
            name = override["matcher"]["options"]
            pattern = re.escape(name) if not name.startswith("/") else name.strip("/")
            assert any(re.fullmatch(pattern, legend) for legend in legends), panel["title"]

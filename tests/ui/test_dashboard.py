"""Every query of the dashboard, run by a real Prometheus on what it scraped of a real engine."""

import json
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from kvtiers.cli import main
from kvtiers.metrics.names import BY_NAME
from tests.ui.engine import HOST_BYTES, Engine
from tests.ui.prometheus import Prometheus, Series, scraping

pytestmark = pytest.mark.timeout(600)

DASHBOARD = json.loads(
    files("kvtiers.observe").joinpath("dashboards", "kvtiers.json").read_text("utf-8")
)
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}

NOTHING_TO_SHOW = {
    "Failures": "nothing fails here",
    "Not taken": "nothing is refused here for certain",
    "Warm-up": "there is no hot list",
    "Events": "none are asked for",
    "Queue of events": "none are asked for",
    "Peers": "there are none",
}
"""Panels whose facts need a fault, a peer, or an option; their metrics are looked for by name."""
MAY_BE_ZERO = {"Jobs in flight", "Waiting for a tier", "Tiers left alone"}
"""Gauges that are zero at rest."""

SEEN_S = 180


def queries(panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Expressions as Grafana would send them, with all engines chosen; and their legends."""
    found = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", "2m")
        expression = re.sub(r"\$(model_name|instance)", ".*", expression)
        assert "$" not in expression
        found.append((expression, target["legendFormat"]))
    return found


def named(panel: dict[str, Any]) -> set[str]:
    return {
        name for expression, _ in queries(panel) for name in re.findall(r"vllm:\w+", expression)
    }


def shows(prometheus: Prometheus, title: str) -> bool:
    """Whether each query of the panel has a value now, and one that is not zero if it can."""
    found = [prometheus.query(expression) for expression, _ in queries(PANELS[title])]
    return all(series and (title in MAY_BE_ZERO or _moves(series)) for series in found)


def _moves(series: list[Series]) -> bool:
    return any(value > 0 for _, value in series)


@pytest.fixture(scope="module")
def prometheus(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped rounds of prompts until each panel shows something, or for long."""
    with scraping(engine.port, tmp_path_factory.mktemp("prometheus")) as server:
        missing = set(PANELS) - NOTHING_TO_SHOW.keys()
        end = time.monotonic() + SEEN_S
        while missing and time.monotonic() < end:
            engine.rounds(3)
            missing = {title for title in missing if not shows(server, title)}
        yield server


@pytest.mark.parametrize("title", [title for title in PANELS if title not in NOTHING_TO_SHOW])
def test_the_panel_shows_data(prometheus: Prometheus, title: str) -> None:
    for expression, legend in queries(PANELS[title]):
        series = prometheus.query(expression)
        assert series, f"no value of {expression}"
        assert title in MAY_BE_ZERO or _moves(series), f"nothing but zero of {expression}"
        for labels, _ in series:
            assert set(re.findall(r"{{(\w+)}}", legend)) <= labels.keys()


@pytest.mark.parametrize("title", NOTHING_TO_SHOW)
def test_the_query_of_a_panel_without_data_is_one(prometheus: Prometheus, title: str) -> None:
    for expression, _ in queries(PANELS[title]):
        prometheus.query(expression)


@pytest.mark.parametrize("title", PANELS)
def test_each_metric_of_the_panel_exists(prometheus: Prometheus, title: str) -> None:
    kinds = prometheus.kinds()
    for name in named(PANELS[title]):
        family = re.sub(r"_(total|bucket)$", "", name)
        if family.startswith("vllm:kvtiers_"):
            assert family in BY_NAME, f"{family} is not declared"
        else:
            assert {family, name} & kinds.keys(), f"vLLM exports no {family}"


def test_legends_of_tiers_are_those_of_the_engine(prometheus: Prometheus) -> None:
    ((expression, _), *_) = queries(PANELS["Hit rate by tier"])[1:]
    assert {labels["tier"] for labels, _ in prometheus.query(expression)} == {"0:primary", "1:fs"}


def test_top_shows_the_same_engine(engine: Engine, prometheus: Prometheus, capsys) -> None:
    url = f"http://127.0.0.1:{engine.port}"
    assert main(["top", "--once", "--interval", "0.2", "--json", "--url", url]) == 0
    seen = json.loads(capsys.readouterr().out)
    device, host, fs = seen["tiers"]
    assert (device["label"], host["label"], fs["label"]) == ("device", "0:primary", "1:fs")
    assert all(0 < tier["hit_rate_ever"] < 1 for tier in seen["tiers"])
    assert 0 < host["used_bytes"] <= host["capacity_bytes"] <= HOST_BYTES
    assert 0 < fs["used_share"] <= 1
    assert fs["state"] == "in use"
    assert all(fs[rate] is not None for rate in ("read_bytes_s", "written_bytes_s", "removed_s"))
    assert {count["labels"][0] for count in seen["tokens"]} >= {"computed", "host", "disk"}
    assert {tuple(count["labels"]) for count in seen["misses"]} >= {("1:fs", "absent")}
    assert 0 < seen["ceiling"] < 1


def test_the_tables_of_top_are_drawn(engine: Engine, prometheus: Prometheus, capsys) -> None:
    url = f"http://127.0.0.1:{engine.port}/metrics"
    assert main(["top", "--once", "--interval", "0.2", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("1:fs ") for line in lines) >= 3

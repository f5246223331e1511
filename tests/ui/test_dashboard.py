"""Every query of the dashboard, run by a real Prometheus on what it scraped of a real engine."""

import json
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from kvtiers.cli import main
from tests.ui.engine import HOST_BYTES, TIERS, Engine
from tests.ui.prometheus import Prometheus, Series, scraping

pytestmark = pytest.mark.timeout(600)

DASHBOARD = json.loads(
    files("kvtiers.observe").joinpath("dashboards", "kvtiers.json").read_text("utf-8")
)
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}

ZERO_AT_REST = {
    "vllm:kv_offload_tiering_active_promotion_jobs",
    "vllm:kv_offload_tiering_active_cascade_jobs",
    "vllm:kvtiers_queue_jobs",
    "vllm:kvtiers_queue_bytes",
    "vllm:kvtiers_event_queue_chunks",
}
"""Gauges of what is under way: that they have a value is all."""
NEVER_HERE = {"vllm:kvtiers_events_dropped_total": "a million chunks would have to wait to be told"}
"""Counters of what no run on one machine brings about: they are there, without a value."""

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


def named(expression: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", expression))


def shows(expression: str, series: list[Series]) -> bool:
    """Whether a query has a value, and one that is not zero unless that is what it is at rest."""
    if named(expression) <= ZERO_AT_REST:
        return bool(series)
    return any(value > 0 for _, value in series) or named(expression) <= NEVER_HERE.keys()


@pytest.fixture(scope="module")
def prometheus(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped what befell the engine until each panel shows something, or for long."""
    with scraping(engine.port, tmp_path_factory.mktemp("prometheus")) as server:
        missing = [query for panel in PANELS.values() for query, _ in queries(panel)]
        end = time.monotonic() + SEEN_S
        while missing and time.monotonic() < end:
            engine.exchange()
            engine.damage()
            engine.rounds(1)
            missing = [query for query in missing if not shows(query, server.query(query))]
        yield server


@pytest.mark.parametrize("title", PANELS)
def test_the_panel_shows_data(prometheus: Prometheus, title: str) -> None:
    for expression, legend in queries(PANELS[title]):
        series = prometheus.query(expression)
        assert shows(expression, series), f"{expression} is {series}"
        for labels, _ in series:
            assert set(re.findall(r"{{(\w+)}}", legend)) <= labels.keys()


@pytest.mark.parametrize("title", PANELS)
def test_each_metric_of_the_panel_exists(prometheus: Prometheus, title: str) -> None:
    kinds = prometheus.kinds()
    for expression, _ in queries(PANELS[title]):
        for name in named(expression):
            family = re.sub(r"_(total|bucket)$", "", name)
            assert {family, name} & kinds.keys(), f"nobody exports {family}"


def test_legends_of_tiers_are_those_of_the_engine(prometheus: Prometheus) -> None:
    ((expression, _), *_) = queries(PANELS["Hit rate by tier"])[1:]
    tiers = {labels["tier"] for labels, _ in prometheus.query(expression)}
    assert tiers == {"0:primary", "1:fs", "3:p2p"}, "2:kv is down, it answers nothing"


def test_top_shows_the_same_engine(engine: Engine, prometheus: Prometheus, capsys) -> None:
    url = f"http://127.0.0.1:{engine.port}"
    assert main(["top", "--once", "--interval", "0.2", "--json", "--url", url]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [tier["label"] for tier in seen["tiers"]] == ["device", *TIERS]
    device, host, fs, kv, p2p = seen["tiers"]
    assert all(0 < tier["hit_rate_ever"] < 1 for tier in (device, host, fs))
    assert p2p["hit_rate_ever"] > 0
    assert 0 < host["used_bytes"] <= host["capacity_bytes"] <= HOST_BYTES
    assert 0 < fs["used_share"] <= 1
    assert (fs["state"], p2p["state"]) == ("in use", "in use")
    assert kv["state"] != "in use"
    assert all(fs[rate] is not None for rate in ("read_bytes_s", "written_bytes_s", "removed_s"))
    assert {count["labels"][0] for count in seen["tokens"]} >= {"computed", "host", "disk"}
    assert {tuple(count["labels"]) for count in seen["misses"]} >= {("1:fs", "absent")}
    assert 0 < seen["ceiling"] < 1


def test_the_tables_of_top_are_drawn(engine: Engine, prometheus: Prometheus, capsys) -> None:
    url = f"http://127.0.0.1:{engine.port}/metrics"
    assert main(["top", "--once", "--interval", "0.2", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("1:fs ") for line in lines) >= 3

"""Write the Grafana dashboard of the package anew, or say (``--check``) that it is out of date.

    python -m scripts.dashboard [--check]

What it shows is the table in ``scripts/panels.py``.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.panels import ROWS, Panel

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "src" / "kvtiers" / "observe" / "dashboards" / "kvtiers.json"

_SELECTOR = 'model_name=~"$model_name",instance=~"$instance"'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_WIDTH = 8
_HEIGHT = 8


_RIGHT_UNITS = {"/.* bytes/": "bytes", "/peers.*/": "short"}


def build() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "kvtiers",
        "title": "kvtiers",
        "description": "KV-cache offloading: what it saves, what the tiers hold, how fast it is.",
        "tags": ["vllm", "kv-cache"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    chosen = {"type": "query", "datasource": _SOURCE, "includeAll": True, "multi": True}
    chosen |= {"allValue": ".*", "refresh": 2, "sort": 1}
    everywhere = {"text": "All", "value": "$__all"}
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            **chosen,
            "name": "model_name",
            "label": "Model",
            "query": "label_values(vllm:kvtiers_host_bytes, model_name)",
            "current": everywhere,
        },
        {
            **chosen,
            "name": "instance",
            "label": "Engine",
            "query": 'label_values(vllm:kvtiers_host_bytes{model_name=~"$model_name"}, instance)',
            "current": everywhere,
        },
    ]


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 0
    for title, panels in ROWS:
        number += 1
        at = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": at, "panels": []}
        top += 1
        for i, panel in enumerate(panels):
            number += 1
            left, down = i * _WIDTH % _COLUMNS, i * _WIDTH // _COLUMNS * _HEIGHT
            at = {"x": left, "y": top + down, "w": _WIDTH, "h": _HEIGHT}
            yield {"id": number, "gridPos": at, **_drawn(panel)}
        top += -(-len(panels) * _WIDTH // _COLUMNS) * _HEIGHT


def _drawn(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel.right)},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": selected(query),
                "legendFormat": legend,
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def _overrides(right: str | None) -> list[dict[str, Any]]:
    if right is None:
        return []
    regexp = right.startswith("/")
    return [
        {
            "matcher": {"id": "byRegexp" if regexp else "byName", "options": right},
            "properties": [
                {"id": "unit", "value": _RIGHT_UNITS.get(right, "s")},
                {"id": "custom.axisPlacement", "value": "right"},
                {"id": "max", "value": None},
            ],
        }
    ]


def selected(query: str) -> str:
    """A query of the table as Grafana is given it."""

    def with_selector(match: re.Match[str]) -> str:
        name, labels = match.groups()
        return f"{name}{{{labels + ',' if labels else ''}{_SELECTOR}}}"

    query = re.sub(r"(vllm:\w+)(?:\{([^}]*)\})?", with_selector, query)
    return query.replace("[R]", "[$__rate_interval]")


def text() -> str:
    """What the file has to hold."""
    return json.dumps(build(), indent=2) + "\n"


def main() -> int:
    """Run the script; 1 if ``--check`` found the file out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, tell if it is stale")
    check = parser.parse_args().check
    if FILE.exists() and FILE.read_text() == text():
        return 0
    where = FILE.relative_to(ROOT)
    print(f"{where} is out of date: run make docs" if check else f"{where} written")
    if not check:
        FILE.write_text(text())
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())

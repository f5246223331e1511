"""``kvtiers dashboard``: the Grafana dashboard of the package, and what provisions it."""

import argparse
import json
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from kvtiers.cli.common import add_common
from kvtiers.cli.output import Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write files there; default: JSON to stdout"
    )
    parser.add_argument(
        "--seen-as", metavar="PATH", help="what DIR is called where Grafana runs, as in a container"
    )
    parser.add_argument(
        "--prometheus", metavar="URL", help="provision this one too, as Grafana's default source"
    )
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the dashboard, or write it with its provisioning."""
    text = files("kvtiers.observe").joinpath("dashboards", "kvtiers.json").read_text("utf-8")
    if arguments.output is None:
        print(text, end="")
        return 0
    folder: Path = arguments.output.absolute()
    seen_as = PurePosixPath(arguments.seen_as or folder)
    written = {
        folder / "dashboards" / "kvtiers.json": text,
        folder / "provisioning" / "dashboards" / "kvtiers.yaml": _yaml(_provider(seen_as)),
    }
    if arguments.prometheus:
        source = folder / "provisioning" / "datasources" / "kvtiers.yaml"
        written[source] = _yaml(_source(arguments.prometheus))
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")

    def human() -> None:
        for path in written:
            output.line(f"written: {path}")
        output.line(f"start Grafana with GF_PATHS_PROVISIONING={seen_as / 'provisioning'}")

    output.show({"files": [str(path) for path in written]}, human)
    return 0


def _provider(folder: PurePosixPath) -> dict[str, Any]:
    options = {"path": str(folder / "dashboards")}
    return {"providers": [{"name": "kvtiers", "type": "file", "options": options}]}


def _source(url: str) -> dict[str, Any]:
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": url}
    return {"datasources": [{**source, "isDefault": True}]}


def _yaml(document: dict[str, Any]) -> str:
    """JSON, which YAML includes: any path or URL is quoted right."""
    return json.dumps({"apiVersion": 1, **document}, indent=2) + "\n"

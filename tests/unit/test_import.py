"""``import kvtiers`` is cheap: it is what every process of an engine and every tool begins with."""

import subprocess
import sys

LISTED = """
import sys
before = set(sys.modules)
import kvtiers
print(*sorted(set(sys.modules) - before))
"""
HEAVY = {
    "asyncio",
    "concurrent",
    "http",
    "logging",
    "multiprocessing",
    "socket",
    "ssl",
    "subprocess",
}


def test_it_brings_nothing_but_small_parts_of_the_standard_library() -> None:
    run = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"kvtiers"}
    assert loaded & HEAVY == set()
    own = [name for name in run.stdout.split() if name.startswith("kvtiers")]
    assert len(own) <= 8, own


EVERY_FIGURE = """
import importlib, pkgutil, bench
for module in pkgutil.walk_packages(bench.__path__, "bench."):
    importlib.import_module(module.name)
"""


def test_every_figure_can_be_imported() -> None:
    """A part is loaded only when its figure is asked for: a stale import would show there."""
    subprocess.run([sys.executable, "-c", EVERY_FIGURE], check=True)

"""The lines that every part prints, and what was hoped for.

A figure is ``RATIO|FLAT|LIMIT|COST|SHARE <name> <value>``; ``SPREAD <kind> <name> <low> <high>``
are the quartiles of what the figure is the median of. Other words (``TIME``, ``RATE``, ``MODE``,
``NOTE``) start lines for people: a name, then text.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FIGURES = ("RATIO", "FLAT", "LIMIT", "COST", "SHARE")
REMARKS = ("TIME", "RATE", "MODE", "NOTE")
_FIGURE = re.compile(rf"({'|'.join(FIGURES)}) (\S+) (-?\d+(?:\.\d+)?)")
_SPREAD = re.compile(r"SPREAD (\S+ \S+) (-?\d+\.\d+) (-?\d+\.\d+)")

GOALS: dict[str, tuple[str, float]] = {
    "RATIO manager.lookup_many_hit": (">=", 8.0),
    "RATIO manager.lookup_one_hit": (">=", 2.0),
    "RATIO manager.lookup_one_miss": (">=", 2.0),
    "RATIO manager.store": (">=", 2.0),
    "RATIO manager.load": (">=", 2.0),
    "RATIO manager.touch": (">=", 2.0),
    "RATIO manager.store_evict": (">=", 3.0),
    "RATIO manager.arc_store_evict": (">=", 2.0),
    "FLAT manager.": ("<=", 3.0),
    "SHARE observe.": ("<=", 0.05),
    "COST observe.events.memory_bytes": ("<=", 100.0),
    "COST index.lookup_ms": ("<=", 1.0),
    "COST index.block_bytes": ("<=", 200.0),
    "LIMIT copy.contiguous": (">=", 0.8),
    "LIMIT copy.strided": (">=", 0.5),
    "FLAT copy.two_ranks": ("<=", 3.0),
    "LIMIT p2p.tcp.": (">=", 0.8),
    "LIMIT p2p.nixl.": (">=", 0.85),
    "RATIO fs.files.": (">=", 0.95),
    "RATIO fs.log.write.64KiB": (">=", 4.0),
    "RATIO fs.log.write.512KiB": (">=", 2.0),
    "RATIO fs.log.read.64KiB": (">=", 1.5),
    "RATIO fs.log.": (">=", 1.0),
    "LIMIT fs.log.": (">=", 0.8),
    "LIMIT obj.": (">=", 0.85),
    "RATIO obj.": (">=", 3.0),
    "LIMIT kv.": (">=", 0.85),
    "COST fs.log.index_bytes": ("<=", 200.0),
    "COST fs.log.open_s": ("<=", 2.0),
    "COST fs.log.open_killed_s": ("<=", 10.0),
    "RATIO ttft.host": ("<=", 1.1),
    "RATIO ttft.disk": ("<=", 1.2),
    "RATIO ttft.log": ("<=", 1.2),
    "FLAT io.step_p99": ("<=", 1.5),
    "FLAT io_log.step_p99": ("<=", 1.5),
}
"""By kind and name; one that ends with a dot is for all names that begin so."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    kind: str
    name: str
    value: float

    @property
    def goal(self) -> tuple[str, float] | None:
        """The comparison that was hoped for, if any."""
        line = f"{self.kind} {self.name}"
        group = next((g for g in GOALS if g.endswith(".") and line.startswith(g)), "")
        return GOALS.get(line) or GOALS.get(group)

    @property
    def reached(self) -> bool:
        """Whether the goal was reached; a figure without one always is."""
        if self.goal is None:
            return True
        comparison, bound = self.goal
        return self.value >= bound if comparison == ">=" else self.value <= bound

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.value:.3f}"


def figure(kind: str, name: str, value: float, spread: tuple[float, float]) -> None:
    """Print a figure, and quartiles."""
    print(Figure(kind, name, value))
    print(f"SPREAD {kind} {name} {spread[0]:.3f} {spread[1]:.3f}", flush=True)


def median_of(kind: str, name: str, values: Sequence[float]) -> None:
    """Print the median of ``values`` and their quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    figure(kind, name, middle, (low, high))


def remark(kind: str, name: str, text: str) -> None:
    """Print a line for people."""
    print(f"{kind} {name} {text}", flush=True)


def figures_in(lines: Iterable[str]) -> list[Figure]:
    """The figures among ``lines``."""
    found = (_FIGURE.fullmatch(line.strip()) for line in lines)
    return [Figure(m[1], m[2], float(m[3])) for m in found if m]


def spreads_in(lines: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The quartiles among ``lines``, by kind and name of the figure."""
    found = (_SPREAD.fullmatch(line.strip()) for line in lines)
    return {m[1]: (float(m[2]), float(m[3])) for m in found if m}


def remarks_in(lines: Iterable[str]) -> list[tuple[str, str, str]]:
    """(kind, name, text) of the lines for people."""
    words = (line.strip().split(" ", 2) for line in lines)
    return [(w[0], w[1], w[2]) for w in words if len(w) == 3 and w[0] in REMARKS]


def is_ours(line: str) -> bool:
    """Whether a line begins like one of these."""
    return line.split(" ", 1)[0] in (*FIGURES, *REMARKS, "SPREAD")


def table(figures: Sequence[Figure]) -> str:
    """Every figure beside its goal; those that miss it are marked."""
    rows = [("figure", "value", "goal", "")]
    for f in figures:
        goal = "" if f.goal is None else f"{f.goal[0]} {f.goal[1]:g}"
        rows.append((f"{f.kind} {f.name}", f"{f.value:.3f}", goal, "" if f.reached else "missed"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows
    )

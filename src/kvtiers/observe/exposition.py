"""What a scrape of ``/metrics`` says, and what changed between two: reading only.

Format: Prometheus' text exposition, version 0.0.4. What is not a sample is left out.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Labels = Mapping[str, str]

MAX_VALUE = 1e100
"""What is above it, or no number, no engine means; sums stay finite."""

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? +(?P<value>\S+)(?: +\S+)?")
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape, by the name of their metric."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples that have these labels; 0 if there is none."""
        return sum(value for has, value in self.matching(name, labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Such sums for each value of ``label``."""
        sums: dict[str, float] = defaultdict(float)
        for has, value in self.matching(name, labels):
            if label in has:
                sums[has[label]] += value
        return dict(sums)

    def matching(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        """The samples of a metric that have these labels, among others."""
        for has, value in self.samples.get(name, ()):
            if all(has.get(label) == wanted for label, wanted in labels.items()):
                yield has, value


def parse(exposition: str) -> Scrape:
    """Read a scrape."""
    samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for line in exposition.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        value = _number(sample["value"])
        if value is None or abs(value) > MAX_VALUE:
            continue
        labels = {name: _plain(text) for name, text in _LABEL.findall(sample["labels"] or "")}
        samples[sample["name"]].append((labels, value))
    return Scrape({name: tuple(found) for name, found in samples.items()})


def _number(text: str) -> float | None:
    """None: it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def growth(before: Scrape, after: Scrape) -> Scrape:
    """How much each sample grew: of counters, and of the buckets of histograms.

    One that went down was begun anew meanwhile and grew from 0, as Prometheus has it; one that was
    not there before did, too.
    """
    grown = {}
    for name, samples in after.samples.items():
        was = {_key(has): value for has, value in before.samples.get(name, ())}
        grown[name] = tuple((has, _grown(was.get(_key(has), 0.0), now)) for has, now in samples)
    return Scrape(grown)


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def quantile(share: float, histogram: Scrape, name: str, **labels: str) -> float | None:
    """The value below which ``share`` of a histogram's observations lie; None if it has none.

    Linear within a bucket, as Prometheus' ``histogram_quantile`` is; what lies above the last
    bound counts as that bound.
    """
    sums = histogram.by(f"{name}_bucket", "le", **labels)
    bounds = ((_number(text), count) for text, count in sums.items())
    buckets = sorted((bound, count) for bound, count in bounds if bound is not None)
    if not buckets or not buckets[-1][1] > 0:
        return None
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            inside = count - below
            return low + (bound - low) * ((rank - below) / inside if inside else 1.0)
        low, below = bound, count
    return low


def _key(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: _ESCAPES.get(match[1], match[1]), text)

"""The records as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtiers.demo.plan import Mode
from kvtiers.demo.records import PassRecord, Records, speedup

COLOURS = {
    Mode.NONE: "#c0392b",
    Mode.HOST: "#1f77b4",
    Mode.DISK: "#2c8c5a",
    Mode.REFERENCE: "#9a9a9a",
}
_SOURCES = {
    "computed": "#d98880",
    "device": "#d0d3d6",
    "host": "#5fa2d6",
    "disk": "#5cb585",
}
_ORDER = (Mode.NONE, Mode.HOST, Mode.DISK, Mode.REFERENCE)
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def plot_records(path: Path, records: Records) -> None:
    """Write a PNG: time to first token a turn, and where the prompt tokens came from."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        grid = figure.add_gridspec(2, len(_ORDER), height_ratios=(1.15, 1))
        _draw_ttft(figure.add_subplot(grid[0, :]), records)
        first = None
        for column, mode in enumerate(_ORDER):
            axes = figure.add_subplot(grid[1, column], sharey=first)
            first = first or axes
            _draw_sources(axes, records[mode], labels=column == 0)
        _source_legend(figure)
        figure.savefig(path, dpi=150, facecolor="white")


def _draw_ttft(axes: Any, records: Records) -> None:
    baseline = records[Mode.NONE]
    for mode in _ORDER:
        record = records[mode]
        label = mode.title
        if mode in (Mode.HOST, Mode.DISK):
            label += f": {speedup(record, baseline):.1f}x as fast from the second turn on"
        axes.plot(
            range(len(record.turns)),
            [t.ttft_s * 1000 for t in record.turns],
            marker="o",
            markersize=4,
            linewidth=1.2 if mode is Mode.REFERENCE else 2,
            linestyle="--" if mode is Mode.REFERENCE else "-",
            color=COLOURS[mode],
            label=label,
        )
    _mark_restart(axes, records[Mode.DISK])
    axes.set_title("Time to first token, two conversations that take turns")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(baseline.turns)), _tick_labels(baseline))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _mark_restart(axes: Any, record: PassRecord) -> None:
    restarted = [i for i, t in enumerate(record.turns) if t.first_after_restart]
    if not restarted:
        return
    at = restarted[0] - 0.5
    axes.axvline(at, color=COLOURS[Mode.DISK], linestyle=":", linewidth=1.5)
    axes.annotate(
        "server restarted\n(host + disk)",
        (at, 1),
        xycoords=("data", "axes fraction"),
        xytext=(5, -2),
        textcoords="offset points",
        va="top",
        color=COLOURS[Mode.DISK],
    )


def _draw_sources(axes: Any, record: PassRecord, *, labels: bool) -> None:
    bottom = [0] * len(record.turns)
    for source, colour in _SOURCES.items():
        heights = [getattr(t.tokens, source) for t in record.turns]
        axes.bar(range(len(heights)), heights, bottom=bottom, color=colour, width=0.85)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set_ylim(0, 1.06 * max(bottom))
    axes.set_title(record.mode.title, color=COLOURS[record.mode])
    axes.set_xticks(range(len(record.turns)), _tick_labels(record), fontsize=7)
    axes.tick_params(labelleft=labels)
    if labels:
        axes.set_ylabel("prompt tokens")


def _source_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    names = {"computed": "computed", "device": "device cache", "host": "host", "disk": "disk"}
    handles = [Patch(color=colour, label=names[s]) for s, colour in _SOURCES.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), title="prompt tokens from"
    )


def _tick_labels(record: PassRecord) -> list[str]:
    return [f"{'ABCDEFGH'[t.conversation % 8]}{t.turn + 1}" for t in record.turns]


def plot_sweep(path: Path, pools: Sequence[str], rates: Mapping[Mode, Sequence[float]]) -> None:
    """Write a PNG: requests/s a pool and a configuration; ``rates`` has one value a pool."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        axes = figure.add_subplot()
        width = 0.8 / len(rates)
        for i, mode in enumerate(rates):
            at = [pool + (i - (len(rates) - 1) / 2) * width for pool in range(len(pools))]
            bars = axes.bar(at, rates[mode], width * 0.92, color=COLOURS[mode], label=mode.title)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.set_xticks(range(len(pools)), pools)
        axes.set_ylabel("requests/s")
        axes.set_title("Requests/s by pool of conversations, one request at a time")
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150, facecolor="white")

"""How ``kvtiers top`` looks: a board in text. What came from a server is shown, never obeyed."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtiers.cli.output import clean, rate, size
from kvtiers.observe.board import Board, Count, TierRow

_NOT_KNOWN = "-"
_BAR = 24
_A_GIGABYTE = 1e9
_MOST = 8
"""Rows of a list: more than that is no glance."""
_HELD = ("TIER", ">HIT", ">EVER", ">ASKED/s", ">USED", ">OF", ">FULL", "STATE")
_MOVED = ("TIER", ">READ", ">p50", ">p99", ">WRITTEN", ">REMOVED/s", ">JOBS", ">WAITING")
"""Two tables: each fits into 80 columns."""
_FOOTER = "ASKED, HIT and MISSED count lookups of chunks, of peers too; device: tokens"


def render(board: Board, title: str, problem: str | None = None) -> RenderableType:
    """The board as rich draws it; ``problem`` says why it is not of this moment."""
    header = Text(f"{clean(title)}  over {board.seconds:.1f} s", style="bold")
    parts: list[RenderableType] = [header]
    if problem:
        parts.append(Text(clean(problem), style="bold reverse"))
    if board.empty:
        parts.append(Text(clean(nothing_at(title))))
        return Group(*parts)
    parts += [Text(), _table(_HELD, map(_held, board.tiers))]
    parts += [Text(), _table(_MOVED, map(_moved, board.tiers)), Text(_answers(board))]
    if board.tokens:
        parts += [Text(), _table(("PROMPT TOKENS", ">/s", ">EVER", ""), _token_cells(board.tokens))]
    if board.misses:
        parts += [Text(), _counts(("MISSED IN", "BECAUSE"), board.misses)]
    if board.trouble:
        parts += [Text(), _counts(("NOT DONE AT", "TIER", "BECAUSE"), board.trouble)]
    parts += [Text(), Text(_FOOTER, style="dim")]
    return Group(*parts)


def nothing_at(url: str) -> str:
    """What is said of a server that answers and exports nothing that could be shown."""
    return (
        f"{url} exports no metric of vLLM or kvtiers, or none yet: name a vLLM server, or the "
        "observer of an engine, with --url"
    )


def _answers(board: Board) -> str:
    words = []
    if board.ttft_p50_s is not None and board.ttft_p99_s is not None:
        first = f"{_seconds(board.ttft_p50_s)} (p50), {_seconds(board.ttft_p99_s)} (p99)"
        words.append(f"time to first token {first}")
    if board.ceiling is not None:
        would = _share(board.ceiling)
        words.append(f"unlimited capacity, empty at the start, would have hit {would}")
    return "\n".join(["", *words]) if words else ""


def _held(row: TierRow) -> tuple[str, ...]:
    return (
        row.label,
        _share(row.hit_rate),
        _share(row.hit_rate_ever),
        f"{row.queries_s:.1f}",
        _size(row.used_bytes),
        _size(row.capacity_bytes),
        _share(row.used_share),
        row.state or _NOT_KNOWN,
    )


def _moved(row: TierRow) -> tuple[str, ...]:
    return (
        row.label,
        _rate(row.read_bytes_s),
        _seconds(row.read_p50_s),
        _seconds(row.read_p99_s),
        _rate(row.written_bytes_s),
        _number(row.removed_s),
        _whole(row.jobs),
        _whole(row.waiting_chunks),
    )


def _token_cells(tokens: Sequence[Count]) -> Iterable[tuple[str, ...]]:
    """With a bar: the share of each source now, or of all where nothing happens now."""
    now = sum(count.per_s for count in tokens)
    whole = now or sum(count.ever for count in tokens)
    for count in tokens:
        part = (count.per_s if now else count.ever) / whole if whole else 0.0
        bar = "█" * round(part * _BAR)
        share = f"{bar} {_share(part)}".strip()
        yield count.labels[0], f"{count.per_s:,.1f}", f"{count.ever:,.0f}", share


def _counts(labels: Sequence[str], counts: Sequence[Count]) -> Table:
    cells = [(*c.labels, f"{c.per_s:,.1f}", f"{c.ever:,.0f}") for c in counts[:_MOST]]
    return _table((*labels, ">/s", ">EVER"), cells)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            Text(column.removeprefix(">")), justify="right" if right else "left", no_wrap=True
        )
    for row in rows:
        made.add_row(*(Text(clean(cell)) for cell in row))
    return made


def _share(part: float | None) -> str:
    return _NOT_KNOWN if part is None else f"{100 * part:.0f} %"


def _size(count: float | None) -> str:
    return _NOT_KNOWN if count is None else size(round(count))


def _rate(bytes_s: float | None) -> str:
    if bytes_s is None:
        return _NOT_KNOWN
    return rate(bytes_s) if bytes_s >= _A_GIGABYTE else f"{bytes_s / 1e6:.1f} MB/s"


def _number(value: float | None) -> str:
    return _NOT_KNOWN if value is None else f"{value:.1f}"


def _whole(value: float | None) -> str:
    return _NOT_KNOWN if value is None else f"{value:.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOT_KNOWN
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"

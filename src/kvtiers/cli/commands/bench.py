"""``kvtiers bench tier``: how fast a tier moves chunks here, beside the disk or bucket alone.

All of it happens in a hidden folder of its own under the tier's root, or below a prefix of its own,
which is removed at the end, or after a kill by the next ``bench`` or ``gc``: the same disk, and
nothing that an engine counts, evicts or owns. With ``--keep`` the tier lies in the root itself,
which has to be empty, and stays: something to try the other tools on.
"""

import argparse
from contextlib import closing
from typing import Any

from kvtiers.cli.common import add_common, parse_chunk_bytes
from kvtiers.cli.measure import Figures, measure_bare, measure_tier, room_for
from kvtiers.cli.media import medium_of
from kvtiers.cli.output import Output, rate, size
from kvtiers.errors import ConfigError
from kvtiers.tiers.parameters import parse_size
from kvtiers.tiers.urls import parse_url

_LEAST = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("what", choices=["tier"], help="what is measured")
    parser.add_argument(
        "url",
        metavar="URL",
        help="fs:///PATH?layout=..., s3://BUCKET/PREFIX?endpoint=..., redis://HOST",
    )
    parser.add_argument("--chunk-bytes", metavar="SIZE", default="2MiB", help="default 2MiB")
    parser.add_argument("--total-bytes", metavar="SIZE", default="512MiB", help="default 512MiB")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the chunks in URL, where nothing is yet: a tier to try the tools on",
    )
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure; 0 if every byte came back."""
    chunk = parse_chunk_bytes(arguments.chunk_bytes)
    total = parse_size("--total-bytes", arguments.total_bytes)
    if total < max(chunk, _LEAST):
        raise ConfigError(
            f"--total-bytes is {total}: give at least 1MiB, and one chunk of {chunk} bytes"
        )
    medium = medium_of(parse_url(arguments.url))
    medium.refuse(total, arguments.keep)
    count = total // chunk
    with (
        medium.trial(chunk, count, arguments.keep) as trial,
        output.progress(4 * count * chunk, "measuring") as advance,
    ):
        tier, direct = measure_tier(trial.options, chunk, count, advance)
        with closing(trial.open_bare(direct)) as bare:
            alone = measure_bare(bare, chunk, count, advance, medium.name, medium.lanes)
    shares = [ours.bytes_per_s / most.bytes_per_s for ours, most in zip(tier, alone, strict=True)]
    rows = [*zip(tier, shares, strict=True), *((figures, None) for figures in alone)]

    left = room_for(count) if arguments.keep else 0

    def human() -> None:
        of = f">OF THE {medium.name.upper()}"
        columns = ("", ">THROUGHPUT", of, ">P50 A CHUNK", ">P99 A CHUNK")
        output.table(columns, [_row(*row) for row in rows])
        output.line(
            f"{count} chunks of {size(chunk)}, layout {medium.layout}; the last rows are "
            f"{medium.footnote(direct)}"
        )
        if arguments.keep:
            output.line(
                f"what the tier wrote stays, {left} chunks: those of the throughput, and "
                f"{left - count} one at a time; kvtiers ls {medium.kept}"
            )

    document: dict[str, Any] = {
        "url": arguments.url,
        "layout": medium.layout,
        "chunk_bytes": chunk,
        "chunks": count,
        "kept": arguments.keep,
        "kept_chunks": left,
        "direct": direct,
        "figures": [_document(*row, medium.name) for row in rows],
    }
    output.show(document, human)
    return 0


def _document(figures: Figures, share: float | None, medium: str) -> dict[str, Any]:
    return {
        "name": figures.name,
        "bytes_per_s": round(figures.bytes_per_s),
        f"share_of_{medium}": share,
        "p50_s": figures.p50_s,
        "p99_s": figures.p99_s,
    }


def _row(figures: Figures, share: float | None) -> tuple[str, ...]:
    return (
        figures.name,
        rate(figures.bytes_per_s),
        "" if share is None else f"{share:.0%}",
        f"{figures.p50_s * 1e3:.2f} ms",
        f"{figures.p99_s * 1e3:.2f} ms",
    )

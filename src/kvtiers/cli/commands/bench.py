"""``kvtiers bench tier``: how fast a tier moves chunks here, beside the disk alone.

All of it happens in a hidden folder of its own under the tier's root, which is removed at the end,
or after a kill by the next ``bench`` or ``gc``: the same disk, and nothing that an engine counts,
evicts or owns. With ``--keep`` the tier lies in the root itself, which has to be empty, and stays:
something to try the other tools on.
"""

import argparse
import os
from contextlib import closing, suppress
from typing import Any
from urllib.parse import quote

from kvtiers.cli import trials
from kvtiers.cli.common import add_common, parse_chunk_bytes
from kvtiers.cli.measure import Figures, measure_bare, measure_tier, open_bare, trial_options
from kvtiers.cli.output import Output, rate, size
from kvtiers.errors import ConfigError, map_errors
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.urls import layout_of, parse_size, parse_url

_LEAST = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("what", choices=["tier"], help="what is measured")
    parser.add_argument("url", metavar="URL", help="fs:///PATH, with ?layout= if need be")
    parser.add_argument("--chunk-bytes", metavar="SIZE", default="2MiB", help="default 2MiB")
    parser.add_argument("--total-bytes", metavar="SIZE", default="512MiB", help="default 512MiB")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the chunks in URL, a new or empty folder: a tier to try the tools on",
    )
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure; 0 if every byte came back."""
    chunk = parse_chunk_bytes(arguments.chunk_bytes)
    total = parse_size("--total-bytes", arguments.total_bytes)
    url = parse_url(arguments.url)
    _refuse(chunk, total, url)
    if arguments.keep:
        _refuse_to_mix(url.path)
    layout = url.layout or layout_of(arguments.url, url)  # it has a folder of its own
    count = total // chunk
    made = not os.path.lexists(url.path)
    if made and not os.path.isdir(os.path.dirname(url.path)):
        raise ConfigError(f"{arguments.url}: there is no such folder, and none to make it in")
    with map_errors("bench in", url.path):
        if made:
            os.mkdir(url.path, 0o700)
        trials.remove(trials.left_behind(url.path))
    try:
        with map_errors("bench in", url.path), trials.trial_folder(url.path) as folder:
            options = trial_options(folder, layout, url.direct_io, chunk, count)
            if arguments.keep:
                options["root_dir"] = url.path
            with output.progress(4 * count * chunk, "measuring") as advance:
                tier, direct = measure_tier(options, chunk, count, advance)
                with closing(open_bare(folder, layout, chunk, count, direct)) as bare:
                    disk = measure_bare(bare, chunk, count, advance)
    finally:
        if made and not arguments.keep:
            with suppress(OSError):  # others may use it by now
                os.rmdir(url.path)
    shares = [ours.bytes_per_s / most.bytes_per_s for ours, most in zip(tier, disk, strict=True)]
    rows = [*zip(tier, shares, strict=True), *((figures, None) for figures in disk)]

    def human() -> None:
        columns = ("", ">THROUGHPUT", ">OF THE DISK", ">P50 A CHUNK", ">P99 A CHUNK")
        output.table(columns, [_row(*row) for row in rows])
        output.line(
            f"{count} chunks of {size(chunk)}, layout {layout}; the last rows are bare calls of the"
            f" same shape on as many threads, {'past' if direct else 'through'} the page cache"
        )
        if arguments.keep:
            output.line(f"what the tier wrote stays: kvtiers ls fs://{quote(url.path)}")

    document: dict[str, Any] = {
        "url": arguments.url,
        "layout": layout,
        "chunk_bytes": chunk,
        "chunks": count,
        "kept": arguments.keep,
        "direct": direct,
        "figures": [_document(*row) for row in rows],
    }
    output.show(document, human)
    return 0


def _refuse(chunk: int, total: int, url: FsURL) -> None:
    if total < max(chunk, _LEAST):
        raise ConfigError(
            f"--total-bytes is {total}: give at least 1MiB, and one chunk of {chunk} bytes"
        )
    where = url.path
    while not os.path.isdir(where):
        where = os.path.dirname(where)
    disk = os.statvfs(where)
    free = disk.f_bavail * disk.f_frsize
    if 3 * total > free:
        raise ConfigError(
            f"--total-bytes {size(total)} needs three times as much on the disk, where "
            f"{size(free)} are free: lower it"
        )


def _refuse_to_mix(folder: str) -> None:
    """Chunks of no model stay by themselves: an engine would count them, and evict for them."""
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ConfigError(f"--keep: {folder} is no empty folder: name one, or one that is absent")


def _document(figures: Figures, share: float | None) -> dict[str, Any]:
    return {
        "name": figures.name,
        "bytes_per_s": round(figures.bytes_per_s),
        "share_of_disk": share,
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

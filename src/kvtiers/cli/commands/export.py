"""``kvtiers export``: chunks into a portable archive."""

import argparse
import os

from kvtiers.chunks import Namespace
from kvtiers.cli import prefix
from kvtiers.cli.archive import writing
from kvtiers.cli.common import add_place, chosen, place_of, whole
from kvtiers.cli.output import Output, size
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.places import Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("archive", metavar="ARCHIVE", help="the tar file to write")
    parser.add_argument("--tokens", metavar="FILE", help="only chunks of this prompt; - for stdin")
    parser.add_argument("--force", action="store_true", help="replace ARCHIVE if it is there")
    prefix.add_arguments(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write; 0 if every chunk is in it, 1 if damaged ones were left out, or all were."""
    tokens = None if arguments.tokens is None else prefix.read_tokens(arguments.tokens)
    if arguments.archive == "-":
        raise ConfigError("ARCHIVE is '-', but it has to be a file: write ./- if that is the name")
    if os.path.lexists(arguments.archive) and not arguments.force:
        raise ConfigError(f"{arguments.archive!a} is there already: --force replaces it")
    place = place_of(arguments, output)
    found = whole(chosen(place, arguments.namespace), output, "no engine can use it")
    if not found:
        raise ConfigError(f"{place.url} has no namespace to export")
    wanted = {namespace.id: _wanted(place, namespace, tokens, arguments) for _, namespace in found}
    count = sum(map(len, wanted.values()))
    if not count:
        what = "holds no chunk" if tokens is None else "holds no chunk of this prompt"
        raise ConfigError(f"{place.url} {what}: there is nothing to export")
    chunks, written, damaged = 0, 0, []
    total = sum(e.bytes for entries in wanted.values() for e in entries)
    with (
        output.progress(total, "writing") as advance,
        writing(arguments.archive, [n for name, n in found if name in wanted]) as archive,
    ):
        for name, entries in wanted.items():
            by_key = {e.key: e for e in entries}
            for key, payload in place.read(name, list(by_key)):
                advance(by_key[key].bytes)
                if not isinstance(payload, KVTiersError):
                    archive.add(name, by_key[key], payload)
                    chunks, written = chunks + 1, written + payload.nbytes
                elif payload.kind is not Kind.VANISHED:
                    damaged.append((name, key.hex(), str(payload)))
        if not chunks:  # so that no archive appears
            raise _none_left(count, damaged)

    def human() -> None:
        for _, _, problem in damaged:
            output.line(f"left out: {problem}")
        output.line(f"{arguments.archive}: {chunks} chunks, {size(written)}")

    document = {
        "url": place.url,
        "archive": arguments.archive,
        "namespaces": list(wanted),
        "chunks": chunks,
        "bytes": written,
        "left_out": [{"namespace": n, "key": k, "problem": p} for n, k, p in damaged],
    }
    output.show(document, human)
    return 1 if damaged else 0


def _none_left(count: int, damaged: list[tuple[str, str, str]]) -> KVTiersError:
    why = f"the first: {damaged[0][2]}" if damaged else "they left meanwhile: call it again"
    kind = Kind.CORRUPT if damaged else Kind.VANISHED
    return KVTiersError(f"none of {count} chunks can be exported, {why}", kind=kind)


def _wanted(
    place: Place,
    namespace: Namespace,
    tokens: list[int] | None,
    arguments: argparse.Namespace,
) -> list[Entry]:
    """Least recently used first, so that an import keeps the order of use."""
    if tokens is None:
        return sorted(place.entries(namespace.id), key=lambda e: e.used_at)
    keys = prefix.prompt_of(namespace, tokens, arguments).all_keys()
    return [entry for entry in place.find(namespace.id, keys) if entry is not None]

"""``kvtiers stat``: one chunk by its key, or chunk by chunk what is stored of a prompt."""

import argparse
import re
import time
from typing import Any

from kvtiers.chunks import Key, Namespace, key_group
from kvtiers.cli import prefix
from kvtiers.cli.common import add_place, chosen, place_of, walked, whole
from kvtiers.cli.output import Output, Unit, age, size
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.places import Found, Place

_KEY = re.compile(r"[0-9a-f]{1,2048}")
_MOST_SHOWN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("key", metavar="KEY", nargs="?", help="in hex, or the beginning of one")
    parser.add_argument("--tokens", metavar="FILE", help="a JSON list of token ids; - for stdin")
    prefix.add_arguments(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Look it up; 1 if a chunk asked for by key is damaged."""
    if (arguments.key is None) == (arguments.tokens is None):
        raise ConfigError("give a KEY or --tokens FILE, one of them")
    tokens = None if arguments.tokens is None else prefix.read_tokens(arguments.tokens)
    place = place_of(arguments, output)
    found = chosen(place, arguments.namespace)
    if tokens is None:
        return _show_chunk(place, found, arguments.key, output)
    return _show_prompt(place, found, tokens, arguments, output)


def _show_chunk(place: Place, found: list[Found], begin: str, output: Output) -> int:
    if not _KEY.fullmatch(begin):
        raise ConfigError(f"KEY is {begin!a}: give hex digits, as ls --chunks shows them")
    with output.progress(None, "looking", Unit.CHUNKS) as advance:
        matches = [
            (each.id, entry)
            for each in found
            for entry in walked(place.entries(each.id), advance)
            if entry.key.hex().startswith(begin)
        ]
    if len({entry.key for _, entry in matches}) != 1:
        some = ", ".join(sorted({e.key.hex() for _, e in matches})[:_MOST_SHOWN])
        what = f"{len(matches)} chunks begin with {begin}: {some}, ..." if matches else ""
        raise ConfigError(what or f"no chunk of {place.url} begins with {begin}")
    results = [(name, entry, _verdict(place, name, entry.key)) for name, entry in matches]
    now = time.time()

    def human() -> None:
        for name, entry, problem in results:
            output.line(f"key        {entry.key.hex()}")
            output.line(f"group      {key_group(entry.key)}")
            output.line(f"namespace  {name}")
            output.line(f"bytes      {size(entry.bytes)} ({entry.bytes})")
            output.line(f"last use   {age(now - entry.used_at)} ago")
            output.line(f"verified   {problem or 'intact'}")

    document = {
        "url": place.url,
        "chunks": [
            {**_described(entry), "namespace": name, "intact": not problem, "problem": problem}
            for name, entry, problem in results
        ],
    }
    output.show(document, human)
    return 1 if any(problem for _, _, problem in results) else 0


def _verdict(place: Place, name: str, key: Key) -> str | None:
    ((_, payload),) = place.read(name, [key])
    return str(payload) if isinstance(payload, KVTiersError) else None


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key.hex(),
        "group": key_group(entry.key),
        "bytes": entry.bytes,
        "last_used": entry.used_at,
    }


def _show_prompt(
    place: Place,
    found: list[Found],
    tokens: list[int],
    arguments: argparse.Namespace,
    output: Output,
) -> int:
    known = whole(found, output, "no keys can be computed for it")
    results, last = [], None
    for name, namespace in known:
        try:
            results.append((name, *_lookup(place, namespace, tokens, arguments)))
        except ConfigError as e:
            if len(known) == 1:
                raise
            output.warn(f"left out, {e}")
            last = e
    if last is not None and not results:
        raise ConfigError("there is no namespace for which keys can be computed: see the warnings")

    def human() -> None:
        for name, loadable, rows in results:
            stored = sum(1 for row in rows if row["stored"])
            output.line(
                f"namespace {name}: {stored} of {len(rows)} chunks are stored, "
                f"{loadable} of {len(tokens)} tokens could be loaded"
            )
            output.table(("GROUP", ">TOKENS", "STORED", ">BYTES", ">LAST USE", "KEY"), _cells(rows))
        if not results:
            output.line(f"{place.url}: no namespaces")

    document = {
        "url": place.url,
        "tokens": len(tokens),
        "namespaces": [
            {"namespace": name, "loadable_tokens": loadable, "chunks": rows}
            for name, loadable, rows in results
        ],
    }
    output.show(document, human)
    return 0


def _lookup(
    place: Place, namespace: Namespace, tokens: list[int], arguments: argparse.Namespace
) -> tuple[int, list[dict[str, Any]]]:
    prompt = prefix.prompt_of(namespace, tokens, arguments)
    rows, stored = [], {}
    for span in prompt.spans:
        keys = prompt.keys[span.group]
        entries = place.find(namespace.id, keys)
        stored[span.group] = entries
        for i, (key, entry) in enumerate(zip(keys, entries, strict=True)):
            first = i * span.tokens_per_chunk
            rows.append(
                {
                    "group": span.group,
                    "first_token": first,
                    "end_token": first + span.tokens_per_chunk,
                    "key": key.hex(),
                    "stored": entry is not None,
                    "bytes": entry and entry.bytes,
                    "last_used": entry and entry.used_at,
                }
            )
    return prefix.loadable(prompt, stored).tokens, rows


def _cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    now = time.time()
    return [
        (
            str(row["group"]),
            f"{row['first_token']}-{row['end_token']}",
            "yes" if row["stored"] else "no",
            size(row["bytes"]) if row["stored"] else "-",
            age(now - row["last_used"]) if row["stored"] else "-",
            row["key"],
        )
        for row in rows
    ]

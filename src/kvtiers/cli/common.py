"""What several commands take, and how they find their place and its namespaces."""

import argparse
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtiers.chunks import PAGE_BYTES, ChunkLayout, GroupLayout, Key, Namespace, key_group
from kvtiers.cli.output import Advance, Output
from kvtiers.errors import ConfigError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.parameters import parse_size
from kvtiers.tiers.places import MAX_CHUNK_BYTES, Found, Place
from kvtiers.tiers.urls import open_place

_HEX = re.compile(r"[0-9a-f]{1,32}")
_AT_ONCE = 1024
_T = TypeVar("_T")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every command."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--debug", action="store_true", help="a traceback with errors")


def add_place(parser: argparse.ArgumentParser, *, namespace: bool = True) -> None:
    """The URL of a tier and, unless it is of no use, a namespace in it."""
    parser.add_argument(
        "url",
        metavar="URL",
        help="fs:///PATH?layout=..., s3://BUCKET/PREFIX?endpoint=..., redis://HOST",
    )
    if namespace:
        add_namespace(parser)
    add_common(parser)


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """A namespace, by the beginning of its id."""
    parser.add_argument("--namespace", metavar="ID", help="only this one; its first digits will do")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """For what changes anything."""
    parser.add_argument("--dry-run", action="store_true", help="change nothing, say what would be")


def parse_chunk_bytes(text: str) -> int:
    """A size that chunks may have. Raises ConfigError."""
    chunk = parse_size("--chunk-bytes", text)
    if chunk < PAGE_BYTES or chunk % PAGE_BYTES or chunk > MAX_CHUNK_BYTES:
        raise ConfigError(
            f"--chunk-bytes is {chunk}: give a multiple of {PAGE_BYTES}, as chunks are"
        )
    return chunk


def place_of(arguments: argparse.Namespace, output: Output) -> Place:
    """The place that the command names. Raises ConfigError."""
    return open_place(arguments.url, output.warn)


def refuse_owned(place: Place, remedy: str = "stop that engine first") -> None:
    """Raise ConfigError if an engine has the place for itself: before any work is done in vain."""
    owner = place.owner()
    if owner is not None:
        who = f"the living process {owner}" if owner else "a living process"
        raise ConfigError(f"{place.url} belongs to {who}, which shares it with nobody: {remedy}")


def chosen(place: Place, wanted: str | None) -> list[Found]:
    """The namespaces that ``wanted`` names: all if it is None, else the one it begins.

    Raises ConfigError if there is none, or more than one.
    """
    found = place.namespaces()
    if wanted is None:
        return found
    if not _HEX.fullmatch(wanted):
        raise ConfigError(f"--namespace is {wanted!a}: give the first hex digits of its id")
    matches = [f for f in found if f.id.startswith(wanted)]
    if len(matches) != 1:
        there = ", ".join(f.id for f in (matches or found)[:8]) or "none"
        what = f"{len(matches)} namespaces begin" if matches else "no namespace begins"
        raise ConfigError(f"{what} with {wanted}: there are {there}")
    return matches


def whole(found: Sequence[Found], output: Output, why: str) -> list[tuple[str, Namespace]]:
    """Those whose manifest is intact; the others are warned of: ``why`` it takes one."""
    for each in found:
        if each.namespace is None:
            output.warn(f"namespace {each.id} is left out, {why}: {each.problem}")
    return [(each.id, each.namespace) for each in found if each.namespace is not None]


@dataclass(frozen=True, slots=True)
class Span:
    """A KV-cache group as a manifest describes it."""

    group: int
    kind: str
    tokens_per_chunk: int
    window_tokens: int | None


def spans_of(namespace: Namespace) -> list[Span]:
    """The groups in a manifest. Raises ConfigError if it does not say them."""
    fields = namespace.fields
    try:
        per_chunk = fields["bytes"]["blocks_per_chunk"] if "bytes" in fields else None
        spans = [_span(group, per_chunk) for group in fields["groups"]]
    except (KeyError, TypeError, ValueError, IndexError):
        spans = []
    if not spans or any(s.tokens_per_chunk < 1 for s in spans):
        raise ConfigError(
            f"the manifest of namespace {namespace.id} does not say how many tokens a chunk spans: "
            "keys cannot be computed for it"
        )
    return spans


def _span(group: Mapping[str, Any] | Sequence[Any], per_chunk: Any) -> Span:
    """Of an engine that knows its groups, or of one under vLLM's own connector."""
    if isinstance(group, Mapping):
        tokens = int(group["tokens_per_block"]) * int(group["blocks_per_chunk"])
        window = group.get("window_tokens")
        return Span(int(group["group"]), str(group["kind"]), tokens, window and int(window))
    return Span(int(group[0]), "unknown", int(group[1]) * int(per_chunk), None)


def layout_of(entries: Sequence[Entry] | Mapping[int, int]) -> ChunkLayout:
    """Sizes by group, for a store of a tool: it has no model to ask.

    A store takes them as limits; how many tokens a chunk spans it does not ask.
    """
    sizes: dict[int, int] = {}
    pairs = (
        entries.items()
        if isinstance(entries, Mapping)
        else ((key_group(e.key), e.bytes) for e in entries)
    )
    for group, size in pairs:
        sizes[group] = max(size, sizes.get(group, 0))
    groups = tuple(GroupLayout(g, n, 1) for g, n in sorted(sizes.items()))
    return ChunkLayout(groups or (GroupLayout(0, 0, 1),))


def batched(items: Iterable[_T]) -> Iterator[list[_T]]:
    """``items`` in lists of at most 1024: a tier may hold millions."""
    some: list[_T] = []
    for item in items:
        some.append(item)
        if len(some) == _AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def walked(entries: Iterable[Entry], advance: Advance) -> Iterator[Entry]:
    """``entries``, whose number is told to ``advance`` as they come."""
    for some in batched(entries):
        advance(len(some))
        yield from some


Pair = tuple[str, Entry]
"""The id of a namespace, and a chunk in it."""


def last_used(pairs: Iterable[Pair], limit: int | None) -> list[Pair]:
    """The ``limit`` chunks used last, None: all; last used first, and no more in memory at once."""

    def used(pair: Pair) -> tuple[float, Key]:
        return pair[1].used_at, pair[1].key

    if limit is None:
        return sorted(pairs, key=used, reverse=True)
    return heapq.nlargest(limit, pairs, key=used)


def about(namespace: Namespace | None) -> str:
    """A namespace in few words: model, KV dtype, hash."""
    if namespace is None:
        return "damaged"
    fields = namespace.fields
    model = fields.get("model")
    digest = model.get("digest") if isinstance(model, Mapping) else model
    words = [str(digest or "?")[:24], str(fields.get("kv_dtype") or "")]
    return " ".join(word for word in words if word)

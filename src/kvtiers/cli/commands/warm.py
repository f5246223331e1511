"""``kvtiers warm``: a hot list, the chunks worth having in host memory from the start."""

import argparse
import os

from kvtiers.chunks import Key, Namespace
from kvtiers.cli import prefix
from kvtiers.cli.common import add_place, chosen, last_used, place_of, walked, whole
from kvtiers.cli.output import Advance, Output, Unit, size
from kvtiers.errors import ConfigError
from kvtiers.tiers.base import Entry
from kvtiers.tiers.hot import HotPrefix, write_hot_list
from kvtiers.tiers.places import Place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_place(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="hot list to write")
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        action="append",
        default=[],
        help="a hot prompt, any number",
    )
    parser.add_argument("--from-recent", type=int, metavar="N", help="the N chunks used last")
    prefix.add_arguments(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the hot list; 0 if any chunk is in it."""
    recent = arguments.from_recent
    if not arguments.tokens and recent is None:
        raise ConfigError("say what is hot: --tokens FILE, --from-recent N, or both")
    if recent is not None and recent < 1:
        raise ConfigError(f"--from-recent is {recent}: give 1 or more")
    prompts = [prefix.read_tokens(path) for path in arguments.tokens]
    place = place_of(arguments, output)
    found = whole(chosen(place, arguments.namespace), output, "no engine can use it")
    hot: list[tuple[str, list[Entry]]] = []
    for tokens in prompts:
        for name, namespace in found:
            hot.append((name, _stored(place, namespace, tokens, arguments)))
    if recent is not None:
        with output.progress(None, "looking", Unit.CHUNKS) as advance:
            hot += _recent(place, [name for name, _ in found], recent, advance)
    prefixes, nbytes = _without_repeats(hot)
    count = sum(len(p.keys) for p in prefixes)
    if not count:
        raise ConfigError(f"none of these chunks are stored in {place.url}: nothing was written")
    write_hot_list(arguments.output, prefixes)

    def human() -> None:
        output.line(f"{arguments.output}: {count} chunks, {size(nbytes)}")

    document = {
        "url": place.url,
        "hot_list": os.path.abspath(arguments.output),
        "prefixes": len(prefixes),
        "chunks": count,
        "bytes": nbytes,
    }
    output.show(document, human)
    return 0


def _stored(
    place: Place, namespace: Namespace, tokens: list[int], arguments: argparse.Namespace
) -> list[Entry]:
    """What a request that begins with a prompt would load, first what it begins with."""
    prompt = prefix.prompt_of(namespace, tokens, arguments)
    stored = {group: place.find(namespace.id, keys) for group, keys in prompt.keys.items()}
    chunks = prefix.loadable(prompt, stored, whole=True).chunks
    ends = sorted(
        ((i + 1) * span.tokens_per_chunk, span.group, i)
        for span in prompt.spans
        for i in chunks[span.group]
    )
    found = [stored[group][i] for _, group, i in ends]
    return [entry for entry in found if entry is not None]


def _recent(
    place: Place, names: list[str], count: int, advance: Advance
) -> list[tuple[str, list[Entry]]]:
    everything = ((name, entry) for name in names for entry in walked(place.entries(name), advance))
    last = last_used(everything, count)
    return [(name, [e for n, e in last if n == name]) for name in names]


def _without_repeats(hot: list[tuple[str, list[Entry]]]) -> tuple[list[HotPrefix], int]:
    """The prefixes with each chunk once, and bytes of all."""
    seen: set[tuple[str, Key]] = set()
    prefixes, nbytes = [], 0
    for name, entries in hot:
        new = {e.key: e.bytes for e in entries if (name, e.key) not in seen}
        seen.update((name, key) for key in new)
        nbytes += sum(new.values())
        if new:
            prefixes.append(HotPrefix(name, tuple(new)))
    return prefixes, nbytes

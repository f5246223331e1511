"""``kvtiers why``: why a request missed, or where the chunks of a prompt are now."""

import argparse
from collections.abc import Sequence
from typing import Any

from kvtiers.chunks import Key
from kvtiers.cli import prefix, whyview
from kvtiers.cli.common import add_common
from kvtiers.cli.output import Output
from kvtiers.cli.tokenizer import ENGINE, tokens_of
from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe.client import AT, ObserverClient

_THERE = "there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "request",
        metavar="REQUEST_ID",
        nargs="?",
        help="what a client was told; its beginning will do",
    )
    parser.add_argument("--tokens", metavar="FILE", help="a JSON list of token ids; - for stdin")
    parser.add_argument("--prompt", metavar="FILE", help="text, which the engine cuts into tokens")
    parser.add_argument("--at", metavar="URL", default=AT, help=f"the observer; default {AT}")
    parser.add_argument(
        "--engine", metavar="URL", default=ENGINE, help=f"for --prompt; default {ENGINE}"
    )
    prefix.add_arguments(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Ask and show; 0 if there was an answer. Raises KVTiersError if there was none."""
    given = (arguments.request, arguments.tokens, arguments.prompt)
    if sum(each is not None for each in given) != 1:
        raise ConfigError("give a REQUEST_ID, --tokens FILE or --prompt FILE, one of them")
    client = ObserverClient(arguments.at)
    try:
        return _run(client, arguments, output)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as e:
        raise KVTiersError(
            f"{client.url} answers what no observer of this version says "
            f"({type(e).__name__}: {e}): is it one?",
            kind=Kind.BROKEN,
        ) from e


def _run(client: ObserverClient, arguments: argparse.Namespace, output: Output) -> int:
    if arguments.request is not None:
        record = client.request(arguments.request)
        output.show({"url": client.url, **record}, lambda: whyview.show_request(record, output))
        return 0
    if arguments.tokens is not None:
        tokens: Sequence[int] = prefix.read_tokens(arguments.tokens)
    else:
        tokens = tokens_of(arguments.prompt, arguments.engine)
    return _explain(client, tokens, arguments, output)


def _explain(
    client: ObserverClient, tokens: Sequence[int], arguments: argparse.Namespace, output: Output
) -> int:
    namespace = client.namespace()
    prompt = prefix.prompt_of(namespace, tokens, arguments)
    keys = prompt.all_keys()
    if not keys:
        spans = ", ".join(str(span.tokens_per_chunk) for span in prompt.spans)
        raise ConfigError(f"{len(tokens)} tokens are less than a chunk ({spans} tokens)")
    tiers = client.explain(keys)
    loadable = prefix.loadable(prompt, _stored(prompt, tiers)).tokens
    document = {
        "url": client.url,
        "namespace": namespace.id,
        "tokens": len(tokens),
        "loadable_tokens": loadable,
        "chunks": len(keys),
        "tiers": tiers,
        "keys": [key.hex() for key in keys],
    }
    output.show(document, lambda: whyview.show_prompt(prompt, tiers, loadable, output))
    return 0


def _stored(prompt: prefix.Prompt, tiers: list[dict[str, Any]]) -> dict[int, list[Key | None]]:
    """By group the chunks that some tier has."""
    there: set[int] = set()
    for tier in tiers:
        for run in tier["runs"]:
            if run["state"] == _THERE:
                there.update(range(run["first"], run["first"] + run["count"]))
    stored: dict[int, list[Key | None]] = {}
    first = 0
    for span in prompt.spans:
        keys = prompt.keys[span.group]
        stored[span.group] = [key if first + i in there else None for i, key in enumerate(keys)]
        first += len(keys)
    return stored

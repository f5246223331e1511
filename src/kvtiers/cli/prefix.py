"""From the token ids of a prompt to what is stored of it, by what a manifest says of hashing."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.chunks import Key, Lookup, Namespace
from kvtiers.cli.common import Span, spans_of
from kvtiers.core.prefix import Attention, AttentionGroup, Prefix, longest_prefix, most_tokens
from kvtiers.errors import ConfigError
from kvtiers.hashing import (
    ALGORITHMS,
    DEFAULT_SEED,
    ExtraKeys,
    chunk_keys,
    request_extra_keys,
    seed_id,
)

_MAX_FILE = 256 << 20
_MAX_TOKEN = 1 << 32
_WINDOWED = {
    "SlidingWindow": Attention.SLIDING,
    "ChunkedLocalAttention": Attention.CHUNKED_LOCAL,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What computing keys may need besides the tokens."""
    parser.add_argument(
        "--tokens-per-hash", type=int, metavar="N", help="if the manifest is silent"
    )
    parser.add_argument("--hash", choices=ALGORITHMS, help="algorithm, if no manifest says it")
    parser.add_argument("--seed", metavar="TEXT", help="the engines' PYTHONHASHSEED, if it was set")
    parser.add_argument("--salt", metavar="TEXT", help="cache_salt of the request")
    parser.add_argument(
        "--lora", nargs=2, metavar=("NAME", "PATH"), help="adapter of the request, as vLLM has it"
    )


def read_tokens(path: str) -> list[int]:
    """A JSON list of token ids in the file ``path``, ``-`` for stdin. Raises ConfigError."""
    try:
        if path == "-":
            text: str | bytes = sys.stdin.buffer.read(_MAX_FILE + 1)
        else:
            with open(path, "rb") as file:
                text = file.read(_MAX_FILE + 1)
    except OSError as e:
        raise ConfigError(f"--tokens {path!a} cannot be read: {e.strerror}") from None
    remedy = "give a JSON list of token ids like [1, 2, 3]"
    if len(text) > _MAX_FILE:
        raise ConfigError(f"--tokens {path!a} has more than {_MAX_FILE} bytes: {remedy}")
    try:
        tokens = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"--tokens {path!a} is no JSON: {remedy}") from None
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise ConfigError(f"--tokens {path!a} is something else: {remedy}")
    if any(not 0 <= t < _MAX_TOKEN for t in tokens):
        raise ConfigError(f"--tokens {path!a} holds a number that is no token id: {remedy}")
    return tokens


@dataclass(frozen=True, slots=True)
class Hashing:
    """How the engines of a namespace name chunks."""

    tokens_per_hash: int
    algorithm: str
    seed: str
    extra_keys: ExtraKeys


def hashing_of(namespace: Namespace, arguments: argparse.Namespace) -> Hashing:
    """What the manifest says, completed by the call. Raises ConfigError if they disagree."""
    fields = namespace.fields
    per_hash = _agreed(fields, "tokens_per_hash", arguments.tokens_per_hash, "--tokens-per-hash")
    algorithm = _agreed(fields, "hash_algorithm", arguments.hash, "--hash")
    if type(per_hash) is not int or per_hash < 1:
        raise ConfigError(f"--tokens-per-hash is {per_hash!a}: give 1 or more")
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"{algorithm!a} is a hash algorithm that kvtiers does not know")
    seed = _seed(fields, arguments.seed)
    lora = tuple(arguments.lora) if arguments.lora else None
    return Hashing(per_hash, algorithm, seed, request_extra_keys(lora, arguments.salt))


def _agreed(fields: Mapping[str, Any], field: str, given: Any, option: str) -> Any:
    said = fields.get(field)
    if said is None and given is None:
        raise ConfigError(f"the manifest does not say {field}: give {option}")
    if said is not None and given is not None and said != given:
        raise ConfigError(
            f"{option} is {given}, but the manifest says {said!a}: leave {option} out"
        )
    return given if said is None else said


def _seed(fields: Mapping[str, Any], given: str | None) -> str:
    """The seed itself, of which the manifest holds a digest only."""
    said = fields.get("hash_seed", DEFAULT_SEED)
    if str(said).startswith("random:"):
        raise ConfigError(
            "the engine of this namespace drew its hash seed at random, so nobody else can compute "
            "its keys: set PYTHONHASHSEED for engines that share a tier"
        )
    if seed_id(given) == said:
        return DEFAULT_SEED if given is None else given
    if given is None:
        raise ConfigError("the engines of this namespace set PYTHONHASHSEED: give it as --seed")
    raise ConfigError("--seed is not the PYTHONHASHSEED of the engines of this namespace")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the terms of one namespace."""

    tokens: int
    spans: tuple[Span, ...]
    groups: tuple[AttentionGroup, ...]
    keys: Mapping[int, list[Key]]
    """By group, in order of the prompt."""

    def all_keys(self) -> list[Key]:
        """Every key, in order of the prompt within each group."""
        return [key for span in self.spans for key in self.keys[span.group]]


def prompt_of(namespace: Namespace, tokens: Sequence[int], arguments: argparse.Namespace) -> Prompt:
    """The keys of a prompt's chunks. Raises ConfigError if they cannot be computed."""
    spans = spans_of(namespace)
    try:
        groups = tuple(_attention(span) for span in spans)
        how = hashing_of(namespace, arguments)
        keys = {
            span.group: chunk_keys(
                tokens,
                span.group,
                span.tokens_per_chunk,
                how.tokens_per_hash,
                how.algorithm,
                how.seed,
                how.extra_keys,
            )
            for span in spans
        }
    except (ConfigError, ValueError) as e:
        raise ConfigError(f"namespace {namespace.id}: {e}") from None
    return Prompt(len(tokens), tuple(spans), groups, keys)


def _attention(span: Span) -> AttentionGroup:
    """By the name of vLLM's class. One that keeps all tokens is full, also if layers have a window;
    so is what a manifest does not tell.
    """
    window = span.window_tokens
    for name, attention in _WINDOWED.items():
        if name in span.kind and window:
            return AttentionGroup(span.group, span.tokens_per_chunk, attention, window)
    attention = Attention.STATE if "Mamba" in span.kind else Attention.FULL
    return AttentionGroup(span.group, span.tokens_per_chunk, attention)


def loadable(
    prompt: Prompt, stored: Mapping[int, Sequence[object | None]], *, whole: bool = False
) -> Prefix:
    """What an engine would load, if it asked now. ``stored``: by group, ``None`` for absent chunks.

    Of a request that is the prompt and no more; with ``whole`` of one that only begins with it.
    """

    def ask(group: int, chunk: int) -> Lookup:
        there = chunk < len(stored[group]) and stored[group][chunk] is not None
        return Lookup.HIT if there else Lookup.MISS

    most = prompt.tokens if whole else most_tokens(prompt.groups, prompt.tokens)
    return longest_prefix(prompt.groups, most, ask, granularity=1)

"""What a client asks the index, and what it is told. Pure."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.errors import KVTiersError
from kvtiers.hashing import ExtraKeys, block_hashes, event_hash, request_extra_keys
from kvtiers.index.places import Pod
from kvtiers.index.reach import Reach

_FIELDS = {"token_ids", "hashes", "block_size", "model", "cache_salt", "lora"}
_TEXTS = {"prompt", "messages"}
_MAX_TOKEN = 1 << 32
_MAX_HASH = 1 << 64
_MAX_BLOCK = 1 << 31
MAX_BLOCKS = 1 << 18
"""Of one question; four million tokens in blocks of sixteen."""


class Refused(Exception):
    """The question cannot be answered. Says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as token ids or as hashes of its blocks."""

    tokens: Sequence[int] | None
    hashes: Sequence[int] | None
    block_size: int | None
    model: str | None
    extra_keys: ExtraKeys

    def chain(self, block_size: int, algorithm: str, seed: str) -> Sequence[int]:
        """The hashes of its blocks. Takes five microseconds a block if they are to be computed.

        Raises Refused for too many, or if a package is missing for the algorithm.
        """
        if self.hashes is not None:
            return self.hashes
        if len(self.tokens or ()) // block_size > MAX_BLOCKS:
            raise _too_many()
        try:
            found = block_hashes(self.tokens or (), block_size, algorithm, seed, self.extra_keys)
        except KVTiersError as e:
            raise Refused(f"{e}.") from e
        return list(map(event_hash, found))


def read(raw: bytes) -> Question:
    """The question in the body of a request. Raises Refused."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise Refused("The body is not JSON: send an object with token_ids or hashes.") from None
    if not isinstance(body, dict):
        raise Refused("The body is no JSON object: send one with token_ids or hashes.")
    unknown = sorted(body.keys() - _FIELDS)
    if unknown:
        if _TEXTS & body.keys():
            raise Refused(
                "The index cuts no text into tokens: send token_ids, as the engine's /tokenize "
                "says them for the prompt or the messages."
            )
        raise Refused(f"The field {unknown[0]!a} is not known: leave it out.")
    tokens, hashes, size = body.get("token_ids"), body.get("hashes"), body.get("block_size")
    if (tokens is None) == (hashes is None):
        raise Refused("Send either token_ids or hashes.")
    if size is not None and (type(size) is not int or not 0 < size < _MAX_BLOCK):
        raise Refused("The field block_size is no number of tokens: send 1 or more, below 2**31.")
    model, salt = _text(body, "model"), _text(body, "cache_salt")
    if tokens is not None and not _numbers(tokens, _MAX_TOKEN):
        raise Refused("The field token_ids is no list of token ids: send one.")
    known = None if hashes is None else _hashes(hashes)
    return Question(tokens, known, size, model, request_extra_keys(_lora(body), salt))


def comparable(question: Question, pods: Iterable[Pod]) -> list[Pod]:
    """The pods that the question is about."""
    return [pod for pod in pods if question.model is None or pod.model == question.model]


def block_size_of(question: Question, pods: Sequence[Pod]) -> int:
    """Tokens of a block: what is asked, else what all pods have. Raises Refused."""
    if question.block_size is not None:
        return question.block_size
    sizes = {g.block_size for pod in pods for g in pod.groups.values() if g.block_size}
    if len(sizes) > 1:
        raise Refused("Blocks have several sizes here: send block_size.")
    if not sizes:
        raise Refused("No engine has said yet how long its blocks are: send block_size.")
    return sizes.pop()


def answer(
    question: Question,
    hashes: Sequence[int],
    block_size: int,
    found: Sequence[Reach],
    connected: Collection[str],
) -> dict[str, Any]:
    """What the client is told. ``connected``: names of pods whose engine can be reached."""
    asked = len(hashes) * block_size if question.tokens is None else len(question.tokens)
    pods = [
        {
            "pod": one.pod,
            "tokens": one.tokens,
            "complete": one.complete,
            "connected": one.pod in connected,
            "tiers": [{**tier._asdict(), "tokens": tokens} for tier, tokens in one.tiers],
        }
        for one in found
    ]
    return {"tokens": asked, "block_size": block_size, "pods": pods}


def describe(pod: Pod) -> dict[str, Any]:
    """What is known of a pod."""
    return {
        "pod": pod.name,
        "model": pod.model,
        "complete": pod.complete,
        "places": [
            {**place.tier._asdict(), "group": place.group, "blocks": place.blocks}
            for place in pod.places.values()
        ],
        "groups": [
            {"group": n, "kind": g.kind, "block_size": g.block_size, "window": g.window}
            for n, g in pod.groups.items()
        ],
    }


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(f"The field {name} is no text: send text, or leave it out.")
    return value


def _lora(body: Mapping[str, Any]) -> tuple[str, str] | None:
    match body.get("lora"):
        case None:
            return None
        case [str(name), str(path)]:
            return name, path
    raise Refused("The field lora is not [name, path] of an adapter: send both.")


def _numbers(values: Any, bound: int) -> bool:
    return (
        isinstance(values, list)
        and set(map(type, values)) <= {int}
        and (not values or (min(values) >= 0 and max(values) < bound))
    )


def _too_many() -> Refused:
    return Refused(f"There are more than {MAX_BLOCKS} blocks: ask for the first of them.")


def _hashes(values: Any) -> Sequence[int]:
    """Numbers of 64 bits, or digests in hexadecimal."""
    if isinstance(values, list) and len(values) > MAX_BLOCKS:
        raise _too_many()
    if _numbers(values, _MAX_HASH):
        return values  # type: ignore[no-any-return]
    try:
        return [event_hash(bytes.fromhex(value)) for value in values]
    except (TypeError, ValueError):
        raise Refused(
            "The field hashes is no list of numbers or of hex digests: send one."
        ) from None

"""Who served a prefix last, told by the text of prompts. Pure; no tokenizer is needed.

A prompt is bytes: what stands before the messages (model, tools, salt), then the messages or the
text. It is hashed after 256 bytes, and then each time it is 256 bytes and at least a quarter
longer, so that a prompt of 16 MiB has 50 hashes; each hash covers all bytes before it. Two prompts
that begin alike have their first hashes in common, and a conversation that goes on has those of
its turn before. What is remembered is a bounded map of hashes, last used first.

Prompts with equal text have equal chunks only if engines render them alike; if not, the worker
that is named as a source has nothing, which costs one question.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import xxhash

FIRST_BYTES = 256
_GROWTH = 4
_BEFORE = ("model", "cache_salt", "tools", "chat_template", "chat_template_kwargs")
"""Fields that change how a prompt begins."""

Prompt = tuple[int, ...]
"""Hashes of prefixes, the shortest first; none: too short, or several prompts in one request."""

W = TypeVar("W")


def prompt_of(body: Mapping[str, Any], seed: int) -> Prompt:
    """The prefixes of a request. ``seed``: one for the life of a proxy, and secret.

    Without it a client could make two prompts collide, and so choose who is asked for chunks.
    """
    text = memoryview(_text(body))
    digest = xxhash.xxh3_64(seed=seed)
    found: list[int] = []
    done, end = 0, FIRST_BYTES
    while end <= len(text):
        digest.update(text[done:end])
        found.append(digest.intdigest())
        done, end = end, end + max(FIRST_BYTES, end // _GROWTH)
    return tuple(found)


def several(body: Mapping[str, Any]) -> bool:
    """Whether one request has several prompts, as that for completions may."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _text(body: Mapping[str, Any]) -> bytes:
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        text = b"".join(map(_json, messages))
    elif several(body):
        return b""
    else:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        known = isinstance(prompt, str)
        text = str(prompt).encode("utf-8", "surrogatepass") if known else _json(prompt)
    return _json([body.get(name) for name in _BEFORE]) + text


def _json(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class Affinity(Generic[W]):
    """Prefixes and who served each of them last."""

    def __init__(self, max_prefixes: int = 1 << 16) -> None:
        self._max = max_prefixes
        self._served: OrderedDict[int, W] = OrderedDict()

    def source_for(self, prompt: Prompt) -> W | None:
        """Who served the longest known prefix of this prompt last."""
        for prefix in reversed(prompt):
            worker = self._served.get(prefix)
            if worker is not None:
                return worker
        return None

    def note(self, prompt: Prompt, worker: W) -> None:
        """``worker`` has served it."""
        for prefix in prompt:
            self._served[prefix] = worker
            self._served.move_to_end(prefix)
        while len(self._served) > self._max:
            self._served.popitem(last=False)

    def check(self) -> None:
        """Raise AssertionError if more is remembered than may be."""
        assert len(self._served) <= self._max, "more prefixes than may be"

    def __repr__(self) -> str:
        return f"<Affinity {len(self._served)}/{self._max} prefixes>"

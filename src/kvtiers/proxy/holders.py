"""Who holds a prompt, by the presence index: what is asked for it, and what the answer says. Pure.

The index knows blocks of tokens, so a prompt has to be tokenized as an engine would do it: one of
the workers is asked to (``/tokenize``), and nothing is asked where that is not what it computes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvtiers.proxy.asked import CHAT, Asked
from kvtiers.proxy.workers import Holder

_RENDERED_BY = {
    CHAT: (
        "model",
        "messages",
        "add_generation_prompt",
        "add_special_tokens",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "tools",
    )
}
_DEVICE = "GPU"


def tokens_in(asked: Asked) -> Sequence[int] | None:
    """The tokens of a prompt that came as tokens."""
    prompt = (asked.body or {}).get("prompt")
    return prompt if isinstance(prompt, list) and set(map(type, prompt)) == {int} else None


def to_tokenize(asked: Asked) -> bytes:
    """The body that an engine tokenizes the same prompt for."""
    body = asked.body or {}
    names = _RENDERED_BY.get(asked.path, ("model", "prompt", "add_special_tokens"))
    return json.dumps({name: body[name] for name in names if name in body}).encode()


def tokens_of(raw: bytes) -> Sequence[int] | None:
    """The tokens in an engine's answer; None: there are none."""
    found = _object(raw).get("tokens")
    return found if isinstance(found, list) else None


def question(asked: Asked, tokens: Sequence[int]) -> bytes:
    """What the index is asked."""
    salt = (asked.body or {}).get("cache_salt")
    salted = {"cache_salt": salt} if isinstance(salt, str) and salt else {}
    return json.dumps({"token_ids": tokens, **salted}).encode()


def holders_in(raw: bytes) -> tuple[Holder, ...]:
    """Who holds it, by the answer of the index: those that can be reached, most tokens first.

    Raises ValueError if it is no answer.
    """
    try:
        return tuple(
            Holder(pod["pod"], pod["tokens"], _pullable(pod["tiers"]))
            for pod in json.loads(raw)["pods"]
            if pod["connected"]
        )
    except (KeyError, TypeError, RecursionError) as e:
        raise ValueError("no answer of an index") from e


def _pullable(tiers: Sequence[Mapping[str, Any]]) -> int:
    return max((t["tokens"] for t in tiers if t["medium"] != _DEVICE), default=0)


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

"""What a client asks for, or why it is refused. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.proxy.affinity import Prompt, prompt_of, several
from kvtiers.proxy.replies import Refusal
from kvtiers.proxy.workers import Holder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODELS = "/v1/models"
PARAMS = "kv_transfer_params"
_XARGS = "vllm_xargs"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an answer."""

    path: str
    body: Mapping[str, Any] | None
    """None: a GET."""
    prompt: Prompt
    roles: bool
    """Whether the proxy gives it roles: not where the client has given some, and not where one
    request has several prompts, which would all have one name among peers."""
    holders: Sequence[Holder] = ()
    """Who holds the prompt, if there is an index and it knows; who holds most first."""


LIST_MODELS = Asked(MODELS, None, (), False)


def read(path: str, raw: bytes, seed: int, *, pass_params: bool) -> Asked | Refusal:
    """The request whose body is ``raw``. ``pass_params``: a client may give roles itself."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return Refusal(400, "The body is not JSON: send an object with model and messages.")
    if not isinstance(body, dict):
        return Refusal(400, "The body is no JSON object: send one with model and messages.")
    field = "messages" if path == CHAT else "prompt"
    if not isinstance(body.get(field), list if path == CHAT else (str, list)):
        kind = "a list" if path == CHAT else "a string or a list"
        return Refusal(400, f"The field {field} is missing or not {kind}: give it.", field)
    own = _own_params(body)
    if own is not None and not pass_params:
        return Refusal(
            400, f"The field {own} names peers, which this proxy does itself: leave it out.", own
        )
    try:
        prompt = prompt_of(body, seed)
    except RecursionError:
        return Refusal(400, f"The field {field} is nested too deeply: send less.", field)
    return Asked(path, body, prompt, own is None and not several(body))


def _own_params(body: Mapping[str, Any]) -> str | None:
    """The field by which a client names peers. Engines take extra arguments in two places."""
    if body.get(PARAMS) is not None:
        return PARAMS
    extra = body.get(_XARGS)
    if isinstance(extra, Mapping) and PARAMS in extra:
        return f"{_XARGS}.{PARAMS}"
    return None

"""The bodies that workers get, with roles as ``tiers/p2p/roles.py`` reads them. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from kvtiers.proxy.asked import PARAMS
from kvtiers.proxy.options import Address

_NOT_FOR_PREFILL = {
    "best_of",
    "echo",
    "logprobs",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "stream_options",
    "top_logprobs",
    "use_beam_search",
}
"""What asks for more than one token, or for more than the token."""

Roles = dict[str, dict[str, Any]]


def produces(name: str) -> Roles:
    """Keep the chunks of this request: they will be pulled under ``name``."""
    return {"remote_decoder": {"kv_request_id": name}}


def pulls(name: str, producer: Address) -> Roles:
    """Wait for what ``producer`` computes under ``name``."""
    return {"remote_prefiller": _peer(name, producer)}


def asks(name: str, source: Address) -> Roles:
    """Take what ``source`` has."""
    return {"remote_kv_source": _peer(name, source)}


def _peer(name: str, peer: Address) -> dict[str, Any]:
    return {
        "kv_request_id": name,
        "remote_host": peer.p2p_host,
        "remote_port": peer.p2p_port,
    }


def with_roles(body: Mapping[str, Any], roles: Roles) -> bytes:
    """The request as it came, and with ``roles`` if there are any."""
    return json.dumps({**body, PARAMS: roles} if roles else body).encode()


def for_prefill(body: Mapping[str, Any], roles: Roles) -> bytes:
    """The same prompt, for one token that nobody reads."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    kept |= {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in body:
        kept["max_completion_tokens"] = 1
    return with_roles(kept, roles)

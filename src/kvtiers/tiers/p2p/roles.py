"""What a request says of peers: ``kv_transfer_params``, with vLLM's keys.

====================  ==============================================  ===========================
key                   value                                           this engine
====================  ==============================================  ===========================
``remote_decoder``    ``{"kv_request_id"}``                           keeps what others will pull
``remote_prefiller``  ``{"kv_request_id", "remote_host",              waits for that producer's
                      "remote_port"}``                                chunks as they appear
``remote_kv_source``  the same                                        takes what that peer has
====================  ==============================================  ===========================

``remote_decoder`` may come with ``remote_kv_source``; no other two may come together. The
values are anybody's: whoever may send a request can write them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtiers.tiers.p2p.protocol import Role

_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")
_MAX_ID_BYTES = 256
_WHERE = "kv_request_id, remote_host and remote_port"
_FIELDS = {
    "remote_decoder": "kv_request_id",
    "remote_prefiller": _WHERE,
    "remote_kv_source": _WHERE,
}
_CONSUMERS = {"remote_prefiller": Role.PREFILL, "remote_kv_source": Role.SOURCE}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a request's chunks may come from."""

    role: Role
    request: str
    """``kv_request_id``."""
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Roles:
    """What this engine is for one request."""

    produces: str | None = None
    """The ``kv_request_id`` under which others will ask."""
    source: Source | None = None


NONE = Roles()


def read_roles(params: Mapping[str, Any] | None) -> tuple[Roles, str | None]:
    """The roles in ``kv_transfer_params``, and what is wrong with them, if anything is.

    Of params that are wrong no role is taken. Never raises.
    """
    if not isinstance(params, Mapping):
        return NONE, None
    named = [key for key in ("remote_decoder", *_CONSUMERS) if params.get(key) is not None]
    if not named:
        return NONE, None
    if len(named) > 1 and named != ["remote_decoder", "remote_kv_source"]:
        return NONE, f"{' and '.join(named)} do not go together"
    produces, source = None, None
    for key in named:
        value = params[key]
        if not isinstance(value, Mapping) or "kv_request_id" not in value:
            return NONE, f"{key} has to be a mapping that has {_FIELDS[key]} in it"
        request = value["kv_request_id"]
        if not _is_id(request):
            return NONE, f"{key} has no kv_request_id of 1 to {_MAX_ID_BYTES} bytes"
        if key == "remote_decoder":
            produces = str(request)
            continue
        host, port = value.get("remote_host"), value.get("remote_port")
        if not isinstance(host, str) or not _HOST.fullmatch(host.strip("[]")):
            return NONE, f"{key} has no remote_host that could be one"
        if type(port) is not int or not 0 < port < 1 << 16:
            return NONE, f"{key} has no remote_port from 1 to 65535"
        source = Source(_CONSUMERS[key], str(request), host.strip("[]"), port)
    return Roles(produces, source), None


def _is_id(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return 0 < len(value.encode()) <= _MAX_ID_BYTES
    except UnicodeEncodeError:
        return False

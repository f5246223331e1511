"""Prefill and decode apart, for routers that know vLLM's NIXL connector and not kvtiers.

To prefill they send ``{"do_remote_decode": true}`` among the ``kv_transfer_params``. What the
answer holds as ``kv_transfer_params`` they send to decode as it is. So prefill is taken for a
``remote_decoder``, and its answer makes decode a ``remote_prefiller``.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from kvtiers.tiers.p2p.parent import ServesPeers

_ASKED, _PRODUCES, _CONSUMES = "do_remote_decode", "remote_decoder", "remote_prefiller"


class Handover:
    """Where a prefill's chunks will be found."""

    def __init__(self, peers: ServesPeers | None) -> None:
        self._peers = peers

    def understood(self, params: Any, request_id: str) -> Any:
        """``kv_transfer_params`` with the role that they mean; those of most requests unchanged."""
        if not self._is_meant(params):
            return params
        return {**params, _PRODUCES: {"kv_request_id": _name(request_id)}}

    def told(self, params: Any, request_id: str) -> dict[str, Any] | None:
        """What the answer to a request with these ``params`` says, if it was meant."""
        if self._peers is None or not self._is_meant(params):
            return None
        host, port = self._peers.address
        name = {"kv_request_id": _name(request_id)}
        return {_CONSUMES: {**name, "remote_host": host, "remote_port": port}}

    def _is_meant(self, params: Any) -> bool:
        """Whether it asks for a handover without a word of ours."""
        return (
            self._peers is not None
            and isinstance(params, Mapping)
            and params.get(_ASKED) is True
            and params.get(_PRODUCES) is None
        )

    def __repr__(self) -> str:
        return f"<Handover {'to nobody' if self._peers is None else self._peers.address}>"


def _name(request_id: str) -> str:
    """A ``kv_request_id``, whose length is bounded, for any id."""
    return hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]

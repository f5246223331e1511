"""The tier that a URL names, with a corner of its own for one run of the demo."""

import sys
from typing import Any

from kvtiers.tiers.kv.address import is_address
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.kv.urls import entry_of
from kvtiers.tiers.urls import open_place

_KEPT_S = 3600
"""What a run stores on a server leaves by itself after so long."""


def tier_at(url: str, run: str) -> dict[str, Any]:
    """The entry of ``secondary_tiers`` for ``url``; what is stored has ``run`` in its name.

    So no run finds what another one stored. Raises ConfigError for a URL that is not understood.
    """
    name = f"demo-{run}"
    if is_address(url):
        entry = entry_of(url)
        prefix = entry.get("prefix", KvOptions.prefix)
        return {"ttl_s": _KEPT_S, **entry, "prefix": f"{prefix}:{name}"}
    path, mark, query = url.partition("?")
    place = open_place(f"{path.rstrip('/')}/{name}{mark}{query}", _complain, make=True)
    return dict(place.options)


def _complain(what: str) -> None:
    print(what, file=sys.stderr)

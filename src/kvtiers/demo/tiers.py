"""The tier that a URL names, with a corner of its own for one run of the demo."""

import sys
from typing import Any

from kvtiers.tiers.urls import open_corner


def tier_at(url: str, run: str) -> dict[str, Any]:
    """The entry of ``secondary_tiers`` for ``url``; what is stored has ``run`` in its name.

    So no run finds what another one stored. Raises ConfigError for a URL that is not understood.
    """
    return dict(open_corner(url, f"demo-{run}", _complain).options)


def _complain(what: str) -> None:
    print(what, file=sys.stderr)

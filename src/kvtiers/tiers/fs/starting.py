"""What an engine checks of a root when it starts, without what it leaves there."""

import contextlib
import os

from kvtiers.tiers.fs import folders, names
from kvtiers.tiers.fs.account import refuse_other_ways
from kvtiers.tiers.fs.layouts import refuse_layout
from kvtiers.tiers.fs.log.ownership import refuse_lock
from kvtiers.tiers.fs.quota import Eviction
from kvtiers.tiers.fs.shared import refuse_quota


def refuse_start(root: str, layout: str, eviction: Eviction | None) -> None:
    """Raise the ConfigError with which an engine refuses ``root``, which is there.

    ``eviction``: None if it is not known. Whether a log has a living owner is not asked: it may
    have ended before the engine starts. Nothing is written.
    """
    folders.refuse_strangers(root)
    try:
        refuse_layout(root, layout)
        if layout == "log":
            refuse_lock(root)
        else:
            refuse_quota(root)
            if eviction is not None:
                refuse_other_ways(root, bounded=eviction == "own")
        for namespace in names.namespaces(root):
            with contextlib.suppress(PermissionError):  # of another user's engine
                folders.refuse_namespace(os.path.join(root, namespace))
    except OSError as e:
        raise folders.unusable(root, e) from e

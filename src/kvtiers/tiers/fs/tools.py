"""What both layouts have in common where tools see them: their options, and the store to write."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvtiers.chunks import ChunkLayout, Key, Namespace
from kvtiers.errors import ConfigError
from kvtiers.tiers import fs
from kvtiers.tiers.base import ChunkStore, StoreContext
from kvtiers.tiers.fs import manifests
from kvtiers.tiers.fs.direct import DirectIO
from kvtiers.tiers.options import parse
from kvtiers.tiers.places import Complain, Found


@dataclass(frozen=True, slots=True)
class FsURL:
    """What a URL of an ``fs`` tier says."""

    path: str
    layout: str | None = None
    capacity_bytes: int | None = None
    direct_io: str = "auto"


class FsPlace:
    """A root folder of ``fs``; a layout adds how its bytes are seen.

    See :class:`~kvtiers.tiers.places.Place`.
    """

    layout: str

    def __init__(self, at: FsURL, complain: Complain) -> None:
        self.root = at.path
        self.url = f"fs://{quote(at.path)}?layout={self.layout}"
        self.options: Mapping[str, Any] = {
            "type": "fs",
            "root_dir": at.path,
            "layout": self.layout,
            "capacity_bytes": at.capacity_bytes,
            "direct_io": at.direct_io,
        }
        self._complain = complain
        self._reading: DirectIO = "off" if at.direct_io == "off" else "auto"

    def namespaces(self) -> list[Found]:
        """Every folder named like a namespace."""
        return manifests.namespaces(self.root)

    def _store(
        self, namespace: Namespace, layout: ChunkLayout, bound: Mapping[str, Any]
    ) -> ChunkStore:
        """The store that an engine would use, within ``bound``."""
        context = StoreContext(
            "fs", "tool:fs", namespace, layout, time.monotonic, time.time, _unheard
        )
        options = {key: value for key, value in self.options.items() if key != "type"}
        return fs.build(context, parse(fs.FsOptions, {**options, **bound}))

    def _is_new(self) -> ConfigError:
        return ConfigError(
            f"{self.url} does not say how large it may become: add &capacity= to say so"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.root}>"


def _unheard(keys: Sequence[Key], reason: object) -> None:
    """Nobody listens to a tool's store: it says itself what it did."""

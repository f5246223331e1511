"""URLs of tiers, as tools take them: ``fs:///PATH``, ``s3://BUCKET/PREFIX``, ``redis://HOST``."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvtiers.errors import ConfigError
from kvtiers.tiers.fs.urls import below_fs, open_fs, parse_fs
from kvtiers.tiers.kv import urls as kv
from kvtiers.tiers.obj.urls import below_obj, open_obj, parse_obj
from kvtiers.tiers.parameters import SplitURL, shown, split_url
from kvtiers.tiers.places import Complain, Place


@dataclass(frozen=True, slots=True)
class Scheme:
    """A kind of tier that tools can see."""

    parse: Callable[[SplitURL], Any]
    """What a URL says; raises ConfigError, without a look at what lies there."""
    open: Callable[[Any, Complain, bool], Place]
    """The place of it, which has to be there unless it may be made. Raises ConfigError."""
    below: Callable[[Any, str], Any]
    """The same for a corner of that name, which what lies around it does not see."""


_OBJ = Scheme(parse_obj, open_obj, below_obj)
_KV = Scheme(kv.parse_kv, kv.open_kv, kv.below_kv)

SCHEMES: Mapping[str, Scheme] = {
    "fs": Scheme(parse_fs, open_fs, below_fs),
    "s3": _OBJ,
    "gs": _OBJ,
    "az": _OBJ,
    **dict.fromkeys(kv.SCHEMES, _KV),
}

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)


def open_place(url: str, complain: Complain, *, make: bool = False) -> Place:
    """The place that ``url`` names. ``make``: it need not exist, a store may make it.

    Raises ConfigError, one sentence, for a URL that is not understood or a place that is absent.
    """
    return _scheme(url).open(parse_url(url), complain, make)


def open_corner(url: str, name: str, complain: Complain) -> Place:
    """A place of its own below the one that ``url`` names; nothing need be there yet.

    Raises as ``open_place``.
    """
    scheme = _scheme(url)
    return scheme.open(scheme.below(parse_url(url), name), complain, True)


def parse_url(url: str) -> Any:
    """What a URL says, in the form of its scheme. Raises ConfigError."""
    return _scheme(url).parse(split_url(url))


def _scheme(url: str) -> Scheme:
    match = _URL.fullmatch(url)
    if match is None:
        remedy = f"write fs://{quote(os.path.abspath(url))}" if url.startswith(("/", ".")) else ""
        raise ConfigError(
            f"{shown(url)} is no URL of a tier: {remedy or 'write one like fs:///var/cache/kvtiers'}"
        )
    name = match[1].lower()
    if name not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"there are no tools for {name}:// yet, only for {known}")
    return SCHEMES[name]

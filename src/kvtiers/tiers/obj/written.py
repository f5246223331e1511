"""The options of a tier as tools pass them on: as a URL, as configuration, as a site. Pure.

Credentials are in none of them.
"""

from typing import Any
from urllib.parse import urlencode

from kvtiers.tiers.obj.options import ObjOptions

_SAID = ("endpoint", "region", "virtual_hosted", "ca_bundle", "profile")
"""Where the service is and how it is spoken to, by the same names in a URL and in options."""


def url_of(options: ObjOptions) -> str:
    """As it may be written again."""
    said = {key: value for key, value in _said(options).items() if value}
    if "virtual_hosted" in said:
        said["virtual_hosted"] = "on"
    return str(options.where) + (f"?{urlencode(said, safe=':/')}" if said else "")


def options_of(options: ObjOptions) -> dict[str, Any]:
    """What configures a tier there."""
    said = {"type": "obj", "url": str(options.where), "allow_http": options.allow_http}
    return {**said, **_said(options)}


def site_of(options: ObjOptions) -> tuple[str, ...]:
    """Where it lies; what lies inside it begins with the same parts."""
    scheme, bucket, prefix = options.where
    return (scheme, options.endpoint or "", bucket, *filter(None, prefix.split("/")))


def _said(options: ObjOptions) -> dict[str, Any]:
    return {key: getattr(options, key) for key in _SAID}

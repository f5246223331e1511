"""URLs of ``kv``: ``redis://HOST:PORT/DB?prefix=mine&password_env=SECRET``.

The part before the ``?`` is the ``url`` of the tier (:mod:`kvtiers.tiers.kv.address`); what follows
are its options. A password is never in it.
"""

from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from kvtiers.errors import ConfigError
from kvtiers.tiers.kv import refuse_missing_client
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.options import RunnerOptions
from kvtiers.tiers.parameters import Parameters, SplitURL, one_of, parse_capacity, text
from kvtiers.tiers.places import Complain

if TYPE_CHECKING:
    from kvtiers.tiers.kv.place import KvPlace

SCHEMES = (
    *(f"{word}{how}" for word in ("redis", "rediss") for how in ("", "+cluster", "+sentinel")),
    *(f"{word}{how}" for word in ("valkey", "valkeys") for how in ("", "+cluster", "+sentinel")),
    "unix",
)
_CORNER_TTL_S = 3600.0
"""What a demonstration or a measurement stores leaves by itself after so long."""


def _seconds(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{key} is {value!a}: give a number of seconds") from None


def _database(key: str, value: str) -> str:
    if not value.isdecimal():
        raise ConfigError(f"{key} is {value!a}: a database is a number")
    return value


_TEXTS = (
    "prefix",
    "username",
    "password_env",
    "password_file",
    "sentinel_username",
    "sentinel_password_env",
    "sentinel_password_file",
    "tls_ca_file",
    "tls_cert_file",
    "tls_key_file",
)
_PARAMETERS: Parameters = {
    **{name: (name, text) for name in _TEXTS},
    "tls_check_hostname": (
        "tls_check_hostname",
        lambda key, value: one_of("on", "off")(key, value) == "on",
    ),
    "ttl_s": ("ttl_s", _seconds),
    "capacity": ("capacity_bytes", parse_capacity),
}
_OF_A_SOCKET: Parameters = {**_PARAMETERS, "db": ("db", _database)}


def parse_kv(url: SplitURL) -> KvOptions:
    """What a URL says. Raises ConfigError."""
    if url.fragment:
        raise ConfigError(f"{url.shown} has a part behind #, and no server is called so")
    said = url.parameters(_OF_A_SOCKET if url.scheme == "unix" else _PARAMETERS)
    place = f"{url.scheme}://{url.host}{quote(url.path)}"
    if "db" in said:
        place += f"?db={said.pop('db')}"
    try:
        return KvOptions(url=place, **said)
    except ConfigError as e:
        raise ConfigError(f"{url.shown}: {e}") from None


def below_kv(options: KvOptions, name: str) -> KvOptions:
    """Names of its own; what is stored under them leaves by itself, in an hour if not said."""
    ttl_s = _CORNER_TTL_S if options.ttl_s is None else options.ttl_s
    return replace(options, prefix=f"{options.prefix}:{name}", ttl_s=ttl_s)


def open_kv(options: KvOptions, complain: Complain, make: bool) -> "KvPlace":
    """The place. ``make``: there need be nothing yet. Raises ConfigError, KVTiersError."""
    refuse_missing_client()
    from kvtiers.tiers.kv.place import KvPlace

    place = KvPlace(options, complain)
    if not make and not place.has_any():
        raise ConfigError(
            f"{place.url}: no namespace is stored there under the prefix {options.prefix}; name "
            "the url and the prefix of a kv tier"
        )
    return place


def url_of(options: KvOptions) -> str:
    """As it may be written again."""
    names = {field: name for name, (field, _) in _PARAMETERS.items()}
    said = {names[key]: value for key, value in _said(options).items() if key in names}
    if "tls_check_hostname" in said:
        said["tls_check_hostname"] = "off"
    where = str(parse_address(options.url))
    mark = "&" if "?" in where else "?"
    return where + (f"{mark}{urlencode(said, safe=':/')}" if said else "")


def options_of(options: KvOptions) -> dict[str, Any]:
    """What configures a tier there."""
    return {"type": "kv", "url": options.url, **_said(options)}


def _said(options: KvOptions) -> dict[str, Any]:
    """What differs from the defaults and is no matter of how a tier is driven."""
    driven = {field.name for field in fields(RunnerOptions)}
    return {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if field.name not in driven
        and field.default is not MISSING
        and getattr(options, field.name) != field.default
    }

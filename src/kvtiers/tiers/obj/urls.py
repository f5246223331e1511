"""URLs of ``obj``: ``s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=...``, ``gs://``, ``az://``.

Credentials come from where those of an engine come from, and never from a URL.
"""

from dataclasses import replace

from kvtiers.errors import ConfigError
from kvtiers.tiers.obj import names
from kvtiers.tiers.obj.client import Client, open_client
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.place import ObjPlace
from kvtiers.tiers.parameters import Parameters, SplitURL, one_of, parse_capacity, text
from kvtiers.tiers.places import Complain

_PATIENCE_S = 30.0
"""For one request of a tool, which no request of a model waits for."""

_PARAMETERS: Parameters = {
    "capacity": ("capacity_bytes", parse_capacity),
    "endpoint": ("endpoint", text),
    "region": ("region", text),
    "virtual_hosted": (
        "virtual_hosted",
        lambda key, value: one_of("on", "off")(key, value) == "on",
    ),
    "ca_bundle": ("ca_bundle", text),
    "profile": ("profile", text),
}


def parse_obj(url: SplitURL) -> ObjOptions:
    """What a URL says. An endpoint that is written as ``http://`` is meant so.

    Raises ConfigError.
    """
    if url.fragment:
        raise ConfigError(f"{url.shown} has a part behind #, and no object is called so")
    said = url.parameters(_PARAMETERS)
    plain = str(said.get("endpoint", "")).startswith("http://")
    try:
        return ObjOptions(
            url=f"{url.scheme}://{url.host}{url.path}",
            allow_http=plain,
            request_timeout_s=_PATIENCE_S,
            load_deadline_s=2 * _PATIENCE_S,
            store_deadline_s=2 * _PATIENCE_S,
            **said,
        )
    except ConfigError as e:
        raise ConfigError(f"{url.shown}: {e}") from None


def below_obj(options: ObjOptions, name: str) -> ObjOptions:
    """A prefix of its own below that of a URL."""
    return replace(options, url=f"{str(options.where).rstrip('/')}/{name}")


def open_obj(options: ObjOptions, complain: Complain, make: bool) -> ObjPlace:
    """The place. ``make``: there need be nothing yet. Raises ConfigError, KVTiersError."""
    client = open_client(options)
    if not make:
        _refuse_nothing(client, options)
    return ObjPlace(options, client)


def _refuse_nothing(client: Client, options: ObjOptions) -> None:
    """A prefix with a slip of the pen must not look like a tier that is clean."""
    first = next(client.objects(), [])
    if first and not any(map(names.is_namespace, client.folders())):
        raise ConfigError(
            f"{options.where}: there is nothing of kvtiers below it, but {first[0].name!a}; name "
            "the url of an obj tier"
        )
    if not first:
        raise ConfigError(f"{options.where}: nothing is stored there; name the url of an obj tier")

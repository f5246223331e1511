"""The options of the ``obj`` tier, and what of vLLM's own is translated to them. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from kvtiers.errors import ConfigError
from kvtiers.options import Reader, Unfit, option
from kvtiers.tiers.options import RunnerOptions, bad_option, parse, require

_SECRET = Reader("a string", lambda value: _text(value), secret=True)
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_S3_ONLY = (
    "endpoint",
    "region",
    "virtual_hosted",
    "profile",
    "access_key_id",
    "secret_access_key",
    "session_token",
)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unfit
    return value


class Where(NamedTuple):
    """What a tier is below of."""

    scheme: str
    """``s3``, ``gs`` or ``az``."""
    bucket: str
    """Or container, as Azure calls it."""
    prefix: str
    """Without slashes at its ends; may be empty."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """``store_config`` of vLLM's own ``obj`` tier, key by key."""

    bucket: str
    endpoint_override: str
    access_key: str = option(_SECRET, "", "")
    secret_key: str = option(_SECRET, "", "")
    session_token: str = option(_SECRET, "", "")
    region: str = ""
    scheme: Literal["http", "https"] = "http"
    ca_bundle: str = ""

    def __repr__(self) -> str:
        return f"<StoreConfig {self.bucket} at {self.endpoint_override}>"

    def as_options(self) -> dict[str, Any]:
        """The same in the options of kvtiers; what is empty is left out."""
        endpoint = self.endpoint_override
        if endpoint and "://" not in endpoint:
            endpoint = f"{self.scheme}://{endpoint}"
        said = {
            "endpoint": endpoint,
            "allow_http": self.scheme == "http",
            "region": self.region,
            "ca_bundle": self.ca_bundle,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "session_token": self.session_token,
        }
        return {key: value for key, value in said.items() if value}


def _read_store_config(value: Any) -> StoreConfig:
    if not isinstance(value, Mapping):
        raise Unfit
    try:
        return parse(StoreConfig, value)
    except ConfigError as e:
        raise bad_option("store_config", f"cannot be read: {e}") from None


@dataclass(frozen=True, kw_only=True)
class ObjOptions(RunnerOptions):
    """Options of the ``obj`` tier."""

    url: str | None = None
    """Bucket and prefix: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or
    ``az://container/prefix``. Engines that name the same share their chunks."""
    store_config: StoreConfig | None = option(  # noqa: RUF009 - it makes a field
        Reader("a mapping", _read_store_config), "", None
    )
    """Of vLLM's own ``obj`` tier, instead of ``url``: ``bucket``, ``endpoint_override``,
    ``scheme``, ``access_key``, ``secret_key``, ``session_token``, ``region``, ``ca_bundle``."""
    prefix: str = ""
    """Of vLLM's own ``obj`` tier, beside ``store_config``: what the names of objects begin with."""
    recheck_s: float = 0.0
    """With ``enable_kv_events``, each chunk that is said to be there is asked for within so many
    seconds, which costs two requests in that time for each that has an object of its own; 0: never.
    """
    capacity_bytes: int | None = None
    """Bound of all that lies below ``url``, whoever wrote it; what was written first leaves first.
    Each engine that states it adds up what it writes, and lists all every five minutes and when it
    is full. Without it nothing leaves but by ``kvtiers gc`` or a rule of the bucket."""
    endpoint: str | None = None
    """Where the service is, if it is not Amazon's: ``https://host:port``, without the bucket."""
    region: str | None = None
    """As the service calls it; else ``AWS_REGION``, else us-east-1."""
    virtual_hosted: bool = False
    """Put the bucket into the name of the host instead of the path."""
    allow_http: bool = False
    """Allow an endpoint without TLS: whoever is on the way can read the chunks."""
    ca_bundle: str | None = None
    """A file with certificates (PEM) that are trusted besides those of the system."""
    profile: str | None = None
    """A profile of ``~/.aws``; needs boto3."""
    access_key_id: str | None = option(_SECRET, "", None)
    """Who asks. Better left out, for vLLM logs its configuration: without it credentials come from
    the environment, a web identity, the container or the machine."""
    secret_access_key: str | None = option(_SECRET, "", None)
    """The key that belongs to it."""
    session_token: str | None = option(_SECRET, "", None)
    """Of credentials that expire."""
    request_timeout_s: float = 5.0
    """How long one request may take, its body included; what is tried again begins within the
    same time. Twice as much has to fit into ``load_deadline_s`` and ``store_deadline_s``."""
    connect_timeout_s: float = 2.0
    """How long a connection may take."""
    max_retries: int = 3
    """How often a request is sent again, with growing pauses of random length, if the server
    was not reached, was too busy (429, 5xx) or did not answer. All requests may be repeated."""
    max_requests: int = 32
    """Requests under way at once, besides one for each lane; at most 256."""
    transport: Literal["obstore", "nixl"] = "obstore"
    """What moves bytes: ``obstore``, or the OBJ plug-in of ``nixl``, which is tried at the start
    and refused where it does not work."""
    min_slice_bytes: int = 8 << 20
    """A job is split over the lanes into slices of at least this many bytes: small chunks of a
    slice become one object, and the requests for one slice are sent together."""
    locality: Literal["LOCAL", "REMOTE"] = "REMOTE"
    """What tier filters and KV events call it: of this node, or of another or shared. vLLM's own
    ``obj`` tier leaves it out unless it is set. Some routers drop the events of any but LOCAL."""
    enable_kv_events: bool = False
    """Whether chunks stored in it and removed from it appear among the engine's KV events."""
    where: Where = field(init=False, metadata={"reader": None})

    def __post_init__(self) -> None:
        super().__post_init__()
        self._translate()
        _check_times(self)
        n = self.max_requests
        require(1 <= n <= 256, "max_requests", f"is {n}: give 1 to 256")
        require(self.max_retries >= 0, "max_retries", f"is {self.max_retries}: give 0 or more")
        object.__setattr__(self, "where", _where(self))
        _check_endpoint(self)
        _check_credentials(self)

    def _translate(self) -> None:
        """Fill in what ``store_config`` says. Nothing may be said twice."""
        if self.store_config is None:
            require(not self.prefix, "prefix", "goes with store_config: write it into url")
            return
        require(self.url is None, "store_config", "and url say where chunks lie: give one of them")
        for key, value in self.store_config.as_options().items():
            default = type(self).__dataclass_fields__[key].default
            require(
                getattr(self, key) == default, key, "is said in store_config, too: give one of them"
            )
            object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        return f"<ObjOptions {self.where}>"


def _check_times(options: ObjOptions) -> None:
    for name in ("request_timeout_s", "connect_timeout_s"):
        value = getattr(options, name)
        require(value > 0, name, f"is {value:g}: give above 0")
    least = 2 * options.request_timeout_s
    for name in ("load_deadline_s", "store_deadline_s"):
        deadline = getattr(options, name)
        require(
            least <= deadline,
            "request_timeout_s",
            f"is {options.request_timeout_s:g}, and two of it do not fit into {name} "
            f"({deadline:g}): give less, or a longer deadline",
        )


def _where(options: ObjOptions) -> Where:
    if options.store_config is not None:
        prefix = _prefix("prefix", options.prefix)
        return Where("s3", _bucket("store_config", options.store_config.bucket), prefix)
    url = options.url
    require(url is not None, "url", "is missing: give one like s3://bucket/prefix")
    try:
        split = urlsplit(str(url))
        plain = not (split.query or split.fragment or "@" in split.netloc or split.port)
    except ValueError:
        plain = False
    require(
        plain,
        "url",
        "has more in it than a bucket and a prefix: the rest are options of their own, and "
        "credentials do not belong into a URL",
    )
    require(
        split.scheme in _SCHEMES, "url", f"is {url!a}: give one like s3://bucket/prefix, gs or az"
    )
    scheme = _SCHEMES[split.scheme]
    return Where(scheme, _bucket("url", split.netloc), _prefix("url", split.path))


def _bucket(key: str, name: str) -> str:
    require(
        _BUCKET.fullmatch(name) is not None,
        key,
        f"names the bucket {name!a}, and no bucket is called so",
    )
    return name


def _prefix(key: str, path: str) -> str:
    parts = [part for part in path.split("/") if part]
    fit = all(p not in (".", "..") and re.fullmatch(r"[A-Za-z0-9._=+@-]+", p) for p in parts)
    require(
        fit and len(path) <= 512,
        key,
        f"has the prefix {path!a}: give letters, digits and ._=+@- between slashes, 512 at most",
    )
    return "/".join(parts)


def _check_endpoint(options: ObjOptions) -> None:
    if options.where.scheme != "s3":
        for name in _S3_ONLY:
            value, default = (
                getattr(options, name),
                type(options).__dataclass_fields__[name].default,
            )
            require(value == default, name, f"goes with s3:// only, not with {options.where}")
    if options.endpoint is None:
        return
    try:
        split = urlsplit(options.endpoint)
        good = (
            split.scheme in ("http", "https") and bool(split.hostname) and "@" not in split.netloc
        )
        good = good and split.port != 0  # reading it refuses one that is none
        good = good and split.path in ("", "/") and not (split.query or split.fragment)
    except ValueError:
        good = False
    require(good, "endpoint", "is no address: give one like https://host:port, and nothing else")
    require(
        split.scheme == "https" or options.allow_http,
        "endpoint",
        f"is {options.endpoint}, without TLS: use https, or say allow_http",
    )


def _check_credentials(options: ObjOptions) -> None:
    for name in ("region", "access_key_id", "session_token"):
        value = getattr(options, name)
        fit = value is None or re.fullmatch(r"[!-~]+", value)
        require(bool(fit), name, "has a blank, a line break or nothing in it, and goes in a header")
    given = (options.access_key_id is not None, options.secret_access_key is not None)
    require(given[0] == given[1], "access_key_id", "and secret_access_key go together: give both")
    require(
        given[0] or options.session_token is None,
        "session_token",
        "goes with access_key_id and secret_access_key",
    )
    require(
        not (given[0] and options.profile),
        "profile",
        "names credentials, and access_key_id does: give one of them",
    )

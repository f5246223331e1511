"""``kvtiers doctor``: whether a configuration will work on this machine."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvtiers.cli.checks import (
    IntendedTier,
    check_absent,
    check_place,
    check_start,
    settings_of,
)
from kvtiers.cli.common import add_common, parse_chunk_bytes
from kvtiers.cli.diskchecks import TRIAL_BYTES
from kvtiers.cli.kvchecks import check_server
from kvtiers.cli.machinechecks import check_limits, check_memory, check_versions
from kvtiers.cli.objchecks import check_bucket
from kvtiers.cli.output import Output
from kvtiers.cli.peerchecks import check_peers
from kvtiers.cli.verdicts import Check, Grade
from kvtiers.config import KVTiersConfig, TierSpec, parse_config
from kvtiers.errors import ConfigError, KVTiersError
from kvtiers.host.regionfile import DIRECTORY
from kvtiers.tiers import check_tiers
from kvtiers.tiers.fs import FsOptions
from kvtiers.tiers.fs.folders import nearest_folder, path_of
from kvtiers.tiers.fs.quota import Eviction
from kvtiers.tiers.fs.tools import FsURL
from kvtiers.tiers.kv import urls as kv
from kvtiers.tiers.kv.address import parse_address
from kvtiers.tiers.kv.options import KvOptions
from kvtiers.tiers.obj.options import ObjOptions
from kvtiers.tiers.obj.written import site_of, url_of
from kvtiers.tiers.options import parse
from kvtiers.tiers.urls import open_place, parse_url

_MAX_CONFIG = 16 << 20
_At = FsURL | ObjOptions | KvOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("url", metavar="URL", nargs="?", help="a tier, beside those configured")
    parser.add_argument(
        "--config",
        metavar="JSON|FILE",
        help="what --kv-transfer-config is, or its kv_connector_extra_config",
    )
    parser.add_argument(
        "--chunk-bytes",
        metavar="SIZE",
        help="of a new tier, or of a plan: try how fast such chunks are on the disk",
    )
    add_common(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Check; 0 unless a check failed."""
    config = None if arguments.config is None else read_config(arguments.config)
    given = arguments.chunk_bytes
    chunk = None if given is None else parse_chunk_bytes(given)
    checks = [("", check) for check in _machine(config, chunk)]
    tiers = _tiers(config, arguments.url)
    for tier in tiers:
        checks += [(tier.url, check) for check in _check_tier(tier, chunk, output)]
    failed = any(check.grade is Grade.FAIL for _, check in checks)

    def human() -> None:
        columns = ["", "CHECK", "FOUND", "WHAT TO DO"]
        rows = [[check.grade.value, check.name, check.found, check.remedy] for _, check in checks]
        if len(tiers) > 1:  # whose row it is, else there is no doubt
            columns.insert(1, "TIER")
            for row, (url, _) in zip(rows, checks, strict=True):
                row.insert(1, _shown(parse_url(url)) if url else "")
        output.table(columns, rows)

    document = {
        "ok": not failed,
        "checks": [
            {
                "tier": url or None,
                "check": check.name,
                "grade": check.grade.value,
                "found": check.found,
                "remedy": check.remedy or None,
            }
            for url, check in checks
        ],
    }
    output.show(document, human)
    return 1 if failed else 0


def read_config(given: str) -> KVTiersConfig:
    """Of JSON, or of a file that holds it. Raises ConfigError as an engine would."""
    text: str | bytes = given
    if not given.lstrip().startswith("{"):
        try:
            with open(given, "rb") as file:
                text = file.read(_MAX_CONFIG)
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else e  # without the path once more
            raise ConfigError(f"--config {given!a} cannot be read: {why}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"--config is no JSON: {e}") from None
    config = parse_config(settings_of(document))
    check_tiers(config.secondary_tiers)
    return config


def _machine(config: KVTiersConfig | None, chunk: int | None) -> Iterator[Check]:
    cpu_bytes = config.cpu_bytes_to_use if config else None
    yield from check_versions()
    yield from check_memory(cpu_bytes, chunk, config.region_directory if config else DIRECTORY)
    yield from check_limits(cpu_bytes)
    yield from check_peers(config.secondary_tiers if config else ())


@dataclass(frozen=True, slots=True)
class _Tier:
    """A tier to look at."""

    url: str
    at: _At
    given: bool = False
    """By the call itself, not by the configuration."""
    share: float | None = None
    """Its ``capacity_fraction``."""
    eviction: Eviction | None = None
    """As configured."""


def _tiers(config: KVTiersConfig | None, url: str | None) -> list[_Tier]:
    """Those configured, and that of ``url`` unless it is one of them: its options are known."""
    specs = [s for s in (config.secondary_tiers if config else ()) if s.module_path is None]
    tiers = [_configured(s) for s in specs if s.type in ("fs", "obj", "kv")]
    if url is None:
        return tiers
    at = parse_url(url)
    known = any(_site(at) == _site(tier.at) for tier in tiers)
    return tiers if known else [*tiers, _Tier(url, at, given=True)]


def _configured(spec: TierSpec) -> _Tier:
    if spec.type == "obj":
        options = parse(ObjOptions, spec.options)
        return _Tier(url_of(options), options)
    if spec.type == "kv":
        values = parse(KvOptions, spec.options)
        return _Tier(kv.url_of(values), values)
    url = _url_of(spec)
    return _Tier(
        url,
        parse_url(url),
        share=spec.options.get("capacity_fraction"),
        eviction=spec.options.get("eviction", FsOptions.eviction),
    )


def _site(at: _At) -> tuple[str, ...]:
    if isinstance(at, KvOptions):
        return str(parse_address(at.url)), at.prefix
    return (os.path.realpath(at.path),) if isinstance(at, FsURL) else site_of(at)


def _shown(at: _At) -> str:
    if isinstance(at, KvOptions):
        return str(parse_address(at.url))
    return at.path if isinstance(at, FsURL) else str(at.where)


def _url_of(spec: TierSpec) -> str:
    options = spec.options
    root = path_of(str(options["root_dir"]))
    parameters = [
        ("layout", options.get("layout", FsOptions.layout)),
        ("capacity", _capacity_of(options, root)),
        ("direct_io", options.get("direct_io")),
    ]
    query = "&".join(f"{key}={value}" for key, value in parameters if value is not None)
    return f"fs://{quote(root)}" + (f"?{query}" if query else "")


def _capacity_of(options: Mapping[str, Any], root: str) -> int | None:
    """In bytes, 1 or more: a share is of the file system as it is now."""
    stated, share = options.get("capacity_bytes"), options.get("capacity_fraction")
    if stated is not None or share is None:
        return None if stated is None else int(stated)
    disk = os.statvfs(nearest_folder(root))
    return max(1, int(share * disk.f_blocks * disk.f_frsize))


def _check_tier(tier: _Tier, chunk: int | None, output: Output) -> list[Check]:
    at, intended = tier.at, IntendedTier(tier.share, chunk)
    total = None if chunk is None else 4 * TRIAL_BYTES
    started: list[Check] = []
    try:
        with output.progress(total, "looking" if chunk is None else "trying it") as advance:
            if isinstance(at, ObjOptions):
                return list(check_bucket(at, chunk, advance))
            if isinstance(at, KvOptions):
                return list(check_server(at, chunk, advance))
            if not os.path.lexists(at.path):
                return list(check_absent(at, intended, advance))
            started = [check_start(at, tier.eviction)]
            return started + list(check_place(open_place(tier.url, output.warn), intended, advance))
    except (KVTiersError, OSError) as e:
        if tier.given and isinstance(e, ConfigError):
            raise
        if any(check.grade is Grade.FAIL for check in started):
            return started
        return [Check("tier", Grade.FAIL, str(e), "see the folder and who may use it")]

from kvtiers.tiers.fs import FsOptions
from kvtiers.tiers.options import parse

BOUND = {"capacity_bytes": 1 << 30, "capacity_fraction": None}


def test_null_is_no_value_as_in_upstreams_defaults() -> None:
    options = parse(FsOptions, {"root_dir": "/kv", "locality": None, "fsync": None} | BOUND)
    assert (options.locality, options.fsync) == ("LOCAL", False)

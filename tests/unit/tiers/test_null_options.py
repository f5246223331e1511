from kvtiers.tiers.fs import FsOptions
from kvtiers.tiers.options import parse


def test_null_is_no_value_as_in_upstreams_defaults() -> None:
    options = parse(FsOptions, {"root_dir": "/kv", "locality": None, "capacity_bytes": None})
    assert (options.locality, options.capacity_bytes) == ("LOCAL", None)

"""The laws of stores and tiers over ``transport: nixl``, on a machine with NIXL and a real server.

    python scripts/check_nixl.py [--transport nixl]

Starts SeaweedFS of its own (``pip install "kvtiers[test,obj]" nixl``). Prints ``OK`` or what is
broken for each law, and exits with the number of those that are. ``--transport obstore`` is a dry
run: the same without NIXL.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from kvtiers.errors import ConfigError
from kvtiers.testing import laws_of, run
from tests.laws import test_obj as laws
from tests.servers.seaweedfs import seaweedfs

FAMILIES = (laws.TestObjects, laws.TestPacks, laws.TestObjectsTier, laws.TestPacksTier)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=("nixl", "obstore"), default="nixl")
    transport = parser.parse_args(argv).transport
    with seaweedfs() as server:
        os.environ.update(server.credentials, AWS_REGION=server.region)
        laws.Server.use(server, transport)
        try:
            laws.Server.client("probe")
        except ConfigError as e:
            print(e)
            return 1
        return sum(broken(family, number) for family in FAMILIES for number in laws_of(family))


def broken(family: type, number: str) -> bool:
    with tempfile.TemporaryDirectory() as place:
        error = run(family(), number, Path(place))
    print(f"{family.__name__} {number}: {'OK' if error is None else f'WRONG: {error}'}", flush=True)
    return error is not None


if __name__ == "__main__":
    sys.exit(main())

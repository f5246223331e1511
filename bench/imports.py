"""What ``import kvtiers`` costs: every process of an engine and every tool begins with it.

    python -m bench.imports [--rounds 9]

Prints::

    TIME import.kvtiers <ms in modules of this package, and in all that it imports: medians>
"""

import argparse
import re
import statistics
import subprocess
import sys

from bench.lines import remark

_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)")


def milliseconds() -> tuple[float, float]:
    """Own and cumulative time of one import in a new process."""
    command = [sys.executable, "-X", "importtime", "-c", "import kvtiers"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = [(int(own), int(all_), name) for own, all_, name in _LINE.findall(told)]
    ours = [f for f in found if f[2].partition(".")[0] == "kvtiers"]
    return sum(f[0] for f in ours) / 1e3, ours[-1][1] / 1e3


def measure(rounds: int) -> None:
    """Print the figure; the first import, which may write bytecode, does not count."""
    times = [milliseconds() for _ in range(rounds + 1)][1:]
    own, everything = (statistics.median(t) for t in zip(*times, strict=True))
    remark("TIME", "import.kvtiers", f"{own:.1f} {everything:.1f} ms: own modules, all modules")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    measure(parser.parse_args().rounds)


if __name__ == "__main__":
    main()

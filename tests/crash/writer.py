"""The child of the kill matrix: writes from several threads until it is killed.

``python -m tests.crash.writer LAYOUT ROOT DIRECT_IO FSYNC FIRST`` stores the chunks from number
FIRST on, each once, reads some of them, and says on its standard output what it did.
"""

import itertools
import sys
import threading
from pathlib import Path

from tests.crash.crash_kit import TELL, open_telling, say, write, wrong

THREADS = 4


def main(layout: str, root: str, direct_io: str, fsync: str, first: str) -> None:
    TELL[layout](1)
    store = open_telling(1, layout, Path(root), direct_io=direct_io, fsync=fsync == "True")
    store.scan()
    numbers = itertools.count(int(first), 3)
    taking = threading.Lock()

    def work() -> None:
        recent: list[int] = []
        while True:
            with taking:
                n = next(numbers)
            ns = list(range(n, n + 3))
            errors = write(store, ns)
            say(1, "stored", [n for n, e in zip(ns, errors, strict=True) if e is None])
            recent = [*recent[-6:], n]
            if n % 5:
                continue
            bad = {n: e for n, e in wrong(store, recent[:2]).items() if isinstance(e, str)}
            assert not bad, bad

    for _ in range(THREADS - 1):
        threading.Thread(target=work, daemon=True).start()
    work()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Regions of this and of other processes, for the tests of the region and of its file."""

import fcntl
import os
import subprocess
import sys
import textwrap

SLOT = 8192
RECORD = {"layers": 2, "dtype": "bfloat16", "groups": [[0, 128]]}


class Process:
    """Another Python, with Region imported and ``directory`` bound, that runs a script by lines.

    The script talks with ``say(...)`` and waits with ``wait()``; nothing here sleeps.
    """

    PREAMBLE = """
        import os, signal, sys
        from kvtiers.errors import KVTiersError
        from kvtiers.host.region import Region, sweep
        directory, RECORD, SLOT = sys.argv[1], {record!r}, {slot}
        def say(*words): print(*words, flush=True)
        def wait(): return sys.stdin.readline().strip()
    """

    def __init__(self, script, directory):
        preamble = textwrap.dedent(self.PREAMBLE).format(record=RECORD, slot=SLOT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", preamble + textwrap.dedent(script), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def hear(self):
        return self.process.stdout.readline().strip()

    def tell(self, word=""):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def files(folder):
    return sorted(os.listdir(folder))


def dead(path, operation=fcntl.LOCK_EX):
    """Whether nobody holds the file at ``path``."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(fd)

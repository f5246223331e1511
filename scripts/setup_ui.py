"""What ``make test-ui`` needs besides ``.venv``: a Chromium and a Prometheus, of Debian.

    python -m scripts.setup_ui

What is found on the PATH is taken. Else Chromium is installed, which takes root; Prometheus is
unpacked into ``.tools``, which takes nobody's rights and starts no service, as installing it would.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.setup import ROOT, SetupError

TOOLS = ROOT / ".tools"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def prometheus() -> str | None:
    """The path of a Prometheus, if there is one."""
    return shutil.which("prometheus") or shutil.which(TOOLS / "usr" / "bin" / "prometheus")


def main() -> int:
    """Get what is missing; 1 if it cannot be had."""
    started = time.monotonic()
    try:
        if browser() is None:
            install_browser()
        if prometheus() is None:
            unpack_prometheus()
    except SetupError as e:
        print(f"setup-ui: {e}", file=sys.stderr)
        return 1
    print(f"setup-ui: {browser()}, {prometheus()} after {time.monotonic() - started:.0f} s")
    return 0


def install_browser() -> None:
    """Install Debian's Chromium. Raises SetupError with what a person has to do."""
    remedy = "install chromium (as root: apt-get install chromium) and run make again"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SetupError(f"there is no Chromium on the PATH: {remedy}")
    _apt("install", "--yes", "--no-install-recommends", "chromium")
    if browser() is None:
        raise SetupError(f"apt-get brought no Chromium: {remedy}")


def unpack_prometheus() -> None:
    """Unpack Debian's Prometheus. Raises SetupError with what a person has to do."""
    if shutil.which("apt-get") is None:
        raise SetupError("there is no prometheus on the PATH: install it and run make again")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # apt-get downloads as a user of its own
        _apt("download", "prometheus", folder=folder)
        (package,) = Path(folder).glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "--extract", str(package), str(TOOLS)], check=True)


def _apt(*words: str, folder: str | None = None) -> None:
    """Run apt-get; where it fails its lists are fetched, and it is run once more."""
    print("setup-ui: apt-get", *words, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["apt-get", "--quiet", *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    if run(*words).returncode == 0:
        return
    run("update")
    done = run(*words)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise SetupError(f"apt-get {' '.join(words)} failed, its message is above")


if __name__ == "__main__":
    sys.exit(main())

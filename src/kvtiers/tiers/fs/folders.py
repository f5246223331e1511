"""Opening a root and a namespace in it: made private, checked, refused in plain words.

Raises ConfigError about ``root_dir``; OSError is left to the caller to word.
"""

import contextlib
import os
import re
from collections.abc import Callable

from kvtiers.chunks import Namespace
from kvtiers.tiers.fs import names
from kvtiers.tiers.options import bad_option

FOLDER_MODE = 0o700

_HARMLESS = re.compile(r"\..*|lost\+found|.*_[0-9a-f]{12}(_r[0-9]+)?")
"""May lie beside ours: hidden things and the folders of vLLM's own fs tier."""


def make_folder(path: str) -> None:
    """Make ``path`` and what lacks above it, mode 0700 whatever the umask."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
        os.chmod(path, FOLDER_MODE)
        return
    if not os.path.isdir(path):
        raise NotADirectoryError(path)


def open_root(root_dir: str) -> str:
    """The absolute path of the root, made if absent."""
    root = os.path.abspath(os.path.expanduser(root_dir))
    try:
        make_folder(root)
        entries = os.listdir(root)
    except NotADirectoryError as e:
        raise bad_option("root_dir", f"is {root}, where a file is in the way: name a folder") from e
    except OSError as e:
        raise unusable(root, e) from e
    strangers = [e for e in entries if not names.is_namespace(e) and not _HARMLESS.fullmatch(e)]
    if strangers and not any(names.is_namespace(e) for e in entries):
        raise bad_option(
            "root_dir",
            f"is {root}, which holds other things ({min(strangers)}): "
            "name an empty folder or one that kvtiers made",
        )
    return root


def unusable(root: str, error: OSError) -> Exception:
    """The ConfigError for a root that cannot be worked in."""
    return bad_option(
        "root_dir",
        f"is {root}, where kvtiers cannot write ({error.strerror or error}): "
        "name a folder of its own that it may write to",
    )


def open_manifest(folder: str, namespace: Namespace, write: Callable[[str, bytes], None]) -> None:
    """Compare the manifest in ``folder`` with ours; ``write(path, bytes)`` it if it is new."""
    path = os.path.join(folder, names.MANIFEST)
    expected = namespace.manifest().encode()
    try:
        with open(path, "rb") as f:
            found = f.read()
    except FileNotFoundError:
        strangers = set(os.listdir(folder)) - {names.TEMP, names.QUARANTINE, names.MANIFEST}
        if strangers:
            raise bad_option(
                "root_dir",
                f"holds {folder}, which has files but no {names.MANIFEST} that says what they "
                "are: move that folder away",
            ) from None
        write(path, expected)
        return
    if found != expected:
        raise bad_option(
            "root_dir",
            f"holds {path}, which disagrees with the model and configuration of this engine: "
            f"move the folder {folder} away",
        )

"""The built-in web page: its files, read once, each under its name and no other path."""

from collections.abc import Mapping
from importlib import resources

from kvtiers.observe.http import Answer

FOLDER = "page"
INDEX = "index.html"

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
}


def read_pages() -> Mapping[str, Answer]:
    """Answers by path; the index is ``/`` too. Empty if the page is not there."""
    folder = resources.files("kvtiers.observe") / FOLDER
    if not folder.is_dir():
        return {}
    pages = {}
    for file in folder.iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None and file.is_file():
            pages[f"/{file.name}"] = Answer(200, file.read_bytes(), kind)
    index = pages.get(f"/{INDEX}")
    return pages if index is None else {"/": index, **pages}

"""The documentation is true: links, paths, names, tables and examples agree with the code."""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvtiers.config import parse_config
from kvtiers.device.copier import Copier
from kvtiers.events import Hop, Reason
from kvtiers.host.policies.base import EvictionPolicy
from kvtiers.tiers import base

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "kvtiers"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
THEIRS = {"invalid_block_ids", "transfer_type"}
"""Names of vLLM's that our code does not use."""
NEED_VLLM = {"metrics"}
"""Parts that tests/vllm looks after."""

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|toml))")
_TEST = re.compile(r"`((?:unit|vllm)/\S+?\.py)::(\w+)`")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?:\([\w, ]*\))?")
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def each_page(*pages: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages or PAGES, ids=name_of)


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    for found, info, body in _BLOCK.findall(page.read_text()):
        if found == language:
            yield info.strip(), body


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_page()
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


@each_page()
def test_paths_in_backticks_exist(page: Path) -> None:
    places = (ROOT, PACKAGE, page.parent, ROOT / "tests")
    missing = [
        text
        for text in _CODE.findall(prose(page))
        if _PATH.fullmatch(text)
        and ("/" in text.rstrip("/") or text.endswith(".py"))
        and not any((place / text).exists() for place in places)
    ]
    assert missing == []


@each_page()
def test_named_tests_exist(page: Path) -> None:
    missing = []
    for file, test in _TEST.findall(prose(page)):
        path = ROOT / "tests" / file
        defined = path.exists() and re.search(rf"^(async )?def {test}\(", path.read_text(), re.M)
        if not defined:
            missing.append(f"{file}::{test}")
    assert missing == []


@pytest.fixture(scope="module")
def words() -> set[str]:
    """All words of the source, the tests and what they are configured with."""
    files = [p for d in ("src", "tests", "scripts", "bench") for p in (ROOT / d).rglob("*.py")]
    text = "\n".join(p.read_text() for p in [*files, ROOT / "pyproject.toml", ROOT / "Makefile"])
    return set(re.findall(r"\w+", text))


@each_page()
def test_names_in_backticks_exist(page: Path, words: set[str]) -> None:
    """Identifiers as opposed to plain words: with a capital inside, an underscore, or a dot."""
    unknown = [
        text
        for text in _CODE.findall(prose(page))
        if _NAME.fullmatch(text)
        and re.search(r"[a-z][A-Z]|_|\.|\(", text)
        and not (_PATH.fullmatch(text) and re.search(r"\.(py|md|toml|json)$", text))
        and not set(re.findall(r"\w+", text)) <= words | THEIRS
    ]
    assert unknown == []


def test_every_fault_names_what_shows_it() -> None:
    table = prose(DOCS / "faults.md").split("## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row[0] for row in rows if "`" not in row[-1]] == []


@each_page(*DOCS.rglob("*.md"))
def test_generated_parts_are_up_to_date(page: Path, generator: ModuleType) -> None:
    text = page.read_text()
    assert generator.renewed(text, lambda part: part not in NEED_VLLM) == text, "run make docs"


def test_every_generated_part_is_shown_once(generator: ModuleType) -> None:
    shown = [name for page in PAGES for _, name, _ in generator.PART.findall(page.read_text())]
    assert sorted(shown) == sorted(generator.PARTS)


def test_every_option_has_a_meaning(generator: ModuleType) -> None:
    for name in ("runner", "tier-fs", "tier-memory"):
        rows = generator.PARTS[name]().splitlines()[2:]
        assert [row for row in rows if row.split(" | ")[-1].strip(" |") == ""] == []


HOOKS = [
    contract
    for contract in vars(base).values()
    if getattr(contract, "_is_protocol", False)
    and contract.__module__ == base.__name__
    and contract is not base.TakesCascades
]
"""Stores, tiers, and what either may have; ``TakesCascades`` has no method."""


@pytest.mark.parametrize("contract", [Copier, EvictionPolicy, *HOOKS])
def test_every_method_of_a_contract_is_explained(contract: type) -> None:
    text = (DOCS / "contracts.md").read_text()
    (body,) = [
        node
        for node in ast.parse(
            Path(sys.modules[contract.__module__].__file__ or "").read_text()
        ).body
        if isinstance(node, ast.ClassDef) and node.name == contract.__name__
    ]
    methods = [node.name for node in body.body if isinstance(node, ast.FunctionDef)]
    assert methods
    assert [m for m in methods if f"`{m}`" not in text and f"`{m}(" not in text] == []


def test_every_reason_and_hop_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text()
    assert [r.value for r in Reason if f"| `{r.value}` |" not in text] == []
    assert [h.value for h in Hop if f"`{h.value}`" not in text] == []


@each_page(*[page for page in PAGES if "```python" in page.read_text()])
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python file=NAME`` is written to that file, ``python runnable`` is run beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []
    for info, body in blocks(page, "python"):
        if info.startswith("file="):
            written.append(Path(info.removeprefix("file=")))
            written[-1].write_text(body)
        elif info == "runnable":
            exec(compile(body, f"{page.name} (example)", "exec"), {"__name__": "example"})
    for path in written:
        assert sys.modules.pop(path.stem, None), f"no example uses {path}"


@each_page(*[page for page in PAGES if "```json" in page.read_text()])
def test_configurations_are_accepted(page: Path) -> None:
    for _, body in blocks(page, "json"):
        config = json.loads(body)
        extra = config.get("kv_connector_extra_config")
        if extra is not None:
            assert parse_config(extra).ignored == ()


def test_decisions_are_numbered_and_say_all_four_things() -> None:
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    assert [page.name[:4] for page in pages] == [f"{n:04}" for n in range(1, len(pages) + 1)]
    for page in pages:
        headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "How to check"], page.name


def test_every_page_is_in_an_index() -> None:
    for page in DOCS.rglob("*.md"):
        index = page.parent / "README.md" if page.name != "README.md" else DOCS / "README.md"
        target = str(page.relative_to(index.parent))
        assert page == index or f"]({target})" in index.read_text(), f"{page} is in no index"

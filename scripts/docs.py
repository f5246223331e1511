"""Write the generated parts of docs/ anew, or say (``--check``) which are out of date.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. What it shows is
read from the code, so that a table of options, states or metrics cannot differ from what runs.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtiers import config
from kvtiers.metrics.names import BY_NAME
from kvtiers.options import options_of, table
from kvtiers.testing import Laws, PolicyLaws, StoreLaws, TierLaws, laws_of
from kvtiers.tiers import TIER_TYPES
from kvtiers.tiers.options import RunnerOptions

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_UPSTREAM = "vllm:kv_offload_"


def tier_options(cls: type[Any], without: type[Any] | None = None) -> str:
    """Options of a tier: those ``cls`` adds to, or sets otherwise than, ``without``."""
    docs = _attribute_docs(cls)
    for base in cls.__mro__[1:-1]:
        docs = {**_attribute_docs(base), **docs}
    shared = options_of(without) if without else {}
    return table(
        dataclasses.replace(option, doc=docs.get(key, option.doc))
        for key, option in options_of(cls).items()
        if key not in shared or shared[key].default != option.default
    )


def metrics() -> str:
    """The table that all exporters declare and send from."""
    lines = ["| name | kind | labels | meaning | name is |", "|---|---|---|---|---|"]
    for name, metric in sorted(BY_NAME.items()):
        if metric.sent_by_vllm:
            continue
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        whose = "vLLM's" if name.startswith(_UPSTREAM) else "ours"
        doc = _cell(metric.doc)
        lines.append(f"| `{name}` | {metric.kind.value} | {labels} | {doc} | {whose} |")
    return "\n".join(lines) + "\n"


def laws(family: type[Laws]) -> str:
    """The laws of a family by number, each with its title and its obligation."""
    lines = ["| | law | in other words |", "|---|---|---|"]
    for number, name in laws_of(family).items():
        title = name.split("_", 2)[2].replace("_", " ")
        meaning = _cell(inspect.getdoc(getattr(family, name)) or "")
        lines.append(f"| {number} | {title} | {meaning} |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "config": config.describe,
    "config-observe": config.describe_observe,
    "runner": lambda: tier_options(RunnerOptions),
    **{
        f"tier-{name}": lambda tier=tier: tier_options(
            tier.options, RunnerOptions if issubclass(tier.options, RunnerOptions) else None
        )
        for name, tier in TIER_TYPES.items()
    },
    "metrics": metrics,
    "laws-store": lambda: laws(StoreLaws),
    "laws-tier": lambda: laws(TierLaws),
    "laws-policy": lambda: laws(PolicyLaws),
}


def renewed(text: str, wanted: Callable[[str], bool] = lambda name: True) -> str:
    """``text`` with its generated parts written anew. Raises KeyError for an unknown part."""

    def write(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}{PARTS[name]()}{end}" if wanted(name) else match[0]

    return PART.sub(write, text)


def main() -> int:
    """Run the script; 1 if ``--check`` found something out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, tell what is stale")
    check = parser.parse_args().check
    stale = 0
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        new = renewed(text)
        if new == text:
            continue
        stale += 1
        print(f"{path.relative_to(ROOT)} {'is out of date: run make docs' if check else 'written'}")
        if not check:
            path.write_text(new)
    return 1 if check and stale else 0


def _attribute_docs(cls: type[Any]) -> dict[str, str]:
    """The string literals that stand below the attributes of ``cls``, by attribute."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for above, node in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        target = above.target if isinstance(above, ast.AnnAssign) else None
        if isinstance(above, ast.Assign):
            target = above.targets[0]
        if is_text and isinstance(target, ast.Name):
            docs[target.id] = " ".join(str(node.value.value).split())  # type: ignore[attr-defined]
    return docs


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())

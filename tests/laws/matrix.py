"""Runs every law against every saboteur; ``python -m tests.laws.matrix`` prints it."""

import sys
import tempfile
from pathlib import Path

from kvtiers.testing import Laws, PolicyLaws, StoreTierLaws, laws_of, run
from tests.laws import saboteur_policies, saboteur_tiers, saboteurs
from tests.laws.honest import HonestLaws
from tests.laws.plain_tier import PlainLaws

_PATIENCE_S = 0.2


TIER_FAMILIES = {"runner": StoreTierLaws, "plain": PlainLaws}


def _standing(name: str, base: type[Laws], **members: object) -> type[Laws]:
    return type(base)(name, (base,), members)


def _subclass(base: type[Laws], saboteur: type, **members: object) -> Laws:
    return _standing(saboteur.__name__, base, patience_s=_PATIENCE_S, **members)()


def subjects():
    """Each saboteur under the laws it has to face: name, laws object, the law that must see it."""
    for cls, number in saboteurs.STORES.items():
        yield cls.__name__, _subclass(HonestLaws, cls, store_type=cls), number
    for cls, number in saboteurs.STORES_UNDER_A_TIER.items():
        below = {"store_laws": _standing("Below", HonestLaws, store_type=cls)}
        for kind, family in TIER_FAMILIES.items():
            yield f"{cls.__name__} ({kind})", _subclass(family, cls, **below), number
    for cls, number in saboteur_tiers.TIERS.items():
        for kind, family in TIER_FAMILIES.items():
            broken = type(cls.__name__, (cls, family.tier_type), {})
            members = {"store_laws": HonestLaws, "tier_type": broken}
            yield f"{cls.__name__} ({kind})", _subclass(family, cls, **members), number
    for cls, number in saboteur_policies.POLICIES.items():
        make = {"make": lambda self, capacity, cls=cls: cls(capacity)}
        yield cls.__name__, _subclass(PolicyLaws, cls, **make), number


def verdicts(laws: Laws, place: Path) -> dict[str, Exception | None]:
    """What each law found."""
    found = {}
    for number in laws_of(type(laws)):
        folder = place / number
        folder.mkdir()
        found[number] = run(laws, number, folder)
    return found


def main() -> None:
    lines = []
    for name, laws, expected in subjects():
        with tempfile.TemporaryDirectory() as place:
            found = {n: e for n, e in verdicts(laws, Path(place)).items() if e is not None}
        lines.append(f"{name:36} {expected:4} {' '.join(found)}\n")
        lines.append(f"    {found.get(expected, 'MISSED')}\n")
    sys.stdout.writelines(lines)


if __name__ == "__main__":
    main()

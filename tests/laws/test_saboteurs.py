"""Every saboteur is caught by the law that it breaks, and every law catches one."""

import pytest

from kvtiers.testing import PolicyLaws, StoreLaws, StoreTierLaws, laws_of, run
from tests.laws import matrix

SUBJECTS = list(matrix.subjects())


@pytest.mark.parametrize(("name", "laws", "number"), SUBJECTS, ids=[s[0] for s in SUBJECTS])
def test_it_is_caught(name, laws, number, tmp_path):
    assert run(laws, number, tmp_path) is not None


@pytest.mark.parametrize("family", [StoreLaws, StoreTierLaws, PolicyLaws])
def test_every_law_catches_a_saboteur(family):
    catches = {number for _, laws, number in SUBJECTS if isinstance(laws, family)}
    assert catches == set(laws_of(family))


def test_the_matrix_names_what_each_law_found(tmp_path):
    subjects = {name: laws for name, laws, _ in SUBJECTS}
    found = matrix.verdicts(subjects["KeepsItsHistory"], tmp_path)
    assert {n: str(e) for n, e in found.items() if e} == {"E5": "its history survived clear"}

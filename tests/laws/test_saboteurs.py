"""Every saboteur is caught by the law that it breaks, and every law catches one."""

import pytest

from kvtiers.testing import LawBroken, PolicyLaws, StoreLaws, StoreTierLaws, laws_of, run
from tests.laws import matrix
from tests.laws.plain_tier import PlainLaws

SUBJECTS = list(matrix.subjects())
RAISE = (
    "RaisesForWhatIsAbsent",
    "CannotDeleteAsItSays",
    "CannotScanAsItSays",
    "TouchMindsTheUnknown",
    "ClosesOnce",
)
"""What these raise is what the law found."""
KINDS = {
    "loses every third key": ("LosesEveryThirdKey",),
    "swaps two slots": ("SwapsTwoSlots",),
    "answers before copying": ("AnswersBeforeCopying",),
    "answers twice": ("AnswersTwice", "AnswersTwice (runner)", "AnswersTwice (plain)"),
    "touches memory late": ("TouchesMemoryLate", "TouchesMemoryAfterItsOutcome (plain)"),
    "ignores the group": ("IgnoresTheGroup", "IgnoresTheGroup (runner)"),
    "short reads": ("ShortReads",),
    "blocks in submit": ("BlocksInSubmit (runner)", "BlocksInSubmit (plain)"),
    "leaks on close": ("LeaksAThreadOnClose", "LeaksAFileOnClose", "LeaksALaneOnShutdown (plain)"),
    "says yes and cannot": (
        "LiesAboutPersistence",
        "LiesAboutSharing",
        "CannotDeleteAsItSays",
        "CannotScanAsItSays",
    ),
    "says no and can": ("PersistsUnasked", "SharesUnasked", "LiesAboutDelete", "LiesAboutScan"),
    "writes through a read-only view": ("WritesThroughAReadOnlyView",),
}


@pytest.mark.parametrize(("name", "laws", "number"), SUBJECTS, ids=[s[0] for s in SUBJECTS])
def test_it_is_caught(name, laws, number, tmp_path):
    found = run(laws, number, tmp_path)
    assert isinstance(found, LawBroken) or (found and name in RAISE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sabotage_is_tried(kind):
    assert set(KINDS[kind]) <= {name for name, _, _ in SUBJECTS}


@pytest.mark.parametrize("family", [StoreLaws, StoreTierLaws, PlainLaws, PolicyLaws])
def test_every_law_catches_a_saboteur(family):
    catches = {number for _, laws, number in SUBJECTS if isinstance(laws, family)}
    assert catches == set(laws_of(family))


def test_the_matrix_names_what_each_law_found(tmp_path):
    subjects = {name: laws for name, laws, _ in SUBJECTS}
    found = matrix.verdicts(subjects["KeepsItsHistory"], tmp_path)
    assert {n: str(e) for n, e in found.items() if e} == {"E5": "its history survived clear"}

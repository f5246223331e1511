from kvtiers.chunks import Lookup
from kvtiers.tiers.asking import Asking
from kvtiers.tiers.lanes import Inbox
from kvtiers.tiers.work import Question
from tests.unit.tiers.tier_kit import ScriptedStore, key


def test_a_key_is_gathered_once_and_becomes_a_miss_in_time() -> None:
    asking = Asking(deadline_s=1)
    assert asking.lookup(key(1), 0) is Lookup.RETRY
    assert asking.lookup(key(1), 0.9) is Lookup.RETRY
    assert asking.lookup(key(1), 1.0) is Lookup.MISS
    assert asking.gather() == [([key(1)], 1.0)]
    assert asking.gather() == []


def test_long_prefixes_are_split_into_batches() -> None:
    asking = Asking(deadline_s=1)
    for n in range(600):
        asking.lookup(key(n), 0)
    assert [len(keys) for keys, _ in asking.gather()] == [256, 256, 88]


def test_a_young_key_is_not_given_up_with_an_old_one_of_its_batch() -> None:
    asking = Asking(deadline_s=1)
    asking.lookup(key(1), 0)
    asking.lookup(key(2), 0.9)
    assert asking.gather() == [([key(1), key(2)], 1.9)]
    assert asking.lookup(key(1), 1.0) is Lookup.MISS
    assert asking.lookup(key(2), 1.8) is Lookup.RETRY


def test_overdue_questions_are_forgotten_and_a_late_answer_is_told_apart() -> None:
    asking = Asking(deadline_s=1)
    asking.lookup(key(1), 0)
    ((keys, deadline),) = asking.gather()
    question = Question(keys, deadline, 0, ScriptedStore(), Inbox())
    asking.sent(question)
    asking.check()
    assert asking.overdue(0.9) == []
    assert asking.overdue(1.0) == [question]
    assert len(asking) == 0
    assert not asking.answered(question)
    assert asking.lookup(key(1), 1.0) is Lookup.RETRY
    asking.check()

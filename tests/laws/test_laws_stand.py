"""Laws cannot be talked down: not redefined, hidden, taken away, marked or skipped."""

import unittest

import pytest

from kvtiers.testing import LawBroken, PolicyLaws, StoreLaws, TierLaws, hook, law, run
from tests.laws.honest import HonestLaws, HonestStore

LAW = "test_s1_what_was_written_is_read_back"


def lenient(*bases, **members):
    return type(HonestLaws)("Lenient", bases or (HonestLaws,), members)


def nothing(self):
    pass


def test_a_law_cannot_be_redefined():
    with pytest.raises(TypeError, match=r"Lenient redefines test_s1_.*S1 cannot be"):
        lenient(**{LAW: nothing})


def test_a_law_cannot_be_hidden_by_a_mixin():
    mixin = type("Mixin", (), {"test_e6_is_deterministic": nothing})
    with pytest.raises(TypeError, match="E6"):
        lenient(mixin, PolicyLaws)


@pytest.mark.parametrize("cls", [StoreLaws, HonestLaws])
def test_a_law_cannot_be_set_or_deleted_later(cls):
    with pytest.raises(TypeError, match="S1 cannot be"):
        setattr(cls, LAW, nothing)
    with pytest.raises(TypeError, match="S1 cannot be"):
        delattr(cls, LAW)
    with pytest.raises(TypeError, match="S1 cannot be"):
        setattr(cls(), LAW, nothing)


@pytest.mark.parametrize("name", ["_open", "_record", "watched", "__setattr__"])
def test_what_laws_are_made_of_cannot_be_redefined_either(name):
    with pytest.raises(TypeError, match=f"redefines {name}|defines {name}"):
        lenient(**{name: nothing})


@pytest.mark.parametrize("name", ["__test__", "__init__", "__new__", "__getattribute__"])
def test_a_class_that_pytest_would_not_collect_is_refused(name):
    with pytest.raises(TypeError, match=f"Lenient defines {name}: pytest would"):
        lenient(**{name: False})
    with pytest.raises(TypeError, match=f"defines {name}"):
        setattr(HonestLaws, name, False)


@pytest.mark.parametrize("member", [{"__test__": False}, {"pytestmark": pytest.mark.skip}])
def test_nor_does_a_mixin_help(member):
    with pytest.raises(TypeError, match="Lenient"):
        lenient(type("Mixin", (), member), HonestLaws)


def test_a_number_belongs_to_one_law():
    with pytest.raises(TypeError, match=r"redefines test_easy: the law S1"):
        lenient(test_easy=law("S1")(nothing))


def test_a_law_cannot_be_called_a_hook():
    with pytest.raises(TypeError, match="S1 cannot be"):
        lenient(**{LAW: hook(lambda self: None)})


MARKS = [
    pytest.mark.skip,
    pytest.mark.skipif(True, reason="today"),
    pytest.mark.xfail,
    pytest.mark.parametrize("tmp_path", []),
]


@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: mark.name)
def test_marks_that_leave_out_are_refused(mark):
    with pytest.raises(TypeError, match=f"is marked {mark.name}"):
        lenient(pytestmark=[pytest.mark.timeout(3), mark])
    with pytest.raises(TypeError, match=f"is marked {mark.name}"):
        mark(lenient())


def test_other_marks_are_not():
    assert pytest.mark.timeout(3)(lenient()).pytestmark[0].name == "timeout"


@pytest.mark.parametrize("way_out", [pytest.skip, pytest.xfail, unittest.SkipTest])
def test_a_hook_that_skips_breaks_the_law(way_out, tmp_path):
    def make(self, place, context):
        raise way_out("no server here")

    error = run(lenient(make=make)(), "S1", tmp_path)
    assert isinstance(error, LawBroken)
    assert str(error) == "the law S1 was left out by a hook: no server here"


@pytest.mark.parametrize("hook", ["make", "peek", "seed"])
def test_without_a_hook_the_laws_that_need_it_fail(hook, tmp_path):
    members = {n: v for n, v in vars(HonestLaws).items() if n in ("make", "peek", "seed")}
    del members[hook]
    cls = lenient(StoreLaws, store_type=HonestStore, **members)
    assert isinstance(run(cls(), "S8", tmp_path), NotImplementedError)
    assert isinstance(run(lenient(TierLaws)(), "T1", tmp_path), NotImplementedError)


def test_a_subclass_may_add_laws_and_they_stand_too():
    class Stricter(HonestLaws):
        @law("X1")
        def test_x1_more(self):
            raise LawBroken("always")

    assert str(run(Stricter(), "X1", None)) == "always"
    with pytest.raises(TypeError, match="X1"):
        lenient(Stricter, test_x1_more=None)


def test_the_laws_of_a_test_class_all_run_under_pytest(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from kvtiers.host.policies import LRUPolicy\n"
        "from kvtiers.testing import PolicyLaws\n"
        "class TestMine(PolicyLaws):\n"
        "    def make(self, capacity):\n"
        "        return LRUPolicy(capacity)\n"
    )

    class Count:
        reports = []

        def pytest_runtest_logreport(self, report):
            self.reports += [report.outcome] if report.when == "call" else []

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--no-header"]
    assert pytest.main([*options, str(tmp_path)], plugins=[Count()]) == 0
    assert Count.reports == ["passed"] * 8

"""The order of leaving, found in sections of the tree."""

import os
from pathlib import Path

import pytest

from kvtiers.tiers.fs import stamps, victims
from kvtiers.tiers.fs.victims import Victims
from tests.unit.tiers.tier_kit import ManualClock

NOW = 1_700_000_000.0
NAMESPACE = "0" * 32


class Tree:
    """Chunks in folders, each of an age in seconds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock, self.wall = ManualClock(), ManualClock(NOW)
        self.used: dict[str, float] = {}
        self.victims = Victims(
            str(root), lambda name: self.used.get(name, 0.0), self.clock, self.wall
        )

    def add(self, fan: int, n: int, age: float) -> str:
        name = f"{NAMESPACE}/{fan:02x}/{fan:02x}{n:04x}-g0.kvc"
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(n))
        os.utime(path, (NOW - age, NOW - age))
        return name

    def leave(self) -> list[str]:
        """What leaves until more of the tree has to be seen."""
        gone = []
        while (victim := self.victims.next()) is not None:
            (self.root / victim.name).unlink()
            gone.append(victim.name)
        self.victims.check()
        return gone


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_small_tree_leaves_in_order_of_use(tree: Tree) -> None:
    names = [tree.add(n % 5, n, age=1000 - n) for n in range(20)]
    assert tree.victims.next() is None, "nothing is known yet"
    assert tree.victims.look_further()
    assert tree.leave() == names


def test_an_eighth_of_a_section_leaves_then_the_oldest_of_all(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims, "_SECTION", 16)
    for n in range(64):
        tree.add(n % 8, n, age=1000 + (n * 37) % 64)
    ages = {p.name: NOW - p.stat().st_mtime for p in tree.root.rglob("*.kvc")}
    rounds = []
    while not tree.victims.look_further():
        rounds.append(tree.leave())
    assert [len(gone) for gone in rounds] == [2, 2, 2, 2]
    rest = [Path(name).name for name in tree.leave()]
    assert len(rest) == 56
    assert rest == sorted(rest, key=lambda name: -ages[name]), "all are known now"


def test_no_more_is_remembered_than_the_bound(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims, "_MAX_KNOWN", 10)
    names = [tree.add(n % 4, n, age=1000 - n) for n in range(40)]
    assert tree.victims.look_further()
    assert tree.leave() == names[:10]
    assert tree.victims.look_further()
    assert tree.leave() == names[10:20]


def test_what_was_used_since_it_was_seen_comes_later(tree: Tree) -> None:
    one, two, three, four = (tree.add(0, n, age=500 - n) for n in range(4))
    tree.victims.look_further()
    os.utime(tree.root / one, (NOW - 400, NOW - 400))
    tree.used[two] = NOW - 300
    (tree.root / three).unlink()
    assert tree.leave() == [four, one, two]


def test_what_is_promised_stays_until_the_promise_ends(tree: Tree) -> None:
    one, two = tree.add(0, 1, age=500), tree.add(0, 2, age=400)
    tree.victims.look_further()
    assert stamps.promise(str(tree.root / one), stamps.until_ns(NOW))
    assert tree.leave() == [two]
    tree.victims.look_further()
    assert tree.leave() == []
    tree.wall.advance(stamps.GRACE_S + 1)
    tree.victims.look_further()
    assert tree.leave() == [one]


def test_a_time_far_ahead_is_a_wrong_clock_and_no_promise(tree: Tree) -> None:
    one = tree.add(0, 1, age=-100_000)
    tree.victims.look_further()
    assert tree.leave() == [one]


def test_a_touch_does_not_take_a_promise_back(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.touch()
    stamps.promise(str(file), stamps.until_ns(NOW))
    stamps.move_up(str(file), NOW + 1)
    assert file.stat().st_mtime == NOW + stamps.GRACE_S
    stamps.move_up(str(file), NOW + 20)
    assert file.stat().st_mtime == NOW + 20
    stamps.move_up(str(tmp_path / "absent"), NOW)


def test_what_could_not_be_deleted_is_passed_over_for_a_while(tree: Tree) -> None:
    one, two = tree.add(0, 1, age=500), tree.add(0, 2, age=400)
    tree.victims.put_off(one)
    tree.victims.look_further()
    assert tree.leave() == [two]
    tree.clock.advance(30)
    tree.victims.look_further()
    assert tree.leave() == [one]

"""Scratch folders of instances that live, end and are killed, beside a model of them.

A killed instance is one whose lock is closed and whose folder stays.
"""

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtiers.tiers.fs import folders
from kvtiers.tiers.fs.scratch import Scratch, sweep
from tests.unit.tiers.tier_kit import NAMESPACE

OTHERS = "0123456789abcdef" * 2
"""Named as a namespace is, but without our manifest: what lies in it is nobody's business."""


class Folders(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.root = Path(self.place.name, "root")
        self.outside = Path(self.place.name, "outside")
        self.outside.mkdir()
        (self.outside / "0").write_text("not ours")
        (self.outside / "lock").touch()  # as if it were a dead one's
        self.live: list[Scratch] = []
        self.dead: set[str] = set()
        self.foreign: dict[str, set[str]] = {}
        """Folders that no sweep may remove, and what has to stay in them."""
        for namespace in (NAMESPACE.id, OTHERS):
            (self.root / namespace).mkdir(parents=True)
        with_manifest = str(self.root / NAMESPACE.id)
        folders.open_manifest(with_manifest, NAMESPACE, lambda: f"{with_manifest}/new")
        self.leave_strangers(self.root / NAMESPACE.id / "tmp")

    def leave_strangers(self, temp):
        temp.mkdir()
        for name, content in {"1-nolock": "0", "notes": "lock", "1-UPPER": "lock"}.items():
            (temp / name).mkdir()
            (temp / name / content).write_text("")
            self.foreign[str(temp / name)] = {content}
        (temp / "1-link").symlink_to(self.outside)
        (temp / "1-locklink").mkdir()
        (temp / "1-locklink" / "lock").symlink_to(self.outside / "0")
        self.foreign[str(temp / "1-locklink")] = {"lock"}
        (temp / "2-file").write_text("")

    def teardown(self):
        for scratch in list(self.live):
            self.end(scratch)
        self.sweep()
        self.agrees()
        self.place.cleanup()

    @rule(namespace=st.sampled_from((NAMESPACE.id, OTHERS)))
    def begin(self, namespace):
        self.live.append(Scratch(str(self.root / namespace)))

    @rule(data=st.data())
    def write(self, data):
        if self.live:
            Path(data.draw(st.sampled_from(self.live)).path()).write_text("half a chunk")

    @rule(data=st.data())
    def end_one(self, data):
        if self.live:
            self.end(data.draw(st.sampled_from(self.live)))

    def end(self, scratch):
        self.live.remove(scratch)
        scratch.close()
        scratch.close()
        assert not os.path.exists(scratch.folder)

    @rule(data=st.data(), visited=st.booleans())
    def kill(self, data, visited):
        """``visited``: somebody has put a file of theirs into its folder."""
        if not self.live:
            return
        scratch = data.draw(st.sampled_from(self.live))
        self.live.remove(scratch)
        os.close(scratch._lock)
        scratch._lock = None
        if visited:
            Path(scratch.folder, "notes.txt").write_text("theirs")
            self.foreign[scratch.folder] = {"notes.txt"}
        elif OTHERS in scratch.folder:
            self.foreign[scratch.folder] = set(os.listdir(scratch.folder))
        else:
            self.dead.add(scratch.folder)

    @rule()
    def sweep(self):
        assert sweep(str(self.root)) == len(self.dead)
        assert not [folder for folder in self.dead if os.path.exists(folder)]
        self.dead.clear()

    @invariant()
    def agrees(self):
        for scratch in self.live:
            scratch.check()
            assert "lock" in os.listdir(scratch.folder), "a live one's lock is gone"
        for folder in self.dead:
            assert os.path.isdir(folder), "swept without being asked"
        for folder, content in self.foreign.items():
            assert content <= set(os.listdir(folder)), f"{folder} lost what is not ours"
        assert sorted(os.listdir(self.outside)) == ["0", "lock"], "a link was followed"
        assert (self.outside / "0").read_text() == "not ours"


TestFolders = Folders.TestCase
TestFolders.settings = settings(max_examples=40, stateful_step_count=25)

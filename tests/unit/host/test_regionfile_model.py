"""Regions that come, go and are left behind, beside a model of who lives; checked at every step.

A process that lives is an open file description with its lock, one that was killed has left its
files and no lock: to the kernel there is no difference between this test and many processes.
"""

import fcntl
import os
import tempfile
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtiers.errors import ConfigError
from kvtiers.host.region import Region, sweep
from kvtiers.host.regionfile import Header, region_path
from tests.unit.host.region_kit import RECORD, dead, files

SLOTS, SLOT = 2, 4096
NAMES = ("a", "b")
HEADER = Header(SLOTS, SLOT, RECORD)
WRITTEN = {"created": b"", "begun": HEADER.encode()[:64], "whole": HEADER.encode()}
"""How far a process may have come with its draft, by the bytes of its header."""


@dataclass(eq=False)
class File:
    """A file of ours, under one name, two or none."""

    ino: int
    lives: int = 0
    """How many processes have it open."""


@dataclass(eq=False)
class Holder:
    """A process that has a file open."""

    file: File
    region: Region | None = None
    fd: int | None = None
    views: list = field(default_factory=list)

    def die(self):
        if self.fd is not None:
            os.close(self.fd)
        else:
            self.views.clear()
            self.region.close()
            self.region = None  # a mapping that had views in use goes with its last reference
        self.file.lives -= 1


class Regions(RuleBasedStateMachine):
    holders = Bundle("holders")

    def __init__(self):
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.folder = self.place.name
        self.names: dict[str, File] = {}
        self.alive: list[Holder] = []
        self.drafts = 0
        self.strangers = {path: fingerprint(path) for path in leave_foreign_things(self.folder)}

    def teardown(self):
        for holder in self.alive:
            holder.die()
        assert set(sweep(self.folder)) == set(self.names), "all are dead"
        self.place.cleanup()

    def added(self, file, **held):
        file.lives += 1
        self.alive.append(Holder(file, **held))
        return self.alive[-1]

    # -- processes -------------------------------------------------------------------------------

    @rule(target=holders, name=st.sampled_from(NAMES))
    def attach(self, name):
        path = region_path(name, self.folder)
        region = Region.attach(name, RECORD, SLOTS, SLOT, self.folder)
        file = self.names.get(path)
        if file is None or not file.lives:
            assert not any(region.view(0, SLOT, writable=False)), "a dead one's memory was joined"
            file = self.names[path] = File(os.stat(path).st_ino)
        region.view(0, 1, writable=True)[0] = 1
        return self.added(file, region=region)

    @rule(target=holders, name=st.sampled_from(NAMES))
    def open(self, name):
        path = region_path(name, self.folder)
        file = self.names.get(path)
        if file is not None and file.lives:
            return self.added(file, region=Region.open(name, self.folder))
        with pytest.raises(ConfigError, match="no live worker"):
            Region.open(name, self.folder)
        self.names.pop(path, None)  # what a dead one left there was removed
        return None

    @rule(holder=holders)
    def unlink(self, holder):
        """Takes its own name away, not that of whoever came after."""
        if holder in self.alive and holder.region is not None:
            holder.region.unlink()
            if self.names.get(holder.region.path) is holder.file:
                del self.names[holder.region.path]

    @rule(target=holders, holder=holders)
    def succeed(self, holder):
        if holder not in self.alive or holder.region is None:
            return None
        self.unlink(holder)
        successor = self.attach(os.path.basename(holder.region.path)[len("kvtiers-") : -7])
        self.unlink(holder)
        return successor

    @rule(holder=holders)
    def use(self, holder):
        if holder in self.alive and holder.region is not None:
            holder.views.append(holder.region.view(1, 1, writable=True))

    @rule(holder=consumes(holders))
    def die(self, holder):
        if holder in self.alive:
            self.alive.remove(holder)
            holder.die()

    @rule(
        target=holders,
        name=st.sampled_from(NAMES),
        how_far=st.sampled_from(sorted(WRITTEN)),
        linked=st.booleans(),
        lives=st.booleans(),
    )
    def stop_within_attach(self, name, how_far, linked, lives):
        """A process is somewhere on its way to a region, or was killed there."""
        path = region_path(name, self.folder)
        self.drafts += 1
        draft = f"{path}.{self.drafts}abcdefg.new"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.pwrite(fd, WRITTEN[how_far], 0)
        file = self.names[draft] = File(os.fstat(fd).st_ino)
        if how_far == "whole":
            os.ftruncate(fd, HEADER.file_bytes)
            if linked and path not in self.names:
                os.link(draft, path)
                self.names[path] = file
        if lives:
            return self.added(file, fd=fd)
        os.close(fd)
        return None

    @rule()
    def sweep(self):
        expected = sorted(path for path, file in self.names.items() if not file.lives)
        assert sweep(self.folder) == expected
        for path in expected:
            del self.names[path]

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def agrees(self):
        listed = {os.path.join(self.folder, name) for name in files(self.folder)}
        assert listed == self.names.keys() | self.strangers.keys()
        for path, file in self.names.items():
            assert os.stat(path).st_ino == file.ino, "another file has the name"
            assert dead(path) == (not file.lives)
        for path, was in self.strangers.items():
            assert fingerprint(path) == was, f"{path} is not ours to touch"
        for holder in self.alive:
            if holder.region is not None:
                holder.region.check()


def leave_foreign_things(folder):
    """What lies beside regions, some of it under names that they could have; their paths."""
    elsewhere = os.path.join(folder, "elsewhere")
    os.mkdir(elsewhere)
    with Region.attach("far", RECORD, SLOTS, SLOT, elsewhere) as region:
        far = region.path
    made = [elsewhere]
    for name, text in {
        "kvtiers-notes.region": b"somebody's notes",
        "kvtiers-empty.region": b"",
        "kvtiers-a.region.bak": HEADER.encode(),
        "kvtiers-a.region.new": b"no draft of ours is called so",
        "other.region": HEADER.encode(),
    }.items():
        made.append(os.path.join(folder, name))
        with open(made[-1], "wb") as file:
            file.write(text)
    for name, make in {
        "kvtiers-folder.region": os.mkdir,
        "kvtiers-fifo.region": os.mkfifo,
        "kvtiers-link.region": lambda path: os.symlink(far, path),
        "kvtiers-dangling.region": lambda path: os.symlink(far + ".gone", path),
    }.items():
        made.append(os.path.join(folder, name))
        make(made[-1])
    return made


def fingerprint(path):
    info = os.lstat(path)
    return info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, sorted(inside(path))


def inside(path):
    return os.listdir(path) if os.path.isdir(path) else ()


TestRegions = Regions.TestCase
TestRegions.settings = settings(max_examples=60, stateful_step_count=30)

"""The words of the simulated world, and a tier in it that does as it is told."""

from kvtiers.chunks import ChunkLayout, GroupLayout, Lookup, make_key
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import ChunksStored
from kvtiers.testing import content
from kvtiers.tiers.base import JobKind, JobOutcome, JobReleased

LAYOUT = ChunkLayout((GroupLayout(0, 32, 16), GroupLayout(1, 48, 16, keeps_every_chunk=False)))
KEYS = [make_key(bytes([n]) * 8, n % 2) for n in range(14)]
RIGHT = {key: content(key, LAYOUT.chunk_bytes(key)) for key in KEYS}
GARBAGE = {key: bytes([0xEE]) * LAYOUT.chunk_bytes(key) for key in KEYS}


class SimTier:
    """A tier with real bytes. A job stays in ``jobs`` while its memory may be touched."""

    medium = "STORAGE"

    def __init__(self, name, locality, wants):
        self.name, self.locality, self.wants = name, locality, wants
        self.stored = {}
        self.lost = set()
        """Chunks that it dropped behind everybody's back: nobody can know."""
        self.jobs = {}
        self.lingering = set()
        self.said = []
        """Every outcome so far, to be said again."""
        self.accepts, self.mode = True, "honest"
        self.raising = []
        self.told = []
        self._ended = []

    def lookup(self, keys, request):
        self._raise_if_told("lookup")
        if self.mode == "liar":
            return [Lookup.HIT] * len(keys)
        if self.mode == "mute":
            return [Lookup.RETRY] * len(keys)
        if self.mode == "talkative":
            return [Lookup.HIT] * (len(keys) + 1)
        return [Lookup.HIT if k in self.stored else Lookup.MISS for k in keys]

    def submit_store(self, job):
        return self._take(job)

    def submit_load(self, job):
        return self._take(job)

    def _take(self, job):
        self._raise_if_told("submit")
        if self.accepts:
            self.jobs[job.id] = job
        return self.accepts

    def get_finished_jobs(self):
        self._raise_if_told("finished")
        ended, self._ended = self._ended, []
        return ended

    def touch(self, keys):
        self._raise_if_told("touch")

    def drain_jobs(self, deadline_s):
        self.answer_all()
        return True

    def shutdown(self, deadline_s):
        self.accepts = False

    def on_new_request(self, request):
        return self.wants

    def on_request_finished(self, request):
        self._raise_if_told("touch")

    def on_schedule_end(self):
        self._raise_if_told("step")

    def has_pending_work(self):
        self._raise_if_told("pending")
        return bool(self.jobs.keys() - self.lingering)

    def take_events(self):
        self._raise_if_told("events")
        told, self.told = self.told, []
        return told

    def _raise_if_told(self, method):
        if self.raising and self.raising[-1] == method:
            self.raising.pop()
            raise RuntimeError("told to raise")

    # -- what happens to it ----------------------------------------------------------------------

    def finish(self, job, failed=(), kind=Kind.IO):
        """Move the bytes of all but ``failed``, and report. Its memory is free from then on."""
        done = [k for i, k in enumerate(job.keys) if k not in failed and self._move(job, i)]
        errors = {k: KVTiersError("told to fail", kind=kind) for k in job.keys if k not in done}
        self._forget(job)
        self.report(JobOutcome(job.id, tuple(done), errors, 1, 0.001))

    def finish_oddly(self, job):
        """Leave keys out, and name one that is not in the job."""
        done = [k for i, k in enumerate(job.keys[:1]) if self._move(job, i)]
        self._forget(job)
        strangers = [k for k in KEYS if k not in job.keys][:1]
        self.report(JobOutcome(job.id, (*done, *strangers)))

    def time_out(self, job):
        """Report failure; the memory is in use until ``release``."""
        if job.id in self.lingering:
            return
        self.lingering.add(job.id)
        errors = {k: KVTiersError("late", kind=Kind.TIMEOUT) for k in job.keys}
        self.report(JobOutcome(job.id, (), errors, memory_in_use=True))

    def release(self, job):
        self._forget(job)
        self._ended.append(JobReleased(job.id))

    def end(self, job):
        """Whatever is due: an outcome, or after one the release."""
        if job.id in self.lingering:
            self.release(job)
        else:
            self.finish(job)

    def scribble(self, job):
        """Write a part of what is being loaded, or of anything else."""
        if job.kind is JobKind.LOAD:
            for key, view in zip(job.keys, job.views, strict=True):
                view[:] = GARBAGE[key]

    def report(self, ended):
        self.said.append(ended)
        self._ended.append(ended)

    def say_again(self, ended):
        self._ended.append(ended)

    def answer_all(self):
        for job in list(self.jobs.values()):
            self.end(job)

    def _move(self, job, i):
        key, view = job.keys[i], job.views[i]
        if job.kind is JobKind.STORE:
            self.told.append(ChunksStored(f"of {self.name}", (key,)))
            self.stored[key] = bytes(view)
            self.lost.discard(key)
            return True
        if key in self.stored:
            view[:] = self.stored[key]
        return key in self.stored

    def _forget(self, job):
        del self.jobs[job.id]
        self.lingering.discard(job.id)

    def check(self):
        for key, data in self.stored.items():
            assert data == RIGHT[key], f"{self.name} was given wrong bytes of {key.hex()}"
        for job in self.jobs.values():
            for key, view in zip(job.keys, job.views, strict=True):
                good = job.kind is JobKind.LOAD or bytes(view) == RIGHT[key]
                assert good, f"the memory of cascade {job.id} was reused under {self.name}"

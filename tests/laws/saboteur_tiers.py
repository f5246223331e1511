"""Deliberately broken tiers: each is put in front of an honest one, ours and a plain one."""

import ctypes
import threading

from kvtiers.tiers.addresses import address_of
from kvtiers.tiers.base import JobOutcome, JobReleased
from tests.laws.saboteurs import caught_by

TIERS: dict[type, str] = {}


@caught_by("T1", TIERS)
class FindsNothing:
    def lookup(self, keys, request):
        return [v.MISS for v in super().lookup(keys, request)]


@caught_by("T3", TIERS)
class AnswersTwice:
    last = ()

    def get_finished_jobs(self):
        ended = super().get_finished_jobs()
        again, self.last = self.last, tuple(ended)
        return [*again, *ended]


@caught_by("T3", TIERS)
class ForgetsAnOutcome:
    def get_finished_jobs(self):
        return super().get_finished_jobs()[1:]


@caught_by("T3", TIERS)
class IsDoneWithWhatFailed:
    def get_finished_jobs(self):
        return [self.lie(ended) for ended in super().get_finished_jobs()]

    def lie(self, ended):
        if isinstance(ended, JobReleased):
            return ended
        return ended._replace(done=(*ended.done, *ended.failed), failed={})


@caught_by("T4", TIERS)
class BlocksInSubmit:
    def submit_store(self, job):
        self.store.contains(job.keys)
        return super().submit_store(job)


@caught_by("T4", TIERS)
class AsksTheStoreInLookup:
    def lookup(self, keys, request):
        self.store.contains(keys)
        return super().lookup(keys, request)


@caught_by("T4", TIERS)
class AsksTheStoreInTouch:
    def touch(self, keys):
        self.store.contains(keys)
        super().touch(keys)


@caught_by("T5", TIERS)
class TouchesMemoryAfterItsOutcome:
    late = ()

    def submit_load(self, job):
        self.scribble()
        self.late = [(view.obj, address_of(view)) for view in job.views]
        return super().submit_load(job)

    def submit_store(self, job):
        self.scribble()
        return super().submit_store(job)

    def scribble(self):
        for _alive, at in self.late:
            ctypes.memset(at, 0, 1)


@caught_by("T5", TIERS)
class KeepsAnExportOfItsJobs:
    kept = []

    def submit_load(self, job):
        self.kept.append(job.views[0][:1])
        return super().submit_load(job)


@caught_by("T6", TIERS)
class FailsTheNeighbours:
    def get_finished_jobs(self):
        return [self.spread(ended) for ended in super().get_finished_jobs()]

    def spread(self, ended):
        if isinstance(ended, JobReleased) or not ended.failed:
            return ended
        error = next(iter(ended.failed.values()))
        return ended._replace(done=(), failed=dict.fromkeys((*ended.failed, *ended.done), error))


@caught_by("T9", TIERS)
class IsAlwaysDrained:
    def drain_jobs(self, deadline_s):
        super().drain_jobs(deadline_s)
        return True


@caught_by("T10", TIERS)
class NeverGivesUp:
    def _expire(self, now):
        pass


@caught_by("T10", TIERS)
class LetsGoTooEarly:
    def get_finished_jobs(self):
        ended = [e for e in super().get_finished_jobs() if isinstance(e, JobOutcome)]
        return [e._replace(memory_in_use=False) for e in ended]


@caught_by("T13", TIERS)
class InventsAMedium:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.medium = "TAPE"


@caught_by("T13", TIERS)
class HasHalfAHook:
    def on_new_request(self, request):
        raise NotImplementedError


@caught_by("T14", TIERS)
class SaysNothing:
    def take_events(self):
        super().take_events()
        return []


@caught_by("T14", TIERS)
class SaysEverythingTwice:
    def take_events(self):
        return [event for event in super().take_events() for _ in range(2)]


@caught_by("T15", TIERS)
class TakesAfterShutdown:
    def submit_store(self, job):
        super().submit_store(job)
        return True


@caught_by("T15", TIERS)
class LeaksALaneOnShutdown:
    def shutdown(self, deadline_s):
        super().shutdown(deadline_s)
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


@caught_by("T16", TIERS)
class WaitsInShutdown:
    def shutdown(self, deadline_s):
        super().shutdown(60)

"""Whoever keeps state has ``check()``, or a reason why not; and each check can fail."""

import ast
import io
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvtiers
from kvtiers.chunks import Lookup
from kvtiers.demo.progress import Progress
from kvtiers.device.copier import CopyOutcome, Outcomes
from kvtiers.device.cuda_copier import CudaCopier
from kvtiers.device.streams import CudaDevice
from kvtiers.engines.vllm.manager import VllmManager
from kvtiers.engines.vllm.offers import Declined
from kvtiers.engines.vllm.pace import Pace
from kvtiers.engines.vllm.scheduler import KVTiersScheduler
from kvtiers.engines.vllm.worker import KVTiersWorker
from kvtiers.errors import Kind, KVTiersError
from kvtiers.events import Hop, TransferFinished, TransferStarted
from kvtiers.host.pretouch import PageToucher
from kvtiers.metrics import Metrics
from kvtiers.tiers.fs.scratch import Scratch
from kvtiers.tiers.lanes import Inbox, Lanes
from kvtiers.tiers.rechecking import Rechecks
from kvtiers.tiers.scanning import StartUpScan
from tests.model.simulation import Simulation
from tests.unit.tiers.tier_kit import Bench, ScriptedStore, key

PACKAGE = Path(kvtiers.__file__).parent
CONTRACTS = PACKAGE.parents[1] / "docs" / "contracts.md"

# -- every object that keeps state ----------------------------------------------------------------

_BUILDERS = ("__init__", "__post_init__", "__setattr__")
_CHANGES = {"add", "append", "clear", "difference_update", "discard", "extend", "insert"}
_CHANGES |= {"move_to_end", "pop", "popitem", "popleft", "remove", "setdefault", "update"}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(PACKAGE)), node


def methods(cls: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in cls.body if isinstance(node, ast.FunctionDef)]


def changed(node: ast.AST) -> list[ast.expr]:
    """What a statement or call changes, as far as can be seen."""
    if isinstance(node, ast.Assign | ast.Delete):
        return [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr in _CHANGES else []
    return []


def is_of_self(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript | ast.Attribute):
        if isinstance(node.value, ast.Name):
            return isinstance(node, ast.Attribute) and node.value.id == "self"
        node = node.value
    return False


def keeps_state(cls: ast.ClassDef) -> bool:
    """Whether a method other than its builders changes an attribute, or something in one."""
    later = [m for m in methods(cls) if m.name not in _BUILDERS]
    return any(is_of_self(e) for m in later for node in ast.walk(m) for e in changed(node))


def table(heading: str) -> set[str]:
    """The first column of the table below a heading of contracts.md."""
    below = CONTRACTS.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    return {name for row in re.findall(r"^\| (`.+?) \|", below, re.M) for name in row.split(", ")}


def test_every_object_that_keeps_state_has_a_check_or_a_reason():
    with_check = {n.name for _, n in classes() if any(m.name == "check" for m in methods(n))}
    stateful = {n.name for _, n in classes() if keeps_state(n)}
    contracts = {n.name for _, n in classes() if "Protocol" in map(ast.unparse, n.bases)}
    bases = {n.name: {ast.unparse(b) for b in n.bases} for _, n in classes()}
    inherit = {name for name in stateful if bases[name] & with_check}
    assert table("Objects with `check()`") == {f"`{n}`" for n in with_check - contracts}
    assert table("Objects without") == {f"`{n}`" for n in stateful - with_check - inherit}


# -- each check can fail --------------------------------------------------------------------------


def broken(why):
    """A check finds what is broken; under ``python -O`` it looks for nothing."""
    return pytest.raises(AssertionError, match=why) if __debug__ else nullcontext()


def first(_):
    return 0


def promoting():
    """A simulation in which a request waits for the end of the step that promotes its chunks."""
    simulation = Simulation()
    simulation.new_request(first)
    asking = simulation.requests[0]
    simulation.tiers[0].stored.update(dict.fromkeys(asking.prompt, b""))
    assert simulation.manager.lookup(asking.prompt[0], asking.handle) is Lookup.HIT_PENDING
    return simulation.manager._promotions, asking.handle


def test_promotions_count_what_is_on_the_way():
    promotions, request = promoting()
    promotions.check()
    assert "1 chunks" in repr(promotions)
    request.promoting += 1
    with broken("2 chunks are promoted for r1, 1 are on the way"):
        promotions.check()


def test_promotions_gather_slots_that_are_filled():
    promotions, _ = promoting()
    promotions._index.fetching.clear()
    with broken("not in the slot"):
        promotions.check()


def test_a_fence_ends():
    attached = Simulation().manager.tiers[0]
    attached.now = 100.0
    attached._fenced_until = 131.0
    with broken("fenced for longer"):
        attached.check()


def test_metrics_see_a_job_end_once():
    metrics = Metrics()
    metrics(TransferStarted(Hop.CASCADE, "1:fs", 3))
    metrics.check()
    assert repr(metrics) == "<Metrics 0 counters, 1 jobs in flight>"
    metrics(TransferFinished(Hop.CASCADE, "1:fs", 3, 0, 1, 0.1))
    metrics.check()
    metrics(TransferFinished(Hop.CASCADE, "1:fs", 3, 0, 1, 0.1))
    with broken("cascade of 1:fs: -1 jobs with -3 chunks"):
        metrics.check()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda taken: taken.done.append(key(1)), "has ended and is under way"),
        (lambda taken: taken.pieces.clear(), "not all there"),
        (lambda taken: taken.failed.update({key(9): None}), "not all there"),
    ],
)
def test_a_job_divides_its_chunks(change, why):
    store = ScriptedStore()
    let_go = store.hold("write")
    with Bench(store) as bench:
        assert bench.tier.submit_store(bench.store_job(1, 2))
        (taken,) = bench.tier._jobs.values()
        before = set(taken.pieces)
        taken.check()
        change(taken)
        with broken(why):
            taken.check()
        taken.done.clear()
        taken.failed.clear()
        taken.pieces |= before
        let_go.set()


def test_a_chunk_is_not_done_and_failed():
    with Bench(ScriptedStore()) as bench:
        outcome = bench.run(bench.store_job(1))
        assert outcome.done == (key(1),)
        assert bench.tier.submit_load(bench.load_job(1))
        (taken,) = bench.tier._jobs.values()
        taken.done.append(key(1))
        taken.failed[key(1)] = KVTiersError("x", kind=Kind.IO)
        with broken("done and failed"):
            taken.check()
        taken.done.clear()
        taken.failed.clear()


def test_a_complete_scan_is_over():
    scan = StartUpScan("1:fs", 10.0)
    scan.begin(ScriptedStore(), Inbox(), lambda: 0.0)
    scan.check()
    scan.complete = True
    with broken("a piece is under way"):
        scan.check()


def test_no_more_is_asked_for_than_there_is():
    rechecks = Rechecks(ScriptedStore(), list, Inbox(), lambda: 0.0, 10.0, 1.0)
    rechecks.check()
    assert repr(rechecks) == "<Rechecks 0 of 0 asked for>"
    rechecks._asked = 1
    with broken("more was asked for"):
        rechecks.check()


def test_no_lane_is_lost():
    lanes = Lanes(1, 1, 1, "test")
    lanes.check()
    lost = lanes._lanes.pop()
    with broken("a lane is missing"):
        lanes.check()
    lanes._lanes.append(lost)
    lanes.stop()
    assert lanes.join(20)


def test_a_scratch_folder_is_locked_while_it_is_open(tmp_path):
    scratch = Scratch(str(tmp_path))
    scratch.check()
    os.close(scratch._lock)
    with pytest.raises(AssertionError, match="its lock was closed"):
        scratch.check()
    scratch._lock = None
    scratch.check()


def test_pinned_memory_is_mapped():
    device = CudaDevice(torch.device("cuda", 0))
    device.check()
    device._registered.append(4096)
    with broken("unmapped, but still pinned"):
        device.check()


def test_a_closed_copier_has_no_unfinished_jobs():
    copier = CudaCopier.__new__(CudaCopier)
    copier._jobs, copier._closed = {1: SimpleNamespace(id=1)}, False
    copier._outcomes = Outcomes()
    copier.check()
    copier._closed = True
    with broken("a closed copier has unfinished jobs"):
        copier.check()
    copier._jobs[2] = copier._jobs.pop(1)
    with broken("under another's id"):
        copier.check()


def test_no_more_outcomes_are_left_than_jobs_ended():
    outcomes = Outcomes()
    outcomes.add(CopyOutcome(1, True, 0, 0.0))
    outcomes.check()
    assert repr(outcomes) == "<Outcomes: 1 done, 0 failed, 1 not taken>"
    outcomes._done -= 1
    with broken("1 outcomes of 0 jobs are left"):
        outcomes.check()


def test_no_more_is_touched_than_there_is():
    toucher = PageToucher(memoryview(bytearray(10)), touch=len)
    toucher.wait()
    toucher.check()
    toucher.touched += 1
    with broken("more was touched than there is"):
        toucher.check()


def test_progress_stays_within_its_total():
    progress = Progress(2, io.StringIO())
    progress.advance(5)
    progress.check()
    progress._done = 3
    with broken("3 of 2"):
        progress.check()


def test_declined_chunks_wait_for_an_epoch_that_comes():
    declined = Declined({0: 1}, epoch=3)
    declined.again({0: 1}, 5)
    declined.check(5)
    with broken("to come"):
        declined.check(4)
    declined.patience = 3
    with broken("double"):
        declined.check(5)


def vllm_manager(**state):
    manager = VllmManager(
        Simulation().manager,
        clock=lambda: 0.0,
        stats=None,
        events=None,
        sink=lambda event: None,
        on_shutdown=lambda: None,
    )
    for name, value in state.items():
        setattr(manager, name, value)
    return manager


def test_the_vllm_manager_awaits_no_flush_for_ever():
    vllm_manager(_orphans=[1], _orphan_steps=2).check()
    manager = vllm_manager(_orphans=[1], flushes_are_reported=False)
    with broken("nobody will report"):
        manager.check()
    manager.inert = True
    manager.check()
    with broken("declined nothing"):
        vllm_manager(_declined={"r": []}).check()


def vllm_scheduler(**state):
    scheduler = KVTiersScheduler.__new__(KVTiersScheduler)
    scheduler.manager = vllm_manager()
    scheduler._jobs = {}
    scheduler._pace = Pace()
    for name, value in {"_declined": {}, "_stale_reports": {}, "_failed_loads": set()}.items():
        setattr(scheduler, name, state.get(name, value))
    return scheduler


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"_declined": {"r": Declined({}, epoch=9)}}, "to come"),
        ({"_stale_reports": {1: 0}}, "in vain"),
        ({"_failed_loads": {1}}, "has ended"),
    ],
)
def test_the_vllm_scheduler_waits_for_what_will_come(state, why):
    vllm_scheduler().check()
    scheduler = vllm_scheduler(**state)
    with broken(why):
        scheduler.check()
    scheduler.manager.inert = True
    scheduler.check()


def test_the_vllm_worker_checks_what_copies_for_it():
    def check():
        raise AssertionError("refused twice")

    worker = KVTiersWorker.__new__(KVTiersWorker)
    worker.worker = SimpleNamespace(check=check)
    with pytest.raises(AssertionError, match="refused twice"):
        worker.check()

import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtiers.config import parse_config
from kvtiers.errors import ConfigError
from kvtiers.tiers import TIER_TYPES, build_tier, check_tiers
from kvtiers.tiers.base import SecondaryTierManager
from kvtiers.tiers.runner import StoreTier
from tests.unit.tiers.tier_kit import LAYOUT, NAMESPACE, ManualClock

PLUGIN = """
from kvtiers.errors import ConfigError
from kvtiers.tiers.base import Capabilities
from kvtiers.tiers.options import RunnerOptions

class Store:
    capabilities = Capabilities(persistent=False, shared=False, scan=False)
    medium = "STORAGE"
    locality = "REMOTE"
    runner_options = RunnerOptions(n_read_threads=1, n_write_threads=1)
    def __init__(self, context, *, colour):
        self.context, self.colour = context, colour
    def write(self, items): return [None] * len(items)
    def read(self, items): return [None] * len(items)
    def close(self): pass

class Tier:
    name, medium, locality = "Tier", "STORAGE", "REMOTE"
    def __init__(self, context, **rest): self.context, self.rest = context, rest
    def lookup(self, key, request): return None
    def submit_store(self, job): return False
    def submit_load(self, job): return False
    def get_finished_jobs(self): return []
    def touch(self, keys): pass
    def drain_jobs(self, deadline): return True
    def shutdown(self, deadline): pass

class HalfATier:
    def __init__(self, context): pass
    def submit_store(self, job): return False

class Neither:
    def __init__(self, context): pass

class Undeclared(Store):
    capabilities = None

class Fails:
    def __init__(self, context): raise OSError("no route")

class Refuses:
    def __init__(self, context): raise ConfigError("the endpoint is unreachable")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "tier_plugin.py").write_text(PLUGIN)
    (tmp_path / "tier_broken.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    yield "tier_plugin"
    for name in ("tier_plugin", "tier_broken"):
        sys.modules.pop(name, None)


def build(options: dict[str, Any], position: int = 0) -> SecondaryTierManager:
    return build_tier(
        options,
        position,
        namespace=NAMESPACE,
        layout=LAYOUT,
        clock=ManualClock(),
        wall_clock=ManualClock(),
    )


def complaint(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fs(tmp_path: Path) -> None:
    tier = build(
        {
            "type": "fs",
            "root_dir": str(tmp_path),
            "eviction": "external",
            "locality": "REMOTE",
            "n_read_threads": 1,
        },
        2,
    )
    assert isinstance(tier, StoreTier)
    assert (tier.name, tier.label) == ("fs", "3:fs")
    assert (tier.medium, tier.locality) == ("STORAGE", "REMOTE")
    tier.shutdown(20)


def test_memory_with_events(caplog: pytest.LogCaptureFixture) -> None:
    options = {"type": "memory", "capacity_bytes": 1 << 20, "enable_kv_events": True}
    tier = build({**options, "backpressure": {}})
    assert tier.medium == "CPU"
    assert "1:memory: the option backpressure has no effect" in caplog.text
    tier.shutdown(20)


def test_built_in_types_are_told_what_is_wrong(tmp_path: Path) -> None:
    assert set(TIER_TYPES) == {"fs", "kv", "memory", "obj", "p2p"}
    assert "secondary_tiers[0].type is None" in complaint({})
    assert (
        "secondary_tiers[0].type is 'memry', which is no built-in tier: did you mean memory?"
        in (complaint({"type": "memry"}))
    )
    assert "needs module_path" in complaint({"type": "MyTier"})
    assert complaint({"type": "fs", "root_dir": str(tmp_path), "fsink": True}) == (
        "secondary_tiers[0].fsink is not a known option: did you mean fsync?"
    )
    assert "secondary_tiers[0].root_dir is missing" in complaint({"type": "fs"})
    assert "secondary_tiers[0].root_dir is empty" in complaint({"type": "fs", "root_dir": ""})
    assert (
        "secondary_tiers[0].capacity_bytes is '100GiB': give a whole number of bytes"
        in complaint({"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": "100GiB"})
    )
    assert "secondary_tiers[0].capacity_bytes is 1, less" in complaint(
        {"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": 1}
    )


def test_p2p_with_keys_of_vllms_own_tier(caplog: pytest.LogCaptureFixture) -> None:
    tier = build({"type": "p2p", "port": 0, "backends": ["UCX"], "unbound_store_timeout_s": 1})
    assert (tier.name, tier.medium, tier.locality) == ("p2p", None, "REMOTE")
    assert "1:p2p: the option unbound_store_timeout_s has no effect" in caplog.text
    tier.shutdown(20)


def test_p2p_is_refused_twice_and_without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [{"type": "p2p"}, {"type": "p2p", "port": 1}]
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\].type is p2p once more: one asks"):
        check_tiers(parse_config({"cpu_bytes_to_use": 1, "secondary_tiers": twice}).secondary_tiers)
    assert "secondary_tiers[0].prot is not a known option: did you mean port?" in complaint(
        {"type": "p2p", "prot": 1}
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert complaint({"type": "p2p"}) == (
        "secondary_tiers[0].type is p2p, which needs pyzmq: pip install 'kvtiers[p2p]'"
    )


def test_no_tool_imports_pyzmq_for_nothing() -> None:
    code = "import sys, kvtiers.cli, kvtiers.wiring; sys.exit('zmq' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


@pytest.mark.parametrize(
    "bound", [{"capacity_bytes": 1 << 60}, {"capacity_bytes": 1}, {"capacity_fraction": 1e-15}]
)
@pytest.mark.parametrize("layout", ["files", "log"])
def test_a_bound_that_is_refused_leaves_no_folder(
    tmp_path: Path, layout: str, bound: dict[str, Any]
) -> None:
    (key,) = bound
    options = {"type": "fs", "root_dir": f"{tmp_path}/a/b", "layout": layout, **bound}
    assert complaint(options).startswith(f"secondary_tiers[0].{key} ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", ["kv", "./kv", "../kv", "~nobody-of-this-name/kv"])
@pytest.mark.parametrize("layout", ["files", "log"])
def test_a_folder_that_depends_on_where_it_is_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, root: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"type": "fs", "root_dir": root, "layout": layout, "capacity_bytes": 1 << 30}
    with pytest.raises(ConfigError, match=r"\Asecondary_tiers\[0\].root_dir is .* absolute path"):
        build(options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_whoever_starts_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = build({"type": "fs", "root_dir": "~/kv", "capacity_bytes": 1 << 30})
    tier.shutdown(10.0)
    assert (tmp_path / "kv").is_dir()


def test_foreign_store_gets_a_runner(plugin: str) -> None:
    tier = build({"type": "Store", "module_path": plugin, "colour": "red"})
    assert isinstance(tier, StoreTier)
    assert (tier.name, tier.label, tier.medium, tier.locality) == (
        "Store",
        "1:Store",
        "STORAGE",
        "REMOTE",
    )
    assert tier.store.colour == "red"  # type: ignore[attr-defined]
    assert tier.store.context.namespace is NAMESPACE  # type: ignore[attr-defined]
    tier.shutdown(20)


def test_foreign_tier_is_used_as_it_is(plugin: str) -> None:
    tier = build({"type": "Tier", "module_path": plugin, "any": 1})
    assert tier.rest == {"any": 1}  # type: ignore[attr-defined]


def test_a_foreign_tier_knows_what_events_call_it(plugin: str) -> None:
    tier = build({"type": "Tier", "module_path": plugin}, position=2)
    assert tier.context.name == "Tier"  # type: ignore[attr-defined]
    assert tier.context.label == "3:Tier"  # type: ignore[attr-defined]


EARLY = [
    ({"type": "X", "module_path": "no.such"}, "[0].module_path is no.such, which cannot be"),
    ({"type": "X", "module_path": "tier_broken"}, "No module named 'no_such_module'"),
    ({"type": "X", "module_path": "tier_plugin"}, "[0].type is X, but tier_plugin has no"),
]
LATE = [
    ({"type": "X", "module_path": 3}, "[0].module_path is 3"),
    ({"type": "Neither", "module_path": "tier_plugin"}, "neither a SecondaryTierManager"),
    ({"type": "HalfATier", "module_path": "tier_plugin"}, "a tier that lacks name, medium"),
    ({"type": "Undeclared", "module_path": "tier_plugin", "colour": 1}, "does not declare"),
    ({"type": "Store", "module_path": "tier_plugin"}, "does not accept its options"),
    ({"type": "Store", "module_path": "tier_plugin", "size": 1}, "'size'"),
    ({"type": "Fails", "module_path": "tier_plugin"}, "could not be built: no route"),
    ({"type": "Refuses", "module_path": "tier_plugin"}, "[0]: the endpoint is unreachable"),
]


@pytest.mark.parametrize(("options", "expected"), EARLY + LATE)
def test_foreign_mistakes(plugin: str, options: dict[str, Any], expected: str) -> None:
    assert expected in complaint(options)


def check(*tiers: dict[str, Any]) -> None:
    check_tiers(parse_config({"cpu_bytes_to_use": 1, "secondary_tiers": tiers}).secondary_tiers)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *EARLY,
        ({"type": "memry"}, "[0].type is 'memry', which is no built-in tier: did you mean memory?"),
        ({"type": "fs"}, "[0].root_dir is missing"),
        ({"type": "fs", "root_dir": "/x", "fsink": True}, "[0].fsink is not a known option"),
        ({"type": "fs", "root_dir": "/x"}, "[0].capacity_bytes is missing: give a number"),
        ({"type": "memory", "capacity_bytes": 1, "n_read_threads": 0}, "[0].n_read_threads is 0"),
    ],
)
def test_the_same_refusal_before_anything_is_built(
    plugin: str, options: dict[str, Any], expected: str
) -> None:
    assert expected in complaint(options)
    with pytest.raises(ConfigError) as caught:
        check(options)
    assert str(caught.value) == complaint(options)


def test_checking_names_the_tier_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\]\.root_dir is missing"):
        check({"type": "memory", "capacity_bytes": 1 << 20}, {"type": "fs"})


def test_two_tiers_in_one_folder_are_refused(tmp_path: Path) -> None:
    first = {"type": "fs", "root_dir": str(tmp_path), "eviction": "external"}
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\]\.root_dir is .* of another fs"):
        check(first, {**first, "root_dir": f"{tmp_path}/x/.."})


def test_checking_builds_and_says_nothing(
    plugin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    threads = threading.active_count()
    check(
        {"type": "fs", "root_dir": str(folder), "capacity_bytes": 1 << 30, "backpressure": {}},
        {"type": "Fails", "module_path": plugin},
    )
    assert not folder.exists()
    assert threading.active_count() == threads
    assert caplog.text == ""


def test_a_traceback_says_the_sentence_once(plugin: str) -> None:
    for options in ({"type": "fs"}, {"type": "Fails", "module_path": plugin}):
        with pytest.raises(ConfigError) as caught:
            build(options)
        text = "".join(traceback.format_exception(caught.value))
        sentence = str(caught.value).removeprefix("secondary_tiers[0].")
        assert text.count(sentence) == 1
    assert "OSError: no route" in text, "the cause is kept"

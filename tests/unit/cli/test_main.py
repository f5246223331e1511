"""Calls: what is a wrong one, how commands end, and what they need installed."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from kvtiers.cli.table import COMMANDS
from tests.unit.cli.cli_kit import (
    KEYS,
    NAMESPACE,
    ROOT,
    Tier,
    good,
    kvtiers,
    process,
    process_of,
    write_json,
)

ALONE = ["why", "proxy", "index", "top", "dashboard", "demo"]
"""Commands that need more than a tier, or none: tested on their own."""
CONFIG = '{"cpu_bytes_to_use": 4194304}'


def calls(tier, tmp_path, prompt):
    """A good call of every command but those in ``ALONE``."""
    archive = tmp_path / "chunks.tar"
    return {
        "ls": ["ls", tier.url],
        "stat": ["stat", tier.url, "--tokens", prompt],
        "du": ["du", tier.url],
        "verify": ["verify", tier.url],
        "gc": ["gc", tier.url, "--max-bytes", "1GiB"],
        "export": ["export", tier.url, archive],
        "import": ["import", archive, Tier(tmp_path / "imported", tier.layout).new],
        "migrate": ["migrate", tier.url, Tier(tmp_path / "migrated", tier.layout).new],
        "warm": ["warm", tier.url, "--from-recent", "2", "-o", tmp_path / "hot.json"],
        "doctor": ["doctor", tier.url, "--config", CONFIG],
        "bench": ["bench", "tier", tier.url, "--chunk-bytes", "64KiB", "--total-bytes", "1MiB"],
        "keys": ["keys", "new", tmp_path / f"{len(os.listdir(tmp_path))}.key"],
    }


def test_every_command_has_a_good_call_here(tier, tmp_path, prompt):
    assert [c.name for c in COMMANDS] == [*calls(tier, tmp_path, prompt), *ALONE]


@pytest.mark.parametrize("name", [c.name for c in COMMANDS if c.name not in ALONE])
def test_each_as_an_operator_calls_it(tier, tmp_path, prompt, name):
    words = calls(tier, tmp_path, prompt)
    if name == "import":
        good(kvtiers(*words["export"]))
    ran = good(process(*words[name], "--json"))
    assert isinstance(ran.json, dict)
    assert ran.json["warnings"] == []


@pytest.mark.parametrize("module", ["kvtiers", "kvtiers.cli"])
def test_it_is_a_module_of_python_too(module):
    ran = good(process_of([sys.executable, "-m", module, "--version"]))
    assert ran.out == f"kvtiers {version('kvtiers')}\n"
    assert process_of([sys.executable, "-m", module]).status == 2


def test_the_same_for_people(tier, tmp_path, prompt):
    for words in calls(tier, tmp_path, prompt).values():
        ran = good(kvtiers(*words))
        assert ran.out.endswith("\n")
        assert not ran.out.startswith("{")


NEEDS_NOTHING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "numpy"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refuse())
import json
from kvtiers.cli import main
for words in json.load(sys.stdin):
    status = main(words)
    if status:
        sys.exit(f"{words} ended with {status}")
loaded = {name.partition(".")[0] for name in sys.modules} & {"vllm", "torch", "numpy"}
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""


def test_no_command_needs_an_engine(tier, tmp_path, prompt):
    words = [[str(word) for word in call] for call in calls(tier, tmp_path, prompt).values()]
    ran = subprocess.run(
        [sys.executable, "-c", NEEDS_NOTHING],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=100,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


WRONG = [
    ["lss"],
    ["\x1b[31mls"],
    ["ls"],
    ["ls", "/var/x"],
    ["ls", "fs:///absent/folder"],
    ["ls", "URL", "--nonsense"],
    ["ls", "URL", "--limit", "0"],
    ["ls", "URL", "--limit", "x"],
    ["ls", "URL", "--namespace", "ffffffffff"],
    ["ls", "URL", "--namespace", "../.."],
    ["ls", "URL?capcity=1"],
    ["du", "URL?capacity=many"],
    ["stat", "URL"],
    ["stat", "URL", "ff", "--tokens", "x"],
    ["stat", "URL", "zz"],
    ["stat", "URL", "ffffffffffffff"],
    ["stat", "URL", "--tokens", "/absent"],
    ["stat", "URL", "--tokens", "/dev/null"],
    ["stat", "URL", "--tokens", "PROMPT", "--hash", "md5"],
    ["verify", "URL", "--dry-run"],
    ["gc", "URL", "--max-bytes", "much"],
    ["gc", "URL", "--older-than", "long"],
    ["gc", "URL", "--older-than", "-1d"],
    ["gc", "URL", "--max", "0"],
    ["export", "URL"],
    ["export", "URL", "PROMPT"],
    ["import", "/absent.tar", "URL"],
    ["import", "PROMPT", "URL"],
    ["import", "FOLDER", "URL"],
    ["migrate", "URL", "URL"],
    ["migrate", "URL", "URL/"],
    ["migrate", "URL"],
    ["warm", "URL", "-o", "x"],
    ["warm", "URL", "--from-recent", "0", "-o", "x"],
    ["warm", "URL", "--from-recent", "2"],
    ["doctor", "--config", "{"],
    ["doctor", "--config", "/absent"],
    ["doctor", "--config", "PROMPT"],
    ["doctor", "--config", '{"cpu_bytes": 1}'],
    ["doctor", "fs:///x?zz=1"],
    ["doctor", "--chunk-bytes", "1000"],
    ["bench", "URL"],
    ["bench", "disk", "URL"],
    ["bench", "tier", "URL", "--chunk-bytes", "1000"],
    ["bench", "tier", "URL", "--total-bytes", "1"],
    ["bench", "tier", "URL", "--total-bytes", "1PiB"],
]


def test_it_says_its_version():
    ran = good(kvtiers("--version"))
    assert ran.out == f"kvtiers {version('kvtiers')}\n"


def test_who_calls_it_alone_is_shown_the_commands():
    ran = kvtiers()
    assert (ran.status, ran.out) == (2, "")
    for command in COMMANDS:
        assert re.search(rf"^    {command.name}\s", ran.err, re.MULTILINE)
        assert command.summary in " ".join(ran.err.split())


@pytest.mark.parametrize("words", WRONG, ids=lambda words: " ".join(map(repr, words)))
def test_a_wrong_call_gets_one_sentence(tier, prompt, tmp_path, words):
    before = tier.image()
    stand_for = {"PROMPT": str(prompt), "FOLDER": str(tmp_path)}
    ran = kvtiers(*(stand_for.get(w, w.replace("URL", tier.url)) for w in words))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("kvtiers")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    assert ran.err.rstrip("\n").isprintable()
    assert tier.image() == before


def test_a_wrong_call_is_one_for_operators_too(tier):
    ran = process("gc", tier.url, "--max-byte", "0")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == ("kvtiers: unrecognized arguments: --max-byte 0; see kvtiers --help\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_help_has_an_example(command):
    ran = good(kvtiers(command.name, "--help"))
    assert command.example in " ".join(ran.out.split())
    assert "kvtiers ls fs:///" in good(kvtiers("--help")).out


def test_the_examples_are_calls(tmp_path):
    """Each is understood: what they miss is the folder, not the words."""
    for command in COMMANDS[: -len(ALONE)]:
        name, *words = command.example.split()[1:]
        ran = kvtiers(name, *(w.replace("/var/cache/kvtiers", "/absent/kvtiers") for w in words))
        assert "usage" not in ran.err + ran.out
        assert "unrecognized" not in ran.err
        assert ran.status == 2, ran.err


class Interrupted:
    """A stdin that somebody waits at in vain."""

    def __init__(self, act):
        self.buffer = self
        self._act = act

    def read(self, count):
        self._act()


def press_ctrl_c():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("act", [press_ctrl_c, terminate])
def test_a_signal_ends_it_quietly(tier, monkeypatch, act):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "stdin", Interrupted(act))
    ran = kvtiers("stat", tier.url, "--tokens", "-")
    assert (ran.status, ran.out, ran.err) == (130, "", "")
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["verify"]])
def test_a_reader_that_went_away_is_no_error(tier, words):
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "kvtiers.cli", *words, tier.url],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=100,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["verify"], ["nonsense"]])
@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_stream_that_is_closed_changes_nothing_else(tier, closed, words):
    words = [sys.executable, "-m", "kvtiers.cli", *words, tier.url]
    as_usual = process(*words[3:])
    ran = process_of(["sh", "-c", f'exec "$@" {closed}>&-', "sh", *words])
    kept = (as_usual.out, "") if closed == "2" else ("", as_usual.err)
    assert (ran.status, ran.out, ran.err) == (as_usual.status, *kept)


def test_what_nobody_thought_of_is_one_line_unless_asked(tier, monkeypatch):
    def fail(arguments, output):
        raise RuntimeError("with\ntwo \x1b[31mlines")

    monkeypatch.setattr("kvtiers.cli.commands.ls.run", fail)
    ran = kvtiers("ls", tier.url)
    assert (ran.status, ran.err) == (1, "kvtiers ls: RuntimeError: with two \\x1b[31mlines\n")
    with pytest.raises(RuntimeError):
        kvtiers("ls", tier.url, "--debug")


def test_tokens_come_from_stdin_too(tier, prompt):
    with prompt.open() as stdin:
        ran = good(process("stat", tier.url, "--tokens", "-", "--json", stdin=stdin))
    assert {n["loadable_tokens"] for n in ran.json["namespaces"]} == {64, 32}


def on_a_terminal(*words):
    """JSON on stdout, and what a terminal shows of stderr."""
    mine, theirs = os.openpty()
    ran = subprocess.run(
        [sys.executable, "-m", "kvtiers.cli", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"},
        timeout=100,
    )
    os.close(theirs)
    shown = os.read(mine, 1 << 16).decode()
    os.close(mine)
    assert ran.returncode == 0
    return json.loads(ran.stdout), shown


def test_progress_is_for_terminals_and_never_on_stdout(tier):
    document, shown = on_a_terminal("verify", tier.url)
    assert document["chunks"] == 6
    assert "reading" in shown


@pytest.mark.parametrize(
    ("words", "doing"),
    [
        (["ls", "URL"], "looking"),
        (["ls", "URL", "--chunks"], "looking"),
        (["stat", "URL", KEYS[3].hex()], "looking"),
        (["du", "URL"], "counting"),
        (["warm", "URL", "--from-recent", "2", "-o", "HOT"], "looking"),
    ],
)
def test_whoever_walks_a_tier_shows_that_it_goes_on(tier, tmp_path, words, doing):
    known = {"URL": tier.url, "HOT": str(tmp_path / "hot.json")}
    _, shown = on_a_terminal(*(known.get(word, word) for word in words))
    assert doing in shown


def test_gc_says_at_a_terminal_that_it_may_wait(tier):
    """Of a log there is no engine beside it; otherwise it keeps quiet: see the good calls."""
    _, shown = on_a_terminal("gc", tier.url, "--max-bytes", "1GiB")
    assert ("waits 10 s" in shown) == (tier.layout == "files")
    _, shown = on_a_terminal("gc", tier.url, "--max-bytes", "0", "--dry-run")
    assert "waits" not in shown


@pytest.mark.parametrize("name", ["ls", "du", "verify"])
def test_an_empty_folder_has_nothing_and_stays_empty(tmp_path, name):
    good(kvtiers(name, f"fs://{tmp_path}"))
    assert list(tmp_path.iterdir()) == []


def test_the_beginning_of_a_namespace_is_enough_if_there_is_one(tier):
    ran = good(kvtiers("ls", tier.url, "--namespace", NAMESPACE.id[:6], "--json"))
    assert [n["namespace"] for n in ran.json["namespaces"]] == [NAMESPACE.id]
    (tier.root / (NAMESPACE.id[:6] + "0" * 26)).mkdir()
    ran = kvtiers("ls", tier.url, "--namespace", NAMESPACE.id[:6])
    assert ran.status == 2
    assert f"2 namespaces begin with {NAMESPACE.id[:6]}" in ran.err


def test_a_full_document_is_one_document(tier, tmp_path):
    write_json(tmp_path / "x", [])
    ran = good(kvtiers("ls", tier.url, "--chunks", "--json"))
    assert {c["key"] for c in ran.json["chunks"]} >= {k.hex() for k in KEYS}

import json

import pytest

from bench import lines
from bench.__main__ import PARTS, as_json, run
from bench.machine import describe, file_system

PRINTED = """\
NOTE machine {"cores": 2}
MODE ttft.disk O_DIRECT
TIME ttft.host 12.5 ms
RATIO ttft.host 1.250
SPREAD RATIO ttft.host 1.200 1.300
RATIO manager.store_evict 3.5
FLAT manager.store_evict 3.5
LIMIT fs.files.write.2MiB 0.97
something else
""".splitlines()


def test_figures_and_quartiles_are_read_back():
    found = lines.figures_in(PRINTED)
    assert [str(f) for f in found] == [
        "RATIO ttft.host 1.250",
        "RATIO manager.store_evict 3.500",
        "FLAT manager.store_evict 3.500",
        "LIMIT fs.files.write.2MiB 0.970",
    ]
    assert lines.spreads_in(PRINTED) == {"RATIO ttft.host": (1.2, 1.3)}
    assert ("TIME", "ttft.host", "12.5 ms") in lines.remarks_in(PRINTED)
    assert [line for line in PRINTED if not lines.is_ours(line)] == ["something else"]


def test_goals_are_compared_the_right_way_round():
    reached = {f"{f.kind} {f.name}": f.reached for f in lines.figures_in(PRINTED)}
    assert reached == {
        "RATIO ttft.host": False,
        "RATIO manager.store_evict": True,
        "FLAT manager.store_evict": False,
        "LIMIT fs.files.write.2MiB": True,
    }
    assert lines.table(lines.figures_in(PRINTED)).count("missed") == 2


def test_a_figure_like_another_one_does_not_take_its_goal():
    assert lines.Figure("RATIO", "manager.store_evict_1m", 1.0).goal is None
    assert lines.Figure("RATIO", "fs.files.read.4MiB", 0.9).goal == (">=", 0.95)


def test_the_median_is_printed_with_its_quartiles(capsys):
    lines.median_of("RATIO", "manager.load", [5.0, 1.0, 3.0, 2.0, 4.0])
    assert capsys.readouterr().out == (
        "RATIO manager.load 3.000\nSPREAD RATIO manager.load 2.000 4.000\n"
    )


def test_json_holds_machine_figures_remarks_and_failures(tmp_path):
    written = json.loads(json.dumps(as_json(describe(str(tmp_path)), PRINTED, ["x"], 1.0)))
    assert written["machine"].keys() >= {
        "cpu",
        "cores",
        "memory_gib",
        "kernel",
        "file_system",
        "python",
        "vllm",
        "load_average",
    }
    host = written["figures"][0]
    assert host == {
        "kind": "RATIO",
        "name": "ttft.host",
        "value": 1.25,
        "quartiles": [1.2, 1.3],
        "goal": "<= 1.1",
        "reached": False,
    }
    assert {"kind": "MODE", "name": "ttft.disk", "text": "O_DIRECT"} in written["remarks"]
    assert written["failed"] == ["x"]


def test_the_file_system_of_a_folder_that_is_not_there_yet_is_its_parents():
    assert file_system("/proc/nowhere").startswith("proc on ")


def test_a_module_that_fails_is_told_with_what_it_said(capsys):
    printed, code = run(["bench.no_such_part"])
    assert (printed, code) == ([], 1)
    assert "no_such_part" in capsys.readouterr().err


@pytest.mark.parametrize("part", PARTS)
def test_each_part_names_modules_that_are_there(part):
    from argparse import Namespace
    from importlib.util import find_spec

    for tiny in (False, True):
        for module, *_ in PARTS[part](Namespace(tiny=tiny, root="/tmp", model=None)):
            assert find_spec(module)

import json
from dataclasses import replace

from kvtiers.demo.plan import Mode
from kvtiers.demo.plot import plot_records, plot_sweep
from kvtiers.demo.report import summary_table, turn_tables, write_json
from kvtiers.demo.verdict import judge

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_table_a_pass_with_a_line_a_turn_and_the_total(samples):
    tables = turn_tables(samples.good_records()).split("\n\n")
    assert len(tables) == len(Mode)
    lines = tables[list(Mode).index(Mode.DISK)].splitlines()
    header = "host + disk first token computed device host disk answer"
    assert lines[0].split() == header.split()
    assert len(lines) == 2 + 8 + 1
    assert " ".join(lines[-1].split()) == "total 8.600 s 2600 600 1800 3000 8 of 8 same"
    assert sum("(restarted)" in line for line in lines) == 2


def test_columns_line_up(samples):
    for table in turn_tables(samples.good_records()).split("\n\n"):
        assert len({len(line) for line in table.splitlines()}) == 1


def test_an_answer_that_differs_is_shown(samples):
    def other(turn):
        return replace(turn, answer="?") if turn.turn == 3 else turn

    tables = turn_tables(samples.change(samples.good_records(), Mode.HOST, other))
    assert tables.count("differs") == 2
    assert "6 of 8 same" in tables


def test_summary_covers_the_turns_from_the_second_on(samples):
    lines = summary_table(samples.good_records()).splitlines()
    row = next(line for line in lines if line.startswith("host tier"))
    assert " ".join(row.split()) == "host tier 0.400 s 5.0x 600 600 4800 - 6 of 6 same"


def test_json_holds_verdict_turns_and_machine(samples, tmp_path):
    records = samples.good_records()
    write_json(tmp_path / "demo.json", records, judge(records))
    document = json.loads((tmp_path / "demo.json").read_text())
    assert document["result"] == "ok"
    assert document["machine"]["cpus"] >= 1
    disk = document["passes"]["disk"]
    assert disk["tokens"] == {
        "computed": 2600,
        "device": 600,
        "host": 1800,
        "disk": 3000,
        "other": 0,
    }
    assert len(disk["turns"]) == 8
    assert all(turn["same_as_reference"] for turn in disk["turns"])
    assert [t["first_after_restart"] for t in disk["turns"]].count(True) == 2


def test_pictures_are_written(samples, tmp_path):
    plot_records(tmp_path / "demo.png", samples.good_records())
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)
    rates = {Mode.NONE: [3.0, 1.0], Mode.HOST: [3.0, 2.5]}
    plot_sweep(tmp_path / "sweep.png", ["small", "large"], rates)
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)

"""``kvtiers dashboard``: files that Grafana reads as they are."""

import json

from kvtiers.cli import main


def test_the_dashboard_on_stdout(capsys):
    assert main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "kvtiers"


def test_provisioning_names_the_folder_of_the_dashboard(tmp_path, capsys):
    assert main(["dashboard", "--output", str(tmp_path / "a b")]) == 0
    provider = json.loads((tmp_path / "a b/provisioning/dashboards/kvtiers.yaml").read_text())
    assert provider["apiVersion"] == 1
    folder = provider["providers"][0]["options"]["path"]
    assert [p.name for p in (tmp_path / "a b/dashboards").iterdir()] == ["kvtiers.json"]
    assert folder == str(tmp_path / "a b/dashboards")
    assert "GF_PATHS_PROVISIONING" in capsys.readouterr().out
    assert not (tmp_path / "a b/provisioning/datasources").exists()


def test_a_second_run_writes_the_same(tmp_path, capsys):
    for _ in range(2):
        assert main(["dashboard", "--output", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.split("}\n")[0] + "}")["files"]) == 2


def test_another_path_in_the_container_and_a_source(tmp_path):
    words = ["--seen-as", "/etc/kvtiers", "--prometheus", "http://prometheus:9090"]
    assert main(["dashboard", "--output", str(tmp_path), *words]) == 0
    provider = json.loads((tmp_path / "provisioning/dashboards/kvtiers.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/etc/kvtiers/dashboards"
    source = json.loads((tmp_path / "provisioning/datasources/kvtiers.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["dashboard", "--output", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.count("\n") == 1

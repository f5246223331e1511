import pytest

from kvtiers.cli import main
from kvtiers.demo.tiers import tier_at
from kvtiers.errors import ConfigError
from kvtiers.tiers.kv import KvOptions
from kvtiers.tiers.options import parse


def test_a_run_on_a_server_has_names_of_its_own_that_leave_by_themselves():
    assert tier_at("redis://h:1/2?prefix=mine", "7") == {
        "type": "kv",
        "url": "redis://h:1/2",
        "prefix": "mine:demo-7",
        "ttl_s": 3600,
    }
    assert tier_at("valkeys+cluster://a,b?ttl_s=60", "7") == {
        "type": "kv",
        "url": "valkeys+cluster://a,b",
        "prefix": "kvtiers:demo-7",
        "ttl_s": 60,
    }


def test_the_options_are_those_of_the_tier():
    url = "unix:///run/s?db=3&prefix=p&capacity=1KiB&username=u"
    entry = tier_at(url, "7")
    options = parse(KvOptions, {k: v for k, v in entry.items() if k != "type"})
    assert (options.url, options.capacity_bytes) == ("unix:///run/s?db=3", 1024)
    assert options.username == "u"
    entry = tier_at("rediss://h?tls_check_hostname=off", "7")
    assert entry["tls_check_hostname"] is False


def test_another_kind_of_tier_gets_a_folder_of_this_run(tmp_path):
    entry = tier_at(f"fs://{tmp_path}/kv?capacity=1GiB", "7")
    assert (entry["type"], entry["root_dir"]) == ("fs", f"{tmp_path}/kv/demo-7")
    assert entry["capacity_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis://h?prefx=x", "unknown parameter 'prefx', did you mean prefix?"),
        ("redis://h?ttl_s=soon", "ttl_s is 'soon': give a number of seconds"),
        ("redis://:hunter2@h", "leave them to the environment"),
        ("redis://h?prefix={}", "prefix is '{}'"),
        ("nfs://h/x", "nfs"),
    ],
)
def test_what_is_refused(url, complaint):
    with pytest.raises(ConfigError) as refused:
        tier_at(url, "7")
    assert complaint in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_what_is_spoilt_on_purpose_is_the_demos_own(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8}'
    )
    options = ["--model", str(model), "--output", str(tmp_path), "--tier", "redis://h"]
    assert main(["demo", *options, "--break", "disk"]) == 1
    assert "leave out --tier" in capsys.readouterr().out.splitlines()[-1]

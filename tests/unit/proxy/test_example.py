"""The deployment for llm-d: what of it can be checked without a cluster."""

import json
from pathlib import Path

import pytest
import yaml

from kvtiers.config import parse_config
from kvtiers.tiers.options import parse
from kvtiers.tiers.p2p.options import P2POptions

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def deployments():
    found = list(yaml.safe_load_all((DOCS / "examples" / "llm-d.yaml").read_text()))
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found}


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_engines_take_the_configuration_and_answer_where_the_sidecar_sends(deployments, name):
    (engine,) = deployments[name]["containers"]
    transfer = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    extra = transfer["kv_connector_extra_config"]
    config = parse_config(extra)
    assert config.ignored == ()
    (tier,) = extra["secondary_tiers"]
    options = parse(P2POptions, {k: v for k, v in tier.items() if k != "type"})
    environment = {"VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.0.1"}
    assert engine["env"][0]["name"] in environment
    assert options.placed(0, environment).host == "10.0.0.1"
    (sidecar,) = deployments["decode"]["initContainers"]
    assert f"--p2p-connector-port={options.port}" in sidecar["args"]
    keys = next(m for m in engine["volumeMounts"] if m["name"] == "keys")
    assert options.keys.startswith(keys["mountPath"])

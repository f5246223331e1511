"""What docs/metrics.md says of names is so: declared by us, and upstream's where it says so."""

import importlib.util
import inspect
import re
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.metrics import loggers

from kvtiers.engines.vllm.metrics import definitions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def test_the_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.renewed(PAGE) == PAGE, "run make docs"


def test_upstreams_names_keep_upstreams_labels():
    tiers = {"secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}
    size = {"cpu_bytes_to_use": 1 << 30}
    theirs = {
        **CPUOffloadingSpec.build_metric_definitions({**size, "store_threshold": 2}),
        **TieringOffloadingSpec.build_metric_definitions({**size, **tiers}),
    }
    for name, ours in definitions().items():
        if name.startswith("vllm:kv_offload_"):
            assert tuple(theirs[name].labelnames) == tuple(ours.labelnames), name
            assert type(theirs[name]) is type(ours), name
    missing = {name for name in theirs if name not in definitions()}
    assert all("_backpressure_" in name for name in missing), missing


def test_every_metric_of_the_connector_is_explained():
    assert [n for n in get_connector_metric_definitions() if f"`{n}`" not in PAGE] == []


def test_every_name_on_the_page_exists():
    known = {**definitions(), **get_connector_metric_definitions()}
    older = {"vllm:kv_offload_total_bytes", "vllm:kv_offload_total_time", "vllm:kv_offload_size"}
    core = set(re.findall(r'"(vllm:\w+)"', inspect.getsource(loggers)))
    named = set(re.findall(r"`(vllm:\w+)`", PAGE))
    assert {n.removesuffix("_total") for n in named - set(known) - older} <= core

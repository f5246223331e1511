"""The tools on what a real engine stored: its manifest and its keys are understood."""

import json

import pytest

from tests.unit.cli.cli_kit import good, kvtiers
from tests.vllm.offloading import disk, manager_of, offload, settle

TOKENS = 2000
CACHED = 1920
CHUNKS = 15


@pytest.mark.parametrize("layout", ["files", "log"])
def test_what_an_engine_stored_is_found_moved_and_warm_in_the_next(
    engine, prompt, tmp_path, layout
):
    root, other = tmp_path / "kv", tmp_path / "other"
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=offload(secondary_tiers=[disk(root, layout=layout)])) as e:
        e.ask(asked)
        settle(e)
        (expected,) = e.ask(asked)
        settle(e)
        tokens = tmp_path / "prompt.json"
        tokens.write_text(json.dumps(list(asked)))
        shown = good(kvtiers("stat", f"fs://{root}", "--tokens", tokens, "--json")).json
        (found,) = shown["namespaces"]
        assert found["loadable_tokens"] == CACHED
        assert [c["stored"] for c in found["chunks"]] == [True] * CHUNKS
        assert good(kvtiers("verify", f"fs://{root}", "--json")).json["chunks"] == CHUNKS
    good(kvtiers("export", f"fs://{root}", tmp_path / "a.tar", "--tokens", tokens))
    good(kvtiers("import", tmp_path / "a.tar", f"fs://{other}?layout={layout}&capacity=1GiB"))
    (arrived,) = good(kvtiers("ls", f"fs://{other}", "--json")).json["namespaces"]
    assert arrived["chunks"] == CHUNKS
    hot = tmp_path / "hot.json"
    good(kvtiers("warm", f"fs://{other}", "--tokens", tokens, "-o", hot))
    config = offload(secondary_tiers=[disk(other, layout=layout)], warm_manifest=str(hot))
    with engine(kv_transfer_config=config) as e:
        settle(e)
        assert manager_of(e).core.use.resident == CHUNKS, "nobody asked yet"
        assert e.ask(asked) == [expected]
        assert e.cached == [CACHED]
        settle(e)

"""A real engine says why a request missed: by HTTP and by the command, for each reason."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtiers.errors import Kind, KVTiersError
from kvtiers.observe import ObserverClient, why
from tests.unit.cli.cli_kit import good, kvtiers
from tests.vllm.offloading import CHUNK_BYTES, disk, files_of, manager_of, offload, settle

TOKENS = 2000
CACHED = 1920
CHUNKS = 15
SPAN = 128
OBSERVE = {"port": 0}


@contextmanager
def observed(engine: Any, *tiers: dict[str, Any], **extra: Any) -> Iterator[tuple[Any, str]]:
    """An engine, and where its observer is."""
    config = offload(**{"secondary_tiers": list(tiers), "observe": OBSERVE, **extra})
    with engine(kv_transfer_config=config) as e:
        yield e, f"http://127.0.0.1:{manager_of(e).observer.port}"


def last_request(at: str) -> str:
    return ObserverClient(at).requests(limit=1)[0]["request_id"]


def reasons(record: dict[str, Any], tier: str) -> set[str]:
    """Why this tier missed."""
    return {m["reason"] for m in record["chunks"]["missed"] if m["tier"] == tier}


def asked_both_ways(at: str) -> dict[str, Any]:
    """The record of the last request, of which the command and the library say the same."""
    name = last_request(at)
    record = why(name, at=at)
    shown = good(kvtiers("why", name, "--at", at, "--json")).json
    assert {k: v for k, v in shown.items() if k not in ("url", "warnings")} == record
    assert record["why"] in good(kvtiers("why", name, "--at", at)).out
    return record


def store(e: Any, asked: Any) -> None:
    e.ask(asked)
    settle(e)


def forget(e: Any) -> None:
    """The device and host memory, not the disk."""
    settle(e)
    e.forget_device(connector=True)


def test_a_first_request_misses_what_nobody_has_and_a_second_hits(engine, prompt, tmp_path):
    with observed(engine, disk(tmp_path)) as (e, at):
        asked = prompt(TOKENS)
        store(e, asked)
        record = asked_both_ways(at)
        assert reasons(record, "0:primary") == reasons(record, "1:fs") == {"absent"}
        assert record["tokens"] == {
            "prompt": TOKENS,
            "asked": CACHED,
            "by_source": {},
            "missed": CACHED,
        }
        assert (record["runs"][0]["first"], record["runs"][0]["count"]) == (0, 1)
        assert "1:fs does not have it" in record["why"]
        assert record["arrived_at"] <= record["settled_at"]
        e.forget_device()
        store(e, asked)
        assert asked_both_ways(at)["tokens"]["by_source"] == {"0:primary": CACHED}
        forget(e)
        store(e, asked)
        record = asked_both_ways(at)
        assert record["tokens"] == {
            "prompt": TOKENS,
            "asked": CACHED,
            "by_source": {"1:fs": CACHED},
            "missed": 0,
        }
        (run,) = record["runs"]
        assert (run["count"], run["verdicts"][-1]["tier"]) == (CHUNKS, "1:fs")
        assert run["verdicts"][-1]["seconds"] > 0
        assert record["waited_s"] > 0


def test_a_damaged_file_is_why(engine, prompt, tmp_path):
    with observed(engine, disk(tmp_path, layout="files")) as (e, at):
        asked = prompt(TOKENS)
        store(e, asked)
        forget(e)
        first = files_of(tmp_path)
        for file in first:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        store(e, asked)
        record = asked_both_ways(at)
        assert "corrupt" in reasons(record, "1:fs")
        assert record["tokens"]["missed"] == CACHED
        assert "damaged" in record["why"]


def test_a_filter_of_the_request_is_why(engine, prompt, tmp_path):
    with observed(engine, disk(tmp_path)) as (e, at):
        asked = prompt(TOKENS)
        store(e, asked)
        forget(e)
        e.ask(asked, extra_args={"kv_transfer_params": {"kv_load_tiers": []}})
        settle(e)
        record = asked_both_ways(at)
        assert reasons(record, "1:fs") == {"filtered"}
        assert "kv_load_tiers" in record["why"]


def test_a_tier_that_is_down_is_why(engine, prompt, tmp_path):
    down = {"type": "DownTier", "module_path": __name__, "root_dir": str(tmp_path)}
    with observed(engine, down) as (e, at):
        for seed in range(8):  # until the breaker opens
            store(e, prompt(TOKENS, seed=seed))
        record = asked_both_ways(at)
        assert reasons(record, "1:DownTier") == {"tier_down"}
        assert "left alone" in record["why"]
        (host, tier) = ObserverClient(at).state()["tiers"]
        assert (host["label"], tier["state"]) == ("0:primary", "left alone")


def test_no_room_in_host_memory_is_why(engine, prompt, tmp_path):
    asked = prompt(TOKENS)
    with engine(kv_transfer_config=offload(secondary_tiers=[disk(tmp_path)])) as e:
        store(e, asked)
    few = 8 * CHUNK_BYTES["llama"]
    with observed(engine, disk(tmp_path), cpu_bytes_to_use=few) as (e, at):
        store(e, asked)
        record = asked_both_ways(at)
        assert reasons(record, "1:fs") == {"no_room"}
        assert record["tokens"]["by_source"] == {"1:fs": 8 * SPAN}
        assert "no room" in record["why"]


def test_a_prompt_that_was_never_asked_is_explained(engine, prompt, tmp_path):
    with observed(engine, disk(tmp_path)) as (e, at):
        asked = list(prompt(TOKENS))
        store(e, asked)
        forget(e)
        file = tmp_path / "tokens.json"
        file.write_text(json.dumps([*asked[:1000], *prompt(TOKENS, seed=9)]))
        before = ObserverClient(at).state()["counters"]
        shown = good(kvtiers("why", "--tokens", file, "--at", at, "--json")).json
        assert shown["loadable_tokens"] == 7 * SPAN
        host, fs = shown["tiers"]
        assert (host["there"], fs["there"], fs["first_missing"]) == (0, 7, 7)
        assert fs["runs"][-1]["reason"] == "absent"
        assert "would load 896 of" in good(kvtiers("why", "--tokens", file, "--at", at)).out
        after = ObserverClient(at).state()["counters"]
        assert after == before, "to look counts as no lookup"
        with pytest.raises(KVTiersError, match="begins with 'nobody'") as raised:
            why("nobody", at=at)
        assert raised.value.kind is Kind.VANISHED


def test_the_observer_ends_with_its_engine(engine, tmp_path):
    with observed(engine, disk(tmp_path)) as (_, at):
        port = int(at.rpartition(":")[2])
        assert ObserverClient(at).state()["engine"]["inert"] is False
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with pytest.raises(ConnectionError):
        connection.request("GET", "/healthz")


def test_a_port_that_is_taken_costs_a_warning(engine, prompt, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = offload(observe={"port": taken.getsockname()[1]})
        with engine(kv_transfer_config=config) as e:
            assert "set another port or host in observe" in caplog.text
            assert manager_of(e).observer is None
            store(e, prompt(TOKENS))


class DownTier:
    """A tier whose every question fails."""

    medium, locality = "STORAGE", "LOCAL"

    def __init__(self, context: Any, root_dir: str) -> None:
        from kvtiers.tiers.base import Capabilities

        self.capabilities = Capabilities(persistent=True, shared=True, scan=False, delete=False)
        assert Path(root_dir).is_dir()
        assert context

    def _fail(self, *_: Any) -> Any:
        raise KVTiersError("the server is gone", kind=Kind.IO)

    contains = write = read = delete = scan = _fail

    def touch(self, keys: Any) -> None:
        pass

    def close(self) -> None:
        pass

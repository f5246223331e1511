"""``kv_transfer_params``: vLLM's keys are understood, anybody's values are harmless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.tiers.p2p.protocol import Role
from kvtiers.tiers.p2p.roles import NONE, Roles, Source, read_roles

WHERE = {"kv_request_id": "x", "remote_host": "10.0.0.1", "remote_port": 5710}
SHAPE = "has to be a mapping that has kv_request_id, remote_host and remote_port in it"


def test_roles():
    assert read_roles(None) == (NONE, None)
    assert read_roles({"kv_load_tiers": []}) == (NONE, None)
    assert read_roles({"remote_decoder": None}) == (NONE, None)
    assert read_roles({"remote_decoder": {"kv_request_id": "x"}}) == (Roles("x"), None)
    pull = Source(Role.SOURCE, "x", "10.0.0.1", 5710)
    assert read_roles({"remote_kv_source": WHERE}) == (Roles(None, pull), None)
    wait = Source(Role.PREFILL, "x", "10.0.0.1", 5710)
    assert read_roles({"remote_prefiller": WHERE}) == (Roles(None, wait), None)
    both = {"remote_decoder": {"kv_request_id": "y"}, "remote_kv_source": WHERE}
    assert read_roles(both) == (Roles("y", pull), None)
    v6 = {"remote_kv_source": {**WHERE, "remote_host": "[::1]"}}
    assert read_roles(v6)[0].source.host == "::1"


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"remote_prefiller": WHERE, "remote_kv_source": WHERE}, "do not go together"),
        ({"remote_decoder": {"kv_request_id": "y"}, "remote_prefiller": WHERE}, "not go together"),
        (
            {"remote_decoder": "x"},
            "remote_decoder has to be a mapping that has kv_request_id in it",
        ),
        ({"remote_kv_source": True, **WHERE}, SHAPE),
        ({"remote_kv_source": "10.0.0.1:5710"}, SHAPE),
        ({"remote_kv_source": {"remote_host": "h"}, "kv_request_id": "x"}, SHAPE),
        ({"remote_decoder": {"kv_request_id": ""}}, "no kv_request_id"),
        ({"remote_decoder": {"kv_request_id": "x" * 257}}, "no kv_request_id"),
        ({"remote_decoder": {"kv_request_id": "\ud800"}}, "no kv_request_id"),
        ({"remote_decoder": {"kv_request_id": 7}}, "no kv_request_id"),
        ({"remote_kv_source": {**WHERE, "remote_host": "a b"}}, "no remote_host"),
        ({"remote_kv_source": {**WHERE, "remote_host": ""}}, "no remote_host"),
        ({"remote_kv_source": {**WHERE, "remote_host": "a\n"}}, "no remote_host"),
        ({"remote_kv_source": {**WHERE, "remote_host": None}}, "no remote_host"),
        ({"remote_kv_source": {**WHERE, "remote_port": "5710"}}, "no remote_port"),
        ({"remote_kv_source": {**WHERE, "remote_port": True}}, "no remote_port"),
        ({"remote_kv_source": {**WHERE, "remote_port": 0}}, "no remote_port"),
        ({"remote_kv_source": {**WHERE, "remote_port": 65536}}, "no remote_port"),
    ],
)
def test_values_that_are_none_are_refused_in_words(params, why):
    roles, complaint = read_roles(params)
    assert roles == NONE
    assert why in complaint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
NAMED = st.dictionaries(
    st.sampled_from(["remote_decoder", "remote_prefiller", "remote_kv_source"]),
    JSON | st.dictionaries(st.sampled_from(["kv_request_id", "remote_host", "remote_port"]), JSON),
)


@given(JSON | NAMED)
def test_no_value_raises(params):
    roles, complaint = read_roles(params)
    assert complaint is None or roles == NONE

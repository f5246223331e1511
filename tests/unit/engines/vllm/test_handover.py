"""What routers that know vLLM's NIXL connector say and are told; see ``handover.py``."""

import pytest

from kvtiers.engines.vllm.handover import Handover
from kvtiers.tiers.p2p.protocol import Role
from kvtiers.tiers.p2p.roles import NONE, read_roles

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vllm-router 0.1.17 sends to prefill with ``--kv-connector nixl``."""


class Peers:
    max_pinned_fraction = 0.5
    address = ("10.0.0.7", 5710)

    def serve(self, parent):
        pass


def test_prefill_produces_and_its_answer_lets_decode_find_it():
    handover = Handover(Peers())
    produces, wrong = read_roles(handover.understood(ASKED, "cmpl-1"))
    assert wrong is None
    consumes, wrong = read_roles(handover.told(ASKED, "cmpl-1"))
    assert wrong is None
    assert (consumes.source.role, consumes.source.request) == (Role.PREFILL, produces.produces)
    assert (consumes.source.host, consumes.source.port) == Peers.address
    assert read_roles(handover.understood(ASKED, "cmpl-2"))[0] != produces


def test_a_request_id_of_any_length_and_script_names_a_request():
    names = {"", "x" * 10_000, "é" * 300, "\ud800"}
    produced = {read_roles(Handover(Peers()).understood(ASKED, n))[0].produces for n in names}
    assert len(produced) == 4
    assert None not in produced


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": False},
        {"do_remote_decode": "yes"},
        ["do_remote_decode"],
        {"do_remote_decode": True, "remote_decoder": {"kv_request_id": "theirs"}},
    ],
)
def test_others_are_left_alone(params):
    handover = Handover(Peers())
    assert handover.understood(params, "r") is params
    assert handover.told(params, "r") is None


def test_without_a_tier_for_peers_nothing_is_promised():
    alone = Handover(None)
    assert alone.told(ASKED, "r") is None
    assert read_roles(alone.understood(ASKED, "r"))[0] == NONE

"""CURVE keys: who has the right one is let in; nobody else, and nobody notices."""

import os

import pytest
import zmq

from kvtiers.chunks import Lookup
from kvtiers.errors import ConfigError
from kvtiers.tiers.p2p.options import P2POptions
from kvtiers.tiers.p2p.security import new_keys, read_keys, secured
from tests.unit.tiers.p2p.engines import Engine, engines, keys, source, with_options

NAMES = keys(4)
HITS, MISSES = [Lookup.HIT] * 4, [Lookup.MISS] * 4


@pytest.fixture
def pairs(tmp_path):
    """Files of key pairs, and their public keys."""
    files = [str(tmp_path / f"{name}.key") for name in "abc"]
    return [(file, new_keys(file).decode()) for file in files]


def secure(pair, allowed) -> P2POptions:
    return with_options(keys=pair[0], allowed_peers=tuple(allowed))


def pulled(b: Engine, a: Engine) -> list[Lookup]:
    request = b.request(source(a))
    verdicts = b.pull(NAMES, request)
    b.manager.on_request_finished(request)
    b.rest()
    return verdicts


def two(a_options, b_options):
    a, b = Engine(options=a_options), Engine(options=b_options)
    a.store(NAMES)
    return a, b


def closing(*engines_):
    for engine in engines_:
        engine.close()


def test_a_listed_peer_is_served(pairs):
    (a_key, b_key, _) = pairs
    a, b = two(secure(a_key, [b_key[1]]), secure(b_key, [a_key[1]]))
    try:
        assert pulled(b, a) == HITS
        b.must_have(NAMES)
    finally:
        closing(a, b)


def test_one_key_pair_for_all(pairs):
    shared = secure(pairs[0], [pairs[0][1]])
    a, b = two(shared, shared)
    try:
        assert pulled(b, a) == HITS
    finally:
        closing(a, b)


def test_a_peer_that_is_not_listed_is_not_let_in(pairs, caplog):
    (a_key, b_key, c_key) = pairs
    a, b = two(secure(a_key, [c_key[1]]), secure(b_key, [a_key[1]]))
    try:
        assert pulled(b, a) == MISSES
        assert "does not let our key in" in caplog.text
        assert not a.endpoint._guests._by_number
    finally:
        closing(a, b)


def test_a_producer_with_another_key_than_expected_is_not_believed(pairs, caplog):
    (a_key, b_key, c_key) = pairs
    a, b = two(secure(a_key, [b_key[1]]), secure(b_key, [c_key[1]]))
    try:
        assert pulled(b, a) == MISSES
        assert not a.endpoint._guests._by_number
    finally:
        closing(a, b)


@pytest.mark.parametrize("secured_side", ["producer", "consumer"])
def test_with_and_without_keys_do_not_meet(pairs, secured_side):
    (a_key, b_key, _) = pairs
    with_keys, without = secure(a_key, [b_key[1], a_key[1]]), with_options()
    options = (with_keys, without) if secured_side == "producer" else (without, with_keys)
    a, b = two(*options)
    try:
        assert pulled(b, a) == MISSES
        assert not a.endpoint._guests._by_number
    finally:
        closing(a, b)


def test_a_stranger_does_not_disturb_a_listed_peer(pairs):
    (a_key, b_key, c_key) = pairs
    a, b = two(secure(a_key, [b_key[1]]), secure(b_key, [a_key[1]]))
    c = Engine(options=secure(c_key, [a_key[1]]))
    try:
        assert pulled(c, a) == MISSES
        assert pulled(b, a) == HITS
        a.store(keys(4, "x"))
    finally:
        closing(a, b, c)


def test_keys_by_address(pairs):
    own, one, other = (zmq.curve_keypair()[0].decode() for _ in range(3))
    pair = read_keys(pairs[0][0])
    security = secured(pair, (f"{one} 10.0.0.1:5710", f"{other} node-b:5711"))
    assert security.key_of("10.0.0.1", 5710) == one.encode()
    assert security.key_of("node-b", 5711) == other.encode()
    assert security.key_of("node-b", 5710) is None
    security = secured(pair, (f"{one} 10.0.0.1:5710", own))
    assert security.key_of("node-b", 5710) == own.encode()
    assert secured(pair, (own, other)).key_of("node-b", 5710) is None


def test_a_key_file_is_private_and_never_replaced(pairs, tmp_path):
    file, public = pairs[0]
    assert os.stat(file).st_mode & 0o777 == 0o600
    pair = read_keys(file)
    assert pair.public.decode() == public
    assert pair.secret.decode() not in repr(pair)
    with pytest.raises(FileExistsError):
        new_keys(file)
    assert read_keys(file) == pair


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (None, 0o600, "cannot be read"),
        ("public x\n", 0o600, "holds no key pair"),
        ("", 0o600, "holds no key pair"),
        ("good", 0o644, "others may read"),
        ("swapped", 0o600, "are no pair"),
    ],
)
def test_a_file_that_is_no_key_pair_is_refused(tmp_path, text, mode, why):
    file = tmp_path / "k"
    if text is not None:
        one, two_ = zmq.curve_keypair(), zmq.curve_keypair()
        public = (two_ if text == "swapped" else one)[0].decode()
        good = f"public {public}\nsecret {one[1].decode()}\n"
        file.write_text(good if text in ("good", "swapped") else text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=why):
        read_keys(str(file))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host": "0.0.0.0"}, "keys is missing: 0.0.0.0 can be reached by others"),
        ({"host": "192.0.2.1"}, "keys is missing"),
        ({"host": "nowhere.invalid."}, "host is nowhere.invalid., a name that does not resolve"),
        ({"keys": "/k", "allowed_peers": ("short",)}, "allowed_peers has 'short'"),
    ],
)
def test_what_is_not_secure_is_refused_before_anything_listens(options, why, pairs):
    if "keys" in options:
        options["keys"] = pairs[0][0]
    with pytest.raises(ConfigError, match=why):
        Engine(options=with_options(**options))


def test_beyond_loopback_plaintext_has_to_be_asked_for(pairs):
    (own, other, _) = pairs
    options = {"host": "0.0.0.0", "keys": own[0], "allowed_peers": (other[1],)}
    with pytest.raises(ConfigError, match="plaintext_data is false, but chunks"):
        Engine(options=with_options(**options))
    options["plaintext_data"] = True
    with pytest.raises(ConfigError, match=r"advertised_host is missing: .* is no address"):
        Engine(options=with_options(**options))
    options["advertised_host"] = "gpu7.example"
    with engines(1, options=with_options(**options)) as (engine,):
        assert engine.tier.address == ("gpu7.example", engine.port)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"allowed_peers": ("x" * 40,)}, "keys is missing"),
        ({"keys": "/k"}, "allowed_peers is missing"),
        ({"transport": "nixl"}, "NIXL encrypts nothing"),
        ({"port": 70000}, "port is 70000"),
        ({"load_deadline_s": 0.0}, "load_deadline_s is 0: give above 0"),
        ({"max_peers": 0}, "max_peers is 0"),
        ({"max_pinned_fraction": 1.5}, "max_pinned_fraction is 1.5"),
        ({"ping_interval_s": 10.0, "silence_deadline_s": 10.0}, "give less than silence"),
    ],
)
def test_options_that_cannot_be(options, why):
    with pytest.raises(ConfigError, match=why):
        P2POptions(**options)


def test_where_an_engine_answers():
    placed = P2POptions().placed(0, {})
    assert (placed.host, placed.port, placed.data_port) == ("127.0.0.1", 5710, 0)
    variables = {"VLLM_P2P_SIDE_CHANNEL_HOST": "::1", "VLLM_P2P_SIDE_CHANNEL_PORT": "6000"}
    placed = P2POptions(data_port=7000).placed(3, variables)
    assert (placed.host, placed.port, placed.data_port) == ("::1", 6003, 7003)
    assert P2POptions(host="localhost", port=1).placed(0, variables).host == "localhost"
    with pytest.raises(ConfigError, match="VLLM_P2P_SIDE_CHANNEL_PORT is 'x'"):
        P2POptions().placed(0, {"VLLM_P2P_SIDE_CHANNEL_PORT": "x"})


def test_a_port_that_is_taken_is_refused():
    with engines(1) as (engine,), pytest.raises(ConfigError, match="cannot be bound"):
        Engine(options=with_options(port=engine.port))

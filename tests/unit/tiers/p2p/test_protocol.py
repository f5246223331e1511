"""Messages are written as they always were, and whatever is read is a message or refused."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import ChunkLayout, GroupLayout, make_key
from kvtiers.tiers.p2p import protocol as p
from kvtiers.tiers.p2p.wire import ProtocolError
from tests.unit.tiers.p2p.messages import EXAMPLES, MESSAGES, TOKEN

GOLDEN = Path(__file__).parent / "golden"


def test_there_is_an_example_of_every_kind():
    assert {type(message) for message in EXAMPLES} == set(p._BODIES)


@pytest.mark.parametrize("version", range(1, p.VERSION + 1))
def test_messages_have_the_bytes_they_always_had(version):
    """Of old versions what is read in every version; of this one everything."""
    golden = json.loads((GOLDEN / f"v{version}.json").read_text())
    for message in EXAMPLES:
        if version == p.VERSION or isinstance(message, p._IN_EVERY_VERSION):
            written = golden[type(message).__name__]
            assert p.encode(message, TOKEN, version).hex() == written
            assert p.parse(bytes.fromhex(written)) == p.Envelope(version, TOKEN, message)


@given(MESSAGES, st.binary(min_size=16, max_size=16))
def test_what_is_written_is_read(message, token):
    assert p.parse(p.encode(message, token)) == p.Envelope(p.VERSION, token, message)


@given(st.binary(max_size=300))
def test_bytes_of_anybody_are_refused_or_read_and_nothing_else(data):
    with suppress(ProtocolError):
        p.parse(data)


@given(MESSAGES, st.data())
def test_a_message_that_was_changed_is_refused_or_read_and_nothing_else(message, data):
    raw = bytearray(p.encode(message, TOKEN))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for changed in (bytes(raw), bytes(raw[:cut]), bytes(raw) + b"\0"):
        with suppress(ProtocolError):
            p.parse(changed)


def test_a_short_message_cannot_ask_for_much_memory():
    raw = p.encode(p.LookUp(1, "r", 0, (b"k" * 36,)), TOKEN)
    huge = raw[: -36 - 2 - 4] + b"\xff\xff\xff\xff" + raw[-38:]
    with pytest.raises(ProtocolError, match="announces 4294967295 items"):
        p.parse(huge)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (p.LookUp(1, "r", 7, (b"k" * 36,)), "no role 7"),
        (p.LookUp(1, "r", 0, ()), "names no chunk"),
        (p.Fetch(1, "r", 0, (b"k" * 36, b"k" * 36)), "or one twice"),
        (p.LookUpAnswer(1, ((0, 9),)), "is none"),
        (p.LookUpAnswer(1, ((0, 1), (0, 2))), "a place twice"),
        (p.TransferDone(1, ((3, 8), (3, 8))), "a place twice"),
        (p.ChunkReady(1, ((3, 8, 1), (3, 9, 1))), "a place twice"),
        (p.Taken(1, ((3,), (3,))), "a place twice"),
        (p.HelloAck(b"short", "x", b"tcp", b""), "nonce has 5 bytes"),
    ],
)
def test_what_the_types_allow_and_the_meaning_does_not_is_refused(message, why):
    with pytest.raises(ProtocolError, match=why):
        p.parse(p.encode(message, TOKEN))


def test_another_version_can_be_told_so_and_nothing_else():
    hello = p.parse(p.encode(EXAMPLES[0], TOKEN, version=9))
    assert hello.version == 9
    with pytest.raises(ProtocolError, match="version 9, this kvtiers has 1"):
        p.parse(p.encode(p.Ping(1), TOKEN, version=9))


LAYOUT = ChunkLayout((GroupLayout(0, 65536, 16), GroupLayout(1, 4096, 16, False)))


@pytest.mark.parametrize(
    ("namespace", "groups", "version", "code", "words"),
    [
        ("n", p.groups_of(LAYOUT), p.VERSION, None, ""),
        ("n", p.groups_of(LAYOUT), 2, p.Code.VERSION, "run the same kvtiers"),
        ("m", p.groups_of(LAYOUT), p.VERSION, p.Code.NAMESPACE, "another model"),
        ("n", ((0, 65536, 16, 1),), p.VERSION, p.Code.GEOMETRY, "blocks_per_chunk"),
        ("n", ((0, 65536, 32, 1), (1, 4096, 16, 0)), p.VERSION, p.Code.GEOMETRY, "(0, 65536, 32)"),
    ],
)
def test_who_does_not_fit_is_refused_in_plain_words(namespace, groups, version, code, words):
    hello = p.Hello(namespace, groups, "x", (b"tcp",))
    refusal = p.refusal_of(hello, "n", LAYOUT, version)
    assert (refusal and refusal.code) == code
    assert words in (refusal.words if refusal else "")


def test_a_refusal_says_what_a_peer_says_in_one_line():
    """It goes into our log, too."""
    hello = p.Hello("x\nanother line\x1b[31m" + "n" * 999, p.groups_of(LAYOUT), "x", (b"tcp",))
    refusal = p.refusal_of(hello, "n", LAYOUT, p.VERSION)
    assert refusal.words.isprintable()
    assert p.parse(p.encode(refusal, TOKEN)).message == refusal


def test_keys_of_chunks_that_the_model_cannot_have_are_refused():
    good = p.LookUp(1, "r", 0, (make_key(b"d", 0), make_key(b"d", 1)))
    assert p.keys_of(good, LAYOUT) == good.keys
    with pytest.raises(ProtocolError, match="group that the model does not have"):
        p.keys_of(p.LookUp(1, "r", 0, (make_key(b"d", 2),)), LAYOUT)
    with pytest.raises(ProtocolError, match="too short"):
        p.keys_of(p.LookUp(1, "r", 0, (b"\0\0\0\0",)), LAYOUT)

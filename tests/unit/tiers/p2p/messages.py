"""One message of each kind, and strategies that make others."""

from hypothesis import strategies as st

from kvtiers.tiers.p2p import protocol as p

TOKEN = bytes(range(16))
EXAMPLES = (
    p.Hello("0" * 32, ((0, 65536, 16, 1), (1, 4096, 16, 0)), "engine-a", (b"nixl", b"tcp")),
    p.HelloAck(TOKEN, "engine-b", b"tcp", b"\x39\x05" + TOKEN),
    p.Refuse(int(p.Code.NAMESPACE), "it is another model"),
    p.LookUp(7, "chat-é", int(p.Role.SOURCE), (b"a" * 36, b"b" * 36)),
    p.LookUpAnswer(7, ((0, int(p.Verdict.PRESENT)), (1, int(p.Verdict.ABSENT)))),
    p.Fetch(8, "chat", int(p.Role.PREFILL), (b"a" * 36, b"\0" * 5)),
    p.ChunkReady(8, ((0, 2**47, 2**64 - 1),)),
    p.Taken(8, ((0,), (1,))),
    p.TransferDone(8, ((1, int(p.Code.ABSENT)),)),
    p.Cancel(8),
    p.Finished("chat"),
    p.Ping(9),
    p.Pong(2**64 - 1),
    p.Goodbye(),
)

_u8, _u16 = st.integers(0, 2**8 - 1), st.integers(0, 2**16 - 1)
_u32, _u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
_text = st.text(max_size=50)
_keys = st.lists(st.binary(max_size=40), min_size=1, max_size=20, unique=True).map(tuple)
_role = st.sampled_from([int(role) for role in p.Role])


def _by_place(value):
    return st.dictionaries(_u16, value, max_size=20).map(lambda d: tuple(d.items()))


MESSAGES = st.one_of(
    st.builds(
        p.Hello,
        _text,
        st.lists(st.tuples(_u32, _u64, _u32, _u8), max_size=5).map(tuple),
        _text,
        st.lists(st.binary(max_size=32), max_size=4).map(tuple),
    ),
    st.builds(
        p.HelloAck,
        st.binary(min_size=16, max_size=16),
        _text,
        st.binary(max_size=32),
        st.binary(max_size=99),
    ),
    st.builds(p.Refuse, _u8, _text),
    st.builds(p.LookUp, _u64, _text, _role, _keys),
    st.builds(p.LookUpAnswer, _u64, _by_place(st.sampled_from([int(v) for v in p.Verdict]))),
    st.builds(p.Fetch, _u64, _text, _role, _keys),
    st.builds(
        p.ChunkReady,
        _u64,
        _by_place(st.tuples(_u64, _u64)).map(lambda rows: tuple((n, *row) for n, row in rows)),
    ),
    st.builds(p.Taken, _u64, st.sets(_u16, max_size=9).map(lambda s: tuple((n,) for n in s))),
    st.builds(p.TransferDone, _u64, _by_place(_u8)),
    st.builds(p.Cancel, _u64),
    st.builds(p.Finished, _text),
    st.builds(p.Ping, _u64),
    st.builds(p.Pong, _u64),
    st.just(p.Goodbye()),
)

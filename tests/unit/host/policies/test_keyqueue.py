from hypothesis import given
from hypothesis import strategies as st

from kvtiers.chunks import make_key
from kvtiers.host.policies.keyqueue import KeyQueue

KEYS = [make_key(bytes([i]) * 32, 0) for i in range(8)]
A, B, *_ = KEYS
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from(KEYS), max_size=4, unique=True)),
        st.tuples(st.just("discard"), st.sampled_from(KEYS)),
        st.tuples(st.just("drop_oldest"), st.integers(-1, 5)),
        st.tuples(
            st.just("take_oldest"),
            st.tuples(st.integers(0, 5), st.frozensets(st.sampled_from(KEYS))),
        ),
    ),
    max_size=60,
)


def take_oldest(plain: list[bytes], count: int, stay: frozenset[bytes]) -> list[bytes]:
    taken = []
    for key in list(plain):
        if len(taken) == count:
            break
        plain.remove(key)
        (plain if key in stay else taken).append(key)
    return taken


@given(steps)
def test_it_does_what_a_plain_list_does(steps) -> None:
    queue, plain = KeyQueue(), []
    for step, what in steps:
        if step == "add":
            new = [k for k in what if k not in plain]
            queue.add(new)
            plain += new
        elif step == "discard" and what in plain:
            queue.discard(what)
            plain.remove(what)
        elif step == "drop_oldest":
            queue.drop_oldest(what)
            del plain[: max(0, what)]
        elif step == "take_oldest":
            count, stay = what
            assert queue.take_oldest(count, stay.intersection) == take_oldest(plain, count, stay)
        assert list(queue) == plain
        assert len(queue) == len(plain)
        assert [k in queue for k in KEYS] == [k in plain for k in KEYS]
        assert queue.isdisjoint([A, B]) == (A not in plain and B not in plain)
        queue.check()


def test_keys_that_come_and_go_do_not_pile_up() -> None:
    queue = KeyQueue()
    queue.add([A])
    for _ in range(10_000):
        queue.add([B])
        queue.discard(B)
    assert len(queue._order) < 200
    assert list(queue) == [A]

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvtiers.core.queue import ChunkQueue
from tests.unit.core.core_harness import keys

ALL = keys(*range(8))
some = st.lists(st.sampled_from(ALL), max_size=5, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), some),
        st.tuples(st.just("discard"), some),
        st.tuples(st.just("take"), st.integers(0, 9)),
        st.tuples(st.just("put_back"), st.integers(0, 9)),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=30,
)


@given(steps)
def test_it_does_what_a_plain_ordered_dictionary_does(steps) -> None:
    queue, plain = ChunkQueue(), OrderedDict()
    for step, what in steps:
        if step == "add":
            queue.add(what)
            plain.update(dict.fromkeys(what))
        elif step == "discard":
            assert list(queue.discard(what)) == [k for k in what if k in plain]
            plain = OrderedDict((k, None) for k in plain if k not in what)
        elif step == "clear":
            queue.clear()
            plain.clear()
        else:
            taken = queue.take(what)
            assert list(taken) == list(plain)[:what]
            if step == "put_back":
                queue.put_back(taken)
            else:
                plain = OrderedDict((k, None) for k in list(plain)[what:])
        assert list(queue) == list(plain)
        assert len(queue) == len(plain)
        queue.check()

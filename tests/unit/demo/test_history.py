from itertools import pairwise

from kvtiers.demo.history import (
    DOCUMENT_CHARS,
    TURNS,
    build_conversation,
    build_history,
    characters,
)


def test_history_is_the_same_every_time():
    assert build_history() == build_history()


def test_conversations_take_turns():
    order = [(r.turn, r.conversation) for r in build_history(conversations=2, turns=3)]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_each_prompt_is_a_strict_prefix_of_the_next_one():
    requests = build_conversation(0, turns=TURNS, document_chars=DOCUMENT_CHARS)
    for earlier, later in pairwise(requests):
        assert later.messages[: len(earlier.messages)] == earlier.messages
        assert [m.role for m in later.messages[len(earlier.messages) :]] == ["assistant", "user"]


def test_prompts_open_with_a_long_document_and_end_within_the_model_length():
    for request in build_history():
        size = characters(request.messages)
        # 4 to 5 characters a token: more than 12 blocks at once, never more than 21.
        assert DOCUMENT_CHARS < size < 10_600
        assert request.messages[-1].role == "user"


def test_no_recorded_text_is_empty():
    for number in range(44):
        last = build_conversation(number, turns=2, document_chars=3300)[-1]
        assert all(len(m.content) > 100 for m in last.messages)


def test_conversations_differ_from_their_first_words_on():
    first, second = (
        build_conversation(n, turns=1, document_chars=500)[0].messages[0].content for n in (0, 20)
    )
    assert first[:80] != second[:80]

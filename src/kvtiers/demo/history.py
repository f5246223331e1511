"""The recorded history: what two users asked and what they were answered, fixed beforehand.

The text is Python's own (``pydoc_data.topics``). The assistant's turns are recorded text too and
not what a model said, so that the prompts are equal in every pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

TURNS = 6
DOCUMENT_CHARS = 8000
"""Characters of the document that opens a conversation, about 1900 tokens."""
PASSAGE_CHARS = 200

_TOPICS = (
    ("execmodel", "naming", "import", "calls", "types"),
    ("compound", "formatstrings", "debugger", "strings", "types"),
    ("specialnames", "customization", "typesseq"),
    ("string-methods", "attribute-access", "comparisons"),
)
_SYSTEM = "You explain Python. Use this document (number {number}):\n\n{document}"
_QUESTION = "What does this passage mean? {passage}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of one conversation: all messages up to the question that is open."""

    conversation: int
    turn: int
    messages: tuple[Message, ...]


def build_history(conversations: int = 2, turns: int = TURNS) -> tuple[Request, ...]:
    """The requests in the order in which they are sent: the conversations take turns."""
    chats = [
        build_conversation(number, turns=turns, document_chars=DOCUMENT_CHARS)
        for number in range(conversations)
    ]
    return tuple(chat[turn] for turn in range(turns) for chat in chats)


def build_conversation(number: int, *, turns: int, document_chars: int) -> tuple[Request, ...]:
    """The turns of conversation ``number``; each prompt is a prefix of the next one.

    Conversations of different number differ from their first words on.
    """
    text = _text(number, document_chars + 2 * turns * (PASSAGE_CHARS + 1))
    document, rest = _cut(text, document_chars)
    messages = [Message("system", _SYSTEM.format(number=number + 1, document=document))]
    requests = []
    for turn in range(turns):
        passage, rest = _cut(rest, PASSAGE_CHARS)
        messages.append(Message("user", _QUESTION.format(passage=passage)))
        requests.append(Request(number, turn, tuple(messages)))
        answer, rest = _cut(rest, PASSAGE_CHARS)
        messages.append(Message("assistant", answer))
    return tuple(requests)


def characters(messages: Sequence[Message]) -> int:
    """Characters of all messages together."""
    return sum(len(m.content) for m in messages)


def _text(number: int, at_least: int) -> str:
    """Words for conversation ``number``: its own topics in its own order, repeated if too few."""
    names = _TOPICS[number % len(_TOPICS)]
    start = number // len(_TOPICS) % len(names)
    words = " ".join(topics[name] for name in (*names[start:], *names[:start])).split()
    text = " ".join(words)
    return " ".join([text] * (1 + at_least // len(text)))


def _cut(text: str, limit: int) -> tuple[str, str]:
    """Cut ``text`` at the last space within ``limit`` characters."""
    end = text.rfind(" ", 0, limit + 1)
    return text[:end], text[end + 1 :]

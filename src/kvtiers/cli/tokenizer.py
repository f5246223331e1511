"""Tokens of a text, by the tokenizer of a running vLLM server: tools need none of their own."""

import json

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe.asking import Server, words_of

ENGINE = "http://127.0.0.1:8000"
_MAX_TEXT = 64 << 20
_MAX_ANSWER = 512 << 20
_TIMEOUT_S = 60.0


def tokens_of(path: str, engine: str) -> list[int]:
    """The token ids of the text in the file ``path``, as ``POST /tokenize`` of ``engine`` says.

    That is the prompt of a completion; a chat has more tokens, of its template. Raises ConfigError
    for a file or URL that will not do, KVTiersError if there is no answer.
    """
    text = _text(path)
    server = Server(engine, f"--engine is {engine!a}", ENGINE, _TIMEOUT_S)
    body = json.dumps({"prompt": text}).encode()
    target = server.path.rstrip("/") + "/tokenize"
    try:
        status, answer = server.ask("POST", target, _MAX_ANSWER, body)
    except OSError as e:
        raise _failure(engine, f"does not answer: {words_of(e)}") from None
    if status != 200:
        raise _failure(engine, f"answers {status} to POST {target}")
    tokens = _tokens_in(answer)
    if tokens is None:
        raise _failure(engine, f"answers POST {target} without a list of tokens")
    return tokens


def _tokens_in(answer: bytes) -> list[int] | None:
    try:
        tokens = json.loads(answer)["tokens"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    good = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    return tokens if good else None


def _failure(engine: str, what: str) -> KVTiersError:
    return KVTiersError(
        f"{engine} does not cut the prompt into tokens, for it {what}; --engine has to be a vLLM "
        "server, or give --tokens FILE",
        kind=Kind.IO,
    )


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as e:
        why = getattr(e, "strerror", None) or "it is no UTF-8"
        raise ConfigError(f"--prompt {path!a} cannot be read: {why}") from None
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"--prompt {path!a} has more than {_MAX_TEXT} characters")
    return text

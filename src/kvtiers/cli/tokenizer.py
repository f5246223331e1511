"""Tokens of a text, by the tokenizer of a running vLLM server: tools need none of their own."""

import json

from kvtiers.errors import ConfigError, Kind, KVTiersError
from kvtiers.observe.asking import Server

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
    try:
        target = server.path.rstrip("/") + "/tokenize"
        status, answer = server.ask("POST", target, _MAX_ANSWER, body)
        tokens = json.loads(answer)["tokens"]
        if status != 200 or not all(type(token) is int for token in tokens):
            raise ValueError(f"status {status}")
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise KVTiersError(
            f"{engine} does not cut the prompt into tokens ({type(e).__name__}): name a vLLM "
            "server with --engine, or give --tokens FILE",
            kind=Kind.IO,
        ) from None
    return list(tokens)


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

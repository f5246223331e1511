"""Tokens of a text, by the tokenizer of a running vLLM server: tools need none of their own."""

import json
import urllib.parse
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from kvtiers.errors import ConfigError, Kind, KVTiersError

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
    try:
        parts = urllib.parse.urlsplit(engine)
        port = parts.port
    except ValueError as e:
        raise ConfigError(f"--engine is {engine!a}: {e}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(f"--engine is {engine!a}: give one like {ENGINE}")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname, port, timeout=_TIMEOUT_S)
    body = json.dumps({"prompt": text})
    try:
        target = f"{parts.path.rstrip('/')}/tokenize"
        connection.request("POST", target, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read(_MAX_ANSWER))
        tokens = document["tokens"]
        if answer.status != 200 or not all(type(token) is int for token in tokens):
            raise ValueError(f"status {answer.status}")
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as e:
        raise KVTiersError(
            f"{engine} does not cut the prompt into tokens ({type(e).__name__}): name a vLLM "
            "server with --engine, or give --tokens FILE",
            kind=Kind.IO,
        ) from None
    finally:
        connection.close()
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

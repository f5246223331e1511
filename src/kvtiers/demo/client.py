"""A minimal client of the OpenAI-compatible server: one streamed answer, one scrape."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from kvtiers.demo.history import Message
from kvtiers.errors import Kind, KVTiersError

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, and when."""

    text: str
    ttft_s: float
    """Seconds from sending the request to the first text."""
    total_s: float
    prompt_tokens: int
    cached_tokens: int


class ChatClient:
    """Asks the server on ``127.0.0.1:port``; one connection a request, no proxies."""

    def __init__(
        self, port: int, model: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._port = port
        self._model = model
        self._clock = clock

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """Send a chat and read the streamed answer. Raises KVTiersError if there is none."""
        body = {
            "model": self._model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = self._clock()
        first: float | None = None
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        for event in self._stream("/v1/chat/completions", json.dumps(body)):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content") or ""
                if piece and first is None:
                    first = self._clock()
                pieces.append(piece)
        if first is None or not usage:
            raise _failure("the server ended the stream without an answer")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(pieces),
            ttft_s=first - started,
            total_s=self._clock() - started,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )

    def scrape(self) -> str:
        """The text of ``/metrics``."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            return _checked(connection.getresponse()).read().decode()
        except (OSError, HTTPException) as e:
            raise _failure(f"the server's metrics cannot be read: {e or type(e).__name__}") from e
        finally:
            connection.close()

    def _stream(self, path: str, body: str) -> Iterator[dict[str, Any]]:
        """The events of a stream, without the closing ``[DONE]``."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = _checked(connection.getresponse())
            while line := response.readline():
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield _event(data)
        except (OSError, HTTPException) as e:
            raise _failure(f"the server broke off: {e or type(e).__name__}") from e
        finally:
            connection.close()


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as e:
        raise _failure(f"the server sent an event that is not JSON: {data[:200]!r}") from e
    if not isinstance(event, dict) or "error" in event:
        raise _failure(f"the server refused: {data[:500].decode(errors='replace')}")
    return event


def _checked(response: HTTPResponse) -> HTTPResponse:
    if response.status != 200:
        reason = response.read(500).decode(errors="replace").strip()
        raise _failure(f"the server answered {response.status}: {reason}")
    return response


def _failure(message: str) -> KVTiersError:
    return KVTiersError(message, kind=Kind.IO, operation="demo")

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvtiers.demo.client import ChatClient
from kvtiers.demo.history import Message
from kvtiers.demo.metrics import TokenCounts
from kvtiers.demo.passes import settled_counts, warm_up
from kvtiers.errors import KVTiersError

QUESTION = (Message("user", "Why?"),)
METRICS = 'vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {}\n'


class _Handler(BaseHTTPRequestHandler):
    """Answers with what the test put into ``server.status``, ``.body`` and ``.scrapes``."""

    def do_POST(self):
        size = int(self.headers["Content-Length"])
        self.server.asked.append((self.path, json.loads(self.rfile.read(size))))
        self._answer(self.server.status, self.server.body)

    def do_GET(self):
        scrapes = self.server.scrapes
        self._answer(200, scrapes.pop(0) if len(scrapes) > 1 else scrapes[0])

    def _answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.status, server.body, server.scrapes = [], 200, "", [""]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(server):
    ticks = iter(range(100))
    return ChatClient(server.server_port, "m", clock=lambda: float(next(ticks)))


def _stream(*events, end="data: [DONE]\n\n"):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def _text(content):
    return {"choices": [{"delta": {"content": content}}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 256}},
}


def test_answer_is_put_together_and_timed_at_its_first_text(server, client):
    server.body = _stream(_text(""), _text("Be"), _text("cause"), USAGE)
    answer = client.ask(QUESTION, max_tokens=7)
    assert answer.text == "Because"
    # The clock moves one second a look: at the start, at "Be", at the end.
    assert (answer.ttft_s, answer.total_s) == (1.0, 2.0)
    assert (answer.prompt_tokens, answer.cached_tokens) == (300, 256)


def test_request_is_greedy_and_streamed(server, client):
    server.body = _stream(_text("x"), USAGE)
    client.ask(QUESTION, max_tokens=7)
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 7, True)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, '{"message": "too long"}', "answered 400: .*too long"),
        (200, _stream({"error": {"message": "engine died"}}), "refused: .*engine died"),
        (200, "data: {nonsense\n\n", "not JSON"),
        (200, _stream(_text("x")), "without an answer"),
        (200, _stream(USAGE), "without an answer"),
        (200, "", "without an answer"),
    ],
)
def test_no_answer_is_an_error(server, client, status, body, said):
    server.status, server.body = status, body
    with pytest.raises(KVTiersError, match=said):
        client.ask(QUESTION, max_tokens=7)


def test_a_dead_server_is_an_error(server, client):
    server.shutdown()
    server.server_close()
    with pytest.raises(KVTiersError, match="broke off"):
        client.ask(QUESTION, max_tokens=7)
    with pytest.raises(KVTiersError, match="metrics cannot be read"):
        client.scrape()


def test_counts_are_waited_for(server, client):
    server.scrapes = [METRICS.format(n) for n in (100.0, 100.0, 399.0, 400.0)]
    before = TokenCounts(computed=100)
    assert settled_counts(client, before, 300) == TokenCounts(computed=400)


def test_counts_that_never_come_are_an_error(server, client):
    server.scrapes = [METRICS.format(100.0)]
    with pytest.raises(KVTiersError, match="count 0 prompt tokens for a prompt of 300"):
        settled_counts(client, TokenCounts(computed=100), 300, within_s=0.1)


def test_warm_up_is_counted_before_the_first_turn(server, client):
    server.body = _stream(_text("Hi"), USAGE)
    server.scrapes = [METRICS.format(0.0), METRICS.format(300.0)]
    assert warm_up(client) == TokenCounts(computed=300)
